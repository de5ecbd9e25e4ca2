"""The vLLM sidecar, which samples for train.py. It receives new weights from train.py at the start
of every step.

    export NANOGRPO_SECRET=$(openssl rand -hex 16)        # the same for its trainers
    python serve.py --model runs/base                     # for trainers on this machine
    python serve.py --model runs/base --host 0.0.0.0      # for other machines too

In: a checkpoint folder. Out: vLLM's own OpenAI-compatible server, with our weight-transfer engine
(nanogrpo/vllm/worker.py) behind its weight routes, and our access control (nanogrpo/vllm/auth.py)
in front of all routes. The environment variable NANOGRPO_SECRET contains the server's secret. The
trainers of the server need the same secret. Options that --help does not list, such as --dtype, are
passed to vLLM. This script runs in the interpreter that has vLLM. This interpreter may lack the
trainer's packages, so the script imports very little of this project. Read next:
nanogrpo/vllm/client.py.
"""

import argparse
import functools
import os
import re
import sys
from pathlib import Path

import nanogrpo
from nanogrpo.errors import UserError
from nanogrpo.vllm.auth import SECRET
from nanogrpo.vllm.process import kill_group, listen, on_end

# Releases of vLLM often change the requests to the weight routes, so only this release is allowed.
TESTED = "0.32.0"
SHORTEST = 16  # minimum length of a secret, in characters

# Options that serve.py sets for vLLM. Training relies on these values, so they cannot be changed.
FIXED = {
    # log-probs of softmax(logits / temperature), the policy that is trained
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",  # no defaults from the model's generation_config.json
    "--worker-extension-cls": "nanogrpo.vllm.worker.Extension",
    "--weight-transfer-config": '{"backend": "nanogrpo"}',
    "--middleware": "nanogrpo.vllm.auth.AccessControl",
    # the route /inference/v1/generate: token ids in, token ids and weight versions out
    "--enable-scale-out": None,
    "--disable-uvicorn-access-log": None,
    "--allowed-media-domains": "pictures.invalid",  # requests contain pictures, not URLs
}

# Options for vLLM on a CPU, which the user can override.
# Chunked prefill is off, so that no prompt is split.
# After a split, vLLM would reset the request's random stream, and this reset fails on a CPU.
# Blocks are short, because the completions of a group share only full blocks of their prompt.
# vLLM's default on a CPU is 128 tokens, and its fast kernel needs a multiple of 32.
ON_CPU = ["--no-enable-chunked-prefill", "--block-size", "32", "--kv-cache-memory-bytes"]
LARGEST = 16 << 30  # default limit of the KV cache in bytes, because vLLM zeroes the full cache


def options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of serve.py, and the options for vLLM. Raises UserError for an option that
    users may not set.
    """
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
        epilog=f"Other options go to vLLM. The environment variable {SECRET} holds the secret.",
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder or hub id")
    add("--host", default="127.0.0.1", help="listening address")
    add("--port", type=int, default=8000)
    add("--owner", type=int, metavar="PID", help="end with this process")
    ours, rest = parser.parse_known_args(argv)
    for word in rest:
        # vLLM also accepts underscores, --no-NAME and --NAME.KEY
        name = re.split(r"[=.]", word)[0].replace("_", "-").replace("--no-", "--")
        if name in (*FIXED, "--api-key"):
            raise UserError(
                f"{name} cannot be set: training or access control relies on it; leave the option "
                f"out (the secret comes from the environment variable {SECRET})."
            )
    fixed = [word for pair in FIXED.items() for word in pair if word is not None]
    where = ["--model", ours.model, "--host", ours.host, "--port", str(ours.port)]
    # If an option is given twice, the last one counts.
    # Our options come last, so that no other spelling, such as an abbreviation, takes effect.
    return ours, [*rest, *where, *fixed]


def check_secret() -> None:
    """Raise UserError if the secret is missing or too short."""
    if not re.fullmatch(f"[!-~]{{{SHORTEST},}}", os.environ.get(SECRET, "")):
        raise UserError(
            f"A server needs a secret of at least {SHORTEST} printable ASCII characters, and its "
            f"trainers need the same secret: run `openssl rand -hex 16` once, and set {SECRET} to "
            "the output on both sides."
        )


def check_vllm() -> None:
    """Raise UserError if vLLM is missing, or if its version was not tested."""
    try:
        from vllm import __version__ as version
    except ModuleNotFoundError as e:
        raise UserError(
            f"vLLM is not installed in {sys.executable}; install vllm=={TESTED} there, or name "
            "another interpreter."
        ) from e
    if not version.startswith(TESTED):
        raise UserError(
            f"vLLM {version} is installed, but the sidecar was tested with {TESTED}; install that "
            "version."
        )


def check_port(host: str, port: int) -> None:
    """Raise UserError if the port is taken, before vLLM spends a minute loading."""
    try:
        # `listen` accepts a port that was closed a moment ago, as the server does
        listen(host, port).close()
    except (OSError, OverflowError) as e:
        raise UserError(
            f"--port {port} on {host} cannot be used ({e}); choose another --port."
        ) from e


def main(argv: list[str] | None = None) -> int:
    try:
        ours, words = options(sys.argv[1:] if argv is None else argv)
        if ours.owner:  # the owner started this process as the leader of a process group
            on_end(ours.owner, functools.partial(kill_group, os.getpid()))
        check_port(ours.host, ours.port)
        check_secret()
        set_environment()
        check_vllm()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    # imported here, because these modules read the environment
    from vllm.entrypoints.launchers.api_server.entry import main as run
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    if current_platform.is_cpu():
        # vLLM requires that its cache fits into the free memory
        free = get_memory_node_info(get_visible_memory_node()[0]).available_memory
        words = [*ON_CPU, str(min(free // 4, LARGEST)), *words]
    sys.argv[1:] = words
    run()
    return 0


def set_environment() -> None:
    """Set the variables that vLLM, its workers and our access control read."""
    os.environ["NANOGRPO_SERVER"] = str(os.getpid())  # the workers end with this process
    # Only vLLM's development mode has the weight routes.
    # Our access control closes the other routes of this mode.
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.pop("VLLM_API_KEY", None)  # vLLM would require this key instead of our secret
    # spawned workers must find nanogrpo, too
    root = str(Path(nanogrpo.__file__).absolute().parents[1])  # links are not followed
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":  # spawned workers import this file again
    sys.exit(main())

"""Real processes for tests: run a function on n gloo ranks; get what each returns, or how it ended.

    from tests.ranks import run, start
    run(2, work, path)              # [work(path) on rank 0, on rank 1]; fails if a rank fails
    start(2, work, path).ends()     # [0, -9]: exit statuses; .errors() is what they wrote to stderr

Processes are forked from one server that has already imported torch and our code, so a rank starts
in a tenth of a second. But each imports the test module that defines its function, so such a module
must not import transformers, which takes seconds. As under torchrun, the ranks find each other
through environment variables, and a store outside of them. Read next: distributed/test_fsdp.py.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch.distributed as dist

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_name("sums.jsonl")  # 32 prompts: rendering all of arithmetic is slow
REWARD = Path(__file__)  # use as --reward-funcs f"{REWARD}:even"
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "train",
        "tests.conftest",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint",
        "fsspec.core",
        "torch._dynamo",  # which the first optimizer imports
        "nanogrpo.extras.commandline",
        "nanogrpo.extras.rewards",
    ]
)


# seconds within which a rank ends unless it hangs, even on one busy core
PATIENCE = 120
RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Return a port that nobody else gets while this process lives.

    We keep it bound: a port that is only looked up could go to another process before the rank
    listens on it.
    """
    RESERVED.append(s := socket.socket())
    # as torch's store does: two sockets may bind, and one listens
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def _rank(rank: int, env: dict[str, str], folder: str, work: Callable, args: tuple) -> None:
    os.environ.update(env)
    os.chdir(ROOT)
    name = Path(folder) / str(rank)
    with open(f"{name}.err", "w") as err:  # gloo and torch bypass sys.stderr
        os.dup2(err.fileno(), 2)
        os.dup2(err.fileno(), 1)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(2), "w", buffering=1) for _ in range(2))
    result = work(*args)
    with open(f"{name}.tmp", "wb") as f:
        pickle.dump(result, f)
    os.replace(f"{name}.tmp", f"{name}.out")


class Ranks:
    """Running processes."""

    def __init__(self, size: int, work: Callable, args: tuple, env: dict[str, str]):
        self.folder = tempfile.TemporaryDirectory()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), **env}
        self.processes = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
            process = SERVER.Process(
                target=_rank, args=(rank, own, self.folder.name, work, args), daemon=True
            )
            process.start()
            self.processes.append(process)

    def ends(self, timeout: float = PATIENCE) -> list[int]:
        """Return exit statuses, negative for signals. Kills processes that are late, and fails."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in late:
            self.processes[rank].kill()
            self.processes[rank].join()
        assert not late, f"ranks {late} did not end within {timeout} s: {self.errors()}"
        return [process.exitcode for process in self.processes]

    def errors(self) -> list[str]:
        """Return what each rank wrote."""
        return [
            path.read_text() if (path := Path(self.folder.name) / f"{r}.err").exists() else ""
            for r in self.all
        ]

    def reports(self) -> list[str]:
        """Return the errors of all ranks, each of which is one line."""
        return re.findall("^error: .*", "\n".join(self.errors()), re.MULTILINE)

    def results(self) -> list:
        return [pickle.loads((Path(self.folder.name) / f"{r}.out").read_bytes()) for r in self.all]

    @property
    def all(self) -> range:
        return range(len(self.processes))


def start(size: int, work: Callable, *args, **env: str) -> Ranks:
    """Start `work(*args)` on each rank: a function of a test module, with picklable arguments."""
    # the server starts with the first process and imports the preloaded modules
    paths = [f"{ROOT}", f"{ROOT}/tests", *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1"):
        return Ranks(size, work, args, env)


def run(size: int, work: Callable, *args, **env: str) -> list:
    """Return the results of `work(*args)` on each rank."""
    ranks = start(size, work, *args, **env)
    ends = ranks.ends()
    assert ends == [0] * size, f"{ends}: {ranks.errors()}"
    return ranks.results()


def torchrun(*script: str, **env: str) -> subprocess.Popen:
    """Start a script on two ranks under torchrun. Its options may come first."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "--master-port", str(free_port()), *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def until(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        threading.Event().wait(0.02)


def alive(pid: int) -> bool:
    """Return whether a process runs. One that has ended may still wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# --- endless runs of train.py ---


def argv(base: Path, output: Path, *more: str) -> list[str]:
    """Return the options of a run that does not end by itself."""
    options = (
        f"--data {DATA} --device cpu --num-generations 4 --generation-batch-size 16 "
        f"--max-completion-length 6 --max-steps 100000 --learning-rate 1e-3 "
        f"--reward-funcs {REWARD}:even"
    ).split()
    return ["--model", str(base), "--output-dir", str(output), *options, *more]


def steps(output: Path) -> list[int]:
    """Return the steps in a run's log; -1 is the evaluation before the first step."""
    found = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in found if "step" in row]


def running(output: Path, beyond: int = 1) -> Callable[[], bool]:
    """Return a function that tells whether the run has logged more than `beyond` steps."""
    return lambda: (output / "metrics.jsonl").exists() and len(steps(output)) > beyond


def insist(ranks: Ranks, number: int) -> int:
    """Signal the only rank until it ends, and return its status. A second signal counts only after
    a second.
    """
    (process,), begun = ranks.processes, time.monotonic()
    os.kill(process.pid, number)
    until(lambda: "send it again to exit" in ranks.errors()[0])
    while process.is_alive() and time.monotonic() < begun + PATIENCE:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process.pid, number)
        process.join(0.1)
    (status,) = ranks.ends(PATIENCE)
    assert time.monotonic() - begun > 1
    return status


def even(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return a reward that gives every group of random completions a signal."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

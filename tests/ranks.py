"""Real processes for tests: a function on n ranks that speak gloo, and what each returns, or how
each ended.

    from tests.ranks import run, start
    run(2, work, path)              # [work(path) of rank 0, of rank 1]; fails if a rank does
    start(2, work, path).ends()     # [0, -9]: exit statuses; what they wrote to stderr is in .errors()

Processes are forked from one server that has imported torch and our code already, so that a rank
starts in a tenth of a second. But each imports the test module that it runs a function of: such a
module must not import transformers, which takes seconds. They find each other through the variables
that torchrun sets. Read next: test_fsdp.py.
"""

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
REWARD = Path(__file__)  # as --reward-funcs wants it: f"{REWARD}:even"
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "train",
        "tests.conftest",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint",
        "fsspec.core",
    ]
)


# seconds within which a rank that does not hang has ended, on one busy core too; a hang is longer
PATIENCE = 120
RESERVED: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else is given while this process lives: it is bound, and who means it may
    still listen there.

    A port that is only looked up and let go may be another process's before the rank listens.
    """
    RESERVED.append(s := socket.socket())
    # as torch's store does: two may bind, and one listens
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def _rank(rank: int, env: dict[str, str], folder: str, work: Callable, args: tuple) -> None:
    os.environ.update(env)
    os.chdir(ROOT)
    name = Path(folder) / str(rank)
    with open(f"{name}.err", "w") as err:  # file descriptors too: gloo and torch write past Python
        os.dup2(err.fileno(), 2)
        os.dup2(err.fileno(), 1)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(2), "w", buffering=1) for _ in range(2))
    result = work(*args)
    with open(f"{name}.tmp", "wb") as f:
        pickle.dump(result, f)
    os.replace(f"{name}.tmp", f"{name}.out")


class Ranks:
    """Processes under way."""

    def __init__(self, size: int, work: Callable, args: tuple, env: dict[str, str]):
        self.folder = tempfile.TemporaryDirectory()
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
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
        """Exit statuses, negative for signals; whoever has not ended in time is killed, and the
        test fails.
        """
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
        """What each rank wrote."""
        return [
            path.read_text() if (path := Path(self.folder.name) / f"{r}.err").exists() else ""
            for r in self.all
        ]

    def results(self) -> list:
        return [pickle.loads((Path(self.folder.name) / f"{r}.out").read_bytes()) for r in self.all]

    @property
    def all(self) -> range:
        return range(len(self.processes))


def start(size: int, work: Callable, *args, **env: str) -> Ranks:
    """Starts `work(*args)` on each rank: a function of a test module, with picklable arguments."""
    # the server is started with the first process, and imports what is preloaded
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), *([before] if before else [])]
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = Ranks(size, work, args, env)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return ranks


def run(size: int, work: Callable, *args, **env: str) -> list:
    """What `work(*args)` returns on each rank."""
    ranks = start(size, work, *args, **env)
    ends = ranks.ends()
    assert ends == [0] * size, f"{ends}: {ranks.errors()}"
    return ranks.results()


def even(completion_ids: list[list[int]], **_: object) -> list[float]:
    """A reward for runs of random weights: no group is without signal."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

"""The runs of bench/soak.py: how they are started, which processes they have, and their faults.

In: a mode (how train.py is started) and a base model. Out: the class `Run`, and the faults in
FAULTS, which damage a run in progress. All processes are real except the vLLM server, which is a
fake in most modes. Read next: soak.py, which checks the result of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import resource
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import train
from nanogrpo.logs.files import checkpoints
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.vllm.auth import SECRET
from nanogrpo.vllm.process import on_end
from tests import ranks
from tests.conftest import timeless, tiny_config
from tests.vllm.fake import FakeVLLM
from tests.vllm.real import CPU, PYTHON, processes

STEPS = 10
OPTIONS = (
    f"--data {ranks.DATA} --reward-funcs {ranks.REWARD}:even --device cpu --max-steps {STEPS} "
    "--save-steps 2 --num-generations 4 --generation-batch-size 16 --max-completion-length 6 "
    "--learning-rate 3e-3 --reward-timeout 11 --ddp-timeout 30 --resume"
).split()
HANG = 35.0  # seconds after which the other ranks no longer wait for a suspended rank


@dataclasses.dataclass(frozen=True)
class Mode:
    options: str = ""
    ranks: int = 1
    torchrun: bool = False
    # "fake": the fake vLLM server below; "own": a real vLLM server, which the trainer starts
    server: str = ""
    exact: bool = True  # whether every run gives bit-identical results
    uncertain: tuple[str, ...] = ("vllm/restarts",)  # metrics that faults may change
    start: float = 2.0  # seconds until a run has started
    hang: float = 7.0  # seconds within which a suspended server or worker must be noticed


MODES = {
    "one process": Mode(),
    "two ranks": Mode(ranks=2),
    "torchrun": Mode(ranks=2, torchrun=True, start=8.0),
    "LoRA": Mode("--lora-r 4 --num-iterations 2"),
    "reference": Mode("--beta 0.05 --ref-model-sync-steps 3"),
    "dynamic sampling": Mode("--max-resample-times 2"),
    "two ranks, all of it": Mode("--lora-r 4 --beta 0.05 --max-resample-times 1", ranks=2),
    "server": Mode(server="fake"),
    "sampling ahead": Mode("--max-staleness 1", server="fake", exact=False),
}
# The last digits of vLLM's log-probs depend on how vLLM batches requests.
REAL = {
    "real vLLM": Mode(server="own", uncertain=("vllm/restarts", "sampling/"), start=60.0, hang=30.0)
}


class Run:
    """A run of train.py, possibly on several ranks, that can be restarted."""

    # all processes must end within this many seconds after torchrun or the last rank has ended
    patience = 30.0

    def __init__(self, mode: Mode, base: Path, folder: Path):
        self.mode, self.folder, self.output = mode, folder, folder / "run"
        # the environment of every process that the run starts contains this mark
        self.mark = uuid.uuid4().hex
        self.errors: list[str] = []  # the stderr of each rank in each start
        self.starts = 0
        self.log_deleted = False  # whether the fault deleted the log
        self.group: ranks.Ranks | None = None
        self.torchrun: subprocess.Popen[str] | None = None
        self.workers: set[int] = set()  # the worker processes of a real vLLM
        self.server: FakeServer | None = None
        (folder / "tmp").mkdir()
        self.argv = ["--model", str(base), "--output-dir", str(self.output), *OPTIONS]
        self.argv += mode.options.split()
        if mode.server == "own":
            self.argv += ["--engine", "vllm", "--server-timeout", "20"]
            self.argv += [f"--vllm-options={' '.join(CPU[2:])}"]
        if mode.server == "fake":
            self.server = FakeServer(base, folder / "network")
            self.server.start()
            self.argv += ["--engine", "vllm", "--server", self.server.url, "--server-timeout", "5"]
            self.argv += ["--weight-transport", "memory"]

    def start(self) -> None:
        self.starts += 1
        # tests/ is not in this path, because ranks would then import tests/vllm instead of vLLM.
        env = {"PYTHONPATH": str(ranks.ROOT), "TMPDIR": str(self.folder / "tmp")}
        env["SOAK"], env["NANOGRPO_VLLM_PYTHON"] = self.mark, PYTHON
        if self.server:
            env[SECRET] = self.server.secret
        if self.mode.torchrun:
            self.logs = self.folder / f"start-{self.starts}"
            files = ("--redirects", "3", "--log-dir", str(self.logs))  # a file for each rank
            self.torchrun = ranks.torchrun(*files, "train.py", *self.argv, **env)
        else:
            jump = str(self.folder / "jump")
            self.group = ranks.start(self.mode.ranks, work, self.argv, jump, **env)

    def alive(self) -> bool:
        if self.torchrun:
            return self.torchrun.poll() is None
        return bool(self.find("rank"))

    def end(self) -> list[int]:
        """Wait until all processes have ended. Return the exit status of torchrun or of train.py.
        If train.py was killed, return the exit status of each rank.
        """
        patience = 900.0  # a run reaches this limit only if it hangs
        if self.torchrun:
            self.torchrun.communicate(timeout=patience)
            ends = [self.torchrun.returncode]
            # a rank may outlive a killed torchrun, so wait before reading the files
            self.settle()
            self.errors += [path.read_text() for path in sorted(self.logs.rglob("stderr.log"))]
        else:
            assert self.group
            ends = self.group.ends(patience)
            self.errors += self.group.errors()
            ends = [self.group.results()[0]] if set(ends) == {0} else ends
            self.settle()
        return ends

    def settle(self) -> None:
        """Wait until no process of the run is alive."""
        # If torchrun is killed while the ranks start, the ranks first wait for --ddp-timeout.
        killed = self.torchrun is not None and self.torchrun.returncode == -signal.SIGKILL
        deadline = time.monotonic() + (90.0 if killed else self.patience)
        while left := self.commands():
            late = time.monotonic() > deadline
            assert not late, f"{len(left)} processes are left: {[*left.values()]}"
            time.sleep(0.05)

    def steps(self) -> list[dict]:
        """Return the logged steps. An incomplete last line is ignored."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.output / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        return [timeless(row) for row in found if "step" in row and "eval/after" not in row]

    def weights(self) -> str:
        last = checkpoints(self.output)[-1]
        return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()

    # --- processes ---

    def commands(self) -> dict[int, str]:
        """Return the commands of the run's living processes, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has just ended
                marked = f"SOAK={self.mark}".encode() in (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                # vLLM's processes overwrite their environment.
                # A zombie process has no command line.
                if command and (marked or int(entry.name) in self.workers):
                    found[int(entry.name)] = command
        if self.mode.server == "own":
            for pid in [pid for pid, command in found.items() if "serve.py" in command]:
                self.workers |= {*processes(pid)[1:]}
        return found

    def find(self, who: str) -> list[int]:
        """Return the living processes of a kind."""
        if who == "server" and self.server:
            return [self.server.process.pid]
        if who == "torchrun":
            return [self.torchrun.pid] if self.torchrun and self.torchrun.poll() is None else []
        if who == "rank" and self.group:
            return [process.pid for process in self.group.processes if process.is_alive()]
        commands = self.commands()
        if who == "worker":
            return [p for p in self.workers & {*commands} if "resource_tracker" not in commands[p]]
        part = {"rank": "train.py", "reward process": "rewards.process", "server": "serve.py"}[who]
        launcher = self.torchrun.pid if self.torchrun else 0
        return [pid for pid, command in commands.items() if part in command and pid != launcher]

    def choose(self, who: str, rng: random.Random) -> list[int]:
        """Wait for processes of a kind. Return [one of them], or [] if the run ends first."""
        while not (found := self.find(who)) and self.alive():
            time.sleep(0.02)
        return found and [rng.choice(found)]

    def kill(self) -> None:
        """Kill all processes that are left."""
        for process in self.group.processes if self.group else ():
            process.kill()
        signal_to([*self.commands()], signal.SIGKILL)
        if self.torchrun:
            self.torchrun.communicate()
        if self.server:
            self.server.process.kill()


def work(argv: list[str], jump: str) -> int:
    """Run train.py in this process. While the file `jump` exists, the clock is one day behind."""
    now = time.time
    time.time = lambda: now() - 86_400 * os.path.exists(jump)
    # this process was forked: forget the temporary folder of an earlier run
    tempfile.tempdir = None
    return train.main(argv)


class FakeServer:
    """A fake vLLM server in a separate process that can be killed and restarted."""

    def __init__(self, base: Path, plan: Path):
        self.port, self.secret = ranks.free_port(), secrets.token_urlsafe()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = tiny_config(vocab_size=Tokenizer(base).vocab_size)
        self.plan = plan  # while this file exists, its contents say how requests are disturbed

    def start(self) -> None:
        """Start the process. Return once it listens."""
        listens, ready = ranks.SERVER.Pipe(duplex=False)
        args = (self.port, self.secret, self.config, self.plan, os.getpid(), ready)
        self.process = ranks.SERVER.Process(target=serve_fake, args=args, daemon=True)
        self.process.start()
        ready.close()
        listens.recv()


def serve_fake(
    port: int, secret: str, config: ModelConfig, plan: Path, owner: int, ready: Connection
) -> None:
    """Run a fake server in this process until the process `owner` ends."""
    calls = itertools.count()

    def disturb(method: str, path: str, body: dict):
        if not plan.exists():
            return None
        how, most = json.loads(plan.read_text())
        if next(calls) >= most:
            return None
        if how == "late":
            return time.sleep(random.uniform(0, 0.5))
        if how == "reset":
            raise ConnectionResetError
        return 500 if how == "status" else {"choices": [["?"]], "weight_version": 1}

    on_end(owner, lambda: os._exit(0))
    fake = FakeVLLM(config, port=port)
    fake.secret, fake.disturb = secret, disturb
    fake.http.handle_error = lambda *_: None  # `disturb` resets connections on purpose
    with fake:
        ready.send(True)
        threading.Event().wait()


# --- faults ---

# A function that damages a run in progress. It returns a function that repairs the damage, if a new
# start does not.
Strike = Callable[[Run, random.Random], Callable[[], object] | None]


@dataclasses.dataclass(frozen=True)
class Fault:
    strike: Strike
    fits: Callable[[Mode], object] = lambda mode: mode.server != "own" and not mode.torchrun


def signal_to(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def sends(who: str, *numbers: int) -> Strike:
    """Return a fault that sends one of these signals to one process of a kind."""

    def strike(run: Run, rng: random.Random):
        signal_to(run.choose(who, rng), rng.choice(numbers))
        if who == "server" and run.server:  # the fake server restarts without weights
            run.server.process.join()
            time.sleep(rng.uniform(0, 3))
            run.server.start()

    return strike


def suspends(who: str, hang: float = 0.0) -> Strike:
    """Return a fault that suspends one process of a kind. The pause is shorter or longer than the
    timeouts. `hang` is the longer pause in seconds. If it is 0, the mode's `hang` is used.
    """

    def strike(run: Run, rng: random.Random):
        chosen = run.choose(who, rng)
        signal_to(chosen, signal.SIGSTOP)
        time.sleep(rng.choice([0.5, hang or run.mode.hang]))
        signal_to(chosen, signal.SIGCONT)

    return strike


def kill_all(run: Run, rng: random.Random):
    signal_to([*run.find("torchrun"), *run.find("rank")], signal.SIGKILL)


def full_disk(run: Run, rng: random.Random):
    """Limit file sizes to a random number of bytes: writes fail midway, as on a full disk. A new
    process has no limit.
    """
    size = rng.randint(20_000, 200_000)
    for pid in run.find("rank"):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def read_only(run: Run, rng: random.Random):
    """Mount the folder read-only over itself (as root), or remove its write permission."""
    mount = os.geteuid() == 0 and shutil.which("mount")
    if not run.output.exists():
        return None
    if not mount:
        run.output.chmod(0o500)
        return lambda: run.output.chmod(0o700)
    quiet = {"check": False, "capture_output": True}
    subprocess.run(["mount", "--bind", run.output, run.output], **quiet)
    subprocess.run(["mount", "-o", "remount,ro,bind", run.output], **quiet)
    return lambda: subprocess.run(["umount", "--lazy", run.output], **quiet)


def delete_folder(run: Run, rng: random.Random):
    run.log_deleted = run.output.exists()
    shutil.rmtree(run.output, ignore_errors=True)


def flip_a_bit(run: Run, rng: random.Random):
    """Kill the run and damage its newest checkpoint. The repair removes this checkpoint."""
    kill_all(run, rng)
    run.end()
    if not (found := checkpoints(run.output)):
        return None
    path = rng.choice([p for p in sorted(found[-1].rglob("*")) if p.is_file() and p.stat().st_size])
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    run.start()
    ends = run.end()
    assert ends != [0], f"damage in {path.relative_to(run.output)} was not found"
    named = any(path.name in text for text in run.errors[-run.mode.ranks :])
    assert named, f"the error does not name {path.name}"
    return lambda: shutil.rmtree(found[-1])


def clock_jump(run: Run, rng: random.Random):
    (run.folder / "jump").touch()
    time.sleep(0.5)
    return lambda: (run.folder / "jump").unlink()


def network(run: Run, rng: random.Random):
    """Answer some requests late, wrongly or not at all."""
    assert run.server
    plan = rng.choice(["late", "status", "garbage", "reset"]), rng.randint(1, 8)
    run.server.plan.write_text(json.dumps(plan))
    return run.server.plan.unlink


FAULTS = {
    "SIGKILL of a rank": Fault(sends("rank", signal.SIGKILL), lambda mode: True),
    "SIGKILL of all ranks": Fault(kill_all, lambda mode: mode.server != "own"),
    "SIGKILL of torchrun": Fault(sends("torchrun", signal.SIGKILL), lambda mode: mode.torchrun),
    "SIGKILL of the reward process": Fault(sends("reward process", signal.SIGKILL)),
    "SIGKILL of the server": Fault(sends("server", signal.SIGKILL), lambda mode: mode.server),
    "SIGKILL of a worker": Fault(
        sends("worker", signal.SIGKILL), lambda mode: mode.server == "own"
    ),
    "SIGSTOP of a rank": Fault(suspends("rank", HANG), lambda mode: mode.server != "own"),
    "SIGSTOP of torchrun": Fault(suspends("torchrun"), lambda mode: mode.torchrun),
    "SIGSTOP of the reward process": Fault(suspends("reward process")),
    "SIGSTOP of the server": Fault(suspends("server"), lambda mode: mode.server),
    "SIGSTOP of a worker": Fault(suspends("worker"), lambda mode: mode.server == "own"),
    "SIGTERM or SIGINT of a rank": Fault(
        sends("rank", signal.SIGTERM, signal.SIGINT), lambda mode: mode.server != "own"
    ),
    "SIGTERM or SIGINT of torchrun": Fault(
        sends("torchrun", signal.SIGTERM, signal.SIGINT), lambda mode: mode.torchrun
    ),
    "full disk": Fault(full_disk),
    "read-only folder": Fault(read_only),
    "deleted folder": Fault(delete_folder),
    "flipped bit": Fault(flip_a_bit),
    "clock jump": Fault(clock_jump),
    "network": Fault(network, lambda mode: mode.server == "fake"),
}

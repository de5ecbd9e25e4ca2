"""Do 200 random faults lose anything? Each run of the tiny task gets one fault at a random moment
and is resumed until it is done. It must then equal the same run without a fault.

In: --faults, --seed. Out: results/soak.json with one record, and one line per broken promise.

A run is one of MODES and its fault is one of FAULTS. The moment is a random time during the start,
or a random time after a random step. These promises are checked:

    rows        every step is in metrics.jsonl once, with the values of the undisturbed run
    weights     the last checkpoint has the same bytes (both not with --max-staleness, whose runs
                depend on time). If the fault deletes the folder, the rows before may be missing,
                and a message names them
    errors      a run that ends by itself prints one sentence and no traceback
    processes   no process of the run is alive after its end
    files       no temporary file is left in the folder

`--suite N` instead runs the tests that depend on scheduling N times, next to six busy processes.
Read next: tests/ranks.py (how runs are started), tests/run/test_state.py (kills at chosen points).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import train
from bench import common, tables
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from tests import ranks
from tests.conftest import timeless, tiny_config, write_base
from tests.vllm.fake import FakeVLLM

STEPS = 10
OPTIONS = (
    f"--data {ranks.DATA} --reward-funcs {ranks.REWARD}:even --device cpu --max-steps {STEPS} "
    "--save-steps 2 --num-generations 4 --generation-batch-size 16 --max-completion-length 6 "
    "--learning-rate 3e-3 --reward-timeout 30"
).split()
TESTS = (  # those that depend on scheduling
    "tests/run/test_killed.py",
    "tests/run/test_state.py",
    "tests/distributed/test_failure.py",
    "tests/distributed/test_signals.py",
    "tests/vllm/test_server.py",
    "tests/vllm/test_sync.py",
)


@dataclasses.dataclass(frozen=True)
class Mode:
    options: str = ""
    ranks: int = 1
    server: bool = False
    exact: bool = True  # the same bits in every run


MODES = {
    "one process": Mode(),
    "two ranks": Mode(ranks=2),
    "LoRA": Mode("--lora-r 4 --num-iterations 2"),
    "reference": Mode("--beta 0.05 --sync-ref-model --ref-model-sync-steps 3"),
    "dynamic sampling": Mode("--max-resample-times 2"),
    "two ranks, all of it": Mode("--lora-r 4 --beta 0.05 --max-resample-times 1", ranks=2),
    "server": Mode(server=True),
    "sampling ahead": Mode("--max-staleness 1", server=True, exact=False),
}


class Run:
    """A run of train.py, possibly on several ranks, which can be started again."""

    def __init__(self, mode: Mode, base: Path, folder: Path):
        self.mode, self.folder, self.output = mode, folder, folder / "run"
        self.mark = uuid.uuid4().hex
        self.errors: list[str] = []  # what each ended process wrote
        self.server = FakeVLLM(tiny_config(vocab_size=Tokenizer(base).vocab_size))
        self.server.http.handle_error = lambda *_: None  # a reset is meant
        self.argv = ["--model", str(base), "--output-dir", str(self.output), *OPTIONS]
        self.argv += [*mode.options.split(), "--resume"]
        if mode.server:
            self.argv += ["--engine", "vllm", "--server", self.server.url, "--server-patience", "2"]
            self.argv += ["--weight-transport", "memory"]
        self.processes: ranks.Ranks | None = None
        self.starts = 0
        self.log_deleted = False  # by the fault; nothing can bring the rows back

    def start(self) -> None:
        self.starts += 1
        self.processes = ranks.start(
            self.mode.ranks,
            work,
            self.argv,
            str(self.folder / "jump"),
            SOAK=self.mark,
            NANOGRPO_SECRET=self.server.secret,
        )

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self.processes.processes]

    def alive(self) -> bool:
        return any(p.is_alive() for p in self.processes.processes)

    def end(self) -> list[int]:
        """Wait for the end and return the exit status of each rank."""
        ends = self.processes.ends()
        self.errors += self.processes.errors()
        return [self.processes.results()[0]] if ends == [0] * len(ends) else ends

    def steps(self) -> list[dict]:
        """Return the logged steps; a last line that is not complete is no step yet."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.output / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        return [timeless(row) for row in found if "reward" in row]

    def children(self) -> list[int]:
        """Return the processes that the run started, such as its reward process."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.owns(pid)]

    def owns(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return f"SOAK={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False

    def weights(self) -> str:
        last = checkpoint.checkpoints(self.output)[-1]
        return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()


def work(argv: list[str], jump: str) -> int:
    """Run train.py in this process. The clock is a day late while the file `jump` exists."""
    now = time.time
    time.time = lambda: now() - 86_400 * os.path.exists(jump)
    return train.main(argv)


# --- faults ---

# Each takes a run that is in progress and returns a function that repairs the damage.
Fault = Callable[[Run, random.Random], Callable[[], None]]


def signal_to(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def nothing() -> None:
    """Repair nothing."""


def kill(run: Run, rng: random.Random):
    signal_to([rng.choice(run.pids)], signal.SIGKILL)
    return nothing


def kill_all(run: Run, rng: random.Random):
    signal_to(run.pids, signal.SIGKILL)
    return nothing


def kill_reward_process(run: Run, rng: random.Random):
    signal_to(run.children()[:1], signal.SIGKILL)
    return nothing


def terminate(run: Run, rng: random.Random):
    signal_to([rng.choice(run.pids)], rng.choice([signal.SIGTERM, signal.SIGINT]))
    return nothing


def stop(run: Run, rng: random.Random):
    """Suspend a process, for less time or more than a heartbeat may take."""
    pids = [rng.choice([*run.pids, *run.children()])]
    signal_to(pids, signal.SIGSTOP)
    time.sleep(rng.choice([0.5, 12]))
    signal_to(pids, signal.SIGCONT)
    return nothing


def full_disk(run: Run, rng: random.Random):
    """Let no file grow beyond a size that some file of a checkpoint has."""
    size = rng.randint(20_000, 200_000)
    for pid in run.pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
    return nothing  # a new process has no limit


def read_only(run: Run, rng: random.Random):
    """Replace the folder by a read-only view of itself (root), or take the right to write."""
    mount = os.geteuid() == 0 and shutil.which("mount")
    if not run.output.exists():
        return nothing
    if not mount:
        run.output.chmod(0o500)
        return lambda: run.output.chmod(0o700)
    quiet = {"check": False, "capture_output": True}
    subprocess.run(["mount", "--bind", run.output, run.output], **quiet)
    subprocess.run(["mount", "-o", "remount,ro,bind", run.output], **quiet)
    return lambda: subprocess.run(["umount", "--lazy", run.output], **quiet) and None


def delete_folder(run: Run, rng: random.Random):
    run.log_deleted = run.output.exists()
    shutil.rmtree(run.output, ignore_errors=True)
    return nothing


def flip_a_bit(run: Run, rng: random.Random):
    """Kill the run, and damage its newest checkpoint. The repair removes it."""
    signal_to(run.pids, signal.SIGKILL)
    run.end()
    if not (found := checkpoint.checkpoints(run.output)):
        return nothing
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
    left, how = [rng.randint(1, 8)], rng.choice(["late", "status", "garbage", "reset"])

    def disturb(method: str, path: str, body: dict):
        left[0] -= 1
        if left[0] < 0:
            return None
        if how == "late":
            return time.sleep(rng.uniform(0, 0.5))
        if how == "reset":
            raise ConnectionResetError
        return 500 if how == "status" else {"choices": [["?"]], "weight_version": 1}

    run.server.disturb = disturb
    return lambda: setattr(run.server, "disturb", lambda *call: None)


FAULTS: dict[str, Fault] = {
    "SIGKILL of a rank": kill,
    "SIGKILL of all": kill_all,
    "SIGKILL of the reward process": kill_reward_process,
    "SIGTERM or SIGINT": terminate,
    "SIGSTOP": stop,
    "full disk": full_disk,
    "read-only folder": read_only,
    "deleted folder": delete_folder,
    "flipped bit": flip_a_bit,
    "clock jump": clock_jump,
    "network": network,
}


# --- one fault ---


def disturbed(run: Run, fault: Fault, rng: random.Random) -> None:
    """Run with the fault, and resume until the run is done."""
    run.start()
    after = rng.randint(-3, STEPS - 2)  # negative: during the start
    if after < 0:
        time.sleep(rng.uniform(0, 2))
    else:
        while run.alive() and len(run.steps()) <= after:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
    repair = fault(run, rng)
    try:
        ends = [-1] if fault is flip_a_bit else run.end()
    finally:
        repair()
    while ends != [0] or not (run.output / f"checkpoint-{STEPS}").exists():
        assert run.starts < 6, f"the run does not end: {ends}"
        run.start()
        ends = run.end()


def check(run: Run, rows: list[dict], weights: str) -> None:
    """Raise AssertionError unless every promise is kept."""
    found = run.steps()
    first = (found[0]["step"] if found else STEPS) if run.log_deleted else 0
    assert [row["step"] for row in found] == list(range(first, STEPS)), "a step is lost or doubled"
    if first and run.starts > 1:
        assert "has no record of" in "".join(run.errors), "no message about the missing steps"
    if run.mode.exact:
        # these count what was disturbed, and a deleted log cannot be counted on
        counts = {"vllm/restarts", *(["num_tokens"] if first else [])}
        different = {
            name
            for mine, theirs in zip(found, rows[first:])
            for name in mine.keys() | theirs.keys()
            if mine.get(name) != theirs.get(name)
        } - counts
        assert not different, f"other values of {', '.join(sorted(different))}"
        assert run.weights() == weights, "the weights differ"
    for text in run.errors:
        assert "Traceback" not in text, "a traceback"
        count = len(re.findall("^error: ", text, re.MULTILINE))
        assert count <= 1, f"{count} errors are printed"
    deadline = time.monotonic() + 5
    while (left := run.children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"{len(left)} processes are left"
    hidden = [p.name for p in run.output.glob(".*")]
    assert hidden == [".lock"], f"files are left: {hidden}"


@contextlib.contextmanager
def new_run(mode: Mode, base: Path) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as where:
        run = Run(mode, base, Path(where))
        with run.server:
            try:
                yield run
            finally:
                if run.processes:
                    signal_to([*run.pids, *run.children()], signal.SIGKILL)


def undisturbed(mode: Mode, base: Path) -> tuple[list[dict], str]:
    """Return the logged steps and the weights of a run without a fault."""
    with new_run(mode, base) as run:
        run.start()
        assert run.end() == [0], run.errors
        check(run, run.steps(), run.weights())
        return run.steps(), run.weights()


def plan(number: int, seed: int) -> tuple[str, str, random.Random]:
    """Return the mode and the fault of a run, and the random numbers for the rest."""
    rng = random.Random(f"{seed} {number}")
    mode = rng.choice(list(MODES))
    return mode, rng.choice([f for f in FAULTS if f != "network" or MODES[mode].server]), rng


def experiment(mode: str, fault: str, rng: random.Random, base: Path, expected: tuple) -> dict:
    """Run one fault, and return what happened."""
    out = {"mode": mode, "fault": fault, "broken": ""}
    with new_run(MODES[mode], base) as run:
        try:
            disturbed(run, FAULTS[fault], rng)
            check(run, *expected)
        except Exception as e:  # a failed run is a result; the others go on
            why = str(e) if isinstance(e, AssertionError) else traceback.format_exc()
            out["broken"] = f"{why}\n{''.join(run.errors)[-3000:]}"
        return {**out, "starts": run.starts}


def soak(faults: int, seed: int, workers: int) -> dict:
    plans = [plan(number, seed) for number in range(faults)]
    with tempfile.TemporaryDirectory() as where, ThreadPoolExecutor(workers) as pool:
        base = write_base(Path(where) / "base")
        used = list(dict.fromkeys(mode for mode, *_ in plans))
        expected = dict(zip(used, pool.map(lambda mode: undisturbed(MODES[mode], base), used)))
        results = []
        for found in pool.map(lambda p: experiment(*p, base, expected[p[0]]), plans):
            if found["broken"]:
                print(f"{len(results)}: {found['mode']}, {found['fault']}: {found['broken']}")
            results.append(found)
    kinds = collections.defaultdict(list)
    for r in results:
        kinds[r["fault"]].append(r)
    return {
        "faults": faults,
        "seed": seed,
        "broken": [r for r in results if r["broken"]],
        "modes": dict(collections.Counter(r["mode"] for r in results)),
        "kinds": {
            kind: {
                "runs": len(found),
                "starts": sum(r["starts"] for r in found),
                "broken": sum(bool(r["broken"]) for r in found),
            }
            for kind, found in sorted(kinds.items())
        },
    }


# --- tests under load ---


def suite(times: int) -> dict:
    """Run the tests that depend on scheduling, next to six busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    failures = []
    try:
        for turn in range(times):
            done = subprocess.run(
                command, cwd=common.ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                failures.append({"turn": turn, "output": done.stdout[-3000:]})
                print(done.stdout[-3000:])
    finally:
        for process in busy:
            process.kill()
    return {"times": times, "failures": failures}


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "soak",
        __doc__,
        threads=False,
        faults=(200, "runs with one fault each"),
        seed=(0, "seed of the modes, faults and moments"),
        workers=(2, "runs at a time"),
        suite=(0, "instead, run the tests that depend on scheduling so many times under load"),
    )
    args = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = str(common.ROOT)
    ranks.SERVER.set_forkserver_preload(["train", "tests.conftest", "torch.distributed.checkpoint"])
    began = time.monotonic()
    if args.suite:
        case, found = "suite", suite(args.suite)
        failed = found["failures"]
    else:
        case, found = "faults", soak(args.faults, args.seed, args.workers)
        failed = found["broken"]
    seconds = round(time.monotonic() - began, 1)
    records = [common.record("soak", case, "nanogrpo", argv, **found, seconds=seconds)]
    common.merge("soak", records, args.out)
    tables.show("soak", records)
    if failed:
        raise SystemExit(1)
    return records


if __name__ == "__main__":
    main(sys.argv[1:])

"""A run in a plain process is killed by SIGKILL at a random time, or at random operations on files;
resumed, it repeats the same bits.

Kills at chosen points, under torchrun, are in test_state.py. Read next: test_resume.py.
"""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time

import train
from tests.conftest import arguments, steps
from tests.ranks import start


def test_a_run_killed_at_a_random_time_and_resumed_repeats_the_same_bits(
    tiny_base, files, tmp_path
):
    once, killed = tmp_path / "once", tmp_path / "killed"
    options = ["--save-steps", "2", "--num-iterations", "2", "--beta", "0.05", "--max-steps"]
    seed = random.SystemRandom().randrange(2**32)
    rng, resumed = random.Random(seed), arguments(tiny_base, files, killed, "--resume", *options)
    # too many steps to end by itself, however late the kill is on a busy machine
    command = [sys.executable, train.__file__, *resumed, "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        finished = (line for line in process.stderr if re.match(r" *\d+/100,?000 ", line))
        for _ in range(rng.randint(1, 6)):
            next(finished)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
    assert process.returncode == -signal.SIGKILL, f"{seed=}"
    count = 4 + (killed / "metrics.jsonl").read_bytes().count(b"\n")
    assert train.main([*resumed, str(count)]) == 0
    assert train.main(arguments(tiny_base, files, once, *options, str(count))) == 0
    assert [row["step"] for row in steps(killed)] == list(range(count)), f"{seed=}"
    assert steps(killed) == steps(once), f"{seed=}"
    last = [folder / f"checkpoint-{count}" / "model.safetensors" for folder in (once, killed)]
    assert last[0].read_bytes() == last[1].read_bytes(), f"{seed=}"
    assert [p.name for p in killed.glob(".*")] == [".lock"], f"{seed=}"


CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod")


def train_until_operation(options: list[str], folder: str, last: int) -> int:
    """Run train.py, and kill it before the n-th operation that changes or flushes a file there."""
    count, fsync = itertools.count(1), os.fsync

    def operation(path: object) -> None:
        if str(path).startswith(folder) and next(count) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CHANGES:
            operation(args[0])

    def flush(descriptor: int) -> None:
        operation(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = flush
    sys.addaudithook(hook)
    return train.main(options)


def test_a_run_killed_at_random_operations_on_files_and_resumed_repeats_the_same_bits(
    tiny_base, files, tmp_path
):
    """A step with a save has about 60 such operations: of the log, completions and checkpoint."""
    once, killed = tmp_path / "once", tmp_path / "killed"
    options = ["--save-steps", "1", "--save-total-limit", "1", "--log-completions", "--max-steps"]
    seed = random.SystemRandom().randrange(2**32)
    rng, resumed = random.Random(seed), arguments(tiny_base, files, killed, "--resume", *options)
    for _ in range(5):
        run = start(1, train_until_operation, [*resumed, "99"], str(killed), rng.randint(1, 120))
        assert run.ends() == [-signal.SIGKILL], (seed, run.errors())
    assert train.main([*resumed, "12"]) == 0, f"{seed=}"
    assert train.main(arguments(tiny_base, files, once, *options, "12")) == 0
    assert steps(killed) == steps(once), f"{seed=}"
    names = [{p.name for p in (folder / "completions").iterdir()} for folder in (once, killed)]
    assert names[0] == names[1], f"{seed=}"
    last = [folder / "checkpoint-12" / "model.safetensors" for folder in (once, killed)]
    assert last[0].read_bytes() == last[1].read_bytes(), f"{seed=}"
    assert [p.name for p in killed.glob(".*")] == [".lock"], f"{seed=}"

"""Runs of train.py that are killed and resumed: SIGKILL at any moment, in a process of their own,
and nothing is lost or changed.

Read next: test_resume.py, where each damage is done by hand.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import train
from tests.conftest import arguments, steps

ROOT = Path(train.__file__).parent


def launch(argv: list[str]) -> subprocess.Popen:
    # one thread here and there, whatever pytest was started with
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "train.py", *argv], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
    )


def kill_somewhere(argv: list[str], output: Path, rng: random.Random, written: int | None) -> str:
    """Some steps and a moment more, or until so many files of a checkpoint are written; then
    SIGKILL. Says what was there.
    """
    launched, process = time.time(), launch(argv)
    reported = (line for line in process.stderr if line.startswith("step"))
    for _ in range(rng.randint(1, 4)):
        next(reported, None)
    if written is None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # as hoped: it is still running
            process.wait(timeout=rng.uniform(0, 0.1))
    else:
        while (
            process.poll() is None
            and files_of_a_checkpoint_under_way(output, since=launched) < written
        ):
            pass  # it exists for some milliseconds only: no time to do anything but look again
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    return str(sorted(p.name for p in output.iterdir()))


def files_of_a_checkpoint_under_way(output: Path, since: float) -> int:
    """-1: none is under way. One that an earlier kill left behind does not count."""
    for folder in output.glob(".checkpoint-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # renamed while we look
            if folder.stat().st_mtime > since:
                return len(os.listdir(folder))
    return -1


def test_killed_anywhere_and_resumed_it_is_the_same_run_bit_for_bit(tiny_base, files, tmp_path):
    """Four SIGKILLs, two of them while a checkpoint is written: the same losses, rewards, norms and
    last checkpoint.
    """
    options = [
        "--max-steps",
        "20",
        "--save-steps",
        "2",
        "--steps-per-generation",
        "2",
        "--num-iterations",
        "2",
    ]
    options += ["--lr-scheduler-type", "cosine", "--warmup-steps", "4", "--beta", "0.05"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = launch(arguments(tiny_base, files, whole, *options))
    seed = random.SystemRandom().randrange(2**32)
    rng, hits = random.Random(seed), []
    for written in (None, 0, None, 4):
        # with nothing to resume, it begins
        argv = arguments(tiny_base, files, broken, *options, "--resume")
        hits.append(kill_somewhere(argv, broken, rng, written))
    last = launch(arguments(tiny_base, files, broken, *options, "--resume"))
    story = f"seed {seed}: " + "; ".join(hits)
    print(story)
    for run in (process, last):
        _, errors = run.communicate()
        assert run.returncode == 0, story + errors
    # at least one kill left half a checkpoint behind
    assert any(".tmp" in hit for hit in hits), story
    assert [row["step"] for row in steps(broken)] == list(range(20)), story
    assert steps(broken) == steps(whole), story
    assert len({row["loss"] for row in steps(whole)}) == 20  # not a run in which nothing happens
    last = [folder / "checkpoint-20" / "model.safetensors" for folder in (broken, whole)]
    assert last[0].read_bytes() == last[1].read_bytes(), story
    assert [p.name for p in broken.glob(".*")] == [".lock"], story


def test_a_longer_run_continues_a_shorter_one(tiny_base, files, tmp_path):
    assert train.main(arguments(tiny_base, files, tmp_path / "once", "--max-steps", "4")) == 0
    assert train.main(arguments(tiny_base, files, tmp_path / "twice", "--max-steps", "2")) == 0
    assert (
        train.main(arguments(tiny_base, files, tmp_path / "twice", "--max-steps", "4", "--resume"))
        == 0
    )
    assert steps(tmp_path / "once") == steps(tmp_path / "twice")

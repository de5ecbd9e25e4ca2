"""How a run ends before its time: asked to, by a second word, by another rank's failure; never in a
hang, always with one word.

Read next: test_bad_input.py, the mistakes of one process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from nanogrpo.distributed.failure import Stop
from nanogrpo.errors import UserError
from nanogrpo.rewards.runner import Runner
from nanogrpo.run import state
from tests.conftest import write_base
from tests.ranks import PATIENCE, REWARD, ROOT, Ranks, free_port, run, start


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


def argv(base: Path, output: Path, *more: str) -> list[str]:
    options = [
        "--model",
        str(base),
        "--data",
        "arithmetic",
        "--output-dir",
        str(output),
        "--device",
        "cpu",
    ]
    options += [
        "--num-generations",
        "4",
        "--generation-batch-size",
        "16",
        "--max-completion-length",
        "6",
    ]
    return [
        *options,
        "--reward-funcs",
        f"{REWARD}:even",
        "--max-steps",
        "100000",
        "--learning-rate",
        "1e-3",
        *more,
    ]


def steps(output: Path) -> list[int]:
    return [
        row["step"]
        for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        if "step" in row
    ]


def until(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        threading.Event().wait(0.02)


def running(output: Path, beyond: int = 1) -> Callable[[], bool]:
    """Whether the run has logged more than so many steps."""
    return lambda: (output / "metrics.jsonl").exists() and len(steps(output)) > beyond


# ---- asked to ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("who", "number"), [(1, signal.SIGTERM), (0, signal.SIGINT)])
def test_a_signal_to_any_rank_finishes_the_step_saves_and_ends_all_with_success(
    base, tmp_path, who, number
):
    ranks = start(2, train.main, argv(base, tmp_path))
    until(running(tmp_path))
    os.kill(ranks.processes[who].pid, number)
    assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()
    assert ranks.results() == [0, 0]
    done = len(steps(tmp_path))
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        ".lock",
        f"checkpoint-{done}",
        "metrics.jsonl",
    ]
    assert (
        f"{number.name}: this step is finished and saved, then the run ends" in ranks.errors()[who]
    )
    more = argv(base, tmp_path, "--resume", "--max-steps", str(done + 1))
    assert run(2, train.main, more) == [0, 0]
    assert steps(tmp_path) == list(range(done + 1))


def test_one_process_too_and_twice_within_a_second_is_once(base, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "train.py", *argv(base, tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(running(tmp_path))
    # both wait for it to go on: no second between
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, told
    assert "Traceback" not in told
    assert (tmp_path / f"checkpoint-{len(steps(tmp_path))}" / "state.json").exists()


def never_ends_a_step(options: list[str]) -> int:
    """A run whose scoring waits for ever once two steps are done: what a user interrupts twice."""
    score, calls = Runner.score, []

    def stuck(*args) -> None:
        calls.append(1)
        if len(calls) > 2:
            print("stuck", file=sys.stderr)
        while len(calls) > 2:
            threading.Event().wait(0.05)
        score(*args)

    Runner.score = stuck
    return train.main(options)


def test_a_second_signal_ends_at_once(base, tmp_path):
    ranks = start(1, never_ends_a_step, argv(base, tmp_path))
    # not sooner: at the end of the step before, the signal would be obeyed
    until(lambda: "stuck" in ranks.errors()[0])
    assert insist(ranks, signal.SIGINT) == 128 + signal.SIGINT


def insist(ranks: Ranks, number: int) -> int:
    """Sends a lone rank a signal, and again until it ends; its status. The second one counts once a
    second has passed.
    """
    (process,), told = ranks.processes, time.monotonic()
    os.kill(process.pid, number)
    until(lambda: "once more ends it at once" in ranks.errors()[0])
    while process.is_alive() and time.monotonic() < told + PATIENCE:
        os.kill(process.pid, number)
        process.join(0.1)
    (status,) = ranks.ends(PATIENCE)
    assert time.monotonic() - told > 1
    return status


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in Stop.signals]
    with Stop() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
    assert [signal.getsignal(number) for number in Stop.signals] == before


# ---- by failure ----------------------------------------------------------------------------------


def fails_in_the_third_step(options: list[str], who: int, how: str) -> int:
    """A run of which rank `who` fails: with a mistake of the user's, with a bug, or killed."""
    score, calls = Runner.score, []

    def failing(*args) -> None:
        calls.append(1)
        if len(calls) == 3 and int(os.environ["RANK"]) == who:
            if how == "mistake":
                raise UserError("the reward cannot be had: mend it.")
            if how == "bug":
                raise ZeroDivisionError("no such luck")
            os.kill(os.getpid(), signal.SIGKILL)
        score(*args)

    Runner.score = failing
    return train.main(options)


@pytest.mark.parametrize("how", ["mistake", "bug", "killed"])
def test_one_rank_failing_ends_the_others_and_one_alone_speaks(base, tmp_path, how):
    ranks = start(
        3,
        fails_in_the_third_step,
        argv(base, tmp_path, "--save-steps", "1", "--generation-batch-size", "24"),
        2,
        how,
    )
    ends = ranks.ends(PATIENCE)
    told = "".join(ranks.errors())
    said = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, told
    assert ends[2] == {"mistake": 2, "bug": 1, "killed": -signal.SIGKILL}[how]
    assert ends[:2] == [1, 1], told
    if how == "mistake":
        assert said == ["error: the reward cannot be had: mend it."]
        assert "Traceback" not in told
    elif how == "bug":
        assert said == ["error: rank 2 failed: ZeroDivisionError: no such luck"]
        assert told.count("Traceback") == 1
    else:
        assert re.fullmatch(
            r"error: rank [01] has lost another process \(.+\): see what ended it.* --resume\.",
            said[0],
        )
        assert "Traceback" not in told
    assert (tmp_path / "checkpoint-1").exists()
    if how != "killed":  # a save that was under way was completed before anybody left
        assert (tmp_path / "checkpoint-2" / "state.json").exists()


def waits_for_nobody(options: list[str]) -> int:
    """Rank 0 fails while rank 1 is far from any collective: only its watch can tell it."""
    score = Runner.score

    def work(*args) -> None:
        if os.environ["RANK"] == "0":
            raise UserError("no more of this.")
        while True:
            threading.Event().wait(0.05)

    Runner.score = work
    del score
    return train.main(options)


def test_a_rank_that_waits_for_nobody_is_ended_too(base, tmp_path):
    ranks = start(2, waits_for_nobody, argv(base, tmp_path))
    assert ranks.ends(PATIENCE) == [2, 1]


def save_fails(options: list[str], who: int) -> int:
    """The disk is full for rank `who` when the second checkpoint is written."""
    write, calls = state.dcp.FileSystemWriter.write_data, []

    def full(*args):
        calls.append(1)
        if len(calls) == 2 and int(os.environ["RANK"]) == who:
            raise OSError(28, "No space left on device")
        return write(*args)

    state.dcp.FileSystemWriter.write_data = full
    return train.main(options)


@pytest.mark.parametrize("who", [0, 1])
def test_a_save_that_fails_on_one_rank_is_told_once_and_ends_all(base, tmp_path, who):
    ranks = start(2, save_fails, argv(base, tmp_path, "--save-steps", "2"), who)
    assert sorted(ranks.ends(PATIENCE)) in ([1, 2], [2, 2]), ranks.errors()
    told = "".join(ranks.errors())
    (said,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: \S+checkpoint-4 could not be written \(No space left on device\): make room .* are whole\.",
        said,
    )
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        ".lock",
        "checkpoint-2",
        "metrics.jsonl",
    ]
    assert len(steps(tmp_path)) >= 5  # told at the end of a later step, not in the middle of one


def test_under_torchrun_the_sentence_is_the_last_of_its_report(base, tmp_path):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    options = argv(base, tmp_path, "--data", str(tmp_path / "none.jsonl"))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "train.py", *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    sentence = r"error: \S+none\.jsonl is not a file.*"
    assert len(re.findall(rf"^{sentence}", done.stderr, re.M)) == 1, done.stderr
    assert re.search(rf"traceback : {sentence}\n=+\n*$", done.stderr), done.stderr

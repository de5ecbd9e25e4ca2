"""A run that ends early, on request or because a rank fails, never hangs and reports one error.

Read next: test_failure.py (ends that no collective notices), tests/test_bad_input.py (mistakes in
one process).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

import train
from nanogrpo.distributed.failure import Stop, Watch
from nanogrpo.errors import UserError
from nanogrpo.rewards.runner import Runner
from nanogrpo.run import state
from tests.conftest import write_base
from tests.ranks import PATIENCE, argv, insist, running, start, steps, torchrun, until


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


# --- on request -----


def test_a_signal_to_any_rank_finishes_the_step_saves_and_ends_all_with_success(base, tmp_path):
    done, saved = 1, []
    for who, number in ((1, signal.SIGTERM), (0, signal.SIGINT)):  # the second one is resumed
        ranks = start(2, train.main, argv(base, tmp_path, "--resume"))
        until(running(tmp_path, beyond=done))
        os.kill(ranks.processes[who].pid, number)
        assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()
        assert ranks.results() == [0, 0]
        saved.append(f"checkpoint-{(done := len(steps(tmp_path)))}")
        assert steps(tmp_path) == list(range(done))
        assert {p.name for p in tmp_path.iterdir()} == {".lock", "metrics.jsonl", *saved}
        assert f"{number.name}: finishing and saving this step, then" in ranks.errors()[who]


def test_two_signals_within_a_second_count_as_one_and_one_process_saves_too(base, tmp_path):
    ranks = start(1, train.main, argv(base, tmp_path))
    until(running(tmp_path))
    # the stopped process receives both when it continues, within a second
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        os.kill(ranks.processes[0].pid, number)
    assert ranks.ends() == [0], ranks.errors()
    assert ranks.results() == [0]
    assert "Traceback" not in ranks.errors()[0]
    assert (tmp_path / f"checkpoint-{len(steps(tmp_path))}" / "state.json").exists()


def never_ends_a_step(options: list[str]) -> int:
    """Run train.py with a reward that hangs after two steps, as when a user interrupts twice."""
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
    # not sooner, because the run would stop at the end of the step before
    until(lambda: "stuck" in ranks.errors()[0])
    assert insist(ranks, signal.SIGINT) == 128 + signal.SIGINT


def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in Stop.signals]
    with Stop() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
    assert [signal.getsignal(number) for number in Stop.signals] == before


# --- on failure -----


def patient(options: list[str], grace: float = PATIENCE) -> int:
    """Run train.py. If a rank fails, rank 0 waits long for the others, which read of it in rank 0's
    store. On a busy machine one may be late, and report that the store is gone.
    """
    Watch.grace = grace
    return train.main(options)


def fails_in_the_third_step(options: list[str], who: int, how: str) -> int:
    """Run train.py; rank `who` fails with a user's mistake or a bug, or is killed."""
    score, calls = Runner.score, []

    def failing(*args) -> None:
        calls.append(1)
        if len(calls) == 3 and int(os.environ["RANK"]) == who:
            if how == "mistake":
                raise UserError("the reward is missing: fix it.")
            if how == "bug":
                raise ZeroDivisionError("no such luck")
            os.kill(os.getpid(), signal.SIGKILL)
        score(*args)

    Runner.score = failing
    # a killed rank never reads it, so then the wait always takes this long
    return patient(options, 5.0 if how == "killed" else PATIENCE)


@pytest.mark.parametrize("how", ["mistake", "bug", "killed"])
def test_one_failing_rank_ends_the_others_and_only_one_reports(base, tmp_path, how):
    options = argv(base, tmp_path, "--save-steps", "1", "--generation-batch-size", "12")
    ranks = start(3, fails_in_the_third_step, options, 2, how)
    ends = ranks.ends(PATIENCE)
    errors = "".join(ranks.errors())
    reports = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(reports) == 1, errors
    assert ends == [1, 1, {"mistake": 2, "bug": 1, "killed": -signal.SIGKILL}[how]], errors
    if how == "mistake":
        assert reports == ["error: the reward is missing: fix it."]
        assert "Traceback" not in errors
    elif how == "bug":
        assert reports == ["error: rank 2 failed: ZeroDivisionError: no such luck"]
        assert errors.count("Traceback") == 1
    else:
        assert re.fullmatch(
            r"error: rank [01] lost its connection to another process \(.+\): "
            r"find out what ended it.* --resume\.",
            reports[0],
        )
        assert "Traceback" not in errors
    assert (tmp_path / "checkpoint-1").exists()
    if how != "killed":  # the save in progress was completed before any rank left
        assert (tmp_path / "checkpoint-2" / "state.json").exists()


def hangs_outside_collectives(options: list[str]) -> int:
    """Run train.py; rank 0 fails while rank 1 is in no collective, so only its watch can notice."""

    def work(*args) -> None:
        if os.environ["RANK"] == "0":
            raise UserError("no more of this.")
        while True:
            threading.Event().wait(0.05)

    Runner.score = work
    return train.main(options)


def test_a_failure_ends_a_rank_that_is_in_no_collective(base, tmp_path):
    ranks = start(2, hangs_outside_collectives, argv(base, tmp_path))
    assert ranks.ends(PATIENCE) == [2, 1]


def save_fails(options: list[str]) -> int:
    """Run train.py; for rank 1 the disk is full when it writes the second checkpoint."""
    write, calls = state.dcp.FileSystemWriter.write_data, []

    def full(*args):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return write(*args)

    state.dcp.FileSystemWriter.write_data = full
    return patient(options)


def test_a_save_that_fails_on_one_rank_is_reported_once_and_ends_all(base, tmp_path):
    ranks = start(2, save_fails, argv(base, tmp_path, "--save-steps", "2"))
    assert sorted(ranks.ends(PATIENCE)) in ([1, 2], [2, 2]), ranks.errors()
    errors = "".join(ranks.errors())
    (report,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: \S+checkpoint-4 could not be written \(No space left on device\): "
        r"make room .* are intact\.",
        report,
    )
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        ".lock",
        "checkpoint-2",
        "metrics.jsonl",
    ]
    assert (
        len(steps(tmp_path)) >= 5
    )  # reported at the end of a later step, not in the middle of one


def test_torchruns_report_ends_with_our_error(base, tmp_path):
    options = argv(base, tmp_path, "--data", str(tmp_path / "none.jsonl"))
    with torchrun("train.py", *options) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    error = r"error: \S+none\.jsonl is not a file.*"
    assert len(re.findall(rf"^{error}", errors, re.M)) == 1, errors
    assert re.search(rf"traceback : {error}\n=+\n*$", errors), errors

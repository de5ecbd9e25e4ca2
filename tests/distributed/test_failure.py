"""A run that ends early, on request or because a rank fails, never hangs and reports one error.

Read next: tests/test_bad_input.py (mistakes in one process).
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from nanogrpo import Config
from nanogrpo.distributed import failure
from nanogrpo.distributed.failure import SIGNALS, stoppable
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint
from nanogrpo.rewards.scorer import Scorer
from nanogrpo.run import state
from tests.ranks import (
    DATA,
    PATIENCE,
    ROOT,
    argv,
    insist,
    run,
    running,
    start,
    steps,
    until,
)

# --- on request -----


def test_a_signal_to_any_rank_finishes_the_step_saves_and_ends_all_with_success(
    tied_base, tmp_path
):
    done, saved = 1, []
    for who, number in ((1, signal.SIGTERM), (0, signal.SIGINT)):  # the second one is resumed
        ranks = start(2, train.main, argv(tied_base, tmp_path, "--resume"))
        until(running(tmp_path, beyond=done))
        os.kill(ranks.processes[who].pid, number)
        assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()
        assert ranks.results() == [0, 0]
        saved.append(f"checkpoint-{(done := len(steps(tmp_path)))}")
        assert steps(tmp_path) == list(range(done))
        assert {p.name for p in tmp_path.iterdir()} == {".lock", "metrics.jsonl", *saved}
        assert f"{number.name}: finishing and saving this step, then" in ranks.errors()[who]


def slow_at_setup(options: list[str], flag: Path, heeds: bool = True) -> int:
    """Run train.py; the last rank reads its weights until it gets a signal, or forever."""
    original = checkpoint.load_weights

    def slow(*args) -> None:
        if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            flag.touch()
            while not heeds:
                time.sleep(0.05)
            failure.asked.wait(PATIENCE)
        original(*args)

    checkpoint.load_weights = slow
    return train.main(options)


def test_a_signal_before_the_first_step_ends_the_run_after_it(tied_base, tmp_path):
    output, flag = tmp_path / "run", tmp_path / "flag"
    options = argv(tied_base, output, "--eval-steps", "1000", "--eval-data", str(DATA))
    ranks = start(2, slow_at_setup, options, flag)
    until(flag.exists)
    os.kill(ranks.processes[1].pid, signal.SIGTERM)
    assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()
    assert [p.name for p in checkpoints(output)] == ["checkpoint-1"]
    assert [step for step in steps(output) if step >= 0] == [0]


def test_a_second_signal_ends_at_once(tied_base, tmp_path):
    ranks = start(1, slow_at_setup, argv(tied_base, tmp_path / "run"), tmp_path / "flag", False)
    until((tmp_path / "flag").exists)
    assert insist(ranks, signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_is_a_request_and_its_handler_is_restored(number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # otherwise `nohup make test` ignores it
    before = [signal.getsignal(n) for n in SIGNALS]
    with stoppable() as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), number)
        assert asked.is_set()
        os.kill(os.getpid(), number)  # within a second, signals count as one
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_a_process_that_the_users_code_forked_ends_at_a_signal():
    with stoppable() as asked:
        if not (child := os.fork()):
            time.sleep(PATIENCE)
            os._exit(0)
        status = None
        while status is None:  # Python forgets a signal that arrives during the fork
            os.kill(child, signal.SIGTERM)
            ended, status = os.waitpid(child, os.WNOHANG)
            status = status if ended else None
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not asked.is_set()


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("timeout", ["60", "0"])
def test_a_console_that_goes_away_or_is_closed_does_not_end_the_run(tied_base, tmp_path, timeout):
    """As with `train.py … | tee log`, where Ctrl-C ends tee. The reward functions print, too."""
    reward = tmp_path / "loud.py"
    reward.write_text(
        "def loud(completion_ids, **kwargs):\n"
        "    print('x' * 100_000)\n"
        "    return [float(sum(ids) % 7) for ids in completion_ids]\n"
    )
    options = argv(
        tied_base, tmp_path / "run", "--log-completions", "--num-completions-to-print", "4"
    )
    options += ["--reward-funcs", f"{reward}:loud", "--reward-timeout", timeout]
    command = [sys.executable, ROOT / "train.py", *options, "--max-steps", "4"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.stdout.read(1000)
    run.stdout.close()
    assert run.wait(PATIENCE) == 0
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "", *command, "--resume", "--max-steps", "5"]
    assert subprocess.run(closed).returncode == 0
    assert steps(tmp_path / "run") == list(range(5))
    assert (tmp_path / "run/checkpoint-5/state.json").exists()


# --- on failure -----


def fails_in_the_third_step(options: list[str], who: int, how: str) -> int:
    """Run train.py; rank `who` fails with a user's mistake or a bug, or is killed."""
    score, calls = Scorer.score, []

    def failing(*args) -> None:
        calls.append(1)
        if len(calls) == 3 and int(os.environ["RANK"]) == who:
            if how == "mistake":
                raise UserError("the reward is missing: fix it.")
            if how == "bug":
                raise ZeroDivisionError("no such luck")
            os.kill(os.getpid(), signal.SIGKILL)
        score(*args)

    Scorer.score = failing
    return train.main(options)


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("how", ["mistake", "bug", "killed"])
def test_one_failing_rank_ends_the_others_and_only_one_reports(tied_base, tmp_path, how, who):
    options = argv(tied_base, tmp_path, "--save-steps", "1", "--generation-batch-size", "12")
    ranks = start(3, fails_in_the_third_step, options, who, how)
    ends = ranks.ends(PATIENCE)
    errors = "".join(ranks.errors())
    (report,) = ranks.reports()
    status = {"mistake": 2, "bug": 1, "killed": 1}[how]
    assert [end for rank, end in enumerate(ends) if rank != who] == [status, status], errors
    assert ends[who] == (-signal.SIGKILL if how == "killed" else status)
    assert errors.count("Traceback") == (how == "bug")
    if how == "mistake":
        assert report == "error: the reward is missing: fix it."
    elif how == "bug":
        assert report == f"error: rank {who} failed: ZeroDivisionError: no such luck"
    else:
        assert re.fullmatch(
            r"error: rank \d lost its connection to another process \(.+\): find out what ended it,"
            r" then continue with --resume\.",
            report,
        )
    assert (tmp_path / "checkpoint-1").exists()
    if how != "killed":  # the save in progress was completed before any rank left
        assert (tmp_path / "checkpoint-2" / "state.json").exists()


def save_fails(options: list[str]) -> int:
    """Run train.py; for rank 1 the disk is full when it writes the second checkpoint."""
    write, calls = state.dcp.FileSystemWriter.write_data, []

    def full(*args):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return write(*args)

    state.dcp.FileSystemWriter.write_data = full
    return train.main(options)


def test_a_save_that_fails_on_one_rank_is_reported_once_and_ends_all(tied_base, tmp_path):
    ranks = start(2, save_fails, argv(tied_base, tmp_path, "--save-steps", "2"))
    assert ranks.ends(PATIENCE) == [2, 2], ranks.errors()
    (report,) = ranks.reports()
    assert re.fullmatch(
        r"error: \S+checkpoint-4 could not be written \(No space left on device\): "
        r"choose .* are intact\.",
        report,
    )
    left = [p.name for p in sorted(tmp_path.iterdir())]
    assert left == [".lock", "checkpoint-2", "metrics.jsonl"]
    # reported at the end of a later step, not in the middle of one
    assert len(steps(tmp_path)) >= 5


def saves_slowly(options: list[str]) -> int:
    """Run train.py; rank 0 writes the model for longer than --ddp-timeout."""
    write = checkpoint.write_model
    checkpoint.write_model = lambda *args: (time.sleep(9), write(*args))
    return train.main(options)


def test_ranks_wait_longer_than_the_timeout_for_the_last_save(tied_base, tmp_path):
    options = argv(tied_base, tmp_path, "--max-steps", "1", "--ddp-timeout", "6")
    assert run(2, saves_slowly, options) == [0, 0]


def waits_for_the_other(seconds: int) -> None:
    with join(Config(device="cpu", ddp_timeout=seconds)) as world:
        if world.rank == 1:
            time.sleep(3 * seconds)
        world.gather(world.rank)


def test_a_rank_that_hangs_is_lost_after_the_timeout():
    ranks = start(2, waits_for_the_other, 2)
    assert ranks.ends() == [1, 1]
    (error,) = ranks.reports()
    assert "lost its connection to another process (" in error
    assert "find out what ended it, then continue with --resume." in error

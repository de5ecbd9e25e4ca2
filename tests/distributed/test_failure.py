"""Ranks notice that another is gone when no collective does, and never falsely; signals before the
first step.

The processes are real. Read before: test_signals.py (ends that a run's collectives notice).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import train
from nanogrpo import timelimit
from nanogrpo.config import Config
from nanogrpo.distributed import failure
from nanogrpo.distributed.world import join
from nanogrpo.engine import tools
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.rewards.runner import Runner
from nanogrpo.run import state
from tests.conftest import write_base
from tests.ranks import DATA, PATIENCE, argv, insist, run, start, steps, until

WATCHED = Config(device="cpu", heartbeat_timeout=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


# --- on silence ---


def waits(folder: Path, how: str) -> None:
    """Wait where no failure is noticed: in the store, as in NCCL across machines, or asleep."""
    # many processes start on two cores, so heartbeats may be late
    with join(dataclasses.replace(WATCHED, heartbeat_timeout=6)) as world:
        (folder / str(world.rank)).touch()
        if how == "store":
            dist.distributed_c10d._get_default_store().wait(
                ["never"], datetime.timedelta(seconds=2 * PATIENCE)
            )
        time.sleep(2 * PATIENCE)


def test_the_others_notice_a_rank_that_is_killed_or_suspended(tmp_path):
    """All cases run at once because they sleep. Rank 0 holds the store: if it is suspended, the
    others cannot communicate and both report.
    """
    cases = {}
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    for i, case in enumerate([("store", 0, kill), ("store", 2, stop), ("pause", 0, stop)]):
        (tmp_path / str(i)).mkdir()
        cases[case] = start(3, waits, tmp_path / str(i), case[0])
    until(lambda: len(list(tmp_path.glob("*/*"))) == 3 * len(cases))
    for (_, who, number), ranks in cases.items():
        os.kill(ranks.processes[who].pid, number)
    for (_, who, _), ranks in cases.items():
        others = [process for rank, process in enumerate(ranks.processes) if rank != who]
        for process in others:
            process.join(PATIENCE)
        assert [process.exitcode for process in others] == [1, 1], ranks.errors()
    for (_, who, _), ranks in cases.items():
        ranks.processes[who].kill()
        ranks.ends(PATIENCE)
        reports = [
            line
            for text in ranks.errors()
            for line in text.splitlines()
            if line.startswith("error: ")
        ]
        assert len(reports) == 1 or (who == 0 and len(reports) == 2), reports
        assert all(
            "find out what ended it, then continue with --resume." in line for line in reports
        )
        assert all("Traceback" not in text for text in ranks.errors())


def busy(seconds: float) -> None:
    """Hold Python's lock on rank 1 for so long, like a C function that does not release it."""
    with join(WATCHED) as world:
        if world.rank == 1:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        world.any()


def test_a_rank_that_holds_pythons_lock_counts_as_lost_only_after_the_limit():
    run(2, busy, 1.0)
    ranks = start(2, busy, 2 * PATIENCE)
    ranks.processes[0].join(PATIENCE)
    ranks.processes[1].kill()
    assert ranks.ends(PATIENCE)[0] == 1
    assert (
        "no heartbeat from rank 1 or the store for 3 s (--heartbeat-timeout)" in ranks.errors()[0]
    )


def waits_for_a_file(path: Path) -> None:
    with join(WATCHED) as world:
        path.with_name(str(world.rank)).touch()
        until(path.exists)
        world.any()


def test_ranks_that_were_all_suspended_do_not_report_each_other(tmp_path):
    """As on a laptop that slept: by the clock each missed many heartbeats, but none polled."""
    ranks = start(2, waits_for_a_file, tmp_path / "go")
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    for number, pause in ((signal.SIGSTOP, 5), (signal.SIGCONT, 1.2)):
        for process in ranks.processes:
            os.kill(process.pid, number)
        time.sleep(pause)
    (tmp_path / "go").touch()
    assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()


def dawdles(seconds: float) -> None:
    """End rank 1 long before rank 0."""
    with join(WATCHED) as world:
        if world.main:
            time.sleep(seconds)


def test_a_rank_that_is_done_waits_and_does_not_count_as_lost():
    run(2, dawdles, 4.0)


def stops_late() -> None:
    """Keep rank 1's watch reading the store, which rank 0 holds, for two more seconds."""
    stop = failure.Watch.stop
    if os.environ["RANK"] == "1":
        failure.Watch.stop = lambda watch: (time.sleep(2), stop(watch))
    with join(WATCHED):
        pass


def test_the_store_outlives_every_watch():
    run(2, stops_late)


# --- where nothing can be raised ---


def uses_a_tool(stuck: int) -> None:
    """Call a tool that catches every exception on one rank; the other waits for the result."""
    timelimit.TRIES, timelimit.PAUSE = 1, 0.02

    def stubborn() -> None:
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(PATIENCE)

    with join(WATCHED) as world:
        patient = world.patient()
        if world.rank == stuck:
            tools.limited(stubborn, 0.02)
        patient.gather(world.rank)


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_tool_that_does_not_end_on_one_rank_ends_all_with_its_own_error(stuck):
    ranks = start(2, uses_a_tool, stuck)
    ends = ranks.ends()
    assert (ends[stuck], ends[1 - stuck]) == (2, 1), ranks.errors()
    (error,) = re.findall("^error: .*", "\n".join(ranks.errors()), re.MULTILINE)
    assert error.startswith("error: --tool-timeout 0.02: a tool does not end (it is at test_fail")


# --- a failure during a save ---


def fails_while_it_saves(options: list[str], folder: Path) -> int:
    """Run train.py; rank 1 fails while its part of checkpoint-1 takes until rank 0 has read of the
    failure, or a minute.
    """
    write, score, finish = state.dcp.FileSystemWriter.write_data, Runner.score, failure.finish_saves
    first = os.environ["RANK"] == "0"

    def slow(*args):
        if not first:
            with contextlib.suppress(AssertionError):
                until((folder / "reported-0").exists, PATIENCE / 2)
                (folder / "reported-before-written").touch()
        return write(*args)

    def failing(*args) -> None:
        if not first and checkpoint_begun.is_set():
            raise UserError("no more of this.")
        score(*args)

    def report(rank_lost: bool = False) -> None:
        (folder / f"reported-{os.environ['RANK']}").touch()
        finish(rank_lost)

    checkpoint_begun, save = threading.Event(), state.Saver.save
    state.Saver.save = lambda *args: (save(*args), checkpoint_begun.set())
    state.dcp.FileSystemWriter.write_data, Runner.score = slow, failing
    failure.finish_saves = report
    return train.main(options)


def test_a_failing_rank_reports_before_it_waits_for_its_save(base, tmp_path):
    (tmp_path / "run").mkdir()
    ranks = start(
        2, fails_while_it_saves, argv(base, tmp_path / "run", "--save-steps", "1"), tmp_path
    )
    assert ranks.ends(PATIENCE) == [1, 2], ranks.errors()
    assert (tmp_path / "reported-before-written").exists()
    # and all completed it
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-1"]


# --- signals before the first step ---


def slow_at(options: list[str], place: str, flag: Path, heeds: bool = True) -> int:
    """Run train.py; the last rank reads its weights, or scores the first evaluation, until it gets
    a signal, or forever.
    """
    owner, name = {"setup": (checkpoint, "load_weights"), "evaluation": (Runner, "score")}[place]
    original = getattr(owner, name)

    def slow(*args) -> None:
        if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            flag.touch()
            while not heeds:
                time.sleep(0.05)
            failure.asked.wait(PATIENCE)
        original(*args)

    setattr(owner, name, slow)
    return train.main(options)


@pytest.mark.parametrize("place", ["setup", "evaluation"])
def test_a_signal_before_the_first_step_ends_the_run_with_nothing_trained(base, tmp_path, place):
    output, flag = tmp_path / "run", tmp_path / "flag"
    ranks = start(
        2,
        slow_at,
        argv(base, output, "--eval-steps", "1000", "--eval-data", str(DATA)),
        place,
        flag,
    )
    until(flag.exists)
    os.kill(ranks.processes[1].pid, signal.SIGTERM)
    assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()
    assert ranks.results() == [0, 0]
    assert (
        "asked to stop before the first step: nothing was trained, and nothing is saved"
        in ranks.errors()[0]
    )
    assert not checkpoint.checkpoints(output)
    assert [step for step in steps(output) if step >= 0] == []


def test_a_second_signal_during_the_setup_ends_at_once(base, tmp_path):
    ranks = start(1, slow_at, argv(base, tmp_path / "run"), "setup", tmp_path / "flag", False)
    until((tmp_path / "flag").exists)
    assert insist(ranks, signal.SIGTERM) == 128 + signal.SIGTERM

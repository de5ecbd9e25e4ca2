"""Who notices that a rank is gone when nothing they wait for does, and who falsely might; signals
before the first step.

Real processes. Read before: test_signals.py (the ends that a run's own collectives notice).
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import train
from nanogrpo.config import Config
from nanogrpo.distributed import failure as ends
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.rewards.runner import Runner
from nanogrpo.run import state
from tests.conftest import write_base
from tests.distributed.test_signals import argv, insist, running, steps, until
from tests.ranks import PATIENCE, ROOT, free_port, run, start

WATCHED = Config(device="cpu", heartbeat_timeout=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


# ---- silence -------------------------------------------------------------------------------------


def waits(folder: Path, how: str) -> None:
    """In what notices nothing: the store's own wait, as across machines NCCL's; or a pause."""
    # twelve processes that start on two cores stutter
    with join(dataclasses.replace(WATCHED, heartbeat_timeout=6)) as world:
        (folder / str(world.rank)).touch()
        if how == "store":
            dist.distributed_c10d._get_default_store().wait(
                ["never"], datetime.timedelta(seconds=2 * PATIENCE)
            )
        time.sleep(2 * PATIENCE)


def test_a_rank_that_is_killed_or_stopped_is_missed_by_the_others(tmp_path):
    """All cases at once: they sleep. Rank 0 holds the store: where it is stopped nobody can tell
    anybody, so each says it.
    """
    cases = {}
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    for i, case in enumerate(
        [("store", 0, kill), ("store", 2, stop), ("pause", 2, kill), ("pause", 0, stop)]
    ):
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
        said = [
            line
            for text in ranks.errors()
            for line in text.splitlines()
            if line.startswith("error: ")
        ]
        assert len(said) == 1 or (who == 0 and len(said) == 2), said
        assert all("see what ended it, and continue with --resume." in line for line in said)
        assert all("Traceback" not in text for text in ranks.errors())


def busy(seconds: float) -> None:
    """Rank 1 holds Python's lock for so long, as a C function does that never gives it back."""
    with join(WATCHED) as world:
        if world.rank == 1:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        world.any()


def test_a_rank_that_holds_pythons_lock_is_not_dead_until_the_limit():
    run(2, busy, 1.0)
    ranks = start(2, busy, 2 * PATIENCE)
    ranks.processes[0].join(PATIENCE)
    ranks.processes[1].kill()
    assert ranks.ends(PATIENCE)[0] == 1
    assert (
        "rank 1, or the store, gives no sign of life for 3 s (--heartbeat-timeout)"
        in ranks.errors()[0]
    )


def waits_for_a_file(path: Path) -> None:
    with join(WATCHED) as world:
        path.with_name(str(world.rank)).touch()
        until(path.exists)
        world.any()


def test_ranks_that_were_all_stopped_accuse_nobody(tmp_path):
    """A laptop that slept: each has missed many beats by the clock, but did not look meanwhile."""
    ranks = start(2, waits_for_a_file, tmp_path / "go")
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    for number, pause in ((signal.SIGSTOP, 5), (signal.SIGCONT, 1.2)):
        for process in ranks.processes:
            os.kill(process.pid, number)
        time.sleep(pause)
    (tmp_path / "go").touch()
    assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()


def dawdles(seconds: float) -> None:
    """Rank 1 is done long before rank 0."""
    with join(WATCHED) as world:
        if world.main:
            time.sleep(seconds)


def test_who_is_done_waits_for_the_others_and_is_not_missed():
    run(2, dawdles, 5.0)


def stops_late() -> None:
    """Rank 1's watch looks at the store, which rank 0 holds, for two seconds more."""
    stop = ends.Watch.stop
    if os.environ["RANK"] == "1":
        ends.Watch.stop = lambda watch: (time.sleep(2), stop(watch))
    with join(WATCHED):
        pass


def test_no_store_ends_before_all_watches_have():
    run(2, stops_late)


# ---- a failure is told before the save is waited for ---------------------------------------------


def fails_while_it_saves(options: list[str], folder: Path) -> int:
    """Rank 1's part of checkpoint-1 takes until rank 0 has heard that it failed in the meantime, or
    half a minute.
    """
    write, score, finish = state.dcp.FileSystemWriter.write_data, Runner.score, ends.finish_saves
    first = os.environ["RANK"] == "0"

    def slow(*args):
        deadline = time.monotonic() + 30
        while not first and not (folder / "told-0").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not first and (folder / "told-0").exists():
            (folder / "told-before-written").touch()
        return write(*args)

    def failing(*args) -> None:
        if not first and checkpoint_begun.is_set():
            raise UserError("no more of this.")
        score(*args)

    def told(lost: bool = False) -> None:
        (folder / f"told-{os.environ['RANK']}").touch()
        finish(lost)

    checkpoint_begun, save = threading.Event(), state.Saver.save
    state.Saver.save = lambda *args: (save(*args), checkpoint_begun.set())
    state.dcp.FileSystemWriter.write_data, Runner.score, ends.finish_saves = slow, failing, told
    return train.main(options)


def test_a_failing_rank_tells_the_others_before_it_waits_for_its_save(base, tmp_path):
    (tmp_path / "run").mkdir()
    ranks = start(
        2, fails_while_it_saves, argv(base, tmp_path / "run", "--save-steps", "1"), tmp_path
    )
    assert ranks.ends(PATIENCE) == [1, 2], ranks.errors()
    assert (tmp_path / "told-before-written").exists()
    # and all completed it
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-1"]


# ---- asked to, before the first step -------------------------------------------------------------


def slow_at(options: list[str], place: str, flag: Path, heeds: bool = True) -> int:
    """A run whose last rank reads its weights, or scores its first evaluation, until it is asked to
    stop; or for ever.
    """
    owner, name = {"setup": (checkpoint, "load_weights"), "evaluation": (Runner, "score")}[place]
    original = getattr(owner, name)

    def slow(*args) -> None:
        if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            flag.touch()
            while not heeds:
                time.sleep(0.05)
            ends.asked.wait(PATIENCE)
        original(*args)

    setattr(owner, name, slow)
    return train.main(options)


@pytest.mark.parametrize("place", ["setup", "evaluation"])
def test_a_signal_before_the_first_step_ends_the_run_with_nothing_trained(base, tmp_path, place):
    output, flag = tmp_path / "run", tmp_path / "flag"
    ranks = start(
        2, slow_at, argv(base, output, "--eval-steps", "1000", "--eval-samples", "4"), place, flag
    )
    until(flag.exists)
    os.kill(ranks.processes[1].pid, signal.SIGTERM)
    assert ranks.ends(PATIENCE) == [0, 0], ranks.errors()
    assert ranks.results() == [0, 0]
    assert (
        "asked to stop before the first step: nothing was trained, nothing is saved"
        in ranks.errors()[0]
    )
    assert not checkpoint.checkpoints(output)
    assert [step for step in steps(output) if step >= 0] == []


def test_a_second_signal_during_the_setup_ends_at_once(base, tmp_path):
    ranks = start(1, slow_at, argv(base, tmp_path / "run"), "setup", tmp_path / "flag", False)
    until((tmp_path / "flag").exists)
    assert insist(ranks, signal.SIGTERM) == 128 + signal.SIGTERM


def test_torchrun_passes_a_signal_on_and_the_run_is_saved(base, tmp_path):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "train.py", *argv(base, tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    until(running(tmp_path))
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0  # torchrun's own, whatever the ranks end with
    assert (tmp_path / f"checkpoint-{len(steps(tmp_path))}" / "state.json").exists(), told

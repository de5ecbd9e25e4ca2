"""Tests of the soak: it finds nothing in two runs, and it would find what it looks for.

`.ci/run` runs twenty faults. Read next: bench/soak.py.
"""

import os
import subprocess
import sys

import pytest

from bench import soak, tables
from bench.soak_faults import MODES, STEPS
from tests.conftest import write_base, write_rows
from tests.ranks import until


def test_runs_with_a_fault_keep_every_promise(tmp_path):
    (record,) = soak.main(["--faults", "2", "--seed", "6", "--out", str(tmp_path)])
    assert record["broken"] == []
    assert sum(kind["runs"] for kind in record["kinds"].values()) == 2
    lines = tables.lines_of("soak", [record])
    assert {len(line) for line in lines} == {len(tables.BENCHES["soak"].columns)}


@pytest.fixture
def finished(tmp_path):
    """A run that looks finished, with its rows and the hash of its weights."""
    base = write_base(tmp_path / "base")
    with soak.new_run(MODES["one process"], base) as run:
        last = run.output / f"checkpoint-{STEPS}"
        last.mkdir(parents=True)
        (last / "model.safetensors").write_bytes(b"weights")
        (run.output / ".lock").touch()
        rows = [{"step": step, "reward": 0.5} for step in range(STEPS)]
        write(run, rows)
        yield run, rows, run.weights()


def lose_the_log(run, rows):
    """As if a fault had deleted the log and the run was started again."""
    run.log_deleted, run.starts = True, 2
    write(run, rows[1:])


def write(run, rows):
    write_rows(run.output / "metrics.jsonl", rows)


def start_process(run, rows):
    """Start a process that belongs to the run. It is killed at the end of the run."""
    run.patience = 0.0
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(command, env=os.environ | {"SOAK": run.mark})
    until(run.commands)  # for a moment after it starts, it has no environment


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda run, rows: write(run, rows[1:]), "lost or doubled"),
        (lambda run, rows: write(run, [rows[0], *rows]), "lost or doubled"),
        (lose_the_log, "no message about the missing steps"),
        (
            lambda run, rows: write(run, [*rows[:-1], {"step": 9, "reward": 0.6}]),
            "other values of reward",
        ),
        (lambda run, rows: (run.output / ".checkpoint-2.tmp").mkdir(), "files are left"),
        (lambda run, rows: (run.folder / "tmp" / "nanogrpo-1").mkdir(), "files are left"),
        (lambda run, rows: run.errors.append("Traceback (most"), "a traceback"),
        (lambda run, rows: run.errors.append("error: a\nerror: b\n"), "2 errors"),
        (
            lambda run, rows: next(run.output.glob("*/model.safetensors")).write_bytes(b"other"),
            "weights differ",
        ),
        (start_process, "1 processes are left"),
    ],
)
def test_each_broken_promise_is_noticed(finished, broken, message):
    run, rows, weights = finished
    soak.check(run, rows, weights)
    broken(run, rows)
    with pytest.raises(AssertionError, match=message):
        soak.check(run, rows, weights)


def test_a_killed_reward_process_may_lose_the_rewards_of_one_step(finished):
    run, rows, weights = finished
    lost = [*rows[:-1], {**rows[-1], "reward": 0.0, "rewards/failures": 4}]
    write(run, lost)
    soak.check(run, rows, "other weights", lossy=True)
    with pytest.raises(AssertionError, match="other values"):
        soak.check(run, rows, weights)
    write(run, [{**rows[0], "reward": 0.0}, *lost[1:]])  # before the loss
    with pytest.raises(AssertionError, match="other values of reward"):
        soak.check(run, rows, weights, lossy=True)
    write(run, rows)
    with pytest.raises(AssertionError, match="weights differ"):
        soak.check(run, rows, "other weights", lossy=True)

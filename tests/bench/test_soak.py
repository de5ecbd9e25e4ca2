"""Tests of the soak: it finds nothing in two runs, and it would find what it looks for.

`.ci/run` runs twenty faults. Read next: bench/soak.py.
"""

import json

import pytest

from bench import soak, tables
from tests.conftest import write_base


def test_runs_with_a_fault_keep_every_promise(tmp_path):
    (record,) = soak.main(["--faults", "2", "--seed", "1", "--out", str(tmp_path)])
    assert record["broken"] == []
    assert sum(kind["runs"] for kind in record["kinds"].values()) == 2
    lines = tables.lines_of("soak", [record])
    assert {len(line) for line in lines} == {len(tables.BENCHES["soak"].columns)}


@pytest.fixture
def finished(tmp_path):
    """A run that looks finished, with its rows and the hash of its weights."""
    base = write_base(tmp_path / "base")
    with soak.new_run(soak.MODES["one process"], base) as run:
        last = run.output / f"checkpoint-{soak.STEPS}"
        last.mkdir(parents=True)
        (last / "model.safetensors").write_bytes(b"weights")
        (run.output / ".lock").touch()
        rows = [{"step": step, "reward": 0.5} for step in range(soak.STEPS)]
        write(run, rows)
        yield run, rows, run.weights()


def write(run, rows):
    (run.output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda run, rows: write(run, rows[1:]), "lost or doubled"),
        (lambda run, rows: write(run, [rows[0], *rows]), "lost or doubled"),
        (
            lambda run, rows: write(run, [*rows[:-1], {"step": 9, "reward": 0.6}]),
            "other values of reward",
        ),
        (lambda run, rows: (run.output / ".checkpoint-2.tmp").mkdir(), "files are left"),
        (lambda run, rows: run.errors.append("Traceback (most"), "a traceback"),
        (lambda run, rows: run.errors.append("error: a\nerror: b\n"), "2 errors"),
        (
            lambda run, rows: next(run.output.glob("*/model.safetensors")).write_bytes(b"other"),
            "weights differ",
        ),
    ],
)
def test_each_broken_promise_is_noticed(finished, broken, message):
    run, rows, weights = finished
    soak.check(run, rows, weights)
    broken(run, rows)
    with pytest.raises(AssertionError, match=message):
        soak.check(run, rows, weights)

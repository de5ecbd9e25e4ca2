"""Tests of the rules of the speedrun. Read next: examples/speedrun/verify.py."""

import json

import pytest

from examples.speedrun import verify


def made(right: int, **changes) -> dict:
    """Return a record whose three seeds each answer this many of 120 problems correctly."""
    curve = [[0, 0, 0, 0.19], [8, 9, 9, right / 120]]
    runs = [{"seed": seed, "threads": 1, "curve": curve} for seed in range(3)]
    record = {"idea": "none", "options": {"max_steps": 8}, "date": "2026-11-24", "runs": runs}
    return {**record, "machine": {"commit": "", "uncommitted_changes": ""}, **changes}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (made(72), None),
        (made(71), "train longer"),  # p < 0.05 needs 72 each
        (made(72, options={"max_steps": 8, "model": "mine"}), "model is fixed"),
        (made(72, options={"max_steps": 9}), "after step 9"),
        (made(72, runs=made(72)["runs"][1:]), "none left out"),
        (made(72, runs=[{"seed": 0}]), "needs seed"),
        (made(72, environment={"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}), "may not be set"),
    ],
)
def test_a_record_is_accepted_unless_it_breaks_a_rule(record, problem, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert bool(verify.main([str(path)])) == bool(problem)
    assert (problem or "processor s") in str(capsys.readouterr())


def test_the_records_of_this_project_follow_the_rules(capsys):
    assert verify.main([]) == 0
    assert capsys.readouterr().out in (verify.RECORDS.parent / "README.md").read_text()

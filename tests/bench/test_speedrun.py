"""Tests of the rules of the speedrun. Read next: examples/speedrun/verify.py."""

import json

import pytest

from examples.speedrun import verify


def made(right: int, **changes) -> dict:
    """Return a record whose three seeds each answer this many of the 120 problems correctly."""
    curve = [[0, 0.0, 0.0, 0.1917], [8, 9.5, 9.0, round(right / 120, 4)]]
    runs = [{"seed": seed, "threads": 1, "curve": curve} for seed in range(3)]
    record = {"idea": "none", "options": {"max_steps": 8}, "date": "2026-11-24", "runs": runs}
    return {**record, "machine": {"commit": "0" * 40, "uncommitted_changes": False}, **changes}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (made(72), None),
        (made(71), "train longer"),  # p < 0.05 from 214 of 360 on
        (made(72, options={"max_steps": 8, "reward_funcs": ["accuracy"]}), "reward_funcs is fixed"),
        (made(72, options={"max_steps": 9}), "after step 9"),
        (made(72, runs=made(72)["runs"][1:]), "none left out"),
        (made(72, runs=[{"seed": 0}]), "needs seed"),
        (made(72, environment={"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}), "may not be set"),
    ],
)
def test_a_record_is_accepted_unless_it_breaks_a_rule(record, problem, tmp_path, capsys):
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert verify.main([str(tmp_path / "record.json")]) == bool(problem)
    assert (problem or "processor s") in capsys.readouterr().out


def test_the_records_of_this_project_follow_the_rules():
    assert verify.main([]) == 0

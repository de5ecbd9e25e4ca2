"""Tests that bench/README.md is made from the records and from nothing else.

Read next: bench/tables.py, bench/readme.py.
"""

import pytest

from bench import common, readme, tables, tables_learning

MACHINE = {
    "cpu": "some chip",
    "cores": 2,
    "threads": 2,
    "gpu": None,
    "versions": {"torch": "2"},
    "commit": "0123456789",
}
RECORD = {"time": "2026-11-21T00:00:00+00:00", "machine": {**MACHINE, "uncommitted_changes": False}}


def learned(side: str, seed: int, shift: float = 0.0) -> dict:
    held_out = {"0": 0.3, "2": 0.6 + 0.1 * seed + shift, "4": 0.95 + 0.01 * seed + shift}
    times = {
        "seconds": [1.0, 1.0, 1.0, 1.0],
        "reward": [1.0, 1.2 + 0.1 * seed, 1.4, 1.5 + 0.1 * seed + shift],
    }
    return {
        "side": side,
        "seed": seed,
        "held_out": held_out,
        "threads": 2,
        "command": "python -m bench.learning",
        **times,
        **RECORD,
    }


def test_the_readme_is_up_to_date():
    page = (common.ROOT / "bench/README.md").read_text()
    assert page == readme.render(), "run python -m bench.readme"
    assert readme.summary() in (common.ROOT / "README.md").read_text(), "a ratio has changed"


def test_a_record_fills_its_cell_and_names_its_origin(tmp_path):
    records = [learned("nanogrpo", 0), learned("nanogrpo", 1)]
    common.write("learning", records, tmp_path)
    section = readme.section("learning", records)
    assert "| nanogrpo | 2 | 0.955 ± 0.007 | " in section
    assert f"| TRL | {tables.MISSING} |" in section
    origin = "ran on 2026-11-21 on some chip (2 cores, 2 threads) with torch 2, at commit 0123456."
    assert f"`python -m bench.learning` {origin}" in section
    assert section in readme.render(tmp_path)


def test_check_reports_whether_the_file_is_up_to_date(tmp_path, capsys):
    argv = ["--file", str(tmp_path / "README.md"), "--results", str(tmp_path)]
    assert readme.main([*argv, "--check"]) == 1
    assert readme.main(argv) == 0
    assert readme.main([*argv, "--check"]) == 0
    common.write("learning", [learned("TRL", 0)], tmp_path)
    assert readme.main([*argv, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out


def test_a_replay_is_compared_with_our_run_of_its_seed():
    ours = [learned("nanogrpo", 0), learned("nanogrpo", 1)]
    replayed = [
        learned(common.REPLAYED, seed) | {"weights_apart": 1e-5 * (1 + seed)} for seed in (0, 1)
    ]
    replayed = [{**record, "ours": dict(record["held_out"])} for record in replayed]
    (note,) = tables_learning.replay_apart([*ours, *replayed])
    assert "held-out accuracy at 6 of 6 evaluations, and the largest difference is 0.000" in note
    assert "at most 2.0e-05 times the distance" in note
    replayed[1]["held_out"]["4"] -= 0.25
    (note,) = tables_learning.replay_apart([*ours, *replayed])
    assert "held-out accuracy at 5 of 6 evaluations, and the largest difference is 0.250" in note
    assert tables_learning.replay_apart(ours) == []
    assert "| TRL, our completions | 2 | 0.830 ± " in readme.section("learning", [*ours, *replayed])


def test_the_distance_of_two_curves():
    same, far = (
        [learned(side, seed, shift * (side == "TRL")) for side in common.SIDES for seed in (0, 1)]
        for shift in (0, 0.05)
    )
    assert tables_learning.apart(same, "held_out") == (1.0, 0.0)
    share, most = tables_learning.apart(far, "held_out")  # deviations 0, 0.1/√2 and 0.01/√2
    assert share == pytest.approx(2 / 3)
    assert most == pytest.approx(0.05 / (0.01 / 2**0.5))
    assert tables_learning.seconds_to(same[0], 0.9) == 4.0
    assert tables_learning.seconds_to(same[0], 0.99) is None

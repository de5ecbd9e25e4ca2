"""The step bench runs, its sides find the same gradient, and its rows say what was measured. Read
next: test_rollout_speed.py.
"""

import argparse
import json
import sys

import pytest

from bench import step_memory, step_time
from tests.run.allocator import most_at_once

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL to transformers
]


def test_the_sides_do_the_same_work(tmp_path):
    argv = [
        "--threads",
        "1",
        "--repeats",
        "1",
        "--scale",
        "0.2",
        "--hidden",
        "64",
        "--layers",
        "2",
        "--cases",
        "uneven, G=8",
    ]
    rows = step_time.main(
        [*argv, "--out", str(tmp_path), "--picture", str(tmp_path / "x.png")]
    )  # raises unless all sides have the same gradient norm
    assert json.loads((tmp_path / "step_time.json").read_text()) == rows
    computed = {row["side"]: row["computed_tokens"] for row in rows}
    assert computed["nanogrpo"] < computed["nanogrpo, prompts copied"] < computed["TRL"]
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["machine"]["versions"]["trl"] == "1.16.0"
        assert set(row["phases"]) == {"pack", "forward", "backward", "optimizer"}
        assert sum(row["phases"].values()) > 0
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_every_panel_of_growth_has_its_cases():
    for _, cases in step_time.GROWTH.values():
        assert len(cases) >= 3
        assert set(cases) <= set(step_time.CASES)


def test_the_head_of_a_large_vocabulary_costs_us_less_memory(tmp_path):
    """On a small step, where the weights outweigh the logits: how much less at a full one is the
    bench's to say.

    The bench measures processes, where so small a step drowns in chance; which side needs less is
    counted, at twice the lengths.
    """
    argv = [
        "--threads",
        "1",
        "--scale",
        "0.1",
        "--hidden",
        "32",
        "--layers",
        "1",
        "--cases",
        "V = 151,936",
    ]
    # raises unless the gradients' norms are equal
    ours, theirs, split = step_memory.main([*argv, "--out", str(tmp_path)])
    assert [row["side"] for row in (ours, theirs, split)] == [
        "nanogrpo",
        "TRL",
        "TRL, 4 micro-batches",
    ]
    assert ours["gradient_norms"][0] > 0
    assert all(
        0 < row["peak_bytes_above_libraries"] < row["peak_bytes"] for row in (ours, theirs, split)
    )
    case, args = "V = 151,936", argparse.Namespace(threads=1, scale=0.2, hidden=32, layers=1)
    step_time.write_model(step_memory.CASES[case], tmp_path, args)
    ours, theirs = (
        most_at_once(lambda s=side: step_memory.child(case, s, tmp_path, args))
        for side in ("nanogrpo", "TRL")
    )
    assert ours < 0.7 * theirs, (ours, theirs)

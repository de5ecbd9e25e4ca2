"""The step bench runs, its sides find the same gradient, and its rows say what was measured. Read next: test_rollout_speed.py."""

import json
import sys

import pytest

from bench import step_time

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL to transformers
]


def test_the_sides_do_the_same_work(tmp_path):
    argv = ["--threads", "1", "--repeats", "1", "--scale", "0.2", "--hidden", "64", "--layers", "2", "--cases", "uneven, G=8"]
    rows = step_time.main([*argv, "--out", str(tmp_path)])  # raises unless all sides have the same gradient norm
    assert json.loads((tmp_path / "step_time.json").read_text()) == rows
    computed = {row["side"]: row["computed_tokens"] for row in rows}
    assert computed["nanogrpo"] < computed["nanogrpo, prompts copied"] < computed["TRL"]
    assert all(row["tokens_per_second"] > 0 and row["machine"]["versions"]["trl"] == "1.16.0" for row in rows)

"""Tests that the step benches run, that their sides find the same gradient, and that their records
are right. Their speeds are not tested.

Read next: test_rollout_speed.py.
"""

import sys

import pytest

from bench import common, step_memory, step_sides, step_time
from tests.run.allocator import most_at_once

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    # TRL uses deprecated parts of transformers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_all_sides_do_the_same_work(tmp_path):
    argv = f"--threads 1 --repeats 1 --scale 0.2 --hidden 64 --layers 2 --out {tmp_path}".split()
    argv += ["--cases", "uneven, G=8", "--picture", f"{tmp_path}/x.png"]
    records = step_time.main(argv)  # raises if the gradient norms differ
    assert common.read("step_time", tmp_path) == records
    computed = {record["side"]: record["computed_tokens"] for record in records}
    assert computed["nanogrpo"] < computed["nanogrpo, prompts copied"] < computed["TRL"]
    for record in records:
        assert record["tokens_per_second"] > 0
        assert record["machine"]["versions"]["trl"] == "1.16.0"
        assert set(record["phases"]) == {"pack", "forward", "backward", "optimizer"}
        assert sum(record["phases"].values()) > 0
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_different_gradient_norms_are_an_error():
    step_sides.check_norms("case", {"nanogrpo": 1.0, "TRL": 1.0005})
    with pytest.raises(RuntimeError, match="case: the gradient norms differ"):
        step_sides.check_norms("case", {"nanogrpo": 1.0, "TRL": 1.002})


def test_every_panel_of_the_picture_has_its_cases():
    for _, cases in step_time.GROWTH.values():
        assert len(cases) >= 3
        assert set(cases) <= set(step_time.CASES)


def test_our_head_needs_less_memory_for_a_large_vocabulary(tmp_path, monkeypatch, in_this_process):
    """The allocator's own count decides: in a process this small, its memory is mostly noise."""
    counts = []
    child = step_memory.child

    def counted(*args):
        found = []
        counts.append(most_at_once(lambda: found.append(child(*args))))
        return found[0]

    monkeypatch.setattr(step_memory, "child", counted)
    case = step_sides.Case(2, 8, 8, 32, vocab=16_384)
    monkeypatch.setattr(step_memory, "CASES", {"large": case})
    argv = ["--threads", "1", "--hidden", "32", "--layers", "1", "--out", str(tmp_path)]
    records = step_memory.main(argv)  # raises if the gradient norms differ
    assert [record["side"] for record in records] == list(step_memory.SIDES)
    assert records[0]["gradient_norms"][0] > 0
    assert len(in_this_process) == 3
    ours, theirs, split = counts
    assert ours < 0.7 * theirs
    assert split < theirs

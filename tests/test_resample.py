"""Dynamic sampling: groups without a signal are replaced, by the same prompts and draws however
often and wherever it is run.
"""

from __future__ import annotations

import pytest
import torch

import train
from nanogrpo.model import checkpoint
from tests.conftest import arguments, steps
from tests.ranks import run

# Only the completions of some prompts differ in reward; the others earn the same whatever they say.
REWARD = """
def some(prompts, completion_ids, **kwargs):
    pairs = zip(prompts, completion_ids)
    return [len(ids) + sum(ids) % 7 if "1" in p or "3" in p else 1.0 for p, ids in pairs]

def none(completions, **kwargs):
    return [1.0] * len(completions)

def worth(completion_ids, **kwargs):
    return [len(ids) + sum(ids) % 7 for ids in completion_ids]

def price(completion_ids, **kwargs):
    return [-2.0 * value for value in worth(completion_ids)]
"""


@pytest.fixture
def argv(tiny_base, files, tmp_path):
    (tmp_path / "r.py").write_text(REWARD)

    def make(name: str, *options: str, function: str = "some") -> list[str]:
        return arguments(
            tiny_base,
            files,
            tmp_path / name,
            "--reward-funcs",
            f"{tmp_path / 'r.py'}:{function}",
            *options,
        )

    return make


def test_equal_groups_are_replaced(argv, tmp_path):
    assert train.main(argv("off")) == 0
    assert train.main(argv("on", "--max-resample-times", "5")) == 0
    off, on = steps(tmp_path / "off"), steps(tmp_path / "on")
    assert "resampled_groups" not in off[0]
    assert off[0]["frac_reward_zero_std"] > 0
    assert on[0]["frac_reward_zero_std"] < off[0]["frac_reward_zero_std"]
    assert on[0]["resampled_groups"] >= 4 * off[0]["frac_reward_zero_std"]


def test_it_ends_when_no_group_ever_differs(argv, tmp_path):
    assert train.main(argv("never", "--max-resample-times", "3", function="none")) == 0
    # 4 groups, three times
    assert all(row["resampled_groups"] == 12 for row in steps(tmp_path / "never"))
    assert all(
        row["frac_reward_zero_std"] == 1.0 and row["grad_norm"] == 0.0
        for row in steps(tmp_path / "never")
    )


def test_groups_that_differ_but_teach_nothing_are_replaced(argv, tmp_path):
    """MaxRL wants a mean above 0; sums that are equal, of functions that differ, teach where each
    function is scaled alone.
    """
    maxrl = ["--advantage-estimator", "maxrl", "--max-resample-times", "2"]
    assert train.main(argv("maxrl", *maxrl, function="price")) == 0
    assert all(
        row["resampled_groups"] == 8 and row["grad_norm"] == 0.0
        for row in steps(tmp_path / "maxrl")
    )

    both = [
        "--reward-funcs",
        *(f"{tmp_path / 'r.py'}:{name}" for name in ("worth", "price")),
        "--reward-weights",
        "1",
        "0.5",
    ]
    for aggregation, replaced in {"sum_then_normalize": 8, "normalize_then_sum": 0}.items():
        options = [*both, "--max-resample-times", "2", "--multi-objective-aggregation", aggregation]
        assert train.main(argv(aggregation, *options)) == 0
        for row in steps(tmp_path / aggregation):
            assert row["resampled_groups"] == replaced
            assert (row["grad_norm"] > 0) == (replaced == 0)


def test_without_equal_groups_it_changes_nothing(tiny_base, files, tmp_path):
    for name, more in {"a": [], "b": ["--max-resample-times", "3"]}.items():
        assert train.main(arguments(tiny_base, files, tmp_path / name, *more)) == 0
    a, b = (steps(tmp_path / name) for name in "ab")
    assert [row.pop("resampled_groups") for row in b] == [0] * 3
    assert a == b


def test_a_resumed_run_draws_the_same_replacements(argv, tmp_path):
    options = ["--max-resample-times", "2", "--save-steps", "1"]
    assert train.main(argv("whole", *options)) == 0
    assert train.main(argv("parts", *options, "--max-steps", "1")) == 0
    assert train.main(argv("parts", *options, "--resume")) == 0
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    first, second = (
        checkpoint.load_model(tmp_path / name / "checkpoint-3") for name in ("whole", "parts")
    )
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters()))


def two_ranks(argv: list[str]) -> int:
    return train.main(argv)


def test_two_ranks_replace_the_same_groups_as_one(argv, tmp_path):
    options = ["--max-resample-times", "3", "--advantage-estimator", "maxrl"]
    assert run(2, two_ranks, argv("two", *options)) == [0, 0]
    assert train.main(argv("one", *options)) == 0
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert any(row["resampled_groups"] for row in one)
    for a, b in zip(one, two, strict=True):
        assert a["resampled_groups"] == b["resampled_groups"]
        assert [a[name] for name in ("reward", "loss", "grad_norm")] == pytest.approx(
            [b[name] for name in ("reward", "loss", "grad_norm")], rel=1e-5, abs=1e-7
        )


def test_a_negative_bound_is_refused(argv, tmp_path, capsys):
    assert train.main(argv("bad", "--max-resample-times", "-1")) == 2
    assert "--max-resample-times is -1" in capsys.readouterr().err

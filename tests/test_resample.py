"""Dynamic sampling: groups without a signal are replaced. tests/configurations.py has the laws that
it shares with all features: a resumed run, and two ranks, replace the same ones.
"""

import pytest

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
def rewarded(rows_of, tmp_path):
    """Train with one of these functions, and return the records of the steps."""
    (tmp_path / "r.py").write_text(REWARD)

    def rewarded(functions: str, options: str = "", folder: str = "") -> list[dict]:
        named = [f"{tmp_path / 'r.py'}:{name}" for name in functions.split()]
        return rows_of(options, "--reward-funcs", *named, folder=folder)

    return rewarded


def test_equal_groups_are_replaced(rewarded):
    off, *_ = rewarded("some", folder="off")
    on, *_ = rewarded("some", "--max-resample-times 5", folder="on")
    assert "resampled_groups" not in off
    assert on["frac_reward_zero_std"] < off["frac_reward_zero_std"]
    assert on["frac_tokens_skipped"] < off["frac_tokens_skipped"] < 1
    assert on["resampled_groups"] >= 4 * off["frac_reward_zero_std"] > 0


def test_it_ends_when_no_group_ever_differs(rewarded):
    for row in rewarded("none", "--max-resample-times 3"):
        assert row["resampled_groups"] == 12  # 4 groups, three times
        assert row["frac_reward_zero_std"] == 1.0
        assert row["grad_norm"] == 0.0


@pytest.mark.parametrize(
    ("functions", "options", "replaced"),
    [
        # MaxRL wants a mean above 0
        ("price", "--advantage-estimator maxrl", 8),
        # sums that are equal, of functions that differ, teach where each is scaled alone
        ("worth price", "--reward-weights 1 0.5", 8),
        (
            "worth price",
            "--reward-weights 1 0.5 --multi-objective-aggregation normalize_then_sum",
            0,
        ),
    ],
)
def test_groups_that_differ_but_teach_nothing_are_replaced(rewarded, functions, options, replaced):
    for row in rewarded(functions, f"{options} --max-resample-times 2 --max-steps 2"):
        assert row["resampled_groups"] == replaced
        assert (row["grad_norm"] > 0) == (replaced == 0)


def test_without_equal_groups_it_changes_nothing(rows_of):
    rows = rows_of("--max-resample-times 3", folder="on")
    assert [row.pop("resampled_groups") for row in rows] == [0] * 3
    assert rows == rows_of()

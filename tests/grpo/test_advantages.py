"""Advantages by hand: each estimator against its definition, and its behavior without evidence
(invariant 4).

test_trl_parity.py compares the same functions with TRL's code. Read next: test_objectives.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogrpo import Config
from nanogrpo.extras import estimators
from nanogrpo.grpo import advantages

REWARD = st.floats(-1e3, 1e3, allow_nan=False) | st.sampled_from([0.0, 0.1, 1.0, 1 / 3, None])
ESTIMATORS = [
    {"advantage_estimator": "rloo"},
    {"advantage_estimator": "maxrl"},
    {"multi_objective_aggregation": "normalize_then_sum"},
    *({"scale_rewards": scale} for scale in ("group", "batch", "none")),
]


def of(rewards: list, **options) -> list[float]:
    """The advantages of a step in which each reward comes from one function."""
    cfg = Config(**options)
    rows = [[r] for r in rewards]
    return advantages.step_advantages(rewards, cfg, rows, [estimators.Estimators(cfg)])[0]


@settings(max_examples=200)
@given(
    st.integers(1, 5).flatmap(
        lambda g: st.lists(st.lists(REWARD, min_size=g, max_size=g), min_size=1, max_size=4)
    ),
    st.sampled_from(ESTIMATORS),
)
def test_every_estimator_is_finite_centered_and_zero_without_evidence(groups, options):
    size, flat = len(groups[0]), [r for group in groups for r in group]
    found = of(flat, num_generations=size, **options)
    values = torch.tensor(found, dtype=torch.float64).view(-1, size)
    assert values.isfinite().all()
    assert all(a == 0 for a, r in zip(values.flatten(), flat) if r is None)
    assert values.sum(1).abs().max() < 1e-9 * max(1.0, values.abs().max().item())


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(1, 16), st.sampled_from(ESTIMATORS))
def test_equal_rewards_give_exactly_zero(reward, size, options):
    """A rounding residue of 1e-17 divided by a standard deviation near zero would be an update in a
    random direction.
    """
    assert set(of([reward] * (2 * size), num_generations=size, **options)) == {0.0}


def test_maxrl_weighs_a_success_by_its_rarity():
    options = dict(advantage_estimator="maxrl", num_generations=4)
    # with a success rate p: 1/p - 1, and -1
    assert of([1.0, 0.0, 0.0, 0.0], **options) == [3.0, -1.0, -1.0, -1.0]
    assert of([1.0, 1.0, 1.0, 0.0], **options) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert of([None, 1.0, 0.0, 0.0], **options) == pytest.approx([0.0, 2.0, -1.0, -1.0])
    # a mean that is not above 0 is no scale; the last one is 0 up to some 1e-17
    for rewards in ([0.0] * 4, [-1.0, 0.0, -1.0, -2.0], [0.1, 0.2, -0.3, None]):
        assert of(rewards, **options) == [0.0] * 4
    assert 0.1 + 0.2 - 0.3 != 0


def test_normalize_then_sum_gives_exactly_zero_without_a_signal():
    """Subtracting the mean of the sums would leave 1e-17, and --max-resample-times asks for exact
    zeros.
    """
    weights = torch.tensor([1.0, 0.3], dtype=torch.float64)
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        some = torch.rand(5, 4, 2, dtype=torch.float64, generator=g)
        values, _ = estimators.decoupled(torch.cat([some, torch.full((1, 4, 2), 0.1)]), weights)
        assert (values[:-1] != 0).all()
        assert (values[-1] == 0).all()

"""Entropy: the quantile over ranks, the tokens above it, and the bonus with its adaptive
coefficient.

tests/grpo/test_trl_parity.py and test_trl_objectives.py compare them with TRL's code. Read next:
tests/run/test_train_menu.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanogrpo.config import Config
from nanogrpo.grpo.entropy import Bonus, keep_top, quantile
from tests.conftest import SOLO


@given(
    st.lists(st.lists(st.floats(0, 8, width=32), max_size=12), min_size=1, max_size=4),
    st.floats(0, 1),
)
def test_the_quantile_over_ranks_equals_torchs(parts, q):
    parts = [torch.tensor(part, dtype=torch.float32) for part in parts]
    together = torch.cat(parts).double()
    expected = torch.quantile(together, q).item() if len(together) else math.inf
    for mine in parts:  # each rank gathers the values of all
        ours = quantile(mine, q, SimpleNamespace(gather=lambda _: parts))
        assert ours == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_quantile_takes_more_values_than_torchs():
    n = 2**24 + 2
    values = torch.arange(n, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.8)
    expected = math.floor(0.8 * (n - 1))
    assert expected <= quantile(values, 0.8, SOLO) <= expected + 1


def batches_of(entropies: list[list[float]], weight: float = 1.0) -> list[SimpleNamespace]:
    weights = [torch.full((len(h),), weight) for h in entropies]
    return [SimpleNamespace(weight=w, entropy_mask=None, entropy_weight=None) for w in weights]


def test_the_top_tokens_are_chosen_over_all_micro_batches_of_a_step():
    rows = [[0.1, 3.0, 0.2], [2.0, 0.3, 0.4, 1.0], [], [0.5, 0.6, 0.7]]
    batches = batches_of(rows)
    # the quantile at 0.7 lies between 0.7 and 1
    keep_top(batches, [torch.tensor(h) for h in rows], 0.3, SOLO)
    assert [b.entropy_mask.tolist() for b in batches] == [
        [False, True, False],
        [True, False, False, True],
        [],
        [False] * 3,
    ]
    batches[0].weight[1] = 0.0  # an untrained token does not count
    keep_top(batches, [torch.tensor(h) for h in rows], 0.0, SOLO)
    assert batches[1].entropy_mask.tolist() == [True, False, False, False]
    batches = batches_of([[1.0, 1.0], [1.0]])  # equal entropies are kept together
    keep_top(batches, [torch.ones(2), torch.ones(1)], 0.1, SOLO)
    assert all(b.entropy_mask.all() for b in batches)


def test_the_bonus_is_a_mean_over_the_trained_tokens_of_a_step():
    batches = batches_of([[1.0, 1.0], [1.0]])
    batches[0].weight[0] = 0.0
    batches[1].entropy_mask = torch.tensor([True])
    Bonus(Config(entropy_coef=0.3), SOLO).weigh(batches)
    assert torch.cat([b.entropy_weight for b in batches]).tolist() == pytest.approx(
        [0.0, 0.15, 0.15]
    )
    batches = batches_of([[1.0]])
    Bonus(Config(), SOLO).weigh(batches)
    assert batches[0].entropy_weight is None


def test_the_adaptive_coefficient_follows_the_target_step_by_step():
    cfg = Config(
        use_adaptive_entropy=True,
        entropy_coef=0.01,
        entropy_coef_delta=0.01,
        entropy_coef_max=0.025,
        entropy_target=1.0,
    )
    bonus, weights = Bonus(cfg, SOLO), []
    for entropy in (0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 0.5):
        (batch,) = batches_of([[1.0] * 4])
        bonus.weigh([batch])
        weights.append(batch.entropy_weight[0].item() * 4)
        bonus.add(batch, SimpleNamespace(entropy=torch.full((4,), entropy)))
        bonus.end_update()
        bonus = Bonus(cfg, SOLO, dict(bonus.state))  # it needs only its state
    # No bonus before a measurement, then 0.02 and 0.025 (the maximum). Above the target there is no
    # bonus, and the coefficient falls to 0.
    assert weights == pytest.approx([0, 0.02, 0.025, 0, 0, 0, 0])
    assert bonus.metrics() == {"entropy_coef": pytest.approx(0.01)}
    before = bonus.state
    bonus.end_update()  # every completion was masked, so no entropy was measured
    assert bonus.state == before

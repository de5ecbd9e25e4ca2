"""Entropy: the exact quantile over ranks, the tokens that it keeps, and the bonus with its adaptive
coefficient.

The same against TRL's code: test_trl_parity.py, test_trl_objectives.py. Read next:
test_train_menu.py.
"""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogrpo.config import Config
from nanogrpo.grpo.entropy import Bonus, keep_top, quantile
from tests.conftest import SOLO


class Ranks:
    """Several ranks as threads of this process: what hypothesis draws, it can give to them."""

    def __init__(self, parts: list[torch.Tensor]):
        self.parts = parts

    def quantile(self, q: float) -> list[float]:
        size, box, barrier, out = len(self.parts), {}, threading.Barrier(len(self.parts)), {}

        def work(rank: int) -> None:
            def gather(mine):
                box[rank] = mine
                barrier.wait()
                everyone = [box[r] for r in range(size)]
                barrier.wait()
                return everyone

            out[rank] = quantile(self.parts[rank], q, SimpleNamespace(gather=gather))

        threads = [threading.Thread(target=work, args=(r,)) for r in range(size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return [out[r] for r in range(size)]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.floats(0, 8, width=32), max_size=12), min_size=1, max_size=4),
    st.floats(0, 1),
)
def test_the_quantile_over_ranks_is_torchs(parts, q):
    together = torch.tensor([x for part in parts for x in part], dtype=torch.float32)
    ours = Ranks([torch.tensor(part, dtype=torch.float32) for part in parts]).quantile(q)
    assert len(set(ours)) == 1
    if len(together):
        assert ours[0] == pytest.approx(
            torch.quantile(together.double(), q).item(), rel=1e-6, abs=1e-9
        )
    else:
        assert ours[0] == math.inf


def test_more_tokens_than_torchs_quantile_takes():
    """2²⁴ + 2 of them; the values are a permutation of 0 … n-1, as far as float32 can tell them
    apart.
    """
    n = 2**24 + 2
    values = torch.arange(n, dtype=torch.float32).flip(0)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.8)
    expected = values.sort().values[math.floor(0.8 * (n - 1))].item()
    assert expected <= quantile(values, 0.8, SOLO) <= expected + 1


def batches_of(entropies: list[list[float]], weight: float = 1.0) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            weight=torch.full((len(h),), weight), entropy_mask=None, entropy_weight=None
        )
        for h in entropies
    ]


def test_the_top_of_a_step_is_of_all_its_micro_batches():
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
    batches[0].weight[1] = 0.0  # an untrained token has no say
    keep_top(batches, [torch.tensor(h) for h in rows], 0.0, SOLO)
    assert batches[1].entropy_mask.tolist() == [True, False, False, False]
    batches = batches_of([[1.0, 1.0], [1.0]])  # equal ones stay together
    keep_top(batches, [torch.ones(2), torch.ones(1)], 0.1, SOLO)
    assert all(b.entropy_mask.all() for b in batches)


def test_the_bonus_is_the_mean_over_a_step():
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


def test_the_adaptive_coefficient_step_by_step():
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
        bonus = Bonus(cfg, SOLO, dict(bonus.state))  # all it knows is its state
    # Not before anything was measured; 0.02 and 0.025 (the most); then none above the target, while
    # the coefficient falls to 0.
    assert weights == pytest.approx([0, 0.02, 0.025, 0, 0, 0, 0])
    assert bonus.metrics() == {"entropy_coef": pytest.approx(0.01)}
    before = bonus.state
    bonus.end_update()  # every completion was masked: no entropy was measured, and none is not 0
    assert bonus.state == before

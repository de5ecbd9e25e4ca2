"""Entropy: the quantile over ranks, the tokens above it, and the bonus.

tests/grpo/test_trl_parity.py compares them with TRL's code. Read next: test_objectives.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanogrpo import Config
from nanogrpo.extras.entropy import prepare, quantile
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


def batches_of(rows: list[list[float]]) -> list[SimpleNamespace]:
    vectors = dict(importance=None, entropy_weight=None)
    return [SimpleNamespace(weight=torch.ones(len(row)), **vectors) for row in rows]


def test_the_top_tokens_are_chosen_over_all_micro_batches_of_a_step():
    def kept(share, batches, rows):
        cfg = Config(top_entropy_quantile=share, entropy_coef=0.3)
        prepare(batches, list(map(torch.tensor, rows)), cfg, SOLO)
        trained = [batch.weight * batch.importance for batch in batches]
        each = 0.3 / sum(
            x.count_nonzero() for x in trained
        )  # the bonus is a mean over these tokens
        for x, batch in zip(trained, batches):
            assert batch.entropy_weight.tolist() == pytest.approx((x > 0).float() * each)
        return [batch.importance.tolist() for batch in batches]

    rows = [[0.1, 3.0, 0.2], [2.0, 0.3, 0.4, 1.0], [], [0.5, 0.6, 0.7]]
    # the quantile at 0.7 lies between 0.7 and 1
    assert kept(0.3, batches_of(rows), rows) == [[0, 1, 0], [1, 0, 0, 1], [], [0, 0, 0]]
    batches = batches_of(rows)
    batches[0].weight[1] = 0.0  # an untrained token does not count
    batches[1].importance = torch.full((4,), 0.5)  # of another correction
    assert kept(0.0, batches, rows)[1] == [0.5, 0, 0, 0]
    rows = [[1.0, 1.0], [1.0]]  # equal entropies are kept together
    assert kept(0.1, batches_of(rows), rows) == rows

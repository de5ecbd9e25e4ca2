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


def test_tokens_that_are_not_trained_on_do_not_count():
    """Neither for the threshold nor for the mean of the bonus. TRL has the other laws."""
    batch = SimpleNamespace(weight=torch.tensor([1.0, 0.0, 1.0]), importance=None)
    cfg = Config(top_entropy_quantile=0.0, entropy_coef=0.3)
    prepare([batch], [torch.tensor([2.0, 3.0, 1.0])], cfg, SOLO)
    assert (batch.importance * batch.weight).tolist() == [1, 0, 0]
    assert batch.entropy_weight.tolist() == pytest.approx([0.3, 0, 0])

"""Spreads over ranks against those of the whole vector.

Read next: nanogrpo/grpo/spread.py.
"""

import pytest
import torch

from nanogrpo.grpo.spread import Spread, spreads


def test_the_spreads_of_two_ranks_are_those_of_the_whole_vector():
    values = torch.randn(100, dtype=torch.float64)
    parcels: list = []

    def gather(mine):
        parcels.append(mine)
        return parcels

    spreads({"a": values[:30], "only here": values[:2], "nowhere": values[:0]}, gather)
    found = spreads({"a": values[30:], "only here": values[:0], "nowhere": values[:0]}, gather)
    assert set(found) == {"a", "only here"}
    total, least, most = values.sum().item(), values.min().item(), values.max().item()
    assert found["a"] == pytest.approx(Spread(100, total, least, most))
    assert found["a"].mean == pytest.approx(values.mean().item())
    assert found["only here"].n == 2


def test_a_mean_of_many_float32_values_keeps_its_digits():
    values = torch.full((1_000_000,), 0.1)
    assert spreads({"a": values})["a"].mean == pytest.approx(values[0].item(), rel=1e-12)

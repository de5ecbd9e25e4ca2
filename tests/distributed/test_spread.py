"""Spreads over ranks against those of the whole vector.

Read next: nanogrpo/distributed/world.py.
"""

import pytest
import torch

from nanogrpo.distributed.world import Spread, World
from tests.conftest import SOLO


def test_the_spreads_of_two_ranks_are_those_of_the_whole_vector():
    values = torch.randn(100, dtype=torch.float64)
    parcels: list = []

    class Pretended(World):
        def gather(self, mine):
            parcels.append(mine)
            return parcels

    ranks = [Pretended(rank, 2, torch.device("cpu")) for rank in range(2)]
    ranks[0].spreads({"a": values[:30], "only here": values[:2], "nowhere": values[:0]})
    found = ranks[1].spreads({"a": values[30:], "only here": values[:0], "nowhere": values[:0]})
    assert set(found) == {"a", "only here"}
    total, least, most = values.sum().item(), values.min().item(), values.max().item()
    assert found["a"] == pytest.approx(Spread(100, total, least, most))
    assert found["a"].mean == pytest.approx(values.mean().item())
    assert found["only here"].n == 2


def test_a_mean_of_many_float32_values_keeps_its_digits():
    values = torch.full((1_000_000,), 0.1)
    assert SOLO.spreads({"a": values})["a"].mean == pytest.approx(values[0].item(), rel=1e-12)

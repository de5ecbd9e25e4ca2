"""Count, sum, minimum and maximum of values that are divided over the ranks.

In: vectors of this rank's values. Out: their spreads over all ranks, from which the metrics are
computed. Each rank reduces its own values and exchanges only these numbers, so the time falls with
the number of ranks. Read next: mismatch.py and logs/metrics.py, which use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Gather = Callable[[Any], list]  # returns every rank's value: World.gather


class Spread(NamedTuple):
    """Example: the spread of 1.0, 4.0 is Spread(n=2, total=5.0, least=1.0, most=4.0)"""

    n: int
    total: float
    least: float
    most: float

    @property
    def mean(self) -> float:
        return self.total / self.n


def one_rank(mine: Any) -> list:
    """Gather from this process only."""
    return [mine]


def spreads(vectors: Mapping[str, Tensor], gather: Gather = one_rank) -> dict[str, Spread]:
    """Return the spread of each vector over all ranks, summed in float64.

    vectors: name → [n], where n may differ between ranks. A name without values is left out.
    """
    mine = {}
    for name, values in vectors.items():
        if len(values):
            x = values.double()
            mine[name] = Spread(len(x), x.sum().item(), x.min().item(), x.max().item())
    found = defaultdict(list)
    for part in gather(mine):
        for name, spread in part.items():
            found[name].append(spread)
    out = {}
    for name, parts in found.items():
        counts, totals, lowest, highest = zip(*parts)
        out[name] = Spread(sum(counts), sum(totals), min(lowest), max(highest))
    return out

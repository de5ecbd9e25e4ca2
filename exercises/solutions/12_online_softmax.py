"""Solution of exercise 12.

e^(z - q_new) = e^(z - q) · e^(q - q_new), so one factor rescales l and s. H = -Σ p (z - lse)
= lse - Σ p z = lse - s/l.

examples/textbook.py is this loop with one q per row, and `fold` in kernels/triton/log_softmax.py
the same with one q per lane. The latter keeps Σ e^(z - q)·(z - q) instead of s, which stays exact
when all logits are near -10,000.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def statistics(blocks: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    q = torch.tensor(-math.inf, dtype=torch.float64)
    l, s = torch.zeros(2, dtype=torch.float64)
    for z in blocks:
        q_new = torch.maximum(q, z.max())
        old, e = (q - q_new).exp(), (z - q_new).exp()
        l = l * old + e.sum()
        s = s * old + (e * z).sum()
        q = q_new
    lse = q + l.log()
    return lse, lse - s / l

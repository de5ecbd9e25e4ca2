"""Exercise 14: the fused head.

The loss -Σ_m c_m · log π(token m) needs logits [M, V] = hidden @ head.T. (Think of c_m as the
advantage of token m times its weight.) For a large vocabulary they take more memory than the model.
But the gradient of a row of logits depends on that row alone. So compute the logits of `chunk` rows
at a time, turn them into their gradient dz, use it, and forget them:

    dz = c · (p - onehot(token))      of the chunk, [chunk, V]
    dhidden of the chunk = dz @ head  [chunk, D]
    dhead += dz.T @ hidden of the chunk

The checker counts the numbers that you hold at a time, which must be fewer than all logits, and
your matrix products: three per chunk. Do not use autograd.

    python -m exercises.check 14
"""

import torch
from torch import Tensor


def fused_head(
    hidden: Tensor, head: Tensor, tokens: Tensor, c: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden: [M, D], head: [V, D], tokens: [M] int64, c: [M].

    Returns the loss [], dhidden [M, D] and dhead [V, D].
    """
    ...

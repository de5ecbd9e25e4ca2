"""Solution of exercise 18.

The library always gets ROWS rows, so it always uses the same order. The last tile is filled up with
rows of zeros, whose results are dropped. The price is that a batch of one row costs as much as one
of 64 rows. On a GPU, this is not much: reading b takes most of the time, and b is read once in both
cases.

Rounding the result hides most differences, but not all: two sums that differ in the last bit may be
on two sides of a boundary, and rounding then makes the difference larger. A sum in float64 also has
an order. Its differences are rarer, and large terms that cancel make them visible again.

The project's function is `product` in kernels/exact.py, and a kernel for GPUs, with blocks of fixed
size, is in kernels/triton/exact.py. `--bitwise` uses them (docs/precision.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from exercises.library import matmul

ROWS = 64


def product(a: Tensor, b: Tensor) -> Tensor:
    results = []
    for tile in a.split(ROWS):
        full = F.pad(tile, (0, 0, 0, ROWS - len(tile)))  # [ROWS, K]
        results.append(matmul(full, b)[: len(tile)])
    return torch.cat(results)

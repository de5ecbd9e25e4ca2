"""Gather rows of a tensor. The backward adds up the gradients of each row in float32.

In: x [T, …], index [n] int64. Out: x[index]. Read next: kernels/head.py.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .log_softmax import accumulate

# The type of the value that describes a summation order.
# Only triton/gather.py needs a summation order.
Order = tuple[Tensor, Tensor] | None


def row_order(index: Tensor, count: int) -> Order:
    return None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.count = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (index,) = ctx.saved_tensors
        total = dy.new_zeros(ctx.count, *dy.shape[1:], dtype=accumulate(dy.dtype))
        return total.index_add_(0, index, dy.to(total.dtype)).to(dy.dtype), None


def gather_rows(x: Tensor, index: Tensor, order: Order = None) -> Tensor:
    """Return x[index] [n, …]. If a row is gathered several times, its gradients are added up in
    float32.
    """
    return _Gather.apply(x, index)

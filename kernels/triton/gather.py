"""Gather rows. The backward adds up the gradients of each row in float32 and in a fixed order.

In: x [T, …], index [n] int64 with values below T. Out: x[index], [n, …]. A prompt that G
completions share is gathered G times, so G gradients are added to each of its rows. On a GPU,
torch's own backward adds gradients with atomics, in the dtype of x and in an order that differs
from run to run. Read next: kernels/head.py.

Equation.   dx_i = Σ_{j: index_j = i} dy_j, with j in increasing order.
Order.      A stable sort of the index, once per packed batch, lists the indices j of each row i.
            The gradients of a row are then added in this order.
Bytes.      The backward moves 2·n·W + 2·T·W bytes in bfloat16, for rows of W numbers.
Exactness.  The sum is rounded only once, however many gradients it has.
Reference.  `gather_rows` in reference/gather.py.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import triton
import triton.language as tl

from ..reference.gather import Order
from .memory import load

BLOCK, WARPS = 1024, 4


@triton.jit
def sum_kernel(DY, ORDER, STARTS, DX, W, blocks, BLOCK: tl.constexpr):
    """Each program sums the gradients of one block of one row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    j = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(tl.load(STARTS + row), tl.load(STARTS + row + 1)):
        total += load(DY + tl.load(ORDER + i) * W + j, j < W)
    tl.store(DX + row * W + j, total, mask=j < W)


def row_order(index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the order of summation for an index [n] into `count` rows.

    The first result [n] lists the indices j of row 0, then of row 1, and so on. The second result
    [count + 1] says where the indices of each row start.
    """
    rows, order = index.sort(stable=True)
    return order, torch.searchsorted(rows, torch.arange(count + 1, device=index.device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, order, starts):
        ctx.save_for_backward(order, starts)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        order, starts = ctx.saved_tensors
        dy, count = dy.contiguous(), len(starts) - 1
        dx = dy.new_empty(count, *dy.shape[1:])
        width = math.prod(dy.shape[1:])
        blocks = triton.cdiv(width, BLOCK)
        sum_kernel[(count * blocks,)](
            dy, order, starts, dx, width, blocks, BLOCK=BLOCK, num_warps=WARPS
        )
        return dx, None, None, None


def gather_rows(x: Tensor, index: Tensor, order: Order = None) -> Tensor:
    """Return x[index] [n, …]. If `order` is None, `row_order` computes it."""
    return _Gather.apply(x, index, *(order or row_order(index, len(x))))

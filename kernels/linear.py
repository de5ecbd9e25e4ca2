"""Matrix products in float32 on a CPU, by oneDNN where that is at hand, and the linear layer that
is made of three of them.

In: x [T, I], weight [O, I], maybe a bias [O]. Out: y [T, O], and the two gradients. Nothing here is
approximate: float32 throughout, only the order of the sums is another library's.

Equation.   Y = X Wᵀ + b;  dX = dY W;  dW = dYᵀ X;  db = Σ_rows dY. All three products have the form A Bᵀ, which is `product`.
Why.        torch gives float32 products on a CPU to the BLAS it was built with, which need not be the best for the CPU it meets:
            MKL reaches 110 GFLOP/s on one core of an AMD EPYC; oneDNN, which torch has too, 186 to 253. It reads a transposed
            view of B as it lies and copies one of A. A call costs 10 µs more, and half a millisecond where it builds its code for
            a number of rows that it has not seen.
Elsewhere.  GPUs, other types, autocast, torch.compile and small products: F.linear.
`torch.backends.mkldnn.flags(enabled=False)`
            turns oneDNN off, here as in torch. Sampling packs its weights once for many steps: local_engine.py.

Read next: head.py (the output head's products), nanogrpo/model/decoder.py (the layers).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTH = 1 << 22  # multiply-adds from which oneDNN's product is faster, its call included
_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # not in every build of torch


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether `product(a, b)` is oneDNN's: plain float32 matrices on a CPU (no DTensor, nothing
    being traced), large enough.
    """
    return (
        a.is_cpu  # asked first: on a GPU nothing else is
        and b.is_cpu
        and a.dtype == b.dtype == torch.float32
        and _onednn is not None
        and torch.backends.mkldnn.enabled
        and not torch.compiler.is_compiling()
        and {type(a), type(b)} <= {Tensor, nn.Parameter}
        and a.ndim == b.ndim == 2
        and a.shape[0] * b.numel() >= WORTH
        and not torch.is_autocast_enabled("cpu")
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ: [N, K], [M, K] → [N, M]. Without a derivative; either may be a transposed view."""
    return _onednn(a, b, None, "none", [], "") if by_onednn(a, b) else a @ b.T


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # a frozen weight (LoRA's base) keeps no activation
        for_dx, for_dweight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_dweight else None, weight if for_dx else None)
        return _onednn(x, weight, bias, "none", [], "")  # [T, O]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need = ctx.needs_input_grad
        dx = product(dy, weight.T) if need[0] else None  # [T, I]
        # [O, I]; twice as fast as product(dy.T, x.T) where O is large
        dweight = product(x.T, dy.T).T if need[1] else None
        return dx, dweight, dy.sum(0) if need[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), differentiable once where oneDNN computes it."""
    return _Linear.apply(x, weight, bias) if by_onednn(x, weight) else F.linear(x, weight, bias)

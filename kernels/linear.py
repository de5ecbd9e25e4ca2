"""Compute float32 matrix products and linear layers on a CPU, with oneDNN if it is available. All
oneDNN calls of the project are in this file.

In: x [T, I], weight [O, I], optionally a bias [O]. Out: y [T, O] and its gradients. Everything is
computed in float32. Results differ from those of F.linear only because sums are computed in a
different order. 16-bit matrices are converted to float32, and results are rounded, as on a GPU.

Equation.   Y = X Wᵀ + b;  dX = dY W;  dW = dYᵀ X;  db = Σ_rows dY. The function `product` computes
            A Bᵀ, and each of the products for Y, dX and dW can be written in this form.
Why.        On a CPU, torch computes float32 matrix products with the BLAS that it was built with.
            On some CPUs, another library is faster. On one core of an AMD EPYC, MKL reaches 110
            GFLOP/s, and oneDNN, which torch also includes, reaches 186 to 253 GFLOP/s. oneDNN reads
            a transposed view of B directly, but copies a transposed view of A. A call of oneDNN
            takes 10 µs longer to start than a call of MKL. If oneDNN must generate code for a new
            number of rows, it takes half a millisecond longer.
16 bits.    On a CPU without instructions for 16-bit products, torch computes them 3 to 25
            times slower than float32 products.
Elsewhere.  GPUs, float64, autocast and small products use F.linear. The setting
            torch.backends.mkldnn.flags(enabled=False) turns oneDNN off, both here and in torch.

Read next: head.py (the products of the output head), nanogrpo/model/decoder.py (the layers).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WORTH = 1 << 22  # minimum number of multiply-adds for which oneDNN is faster
REPACK_FROM = 1 << 14  # minimum number of weight elements for which `repacked` is faster
# some builds of torch do not include oneDNN
_onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN computes `product(a, b)`.

    The result is True for large float32 and 16-bit matrices on a CPU, unless they are DTensors or
    are being traced.
    """
    return bool(
        a.is_cpu  # the device is checked first, so on a GPU, nothing else is evaluated
        and a.shape[0] * b.numel() >= WORTH
        and a.dtype == b.dtype != torch.float64
        and _onednn
        and torch.backends.mkldnn.enabled
        and {type(a), type(b)} <= {Tensor, nn.Parameter}
        and a.ndim == b.ndim == 2
        and not torch.is_autocast_enabled("cpu")
    )


def product(a: Tensor, b: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Return a bᵀ: [N, K], [M, K] → [N, M], without autograd. Both arguments may be transposed
    views.

    The result is written to the first N rows of `buffer`, unless oneDNN computes it: oneDNN
    always allocates a new tensor.
    """
    if by_onednn(a, b):
        return _multiply(a, b, None)
    return torch.mm(a, b.T, out=None if buffer is None else buffer[: len(a)])


def _multiply(*args) -> Tensor:
    """Return a bᵀ + bias for the arguments a, b and bias, or a bᵀ if bias is None."""
    if args[0].dtype != torch.float32:
        return _multiply(*(x if x is None else x.float() for x in args)).type_as(args[0])
    return _onednn(*args, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        # If the weight is frozen, x is not saved.
        for_dx, for_dweight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_dweight else None, weight if for_dx else None)
        return _multiply(x, weight, bias)  # [T, O]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        for_dx, for_dweight, for_dbias, *_ = ctx.needs_input_grad
        return (
            product(dy, weight.T) if for_dx else None,  # [T, I]
            # [O, I]; for large O, twice as fast as product(dy.T, x.T)
            product(x.T, dy.T).T if for_dweight else None,
            dy.sum(0) if for_dbias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear(x, weight, bias). A result that oneDNN computes can be differentiated only
    once.
    """
    return _Linear.apply(x, weight, bias) if by_onednn(x, weight) else F.linear(x, weight, bias)


def repacked(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[..., Tensor]:
    """Return a function x ↦ F.linear(x, weight, bias). The returned function does not notice later
    changes of the weight.

    On a CPU, a weight is copied in float32 to the layout that oneDNN prefers for inputs with `rows`
    rows. On one core of an AMD EPYC, multiplying 64 rows by a weight [2048, 256] then takes 0.29
    ms, compared with 0.72 ms for F.linear. The returned function is for inference only, because a
    repacked weight has no gradient.
    """
    if not (weight.is_cpu and weight.dtype != torch.float64 and _onednn):
        return lambda x, *_: F.linear(x, weight, bias)
    ready = torch.ops.mkldnn._reorder_linear_weight(weight.float(), rows)
    return lambda x, *_: _multiply(x, ready, bias)

"""Count the launches of a decoder block and the bytes that they move, without a GPU.

A block of Qwen3-0.6B runs forward and backward on meta tensors, which have shapes but no memory.
Every operation that reaches torch's dispatcher, and every Triton launch, reads its inputs and
writes its outputs once. Views and allocations are free. Matrix products are counted apart, and
attention is left out, because both are the same in either implementation. PyTorch's RMSNorm counts
as one kernel, as on a GPU, where it is one.

    TRITON_INTERPRET=1 python tests/kernels/traffic.py          # prints the table of README.md

Read next: test_traffic.py.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # run as a script: the checkout is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from nanogrpo.kernels.triton import norm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench import common
from nanogrpo.extras import one_gpu
from nanogrpo.kernels import reference
from nanogrpo.model import dispatch
from nanogrpo.model.decoder import Block

QWEN3 = common.QWEN3["0.6B"]
TOKENS = 16_384


def tensors(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors in values, also inside tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(*value)


@dataclass
class Count:
    bytes: int = 0
    names: list[str] = field(default_factory=list)

    @property
    def launches(self) -> int:
        return len(self.names)

    def add(self, name: str, *values: Any) -> None:
        self.names.append(name)
        self.bytes += sum(x.numel() * x.itemsize for x in tensors(*values))


class Traffic(TorchDispatchMode):
    """Counts operations: `elementwise` and `products`."""

    def __init__(self) -> None:
        super().__init__()
        self.elementwise, self.products = Count(), Count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or "empty" in name or name in ("detach", "_unsafe_view"):
            return out
        count = self.products if name in ("mm", "addmm") else self.elementwise
        count.add(name, args, out)
        return out

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count Triton launches instead of running them, and PyTorch's norms as one kernel."""

        def launch(kernel, *args, grid, warmup=False, **options):
            self.elementwise.add(f"{kernel.fn.__module__}.{kernel.fn.__name__}", args)

        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return _OneKernel.apply(x, weight, self.elementwise)

        kind = type(norm.forward_kernel)  # compiled, or interpreted
        patches = [mock.patch.object(kind, "run", launch)]
        for module in (reference, reference.norm, reference.rope):
            patches.append(mock.patch.object(module, "rms_norm", rms_norm))
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            with self:
                yield


class _OneKernel(torch.autograd.Function):
    """RMSNorm of PyTorch on a GPU: one kernel forward, one backward, and a sum for dweight."""

    @staticmethod
    def forward(ctx, x, weight, count):
        ctx.save_for_backward(x, weight)
        ctx.counter = count
        out = torch.empty_like(x)
        count.add("rms_norm", x, weight, out)
        return out

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        ctx.counter.add("rms_norm_backward", x, weight, dy, dx)
        ctx.counter.add("rms_norm_dweight", dweight)
        return dx, dweight, None


class Attention(torch.autograd.Function):
    """Keeps what FlashAttention keeps, computes nothing, and counts nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def block_traffic(kernels: str, joint: bool = False) -> list[Traffic]:
    """Return the traffic of a block's forward and of its backward in bfloat16. joint: as on one GPU
    without FSDP2 (nanogrpo/extras/one_gpu.py).
    """
    with torch.device("meta"):
        block = Block(QWEN3, 0)
        if joint:
            one_gpu.copy_weights(block)
        else:
            block.to(torch.bfloat16)
        shape = TOKENS, QWEN3.hidden_size
        x, residual = (
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        cos, sin = torch.empty(2, TOKENS, 1, QWEN3.head_dim)
    forward, backward = Traffic(), Traffic()
    with mock.patch.object(dispatch, "choice", kernels):
        with forward.counting():
            out = block(x, residual, cos, sin, lambda layer, *qkv: Attention.apply(*qkv[:3]))
        dout = [torch.empty_like(y) for y in out]
        with backward.counting():
            torch.autograd.grad(out, [x, residual, *(() if joint else block.parameters())], dout)
    return [forward, backward]


def rows() -> list[str]:
    """Return the rows of the table in kernels/README.md."""
    out = []
    for title, kernels in (("PyTorch functions", "torch"), ("Triton kernels", "triton")):
        both = [t.elementwise for t in block_traffic(kernels)]
        cells = [f"{c.launches} launches, {c.bytes / 1e9:.2f} GB" for c in both]
        total = sum(c.bytes for c in both)
        out.append(f"| {title} | {' | '.join(cells)} | {total / 1e9:.2f} GB |")
    return out


if __name__ == "__main__":
    print(*rows(), sep="\n")

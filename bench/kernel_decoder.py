"""The decoder's memory-bound operations for bench/kernel_speed.py: RMSNorm with residual, QK-norm
with RoPE, and SwiGLU, forward and backward.

In: a device. Out: the arguments of kernel_cases.py's `Case`, one dict per operation. The sides are
nanogrpo (kernels/norm.py, rope.py, swiglu.py), eager PyTorch, and torch.compile. The model will use
one of the three kernels once this bench shows that it beats torch.compile. Read next:
kernel_cases.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def eager_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, EPS), h


def eager_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    n = F.rms_norm(x, weight.shape, weight, EPS)
    wide = n.to(torch.promote_types(n.dtype, torch.float32))
    a, b = wide.chunk(2, -1)
    return ((wide * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]).to(x.dtype),)


def eager_swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (F.silu(gate) * up,)


def _fused(name: str) -> Callable[..., tuple[Tensor, ...]]:
    from nanogrpo.kernels import norm, rope, swiglu

    return {
        "norm": lambda x, residual, weight: norm.add_rms_norm(x, residual, weight, EPS),
        "rope": lambda x, weight, cos, sin: (rope.norm_rope(x, weight, cos, sin, EPS),),
        "swiglu": lambda gate, up: (swiglu.swiglu(gate, up),),
    }[name]


def _both_ways(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., dict[str, Tensor]]:
    """Return a side that computes the function and its gradients.

    As upstream gradients it uses its own results, because they have the right shapes.
    """

    def side(**inputs: Tensor) -> dict[str, Tensor]:
        out = function(**inputs)
        leaves = {name: v for name, v in inputs.items() if v.requires_grad}
        grads = torch.autograd.grad(out, list(leaves.values()), [o.detach() for o in out])
        return {"out": out[0], **{f"d{name}": g for name, g in zip(leaves, grads)}}

    return side


def cases(device: str, small: bool) -> list[Callable[[], dict]]:
    dtype = torch.float32 if small else torch.bfloat16
    # the sizes of Qwen3-8B
    T, D, H, E, W = (16, 48, 3, 16, 80) if small else (8192, 4096, 32, 128, 12_288)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    def make(
        name: str, title: str, eager: Callable, inputs: dict[str, Tensor], numbers: int, shape: dict
    ) -> dict:
        def truth(**values: Tensor) -> dict[str, Tensor]:
            wide = {
                k: v.detach().double().requires_grad_(v.requires_grad) for k, v in values.items()
            }
            return _both_ways(eager)(**wide)

        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        absent = "needs a GPU, or TRITON_INTERPRET=1"
        sides = {
            "nanogrpo": _both_ways(_fused(name)) if device == "cuda" or interpreted else absent,
            "torch eager": _both_ways(eager),
            "torch.compile": _both_ways(torch.compile(eager))
            if device == "cuda"
            else "needs a GPU",
        }
        floor = numbers * dtype.itemsize / 4.3e12
        return dict(name=title, inputs=inputs, sides=sides, truth=truth, floor=floor, shape=shape)

    def rope_inputs() -> dict[str, Tensor]:
        angles = torch.randn(T, E // 2, device=device).repeat(1, 2)
        return {"x": draw(T, H, E), "weight": draw(E), "cos": angles.cos(), "sin": angles.sin()}

    return [
        lambda: make(
            "norm",
            "residual add and RMSNorm",
            eager_norm,
            {"x": draw(T, D), "residual": draw(T, D), "weight": draw(D)},
            8 * T * D,
            {"T": T, "D": D},
        ),
        lambda: make(
            "rope",
            "QK-norm and RoPE",
            eager_rope,
            rope_inputs(),
            5 * T * H * E,
            {"T": T, "H": H, "E": E},
        ),
        lambda: make(
            "swiglu",
            "SwiGLU",
            eager_swiglu,
            {"gate": draw(T, W), "up": draw(T, W)},
            8 * T * W,
            {"T": T, "F": W},
        ),
    ]

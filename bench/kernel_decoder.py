"""The memory-bound operations of the decoder for bench/kernel_speed.py: RMSNorm with residual,
QK-norm with RoPE, and SwiGLU, forward and backward.

In: a device. Out: the arguments of kernel_cases.py's `Case`, one dict per operation. The sides are
nanogrpo (kernels/triton/norm.py, rope.py, swiglu.py), eager PyTorch, and torch.compile. Read next:
kernel_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import kernel_peers
from nanogrpo.kernels import reference

EPS = 1e-6


def eager_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, EPS), h


def eager_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.norm_rope(q, k, q_weight, k_weight, cos, sin, EPS)


def eager_swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (F.silu(gate) * up,)


def _fused(name: str) -> Callable[..., tuple[Tensor, ...]]:
    from nanogrpo.kernels import triton

    return {
        "norm": lambda x, residual, weight: triton.add_rms_norm(x, residual, weight, EPS),
        "rope": lambda **inputs: triton.norm_rope(**inputs, eps=EPS),
        "swiglu": lambda gate, up: (triton.swiglu(gate, up),),
    }[name]


def _both_ways(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., dict[str, Tensor]]:
    """Return a side that computes the function and its gradients. The results of the function are
    also used as its upstream gradients, because they have the right shapes.
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
    T, D, H, K, E, W = (16, 48, 3, 1, 16, 80) if small else (8192, 4096, 32, 8, 128, 12_288)

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

        sides = {
            "nanogrpo": kernel_peers.missing("triton", device) or _both_ways(_fused(name)),
            "torch eager": _both_ways(eager),
            "torch.compile": _both_ways(torch.compile(eager))
            if device == "cuda"
            else "needs a GPU",
        }
        moved = numbers * dtype.itemsize
        return dict(name=title, inputs=inputs, sides=sides, truth=truth, bytes=moved, shape=shape)

    def rope_inputs() -> dict[str, Tensor]:
        angles = torch.randn(T, 1, E // 2, device=device).repeat(1, 1, 2)
        heads = {"q": draw(T, H, E), "k": draw(T, K, E), "q_weight": draw(E), "k_weight": draw(E)}
        return {**heads, "cos": angles.cos(), "sin": angles.sin()}

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
            5 * T * (H + K) * E,
            {"T": T, "H": H, "K": K, "E": E},
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

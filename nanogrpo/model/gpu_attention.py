"""Compute causal attention over packed sequences with fused kernels, on a GPU in half precision.

In: queries, keys and values, and the sequences, as for kernels/reference/attention.py. Out: `[T, H,
E]`. The backend is torch's varlen attention, which is FlashAttention 2. The environment variable
NANOGRPO_ATTENTION selects another backend of `BACKENDS`. Read before: attention.py.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanogrpo.errors import UserError
from nanogrpo.kernels.reference.attention import Strip, attention

Backend = Callable[[Tensor, Tensor, Tensor, Strip], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, strip: Strip, window: int = 0) -> Tensor:
    """Call torch's `scaled_dot_product_attention` for each sequence."""
    return attention(q, k, v, strip, window)


@functools.cache
def varlen_function() -> Callable[..., Any]:
    """Return torch's function with support for grouped queries. In torch 2.11, support for grouped
    queries is always on. In later versions of torch, an argument turns this support on.
    """
    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn


def varlen(q: Tensor, k: Tensor, v: Tensor, strip: Strip, window: int = 0) -> Tensor:
    """Call `torch.nn.attention.varlen.varlen_attn` (CUDA, half precision). Torch contains its own
    FlashAttention, so the flash-attn package is not needed. The function follows torch's setting
    for deterministic algorithms.
    """
    at, (k, v) = strip.bounds, strip.gathered(k, v)
    sides = (window - 1, 0 if at.causal else -1)
    return varlen_function()(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k, window_size=sides)


def triton(q: Tensor, k: Tensor, v: Tensor, strip: Strip) -> Tensor:
    """Call our own kernels, which attend to shared prompts in place. These kernels are for causal
    attention, and have not run on a GPU yet.
    """
    from nanogrpo.kernels.triton import attention  # a CPU does not need Triton

    if not strip.causal:
        return (varlen if q.is_cuda else sdpa)(q, k, v, strip)
    return attention(q, k, v, strip)


# An extra may add a backend.
BACKENDS: dict[str, Any] = {"torch": varlen, "triton": triton}


@functools.cache
def backend(device_type: str, dtype: torch.dtype, size: int = 128, window: int = 0) -> Backend:
    """Return the selected backend, or `sdpa` if it cannot run. Only `varlen` and `sdpa` support
    windows.
    """
    name = os.environ.get("NANOGRPO_ATTENTION", "torch")
    if name not in BACKENDS:
        raise UserError(f"NANOGRPO_ATTENTION is {name!r}: use one of {', '.join(BACKENDS)}.")
    if window:
        name = "torch"
    fast = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        fast = False  # FlashAttention needs Ampere or later
    if name == "triton":
        fast = (fast or os.environ.get("TRITON_INTERPRET") == "1") and size in (16, 32, 64, 128)
    found = BACKENDS[name] if fast and size % 8 == 0 and size <= 256 else sdpa
    return functools.partial(found, window=window) if window else found

"""Compute causal attention over packed sequences with fused kernels, on a GPU in half precision.

In: queries, keys and values, and the bounds of the sequences, as for `sdpa` in sdpa.py. Out:
`[Tq, H, E]`. The backend is flash-attn 4 if it is installed and supports the GPU, or else torch's
varlen attention, which is FlashAttention 2. Read before: attention.py.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanogrpo.model.sdpa import Backend, Bounds, sdpa


@functools.cache
def varlen_function() -> Callable[..., Any]:
    """Return torch's function with support for grouped queries. In torch 2.11, support for grouped
    queries is always on. In later versions of torch, an argument turns this support on.
    """
    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn


def varlen(q: Tensor, k: Tensor, v: Tensor, at: Bounds) -> Tensor:
    """Call `torch.nn.attention.varlen.varlen_attn` (CUDA, half precision). Torch contains its own
    FlashAttention, so the flash-attn package is not needed. The function follows torch's setting
    for deterministic algorithms.
    """
    window = (-1, 0 if at.causal else -1)
    return varlen_function()(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k, window_size=window)


def deterministic() -> bool:
    """Return whether backward passes must be deterministic. As in torch's own attention, the passes
    need not be deterministic if torch is set to warn only.
    """
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warn_only


def flash(q: Tensor, k: Tensor, v: Tensor, at: Bounds) -> Tensor:
    """Call flash-attn 4 (CUDA, half precision, Hopper and Blackwell)."""
    from flash_attn.cute import flash_attn_varlen_func

    out, *_ = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=at.cu_q,
        cu_seqlens_k=at.cu_k,
        max_seqlen_q=at.max_q,
        max_seqlen_k=at.max_k,
        causal=at.causal,
        deterministic=deterministic(),
    )
    return out  # without log-sum-exps


@functools.cache
def backend(device_type: str, dtype: torch.dtype, size: int = 128) -> Backend:
    """Return the fastest backend that is installed and supports heads of this size."""
    half = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if not half or size % 8 or size > 256:
        return sdpa
    try:
        from flash_attn.cute import flash_attn_varlen_func  # noqa: F401 (is it installed?)
    except ImportError:
        return varlen
    # flash-attn 4 has no backward pass for GPUs below compute capability 9.
    # flash-attn 4 has no deterministic backward pass for capability 12.
    new = torch.cuda.get_device_capability()[0] in (9, 10, 11)
    return flash if new and size <= 128 else varlen

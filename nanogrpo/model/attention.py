"""Causal attention over packed sequences.

In: queries `[T, H, E]`, keys and values `[T, K, E]` of sequences laid end to end (H is a multiple
of K: grouped-query attention). Out: `[T, H, E]`. A block does not know which kind it uses. It calls
`attend(layer, q, k, v)`, which is one of

* `Packed`, for training, scoring and prefill. Each sequence attends to itself and to the prompt it
  shares; nothing is padded.
* a cache (engine/cache.py), for decoding. Each row is the next token of one sequence. Its key and
value are written to the cache, and then it attends to all cached tokens of its sequence.

`Packed` has four backends with the same signature: flash-attn 4, flash-attn 2, torch's varlen
attention, and a reference that runs anywhere. None of them repeats keys for grouped queries. The
forward passes are deterministic. The backward passes follow one rule, that of torch: they are
deterministic if `torch.use_deterministic_algorithms(True)` was called (`--full-determinism`). Read
next: decoder.py (which calls this), engine/local.py (which owns the cache).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogrpo.errors import UserError
from nanogrpo.kernels.reference import Order
from nanogrpo.model.dispatch import functions_for

log = logging.getLogger("nanogrpo")


# Each backend takes the queries q [Tq, H, E] of N sequences. Sequence n has rows cu_q[n] …
# cu_q[n+1] (int32), and the longest has max_q rows. In the same way, cu_k and max_k describe k and
# v [Tk, K, E]. The queries of a sequence belong to the last of its keys, and each query attends to
# the keys up to its own or, unless `causal`, to all keys of the sequence.


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    max_q: int,
    cu_k: Tensor,
    max_k: int,
    causal: bool = True,
) -> Tensor:
    """Call torch's attention once per sequence. It is exact and, on a CPU, as fast as padding."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, Tq or Tk, E]
    queries, keys = cu_q.diff().tolist(), cu_k.diff().tolist()
    out = []
    for q_n, k_n, v_n in zip(q.split(queries, dim=2), k.split(keys, dim=2), v.split(keys, dim=2)):
        n, past = q_n.shape[2], k_n.shape[2] - q_n.shape[2]
        seen = None
        if past and causal:
            seen = torch.ones(n, n + past, dtype=torch.bool, device=q.device).tril(past)
        out.append(
            F.scaled_dot_product_attention(
                q_n, k_n, v_n, attn_mask=seen, is_causal=causal and not past, enable_gqa=True
            )
        )
    return torch.cat(out, dim=2)[0].transpose(0, 1)  # [Tq, H, E]


@functools.cache
def _varlen_attn() -> tuple[Callable, dict[str, Any]]:
    """Return torch's function and its options. The kernel of torch 2.11 handles grouped queries
    too; later versions ask for a confirmation.
    """
    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if grouped else {}


def torch_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    max_q: int,
    cu_k: Tensor,
    max_k: int,
    causal: bool = True,
) -> Tensor:
    """Call `torch.nn.attention.varlen.varlen_attn` (CUDA, half precision). It runs FlashAttention
    without the flash-attn package, and follows the rule of determinism by itself.
    """
    varlen_attn, options = _varlen_attn()
    window = (-1, 0 if causal else -1)
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size=window, **options)


def deterministic() -> bool:
    """Return whether backward passes must be deterministic, by the rule of torch's own attention:
    a warning is no promise.
    """
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warn_only


@functools.cache
def flash_function(module: str) -> Callable | None:
    """Return `flash_attn_varlen_func` of a module, or None if there is none with the arguments that
    we need.

    That a folder flash_attn exists says little: flash-attn 2 exports the function there, flash-attn
    4 only in flash_attn/cute, and older versions of that folder have another function. A package
    that is installed but cannot be imported is reported.
    """
    try:
        found = getattr(importlib.import_module(module), "flash_attn_varlen_func", None)
    except ImportError as e:
        # not installed; or without a dependency, or built for another version of torch
        if not (isinstance(e, ModuleNotFoundError) and module.startswith(e.name or "-")):
            log.warning("attention does not use %s, which cannot be imported: %s", module, e)
        return None
    needed = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "deterministic"}
    return found if found and needed <= inspect.signature(found).parameters.keys() else None


def flash(
    module: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    max_q: int,
    cu_k: Tensor,
    max_k: int,
    causal: bool = True,
) -> Tensor:
    """Call `flash_attn_varlen_func` of flash-attn 2 or 4 (CUDA, half precision)."""
    function = flash_function(module)
    assert function  # `backend` has checked it
    lengths = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k)
    out = function(q, k, v, **lengths, causal=causal, deterministic=deterministic())
    return out if isinstance(out, Tensor) else out[0]  # version 4 also returns log-sum-exps


FLASH = {"flash4": "flash_attn.cute", "flash": "flash_attn"}  # the modules of versions 4 and 2
BACKENDS: dict[str, Callable[..., Tensor]] = {
    **{name: functools.partial(flash, module) for name, module in FLASH.items()},
    "torch": torch_varlen,
    "reference": reference,
}
# their names in the log
NAMES = {
    "flash4": "flash-attn 4",
    "flash": "flash-attn 2",
    "torch": "torch's varlen_attn",
    "reference": "torch's scaled_dot_product_attention, one call per sequence",
}


@functools.cache
def backend(device_type: str, dtype: torch.dtype, size: int = 128) -> str:
    """Return the name of the fastest backend that can run for heads of this size, or of the one
    that NANOGRPO_ATTENTION names.
    """
    name = os.environ.get("NANOGRPO_ATTENTION", "")
    if name and name not in BACKENDS:
        raise UserError(
            f"NANOGRPO_ATTENTION={name} is not an attention backend: choose one of "
            f"{', '.join(BACKENDS)}."
        )
    if name in FLASH and not flash_function(FLASH[name]):
        raise UserError(
            f"NANOGRPO_ATTENTION={name} needs {FLASH[name]}.flash_attn_varlen_func, which is not "
            "installed: install flash-attn, or leave the variable unset."
        )
    if name:
        return name
    half = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if not half or size % 8 or size > 256:
        return "reference"
    if flash_function(FLASH["flash4"]) and size <= 128:
        # Version 4 has no backward for older GPUs, and no deterministic one for 12.x.
        name = "flash4" if torch.cuda.get_device_capability()[0] in (9, 10, 11) else ""
    return name or ("flash" if flash_function(FLASH["flash"]) else "torch")


class Packed:
    """Attend over sequences laid end to end.

    The queries of sequence n are rows cu_seqlens[n] … cu_seqlens[n+1]. They attend causally to the
    keys of the same rows. With `kv_rows`, they attend to the keys of rows kv_rows[kv_cu_seqlens[n]]
    …, the last of which are their own. So completions share one copy of their prompt: its keys are
    gathered once per completion, and the backward of this gather sums the gradients of all
    completions in float32 and in a fixed order. With `keep`, the keys and values of each layer are
    kept in `kept` (prefill).
    """

    def __init__(
        self,
        cu_seqlens: Tensor,  # [N+1] int32
        max_len: int,
        kv_rows: Tensor | None = None,  # [Tk] int64
        kv_cu_seqlens: Tensor | None = None,  # [N+1] int32
        kv_max_len: int = 0,
        keep: bool = False,
        causal: bool = True,  # False: pictures (vision/model.py)
    ):
        self.kv_rows = kv_rows
        self.kv_order: Order = None  # how `gather_rows` sums gradients
        keys = (cu_seqlens, max_len) if kv_cu_seqlens is None else (kv_cu_seqlens, kv_max_len)
        self.bounds = (cu_seqlens, max_len, *keys, causal)
        self.kept: dict[int, tuple[Tensor, Tensor]] | None = {} if keep else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is not None:
            # copied if they are parts of a larger product, which would then be kept too
            self.kept[layer] = (k.contiguous(), v.contiguous())  # [T, K, E] each
        if self.kv_rows is not None:
            functions = functions_for(k.device)
            if self.kv_order is None:  # the first layer
                self.kv_order = functions.row_order(self.kv_rows, len(k))
            # [Tk, K, E] each
            k, v = (functions.gather_rows(x, self.kv_rows, self.kv_order) for x in (k, v))
        return BACKENDS[backend(q.device.type, q.dtype, q.shape[2])](q, k, v, *self.bounds)

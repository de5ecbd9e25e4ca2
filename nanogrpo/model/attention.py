"""The two kinds of attention that a decoder block can use: causal attention over packed sequences,
and over a key/value cache.

In: queries `[T, H, E]`, keys and values `[T, K, E]` of sequences laid end to end (H is a multiple
of K: grouped-query attention). Out: `[T, H, E]`. A block does not know which kind it uses. It calls
`attend(layer, q, k, v)`, which is one of

* `Packed`, for training, scoring and prefill. Each sequence attends to itself and to the prompt it
  shares; nothing is padded.
* `KVCache`, for decoding. Each row is the next token of one sequence. Its key and value are written
to the cache, and then it attends to all cached tokens of its sequence.

`Packed` has three backends with the same signature: the flash-attn package, torch's varlen
attention, and a reference that runs anywhere. Read next: decoder.py (which calls this),
engine/local.py (which owns the cache).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogrpo.errors import UserError

log = logging.getLogger("nanogrpo")


# --- packed sequences ---

# Each backend takes the queries q [Tq, H, E] of N sequences. Sequence n has rows cu_q[n] …
# cu_q[n+1] (int32), and the longest has max_q rows. In the same way, cu_k and max_k describe k and
# v [Tk, K, E]. The queries of a sequence belong to the last of its keys, and each query attends to
# the keys up to its own.


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, max_q: int, cu_k: Tensor, max_k: int
) -> Tensor:
    """Call torch's attention once per sequence. It is exact and, on a CPU, as fast as padding."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, Tq or Tk, E]
    queries, keys = cu_q.diff().tolist(), cu_k.diff().tolist()
    out = []
    for q_n, k_n, v_n in zip(q.split(queries, dim=2), k.split(keys, dim=2), v.split(keys, dim=2)):
        n, past = q_n.shape[2], k_n.shape[2] - q_n.shape[2]
        seen = None
        if past:
            seen = torch.ones(n, n + past, dtype=torch.bool, device=q.device).tril(past)
        out.append(
            F.scaled_dot_product_attention(
                q_n, k_n, v_n, attn_mask=seen, is_causal=not past, enable_gqa=True
            )
        )
    return torch.cat(out, dim=2)[0].transpose(0, 1)  # [Tq, H, E]


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, max_q: int, cu_k: Tensor, max_k: int
) -> Tensor:
    """Call `torch.nn.attention.varlen.varlen_attn` (CUDA, half precision). It runs FlashAttention
    without the flash-attn package.
    """
    from torch.nn.attention.varlen import varlen_attn

    # the signature changed between torch 2.11 and 2.13
    known = inspect.signature(varlen_attn).parameters
    kwargs: dict = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        kwargs["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # [Tk, H, E]
    # it only returns a tuple if more outputs are requested
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **kwargs)  # type: ignore[return-value]


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, max_q: int, cu_k: Tensor, max_k: int
) -> Tensor:
    """Call `flash_attn_varlen_func` of the flash-attn package (CUDA, half precision), with its
    deterministic backward.
    """
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, causal=True, deterministic=True
    )


BACKENDS = {"reference": reference, "torch": torch_varlen, "flash": flash}


@functools.cache
def backend(device_type: str, dtype: torch.dtype) -> str:
    """Return the name of the fastest backend that can run, or of the one that NANOGRPO_ATTENTION
    names. The name is logged once.
    """
    half = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    fast = "flash" if importlib.util.find_spec("flash_attn") else "torch"
    name = os.environ.get("NANOGRPO_ATTENTION") or (fast if half else "reference")
    if name not in BACKENDS:
        raise UserError(
            f"NANOGRPO_ATTENTION={name} is not an attention backend: choose one of "
            f"{', '.join(BACKENDS)}."
        )
    log.info("attention: %s (%s, %s)", name, device_type, dtype)
    return name


class Packed:
    """Attend over sequences laid end to end.

    The queries of sequence n are rows cu_seqlens[n] … cu_seqlens[n+1]. They attend causally to the
    keys of the same rows. With `kv_rows`, they attend to the keys of rows kv_rows[kv_cu_seqlens[n]]
    …, the last of which are their own. So completions share one copy of their prompt: its keys are
    gathered once per completion, and the backward of this gather sums the gradients of all
    completions. With `keep`, the keys and values of each layer are kept in `kept` (prefill).
    """

    def __init__(
        self,
        cu_seqlens: Tensor,  # [N+1] int32
        max_len: int,
        kv_rows: Tensor | None = None,  # [Tk] int64
        kv_cu_seqlens: Tensor | None = None,  # [N+1] int32
        kv_max_len: int = 0,
        keep: bool = False,
    ):
        self.kv_rows = kv_rows
        keys = (cu_seqlens, max_len) if kv_cu_seqlens is None else (kv_cu_seqlens, kv_max_len)
        self.bounds = (cu_seqlens, max_len, *keys)
        self.kept: dict[int, tuple[Tensor, Tensor]] | None = {} if keep else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept[layer] = (k, v)  # [T, K, E] each
        if self.kv_rows is not None:
            k, v = k.index_select(0, self.kv_rows), v.index_select(0, self.kv_rows)  # [Tk, K, E]
        return BACKENDS[backend(q.device.type, q.dtype)](q, k, v, *self.bounds)


# --- one token per sequence, over a cache ---


class KVCache:
    """The keys and values of B sequences of at most S tokens. Calling it attends with one new token
    for each of the first b rows.

    Before each step, call `begin(positions, span)`: row i writes its token to column `positions[i]`
    and attends to the columns up to and including it. Only the first `span` columns are read, so
    short sequences are fast even in a long cache.

    On a CPU the cache starts with few columns and is widened as sequences grow, because rows that
    are close together in memory are read about 1.5 times as fast. On a GPU it has all S columns
    from the start: CUDA graphs need fixed addresses.
    """

    def __init__(
        self, layers: int, B: int, K: int, S: int, E: int, dtype: torch.dtype, device: torch.device
    ):
        self.S, self.narrow = S, S if device.type == "cuda" else min(S, 64)
        self.k = torch.zeros(layers, B, K, self.narrow, E, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.columns = torch.arange(S, device=device)  # [S]
        self.index = torch.arange(B, device=device)  # [B]

    @property
    def width(self) -> int:
        return self.k.shape[3]

    def clear(self) -> None:
        """Narrow the cache to its initial width and zero it. A NaN left in a masked column would
        spread, since 0 · NaN is NaN.
        """
        if self.width > self.narrow:
            self.k, self.v = (x[:, :, :, : self.narrow].clone() for x in (self.k, self.v))
        self.k.zero_(), self.v.zero_()

    def widen(self, span: int) -> None:
        """Make room for `span` columns, in steps of 64."""
        if span > self.width:
            more = min(-(-span // 64) * 64, self.S) - self.width
            self.k, self.v = (F.pad(x, (0, 0, 0, more)) for x in (self.k, self.v))

    def fill(self, first: int, end: int, k: Tensor, v: Tensor) -> None:
        """Write the keys and values of a prompt, [layers, K, t, E], to the rows first … end-1."""
        self.widen(k.shape[2])
        self.k[:, first:end, :, : k.shape[2]] = k[:, None]
        self.v[:, first:end, :, : v.shape[2]] = v[:, None]

    def move(self, source: list[int], target: list[int], span: int) -> None:
        """Copy the first `span` columns of row source[i] to row target[i]. No row is in both."""
        self.k[:, target, :, :span] = self.k[:, source, :, :span]
        self.v[:, target, :, :span] = self.v[:, source, :, :span]

    def begin(self, positions: Tensor, span: int) -> None:
        """Prepare a step. positions: [b] int64 with b ≤ B, all below `span`; span: at most S."""
        self.widen(span)
        self.positions, self.span = positions, span
        unseen = self.columns[:span] > positions[:, None]  # [b, span]
        bias = torch.zeros_like(unseen, dtype=self.k.dtype).masked_fill_(unseen, float("-inf"))
        self.bias = bias[:, None, None]  # [b, 1, 1, span]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, H, E = q.shape
        K = k.shape[1]
        keys, values = self.k[layer], self.v[layer]  # [B, K, S, E]
        keys[self.index[:b], :, self.positions] = k
        values[self.index[:b], :, self.positions] = v
        keys, values = keys[:b, :, : self.span], values[:b, :, : self.span]
        # the H/K query heads of a key head act as the query length, so no key must be repeated
        q = q.view(b, K, H // K, E)
        if q.is_cuda:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.bias)
        else:
            # on a CPU, two plain matmuls at these sizes take a third of the time of the fused call
            scores = torch.matmul(q * E**-0.5, keys.transpose(-1, -2))  # [b, K, H/K, span]
            out = torch.matmul(scores.add_(self.bias).softmax(-1), values)  # [b, K, H/K, E]
        return out.reshape(b, H, E)

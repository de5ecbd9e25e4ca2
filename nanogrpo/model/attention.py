"""Causal attention over packed sequences, and over a key/value cache: the two ways a decoder block
can look back.

In: queries `[T, H, E]`, keys and values `[T, K, E]` of sequences laid end to end (H is a multiple
of K: grouped-query attention). Out: `[T, H, E]`. A block never knows which way it is used: it is
handed an `attend(layer, q, k, v)`, either

* `Packed`: training, scoring and prefill. Each sequence attends to itself, and to the prompt it
  shares; nothing is padded.
* `KVCache`: decoding. Each row is one sequence's next token; its key and value are written to the
  cache, then it attends to all
  that the cache holds for it.

The backends of `Packed`, one function each, all with the same signature: the flash-attn package,
torch's own varlen attention, and a reference that runs anywhere. Read next: model.py (who calls
this), local_engine.py (who owns the cache).
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


# --- packed sequences -----------------------------------------------------------------------------


# Each backend: q [Tq, H, E] in sequences bounded by cu_q [N+1] int32, none longer than max_q; k, v
# [Tk, K, E] bounded by cu_k. Sequence n's queries are the last ones of its keys: its first query
# sees all keys but those of the queries after it.


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    max_q: int,
    cu_k: Tensor | None = None,
    max_k: int = 0,
) -> Tensor:
    """One scaled-dot-product call a sequence: plain, exact, and on a CPU as fast as anything
    padded.
    """
    queries = cu_q.diff().tolist()
    keys = queries if cu_k is None else cu_k.diff().tolist()
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, Tq or Tk, E]
    out = []
    for q_n, k_n, v_n in zip(q.split(queries, dim=2), k.split(keys, dim=2), v.split(keys, dim=2)):
        n, past = q_n.shape[2], k_n.shape[2] - q_n.shape[2]
        seen = (
            torch.ones(n, n + past, dtype=torch.bool, device=q.device).tril(past) if past else None
        )
        out.append(
            F.scaled_dot_product_attention(
                q_n, k_n, v_n, attn_mask=seen, is_causal=not past, enable_gqa=True
            )
        )
    return torch.cat(out, dim=2)[0].transpose(0, 1)  # [Tq, H, E]


def torch_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    max_q: int,
    cu_k: Tensor | None = None,
    max_k: int = 0,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` (CUDA, half precision): FlashAttention inside, no
    extra package.
    """
    from torch.nn.attention.varlen import varlen_attn

    # the signature moved between torch 2.11 and 2.13
    known = inspect.signature(varlen_attn).parameters
    kwargs: dict = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        kwargs["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # [Tk, H, E]
    return varlen_attn(
        q, k, v, cu_q, cu_q if cu_k is None else cu_k, max_q, max_k or max_q, **kwargs
    )


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    max_q: int,
    cu_k: Tensor | None = None,
    max_k: int = 0,
) -> Tensor:
    """`flash_attn_varlen_func` of the flash-attn package (CUDA, half precision); deterministic
    backward.
    """
    from flash_attn import flash_attn_varlen_func

    cu_k = cu_q if cu_k is None else cu_k
    return flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k or max_q, causal=True, deterministic=True
    )


BACKENDS = {"reference": reference, "torch": torch_varlen, "flash": flash}


@functools.cache
def backend(device_type: str, dtype: torch.dtype) -> str:
    """The name of the fastest backend that can run, or the one named by NANOGRPO_ATTENTION; told
    once in the log.
    """
    name = os.environ.get("NANOGRPO_ATTENTION", "")
    if name and name not in BACKENDS:
        raise UserError(
            f"NANOGRPO_ATTENTION={name} is not an attention backend; choose one of {', '.join(BACKENDS)}."
        )
    fast = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if name in ("torch", "flash") and not fast:
        raise UserError(
            f"NANOGRPO_ATTENTION={name} computes in bfloat16 on a GPU only, not in {dtype} on {device_type}: choose reference."
        )
    if not name:
        name = (
            ("flash" if importlib.util.find_spec("flash_attn") else "torch")
            if fast
            else "reference"
        )
    log.info("attention: %s (%s, %s)", name, device_type, dtype)
    return name


class Packed:
    """`attend` over sequences laid end to end.

    Sequence n owns the queries cu_seqlens[n] … cu_seqlens[n+1] and sees, causally, its own keys;
    or, with `kv_rows`, the keys and values of the rows kv_rows[kv_cu_seqlens[n]] …, the last of
    them its own. So completions share one copy of their prompt: its keys are gathered once a
    completion, and the gather's backward adds the completions' gradients up. With `keep`, remembers
    each layer's keys and values (prefill).
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
        self.cu_seqlens, self.max_len, self.kv_rows = cu_seqlens, max_len, kv_rows
        self.bounds = (
            (cu_seqlens, max_len)
            if kv_rows is None
            else (cu_seqlens, max_len, kv_cu_seqlens, kv_max_len)
        )
        self.kept: dict[int, tuple[Tensor, Tensor]] | None = {} if keep else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept[layer] = (k, v)  # [T, K, E] each
        if self.kv_rows is not None:
            k, v = k.index_select(0, self.kv_rows), v.index_select(0, self.kv_rows)  # [Tk, K, E]
        return BACKENDS[backend(q.device.type, q.dtype)](q, k, v, *self.bounds)


# --- one token a sequence, over a cache -----------------------------------------------------------


class KVCache:
    """Keys and values of B sequences of at most S tokens, and `attend` for one new token of each of
    the first rows.

    Before a step, call `begin(positions, span)`: row b writes its token at `positions[b]` and sees
    the columns up to and with it. `span` bounds the columns read, so that short sequences in a long
    cache stay cheap.

    On a CPU the cache holds `width` columns and widens as sequences grow: rows that lie close
    together are read about half again as fast as the same columns of a cache of full width. On a
    GPU it has all S from the start: CUDA graphs need it to stay put.
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
        """Narrow and zero again. Not only for memory: a NaN left in a masked column would spread,
        for 0 · NaN is NaN.
        """
        if self.width > self.narrow:
            self.k, self.v = (x[:, :, :, : self.narrow].clone() for x in (self.k, self.v))
        self.k.zero_(), self.v.zero_()

    def widen(self, span: int) -> None:
        """Makes room for `span` columns, in steps of 64."""
        if span > self.width:
            more = min(-(-span // 64) * 64, self.S) - self.width
            self.k, self.v = (F.pad(x, (0, 0, 0, more)) for x in (self.k, self.v))

    def fill(self, first: int, end: int, k: Tensor, v: Tensor) -> None:
        """Gives each of the rows first … end-1 the same prefix, a prefilled prompt's: k, v [layers,
        K, t, E].
        """
        self.widen(k.shape[2])
        self.k[:, first:end, :, : k.shape[2]] = k[:, None]
        self.v[:, first:end, :, : v.shape[2]] = v[:, None]

    def move(self, source: list[int], target: list[int], span: int) -> None:
        """Copies the first `span` columns of row source[i] to row target[i]; no row is both."""
        self.k[:, target, :, :span] = self.k[:, source, :, :span]
        self.v[:, target, :, :span] = self.v[:, source, :, :span]

    def begin(self, positions: Tensor, span: int) -> None:
        """positions: [b] int64, b ≤ B; span: above all of them, at most S."""
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
        # the H/K queries that share a key head stand in for a query length: no repeated keys
        q = q.view(b, K, H // K, E)
        if q.is_cuda:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.bias).reshape(
                b, H, E
            )
        # On a CPU two plain matmuls take a third of the time of the fused call at these sizes.
        # [b, K, H/K, span]
        scores = torch.matmul(q * E**-0.5, keys.transpose(-1, -2)).add_(self.bias)
        return torch.matmul(scores.softmax(-1), values).view(b, H, E)

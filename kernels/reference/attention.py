"""Compute causal attention over the packed sequences of a strip, with one torch call per sequence.

In: q [T, H, E], k and v [T, K, E], and the sequences (`Strip`). Out: [T, H, E]. Read next:
triton/attention.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .gather import gather_rows


class Bounds(NamedTuple):
    """The rows of q [Tq, H, E] and of k and v [Tk, K, E] that belong to each of N sequences.

    Sequence n has the queries cu_q[n] … cu_q[n+1] and the keys cu_k[n] … cu_k[n+1]. If `causal`,
    the queries and the last keys of a sequence belong to the same tokens, and each query attends to
    the keys up to its own token. Otherwise, each query attends to all keys of the sequence.
    """

    cu_q: Tensor  # [N+1] int32
    max_q: int  # queries of the longest sequence
    cu_k: Tensor  # [N+1] int32
    max_k: int
    causal: bool = True


@dataclass(eq=False)
class Strip:
    """The sequences of a strip, and the prompts that they share.

    The queries of sequence n are the rows cu_seqlens[n] … cu_seqlens[n+1]. The queries attend
    causally to the keys of the same rows. With `kv_rows`, the queries attend to the keys of the
    rows kv_rows[kv_cu_seqlens[n]] …, which end with the sequence's own rows. So completions share
    one copy of their prompt. The file ../sharing.py finds the rows of the prompt.
    """

    cu_seqlens: Tensor  # [N+1] int32
    max_len: int
    kv_rows: Tensor | None = None  # [Tk] int64
    kv_cu_seqlens: Tensor | None = None  # [N+1] int32
    kv_max_len: int = 0
    causal: bool = True  # False: each token attends to the whole sequence

    @property
    def bounds(self) -> Bounds:
        """Return the sequences for keys that were gathered by `kv_rows`."""
        own = self.cu_seqlens, self.max_len
        keys = own if self.kv_cu_seqlens is None else (self.kv_cu_seqlens, self.kv_max_len)
        return Bounds(*own, *keys, self.causal)

    def gathered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values [Tk, K, E], so that the rows of each sequence are
        adjacent.
        """
        if self.kv_rows is None:
            return k, v
        return gather_rows(k, self.kv_rows), gather_rows(v, self.kv_rows)


def attention(q: Tensor, k: Tensor, v: Tensor, strip: Strip, window: int = 0) -> Tensor:
    """Return the attention output [T, H, E]. If `window` is not 0, each query attends only to its
    own token and the window - 1 tokens before it. Separate calls are exact and, on a CPU, as fast
    as one call with padding.
    """
    at, (k, v) = strip.bounds, strip.gathered(k, v)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, T or Tk, E]
    queries, keys = at.cu_q.diff().tolist(), at.cu_k.diff().tolist()
    out = []
    for q_n, k_n, v_n in zip(q.split(queries, dim=2), k.split(keys, dim=2), v.split(keys, dim=2)):
        n, past = q_n.shape[2], k_n.shape[2] - q_n.shape[2]
        seen = None
        if at.causal and (past or 0 < window < n):
            seen = q.new_ones(n, n + past, dtype=torch.bool).tril(past)
            if window:
                seen = seen.triu(past + 1 - window)
        causal = at.causal and seen is None
        out.append(
            F.scaled_dot_product_attention(
                q_n, k_n, v_n, attn_mask=seen, is_causal=causal, enable_gqa=True
            )
        )
    return torch.cat(out, dim=2)[0].transpose(0, 1)  # [T, H, E]

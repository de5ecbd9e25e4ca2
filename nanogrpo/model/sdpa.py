"""Compute causal attention over packed sequences with torch, in one call per sequence.

In: queries, keys and values of packed sequences, and the bounds of the sequences. Out: `[Tq, H,
E]`. Read before: attention.py. Read next: gpu_attention.py (the same with fused kernels).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Bounds(NamedTuple):
    """The rows of q [Tq, H, E] and of k and v [Tk, K, E] that belong to each of N sequences.

    Sequence n has the queries cu_q[n] … cu_q[n+1] and the keys cu_k[n] … cu_k[n+1]. The queries and
    the last keys of a sequence belong to the same tokens. If `causal`, each query attends to the
    keys up to its own token, and otherwise to all keys of the sequence.
    """

    cu_q: Tensor  # [N+1] int32
    max_q: int  # queries of the longest sequence
    cu_k: Tensor  # [N+1] int32
    max_k: int
    causal: bool = True


def sdpa(q: Tensor, k: Tensor, v: Tensor, at: Bounds) -> Tensor:
    """Call torch's attention once per sequence. Separate calls are exact and, on a CPU, as fast as
    padding.
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, Tq or Tk, E]
    queries, keys = at.cu_q.diff().tolist(), at.cu_k.diff().tolist()
    out = []
    for q_n, k_n, v_n in zip(q.split(queries, dim=2), k.split(keys, dim=2), v.split(keys, dim=2)):
        n, past = q_n.shape[2], k_n.shape[2] - q_n.shape[2]
        seen = None
        if past and at.causal:
            seen = torch.ones(n, n + past, dtype=torch.bool, device=q.device).tril(past)
        causal = at.causal and not past
        out.append(
            F.scaled_dot_product_attention(
                q_n, k_n, v_n, attn_mask=seen, is_causal=causal, enable_gqa=True
            )
        )
    return torch.cat(out, dim=2)[0].transpose(0, 1)  # [Tq, H, E]


Backend = Callable[[Tensor, Tensor, Tensor, Bounds], Tensor]

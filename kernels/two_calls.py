"""Attend to a shared prompt in a second call of FlashAttention, so that no key is copied.

In: the sequences (`Strip`). Out: the bounds of two calls, and their merged results. In the first
call, each sequence attends to its own rows. In the second, all completions of a prompt attend to
the prompt, as one sequence. nanogrpo/model/gpu_attention.py calls flash-attn 4 in this way. Read
next: triton/attention.py, which needs only one call.

Equation.   Over the keys of part p: lse_p = log Σ_j exp(q·k_j / √E) and out_p = Σ_j exp(q·k_j / √E
            - lse_p) v_j. Then lse = log Σ_p exp(lse_p) and out = Σ_p exp(lse_p - lse) out_p.
Backward.   The probability of a key is exp(q·k_j / √E - lse), in whichever part it is. Autograd
            computes it from the gradient of each lse_p, which flash-attn 4 accepts.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .reference.attention import Bounds, Strip
from .sharing import sharing


def merged(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the outputs [T, H, E] and log-sum-exps [H, T] of several parts of the keys.

    The log-sum-exp of a query without keys in a part is -inf, or inf in FlashAttention 2.
    """
    outs, lses, *_ = zip(*parts)
    each = torch.stack([lse.masked_fill(lse == math.inf, -math.inf) for lse in lses])  # [2, H, T]
    lse = each.logsumexp(0)
    weights = (each - lse).exp().transpose(1, 2).unsqueeze(3)  # [2, T, H, 1]
    return sum(w * out for w, out in zip(weights, outs)).to(outs[0].dtype), lse


@functools.lru_cache(maxsize=1)  # for all layers
def calls_of(strip: Strip) -> list[Bounds]:
    """Return the bounds of two calls that need no copies of keys, or of one if nothing is shared.

    In the first call, each sequence attends to its own rows. In the second call, all completions of
    a prompt are one sequence, which attends to the rows of the prompt. All other rows are in
    sequences without queries or without keys. This function waits for the device.
    """
    own = Bounds(strip.cu_seqlens, strip.max_len, strip.cu_seqlens, strip.max_len, strip.causal)
    if strip.kv_rows is None:
        return [own]
    ends, reach = strip.cu_seqlens.tolist(), sharing(strip)[1].tolist()
    queries, keys, longest = [0], [0], 0
    for first, end, last in zip(ends, ends[1:], reach):
        if end < last:  # a prompt, with completions in the rows end … last
            queries += [end, end, last]
            keys += [keys[-1], first, end]
            longest = max(longest, last - end)
    queries += 2 * ends[-1:]
    keys += [keys[-1], ends[-1]]
    cu_q, cu_k = (strip.cu_seqlens.new_tensor(x) for x in (queries, keys))
    return [own, Bounds(cu_q, longest, cu_k, strip.max_len, causal=False)]

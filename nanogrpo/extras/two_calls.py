"""Attention in two calls, so that no key of a shared prompt is copied.

In: queries, keys and values, and the sequences (`Strip`), as for model/gpu_attention.py. Out: `[T,
H, E]`. In the first call, each sequence attends to its own rows. In the second, all completions of
a prompt attend to the prompt, as one sequence. `NANOGRPO_ATTENTION` selects one of two backends:
`two-call` calls torch's FlashAttention 2, and `flash4` calls flash-attn 4. Neither has run on a GPU
yet. Read before: kernels/sharing.py. Read next: kernels/triton/attention.py, which needs only one
call.

Equation.   Over the keys of part p: lse_p = log Σ_j exp(q·k_j / √E) and out_p = Σ_j exp(q·k_j / √E
            - lse_p) v_j. Then lse = log Σ_p exp(lse_p) and out = Σ_p exp(lse_p - lse) out_p.
Backward.   A key of any part has the probability exp(q·k_j / √E - lse). In torch, the backward pass
            of a part computes this probability from the merged lse, and the gradients of the parts
            are added. flash-attn 4 accepts a gradient of each lse_p, so autograd computes the rest.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanogrpo.kernels.reference.attention import Bounds, Strip
from nanogrpo.kernels.sharing import sharing
from nanogrpo.model.gpu_attention import BACKENDS

aten: Any = torch.ops.aten


@functools.lru_cache(maxsize=1)  # for all layers
def calls_of(strip: Strip) -> list[Bounds]:
    """Return the bounds of two calls, or of a single call if no prompt is shared. No key is copied.

    In the first call, each sequence attends to its own rows. The second call has two parts for each
    sequence of the strip. The first part has no keys, and the second part has the sequence's keys.
    The parts have these queries:

    * Shared prompt: the prompt's queries in the first part, its completions' queries in the second.
    * Completion of a shared prompt: no queries in either part.
    * Any other sequence: its queries in the first part, and no queries in the second.

    This function waits for the device.
    """
    own = Bounds(strip.cu_seqlens, strip.max_len, strip.cu_seqlens, strip.max_len, strip.causal)
    if strip.kv_rows is None:
        return [own]
    reach = sharing(strip)[1].cummax(0)[0]  # [N]: the end of the last sequence with this prompt
    ends = strip.cu_seqlens[1:].maximum(F.pad(reach[:-1], (1, 0)))
    cu_q = F.pad(torch.stack((ends, reach), 1).flatten(), (1, 0))  # [2N+1]
    cu_k = strip.cu_seqlens.repeat_interleave(2)[:-1]
    # A kernel computes only the first `max_q` queries of a part, also if the part has no keys.
    # torch has another layout for the lengths 0 and 1.
    longest = max(2, int(cu_q.diff().max()))
    return [own, Bounds(cu_q, longest, cu_k, strip.max_len, causal=False)]


def merged(outs: Any, lses: Any) -> tuple[Tensor, Tensor]:
    """Return the merged output [T, H, E] and log-sum-exp [H, T]. If a query has no keys in the
    second call, this call returns the output 0 and an infinite log-sum-exp: inf in torch, -inf in
    flash-attn 4.
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    own, shared = lses
    shared = shared.masked_fill(shared.isinf(), -torch.inf)
    w = (shared - own).sigmoid().T.unsqueeze(2)  # [T, H, 1]: the weight of the second call
    out = torch.addcmul(outs[0] * (1 - w), outs[1], w)  # float32
    return out.to(outs[0].dtype), torch.logaddexp(own, shared)


class _Flash2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, strip):
        ctx.calls = [
            (at.cu_q, at.cu_k, at.max_q, at.max_k, 0.0, at.causal)  # without dropout
            for at in calls_of(strip)
        ]
        parts = [aten._flash_attention_forward(q, k, v, *at, False)[:4] for at in ctx.calls]
        outs, lses, *ctx.states = zip(*parts)
        out, lse = merged(outs, lses)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        # With the merged log-sum-exp, each call computes the probabilities over all keys.
        saved = ctx.saved_tensors
        grads = [
            aten._flash_attention_backward(dy, *saved, *at, *state)
            for at, *state in zip(ctx.calls, *ctx.states)
        ]
        return *(functools.reduce(torch.add, parts) for parts in zip(*grads)), None


def flash2(q: Tensor, k: Tensor, v: Tensor, strip: Strip) -> Tensor:
    """Return the attention output (CUDA, half precision)."""
    return _Flash2.apply(q, k, v, strip)


def flash4(q: Tensor, k: Tensor, v: Tensor, strip: Strip) -> Tensor:
    """Return the attention output (CUDA, half precision, Hopper and Blackwell)."""
    from flash_attn.cute import flash_attn_varlen_func

    def call(at: Bounds) -> tuple[Tensor, ...]:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=at.cu_q,
            cu_seqlens_k=at.cu_k,
            max_seqlen_q=at.max_q,
            max_seqlen_k=at.max_k,
            causal=at.causal,
            # torch's own attention follows the same rule
            deterministic=torch.get_deterministic_debug_mode() == 2,  # 1: warn only
            return_lse=True,
        )

    return merged(*zip(*(call(at)[:2] for at in calls_of(strip))))[0]


BACKENDS.update({"two-call": flash2, "flash4": flash4})

"""Attention in two calls, so that no key of a shared prompt is copied.

In: queries, keys and values, and the sequences (`Strip`), as for model/gpu_attention.py. Out: `[T,
H, E]`. In the first call, each sequence attends to its own rows. In the second, all completions of
a prompt attend to the prompt, as one sequence. `NANOGRPO_ATTENTION` selects one of two backends:
`two-call` calls torch's FlashAttention 2, and `flash4` calls flash-attn 4. Neither has run on a GPU
yet. Read before: kernels/sharing.py. Read next: kernels/triton/attention.py, which needs only one
call.

Equation.   Over the keys of part p: lse_p = log Σ_j exp(q·k_j / √E) and out_p = Σ_j exp(q·k_j / √E
            - lse_p) v_j. Then lse = log Σ_p exp(lse_p) and out = Σ_p exp(lse_p - lse) out_p.
Backward.   A key of any part has the probability exp(q·k_j / √E - lse). The backward pass of a part
            computes this probability if it receives the merged lse and out instead of its own. The
            gradients of the parts are added.
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


class _TwoCalls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, q, k, v, strip):
        ctx.calls = [
            (at.cu_q, at.cu_k, at.max_q, at.max_k, 0.0, at.causal)  # without dropout
            for at in calls_of(strip)
        ]
        ctx.kernel = backward
        parts = [forward(q, k, v, *at, False)[:4] for at in ctx.calls]
        (out, *outs), (lse, *lses), *ctx.states = zip(*parts)  # [T, H, E] and [H, T] each
        for o, x in zip(outs, lses):  # of the second call, if there is one
            # For a query without keys, torch returns inf, and flash-attn 4 returns -inf.
            x = x.masked_fill(x.isinf(), -torch.inf)
            w = (x - lse).sigmoid().T.unsqueeze(2)  # [T, H, 1]: the weight of the second call
            out = torch.addcmul(out * (1 - w), o, w).to(q.dtype)  # from float32
            lse = torch.logaddexp(lse, x)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        # With the merged log-sum-exp, each call computes the probabilities over all keys.
        saved, calls = ctx.saved_tensors, zip(ctx.calls, *ctx.states)
        grads = [ctx.kernel(dy, *saved, *at, *state) for at, *state in calls]
        return None, None, *(sum(more, first) for first, *more in zip(*grads)), None


def flash2(*inputs: Any) -> Tensor:
    """Return the attention output (CUDA, half precision)."""
    return _TwoCalls.apply(aten._flash_attention_forward, aten._flash_attention_backward, *inputs)


# --- flash-attn 4, with the arguments of torch's own operators ---


def _named(at):
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, at), causal=at[5])


def _forward4(q, k, v, *at):
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, **_named(at), return_lse=True)[:2]


def _backward4(dy, q, k, v, out, lse, *at):
    # No public function of flash-attn 4 accepts the merged log-sum-exp. This private function has
    # these arguments in version 4.0.0b36.
    from flash_attn.cute.interface import _flash_attn_bwd

    # torch's own attention follows the same rule; 1: warn only
    exact = torch.get_deterministic_debug_mode() == 2
    return _flash_attn_bwd(q, k, v, out, dy, lse, **_named(at), deterministic=exact)


# Selective recomputation can keep the results of operators of torch, but not of other functions.
torch.library.define(
    "nanogrpo::flash_attn_4",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, int max_k, float dropout,"
    " bool causal, bool mask) -> (Tensor, Tensor)",
)
torch.library.impl("nanogrpo::flash_attn_4", "default", _forward4)


def flash4(*inputs: Any) -> Tensor:
    """Return the attention output (CUDA, half precision, Hopper and Blackwell)."""
    return _TwoCalls.apply(torch.ops.nanogrpo.flash_attn_4, _backward4, *inputs)


BACKENDS.update({"two-call": flash2, "flash4": flash4})

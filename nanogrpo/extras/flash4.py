"""Attention with flash-attn 4. A second call attends to shared prompts, so no key is copied.

In: queries, keys and values, and the sequences (`Strip`), as for model/gpu_attention.py. Out: `[T,
H, E]`. In the first call, each sequence attends to its own rows. In the second, all completions of
a prompt attend to the prompt, as one sequence. `NANOGRPO_ATTENTION=flash4` selects this backend,
which has not run on a GPU yet. Read before: kernels/sharing.py. Read next:
kernels/triton/attention.py, which needs only one call.

Equation.   Over the keys of part p: lse_p = log Σ_j exp(q·k_j / √E) and out_p = Σ_j exp(q·k_j / √E
            - lse_p) v_j. Then lse = log Σ_p exp(lse_p) and out = Σ_p exp(lse_p - lse) out_p.
Backward.   The probability of a key is exp(q·k_j / √E - lse), in whichever part it is. Autograd
            computes it from the gradient of each lse_p, which flash-attn 4 accepts.
"""

import functools

import torch
from torch import Tensor

from nanogrpo.kernels.reference.attention import Bounds, Strip
from nanogrpo.kernels.sharing import sharing
from nanogrpo.model.gpu_attention import BACKENDS


@functools.lru_cache(maxsize=1)  # for all layers
def calls_of(strip: Strip) -> list[Bounds]:
    """Return the bounds of two calls, or of a single call if no prompt is shared. No key is copied.

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


def deterministic() -> bool:
    """Return whether backward passes must be deterministic. If torch is set to warn only, they need
    not be. torch's own attention follows the same rule.
    """
    return torch.get_deterministic_debug_mode() == 2  # 1: warn only


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
            deterministic=deterministic(),
            return_lse=True,
        )

    outs, lses = zip(*(call(at)[:2] for at in calls_of(strip)))
    if len(outs) == 1:
        return outs[0]
    # the log-sum-exp of a query without keys in a part is -inf, so its weight is 0
    weights = torch.stack(lses).softmax(0).transpose(1, 2).unsqueeze(3)  # [2, T, H, 1]
    return sum(w * out for w, out in zip(weights, outs)).to(q.dtype)


BACKENDS["flash4"] = flash4

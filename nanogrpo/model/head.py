"""Operations on the output head: the only interface between the kernels and the rest of the
project.

In: hidden states [M, D], the output head [V, D], and per-token vectors [M]. Out: log-probs,
entropies, and the policy loss with its gradient. Both operations store the logits of only one chunk
of rows at a time, never all [M, V].

| operation | in → out | used for |
|---|---|---|
| `head_policy_loss` | hidden [M, D] → loss | the training step: three matrix products |
| `head_logp` | hidden [M, D] → log-prob, entropy [M] | old and reference log-probs |

On CUDA they run the Triton kernels of kernels/triton/, and on other devices the PyTorch code of
kernels/reference/, unless --kernels chooses (dispatch.py). Read next: kernels/reference/policy.py
(the loss), kernels/head.py (the loop over chunks), kernels/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanogrpo.kernels.head import HeadLogp, HeadPolicyLoss
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from nanogrpo.model.dispatch import functions_for

# (hidden [M, D], lm_head [V, D]) → anything: what Decoder.forward_strip applies
HeadOp = Callable[[Tensor, Tensor], Any]


class PolicyOut(NamedTuple):
    """The result of a loss. Only `loss` has a gradient. Tokens with weight 0 have zero entries."""

    loss: Tensor  # [] float32: Σ weight · l - entropy_weight · H
    logp: Tensor  # [M] float32
    entropy: Tensor  # [M] float32, nats
    kl: Tensor | None  # [M] float32: the KL of kernels/reference/policy.py; None without ref_logp
    # More vectors [M], each under the name that its mean has in the log. "clip" is int8: -1 if
    # clipped low, +1 if clipped high, else 0.
    metrics: dict[str, Tensor]
    # Whether each metric has one value per sequence, repeated for its tokens. If so, its mean is
    # taken over sequences.
    by_sequence: bool = False


def default_chunk(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of rows of logits in a chunk: 2.5 GB on CUDA (8228 rows of Qwen3 in
    bfloat16), 200 MB and at most 512 rows elsewhere.

    The limit of 512 keeps the temporaries of a chunk small, so the allocator reuses their memory.
    Larger temporaries would need new pages from the operating system each time (docs/log.md).
    """
    size, most = (2.5e9, 1 << 30) if device.type == "cuda" else (200e6, 512)
    return min(most, max(1, int(size // (vocab * dtype.itemsize))))


def head_policy_loss(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    inputs: LossInputs,
    clip: Clip,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> PolicyOut:
    """Compute Σ weight · l - Σ entropy_weight · H in three matrix products.

    hidden [M, D] and lm_head [V, D] of the same dtype, targets [M] int64; chunk: number of rows
    processed at a time. The gradients are computed during the forward pass, so the loss must be the
    root of the graph up to a scalar factor, and `inputs.weight` must be known beforehand. Tokens
    whose weight and entropy_weight are both 0 are skipped (their results are 0). Under `no_grad`
    one matrix product is enough.
    """
    if not torch.is_grad_enabled():
        hidden, lm_head = hidden.detach(), lm_head.detach()
    chunk = chunk or default_chunk(len(lm_head), hidden.dtype, hidden.device)
    args = targets, inputs, clip, temperature, chunk, functions_for(hidden.device)
    loss, logp, entropy, flags, kl = HeadPolicyLoss.apply(hidden, lm_head, *args)
    return PolicyOut(loss, logp, entropy, kl, {"clip": flags})


def head_logp(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy [M] float32 under softmax(hidden @ lm_head.T / temperature).

    hidden [M, D] and lm_head [V, D] of the same dtype, targets [M] int64; chunk: number of rows
    processed at a time. The function is differentiable: the backward recomputes each chunk's
    logits, except for rows whose upstream gradients are 0. Logits are rounded to the dtype of
    hidden, as in inference engines; everything after them is computed in float32.
    """
    chunk = chunk or default_chunk(len(lm_head), hidden.dtype, hidden.device)
    args = targets, temperature, chunk, functions_for(hidden.device)
    return HeadLogp.apply(hidden, lm_head, *args)

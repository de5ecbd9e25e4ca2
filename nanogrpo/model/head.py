"""Operations that compute log-probs and the loss at the output head, in chunks of rows.

In: hidden states [M, D], the output head [V, D], and per-token vectors [M]. Out: log-probs,
entropies, and the policy loss with its gradient. Both operations store the logits of one chunk of
rows at a time, and never all logits [M, V].

| operation | in → out | used for |
|---|---|---|
| `head_policy_loss` | hidden [M, D] → loss | the training step: three matrix products |
| `head_logp` | hidden [M, D] → log-prob, entropy [M] | old and reference log-probs |

On CUDA, the operations run the Triton kernels of kernels/triton/; on other devices, they run the
PyTorch code of kernels/reference/. The option --kernels overrides this choice (dispatch.py). Read
next: kernels/reference/policy.py (the loss), kernels/head.py (the loop over chunks),
kernels/README.md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanogrpo.kernels.head import HeadLogp, HeadPolicyLoss
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from nanogrpo.model.dispatch import functions_for

# (hidden [M, D], lm_head [V, D]) → anything; see Decoder.forward_strip
HeadOp = Callable[[Tensor, Tensor], Any]


class PolicyOut(NamedTuple):
    """The result of a loss. Only `loss` has a gradient."""

    loss: Tensor  # [] float32: Σ weight · l - entropy_weight · H
    logp: Tensor  # [M] float32
    entropy: Tensor  # [M] float32, nats
    kl: Tensor | None  # [M] float32: the KL of kernels/reference/policy.py; None without ref_logp
    # Further vectors [M]. The mean of each vector is logged under the vector's name.
    # "clip" is int8: -1 if clipped low, +1 if clipped high, else 0.
    metrics: dict[str, Tensor]
    # Whether the metrics have one value per sequence, repeated for each token of the sequence.
    # The means of such metrics are taken over sequences.
    by_sequence: bool = False


def default_chunk(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of rows of logits in a chunk. A chunk takes at most 2.5 GB on CUDA (8227
    rows for Qwen3 in bfloat16). On other devices, a chunk takes at most 200 MB and has at most 512
    rows.

    The limit of 512 rows keeps temporary tensors small, so the allocator reuses their memory.
    Larger temporary tensors would need new pages from the operating system each time (docs/log.md).
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
    functions: Any = None,
) -> PolicyOut:
    """Compute Σ weight · l - Σ entropy_weight · H in three matrix products.

    The arguments hidden [M, D] and lm_head [V, D] have the same dtype; targets is [M] int64. At
    most `chunk` rows are processed at a time. `functions` replaces the package of kernels. The
    gradients are computed during the forward pass.
    So `inputs.weight` must be known before the forward pass, and the backward pass can only
    multiply these gradients by a number. With `no_grad`, one matrix product is enough.
    """
    if not torch.is_grad_enabled():
        hidden, lm_head = hidden.detach(), lm_head.detach()
    chunk = chunk or default_chunk(len(lm_head), hidden.dtype, hidden.device)
    loss, logp, entropy, flags, kl = HeadPolicyLoss.apply(
        hidden,
        lm_head,
        targets,
        inputs,
        clip,
        temperature,
        chunk,
        functions or functions_for(hidden.device),
    )
    return PolicyOut(loss, logp, entropy, kl, {"clip": flags})


def head_logp(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
    functions: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy [M] float32 under softmax(hidden @ lm_head.T / temperature).

    The arguments hidden [M, D] and lm_head [V, D] have the same dtype; targets is [M] int64. At
    most `chunk` rows are processed at a time. The function is differentiable: the backward pass
    recomputes the logits of each chunk, except for rows whose upstream gradients are 0. Logits are
    rounded to the dtype of `hidden`, as in inference engines. All later results are computed in
    float32.
    """
    chunk = chunk or default_chunk(len(lm_head), hidden.dtype, hidden.device)
    functions = functions or functions_for(hidden.device)
    return HeadLogp.apply(hidden, lm_head, targets, temperature, chunk, functions)

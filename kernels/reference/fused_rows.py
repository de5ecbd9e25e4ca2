"""Compute log-probs from logits, and overwrite the logits with the gradient of the loss.

In: logits [N, V], targets [N], `LossInputs` [N]. Out: log-prob, entropy and loss [N], and the
gradient in place of the logits. Read next: kernels/head.py, which calls `policy_rows_` on a chunk
of logits.
"""

import torch
from torch import Tensor

from .log_softmax import log_softmax_backward_, log_softmax_forward
from .policy import Clip, LossInputs, policy_terms


def policy_rows_(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    inputs: LossInputs,
    c: Clip,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return log-prob, entropy, l, clip flag and KL (or None) of each row, all [N], and the
    gradient of Σ weight · l - entropy_weight · H [N, V]. The gradient is written to `out`; by
    default, it overwrites the logits.

    If the weight of a row is 0, its l, clip flag and KL are 0, but its log-prob must still be
    finite. If the weight and the entropy_weight of a row are both 0, kernels/head.py skips the row.
    """
    logp, entropy, norm = log_softmax_forward(logits, targets, temperature)
    l, dl, clip, kl = policy_terms(logp, inputs, c)
    on = inputs.weight != 0
    # `where` instead of a product: NaN · 0 is NaN
    l, dl, clip = (torch.where(on, x, 0) for x in (l, dl, clip))
    kl = None if kl is None else torch.where(on, kl, 0.0)
    dentropy = None if inputs.entropy_weight is None else -inputs.entropy_weight
    dlogp = inputs.weight * dl
    out = log_softmax_backward_(logits, targets, temperature, norm, entropy, dlogp, dentropy, out)
    return logp, entropy, l, clip, kl, out

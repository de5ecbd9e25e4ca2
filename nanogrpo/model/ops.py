"""The two kernels as differentiable functions, for code that already has logits or log-probs.

In: logits [N, V] with targets [N], or log-probs [M] with `LossInputs` [M]. Out: log-probs and
entropies, or the loss, with gradients. Use them in your own experiments. A training step calls
head.py instead, because its fused head never stores all logits. Read next: kernels/log_softmax.py
and kernels/policy.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanogrpo.kernels.reference import LossInputs, Objective
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.head import PolicyOut, check_reference


def policy_loss(logp: Tensor, inputs: LossInputs, objective: Objective) -> PolicyOut:
    """Return Σ weight · l over [M] log-probs, with l as in `kernels.reference.policy_terms`.

    The gradient flows only to logp. Tokens with weight 0 are ignored, even if their values are NaN.
    The entropy is left empty, because a log-prob does not determine it.
    """
    check_reference(inputs, objective)
    loss, clip, kl = _PolicyLoss.apply(logp, inputs, objective)
    return PolicyOut(loss, logp.detach(), logp.new_empty(0), kl, {"clip": clip})


def selective_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature)[targets] [N] and the entropy [N], float32.

    logits [N, V], targets [N] int64. The softmax is never written to memory. Both results are
    differentiable.
    """
    return _LogSoftmax.apply(logits, targets, temperature)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, inputs, objective):
        loss, dlogp, clip, kl = functions_for(logp.device).policy_forward(logp, inputs, objective)
        ctx.save_for_backward(dlogp)
        ctx.mark_non_differentiable(*(x for x in (clip, kl) if x is not None))
        return loss, clip, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        (dlogp,) = ctx.saved_tensors
        return dlogp * upstream, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):
        rows = functions_for(logits.device)
        logp, entropy, norm = rows.log_softmax_forward(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, norm, entropy)
        ctx.settings = rows, temperature
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogp, dentropy):
        logits, targets, norm, entropy = ctx.saved_tensors
        rows, temperature = ctx.settings
        args = logits.clone(), targets, temperature, norm, entropy, dlogp, dentropy
        return rows.log_softmax_backward_(*args), None, None

"""The loss of given log-probs, as a differentiable function.

A training step does not need it, because the fused head computes log-probs and loss together. Tests
compare it with autograd and with the code of other libraries. Read next: tests/model/test_head.py.
"""

import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs, policy_terms
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanogrpo.model.head import PolicyOut


def policy_loss(logp: Tensor, inputs: LossInputs, clip: Clip) -> PolicyOut:
    """Return Σ weight · l over [M] log-probs, without entropies. The gradient flows to logp."""
    loss, flags, kl = _PolicyLoss.apply(logp, inputs, clip)
    return PolicyOut(loss, logp.detach(), logp.new_empty(0), kl, {"clip": flags})


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, inputs, clip):
        l, dl, flags, kl = policy_terms(logp, inputs, clip)
        on = inputs.weight != 0
        l, dl, flags = (torch.where(on, x, 0) for x in (l, dl, flags))
        kl = None if kl is None else torch.where(on, kl, 0.0)
        ctx.save_for_backward(dl * inputs.weight)
        ctx.mark_non_differentiable(*(x for x in (flags, kl) if x is not None))
        return (l * inputs.weight).sum(), flags, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        (dlogp,) = ctx.saved_tensors
        return dlogp * upstream, None, None

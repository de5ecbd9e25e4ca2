"""The loss of given log-probs, as a differentiable function.

A training step does not need it, because the fused head computes log-probs and loss together. Tests
compare it with autograd and with the code of other libraries. Read next: tests/model/test_head.py.
"""

import torch
from nanogrpo.kernels.reference.policy import policy_terms

from nanogrpo.model.head import PolicyOut


def policy_loss(logp, inputs, clip) -> PolicyOut:
    """Return Σ weight · l over [M] log-probs, without entropies. The gradient flows to logp."""
    given, on = logp.detach(), inputs.weight != 0
    l, dl, flags, kl = policy_terms(given, inputs, clip)
    l, dl, flags = (torch.where(on, x, 0) for x in (l, dl, flags))
    kl = None if kl is None else torch.where(on, kl, 0.0)
    loss = ((l + dl * (logp - given)) * inputs.weight).sum()
    return PolicyOut(loss, given, given.new_empty(0), kl, {"clip": flags})

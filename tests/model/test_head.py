"""The operations of nanogrpo/model/head.py with the equations of kernels/reference/, against
autograd.

Read next: test_head_autograd.py (torch features), tests/kernels/test_head_work.py (the cost),
tests/kernels/test_log_softmax.py (the Triton kernels against these equations).
"""

import pytest
import torch
from nanogrpo.kernels.reference.policy import LossInputs, policy_terms

from nanogrpo.model import head as ops
from tests.model.head_inputs import CLIP, D, T, V, draw

pytestmark = pytest.mark.usefixtures("reference_ops")


def _definition(logits, targets, inputs, o):
    """The loss as one would write it in a notebook, left to autograd."""
    logp_all = torch.log_softmax(logits, -1)
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    logp = logp_all.gather(1, targets[:, None]).squeeze(1)
    old, a = inputs.old_logp, inputs.advantage
    ratio = (logp - (logp.detach() if old is None else old)).exp()
    capped = ratio.clamp(max=o.delta)
    l = -torch.min(capped * a, ratio.clamp(1 - o.epsilon, 1 + o.epsilon_high) * a)
    if inputs.importance is not None:
        l = l * inputs.importance
    x = inputs.ref_logp - logp
    k3 = x.exp() - x - 1
    l = l + o.beta * k3 * ratio
    loss = (l * inputs.weight).sum()
    bonus = inputs.entropy_weight
    return loss if bonus is None else loss - (bonus * entropy).sum()


def policy_loss(logp, inputs, clip):
    """Return the loss of given log-probs, as the second of two phases computes it."""
    given = logp.detach()
    l, dl, *_ = policy_terms(given, inputs, clip)
    return ((l + dl * (logp - given)) * inputs.weight).sum()


CASES = {  # the vectors that are absent, and the constants that differ
    "on policy": (("old_logp", "importance", "entropy_weight"), {}),
    "on policy, KL, bonus": (("old_logp", "importance"), {"beta": 0.1}),
    "importance": (("entropy_weight",), {}),
    "delta": (("importance", "entropy_weight"), {"delta": 1.5}),
    "KL, importance": (("entropy_weight",), {"beta": 0.1}),
    "everything": ((), {"beta": 0.1, "delta": 1.1}),
    "KL, delta, bonus": (("importance",), {"beta": 0.1, "delta": 1.5}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fused_head_and_two_phases_equal_autograd_of_the_definition(case, dtype):
    absent, constants = CASES[case]
    hidden, head, targets, inputs = draw(dtype)
    inputs, o = inputs._replace(**dict.fromkeys(absent)), CLIP._replace(**constants)
    expected = _definition(hidden @ head.T / T, targets, inputs, o)
    gradients = torch.autograd.grad(3 * expected, (hidden, head))
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for chunk in (None, 4):
        more = dict(temperature=T, chunk=chunk)
        fused = ops.head_policy_loss(hidden, head, targets, inputs, o, **more).loss
        logp, entropy = ops.head_logp(hidden, head, targets, **more)
        two_phases = policy_loss(logp, inputs, o)
        if inputs.entropy_weight is not None:
            two_phases = two_phases - (inputs.entropy_weight * entropy).sum()
        for loss in (fused, two_phases):
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            got = torch.autograd.grad(3 * loss, (hidden, head))
            torch.testing.assert_close(got, gradients, rtol=tolerance, atol=tolerance)


def test_nothing_to_train_gives_zeros():
    hidden, head = torch.randn(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    empty = torch.zeros(0)
    out = ops.head_policy_loss(hidden, head, empty.long(), LossInputs(empty, empty, empty), CLIP)
    (out.loss + ops.head_logp(hidden, head, empty.long())[0].sum()).backward()
    assert out.loss == 0
    assert head.grad.shape == head.shape
    assert not head.grad.any()

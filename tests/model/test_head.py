"""The operations of nanogrpo/model/head.py with the equations of kernels/reference/, against
autograd and finite differences.

Read next: test_head_autograd.py (torch features), tests/kernels/test_head_work.py (the cost),
tests/kernels/test_log_softmax.py (the Triton kernels against these equations).
"""

import math

import pytest
import torch
from nanogrpo.kernels.reference.policy import LossInputs

from nanogrpo.kernels import reference
from nanogrpo.model import head as ops
from tests.kernels import autograd
from tests.model.head_inputs import CLIP, D, M, T, V, draw

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
        two_phases = autograd.policy_loss(logp, inputs, o).loss
        if inputs.entropy_weight is not None:
            two_phases = two_phases - (inputs.entropy_weight * entropy).sum()
        for loss in (fused, two_phases):
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            got = torch.autograd.grad(3 * loss, (hidden, head))
            torch.testing.assert_close(got, gradients, rtol=tolerance, atol=tolerance)


def test_log_softmax_at_the_edges():
    z = torch.randn(6, V)
    z[0] = 1.0  # all equal: entropy log V
    z[1, 4] = 80.0  # p → 1
    z[2] -= 10_000.0  # all far below zero
    z[3, : V // 2] = -math.inf
    targets = torch.tensor([0, 4, V - 1, V - 1, 0, V - 1])
    logp, entropy, norm = reference.log_softmax_forward(z, targets, 1.0)
    exact = torch.log_softmax(z.double(), -1)
    finite = torch.where(exact > -1e300, exact, 0.0)
    of_targets = exact.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logp.double(), of_targets, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        entropy.double(), -(exact.exp() * finite).sum(-1), rtol=1e-6, atol=1e-6
    )
    ones = torch.ones(6)
    dz = reference.log_softmax_backward_(z, targets, 1.0, norm, entropy, ones, ones)
    assert torch.isfinite(dz).all()
    # a shift of a row changes nothing
    torch.testing.assert_close(dz.sum(-1), torch.zeros(6), rtol=0, atol=1e-5)
    assert reference.log_softmax_forward(z[:0], targets[:0], 1.0)[0].shape == (0,)


def test_nothing_to_train_gives_zeros():
    hidden, head = torch.randn(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    empty = torch.zeros(0)
    out = ops.head_policy_loss(hidden, head, empty.long(), LossInputs(empty, empty, empty), CLIP)
    (out.loss + ops.head_logp(hidden, head, empty.long())[0].sum()).backward()
    assert out.loss == 0
    assert head.grad.shape == head.shape
    assert not head.grad.any()
    hidden, head, targets, inputs = draw(torch.float32)
    nothing = LossInputs(inputs.advantage, torch.zeros(M))
    ops.head_policy_loss(hidden, head, targets, nothing, CLIP).loss.backward()
    assert not hidden.grad.any()
    assert not head.grad.any()

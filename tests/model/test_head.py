"""The operations of nanogrpo/model/head.py with the equations of kernels/reference.py, against
autograd and finite differences.

Read next: test_head_autograd.py (torch features), tests/kernels/test_head_work.py (the cost),
tests/kernels/test_log_softmax.py (the Triton kernels against these equations).
"""

import math

import pytest
import torch
from nanogrpo.kernels.reference import LossInputs

from nanogrpo.model import head as ops
from nanogrpo.model import ops as kernel_ops
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
    l = l + o.beta * (k3 * ratio if o.bias_correction else k3)
    loss = (l * inputs.weight).sum()
    bonus = inputs.entropy_weight
    return loss if bonus is None else loss - (bonus * entropy).sum()


CASES = {  # the vectors that are absent, and the constants that differ
    "on policy": (("old_logp", "importance", "entropy_weight"), {}),
    "on policy, KL, bonus": (("old_logp", "importance"), {"beta": 0.1}),
    "importance": (("entropy_weight",), {}),
    "delta": (("importance", "entropy_weight"), {"delta": 1.5}),
    "KL, importance": (("entropy_weight",), {"beta": 0.1}),
    "plain KL": ((), {"beta": 0.1, "delta": 1.1, "bias_correction": False}),
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
        two_phases = kernel_ops.policy_loss(logp, inputs, o).loss
        if inputs.entropy_weight is not None:
            two_phases = two_phases - (inputs.entropy_weight * entropy).sum()
        for loss in (fused, two_phases):
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            got = torch.autograd.grad(3 * loss, (hidden, head))
            torch.testing.assert_close(got, gradients, rtol=tolerance, atol=tolerance)


def test_gradients_match_finite_differences():
    hidden, head, targets, inputs = draw()
    hidden, targets = hidden[:3].detach().requires_grad_(), targets[:3]
    inputs, o = inputs.map(lambda v: v[:3]), CLIP._replace(beta=0.1)
    logits, logp = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, V), (3,))
    )
    for function, args in [
        (
            lambda h, w: ops.head_policy_loss(h, w, targets, inputs, o, temperature=T).loss,
            (hidden, head),
        ),
        (lambda h, w: ops.head_logp(h, w, targets, T, chunk=2), (hidden, head)),
        (lambda z: kernel_ops.selective_log_softmax(z, targets, T), (logits,)),
        (lambda x: kernel_ops.policy_loss(x, inputs, o).loss, (logp,)),
    ]:
        assert torch.autograd.gradcheck(function, args)


def test_selective_log_softmax_at_the_edges():
    z = torch.randn(6, V)
    z[0] = 1.0  # all equal: entropy log V
    z[1, 4] = 80.0  # p → 1
    z[2] -= 10_000.0  # all far below zero
    z[3, : V // 2] = -math.inf
    targets = torch.tensor([0, 4, V - 1, V - 1, 0, V - 1])
    z.requires_grad_()
    logp, entropy = kernel_ops.selective_log_softmax(z, targets)
    exact = torch.log_softmax(z.detach().double(), -1)
    finite = torch.where(exact > -1e300, exact, 0.0)
    of_targets = exact.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logp.double(), of_targets, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        entropy.double(), -(exact.exp() * finite).sum(-1), rtol=1e-6, atol=1e-6
    )
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(z.grad).all()
    # a shift of a row changes nothing
    torch.testing.assert_close(z.grad.sum(-1), torch.zeros(6), rtol=0, atol=1e-5)
    assert kernel_ops.selective_log_softmax(z[:0], targets[:0])[0].shape == (0,)


def test_clipping_stops_the_gradient_where_it_should_for_both_signs():
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 9.0, 9.0])
    advantage = torch.tensor([1.0, -1.0] * 4)
    logp = ratio.log().requires_grad_()
    inputs = LossInputs(advantage, torch.ones(8), torch.zeros(8))
    out = kernel_ops.policy_loss(logp, inputs, CLIP._replace(delta=4.0))
    (grad,) = torch.autograd.grad(out.loss, logp)
    torch.testing.assert_close(grad, torch.tensor([-0.5, 0.0, -1.0, 1.0, 0.0, 1.5, 0.0, 0.0]))
    assert out.metrics["clip"].tolist() == [0, -1, 0, 0, 1, 0, 1, 0]


def test_kl_is_zero_at_equality_and_never_negative():
    x = torch.cat([torch.zeros(1), torch.linspace(-3, 3, 601), 10.0 ** -torch.arange(1.0, 12.0)])
    out = kernel_ops.policy_loss(
        torch.zeros_like(x), LossInputs(x, torch.ones_like(x), ref_logp=x), CLIP
    )
    assert (out.kl >= 0).all()
    assert out.kl[0] == 0
    exact = torch.expm1(x.double()) - x.double()
    torch.testing.assert_close(out.kl.double(), exact, rtol=1e-3, atol=1e-9)


def test_masked_tokens_may_hold_anything():
    hidden, head, targets, inputs = draw(torch.float32)
    inputs = inputs._replace(importance=None, entropy_weight=None)
    o = CLIP._replace(beta=0.1)
    dirty = hidden.detach().clone()
    dirty[5] = math.nan
    spoiled = inputs.map(torch.clone)
    for vector in (spoiled.old_logp, spoiled.advantage, spoiled.ref_logp):
        vector[5] = math.inf
    clean = ops.head_policy_loss(hidden, head, targets, inputs, o)
    out = ops.head_policy_loss(dirty.requires_grad_(), head, targets, spoiled, o)
    assert torch.equal(out.loss, clean.loss)
    for a, b in zip(
        torch.autograd.grad(out.loss, (dirty, head)),
        torch.autograd.grad(clean.loss, (hidden, head)),
    ):
        assert torch.equal(a, b)
    assert out.logp[5] == out.entropy[5] == out.kl[5] == out.metrics["clip"][5] == 0


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


def test_a_head_of_another_type_raises_an_error():
    hidden, head, targets, _ = draw(torch.float32)
    with pytest.raises(RuntimeError, match="same dtype"):
        ops.head_logp(hidden, head.bfloat16(), targets)


def test_a_kl_without_a_reference_is_an_error():
    hidden, head, targets, inputs = draw()
    inputs, o = inputs._replace(ref_logp=None), CLIP._replace(beta=0.1)
    with pytest.raises(ValueError, match="ref_logp must not be None"):
        ops.head_policy_loss(hidden, head, targets, inputs, o)
    with pytest.raises(ValueError, match="ref_logp must not be None"):
        kernel_ops.policy_loss(torch.zeros(len(targets)), inputs, o)

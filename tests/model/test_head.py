"""What the operations of nanogrpo/model/head.py compute, with the equations of
kernels/reference.py: against autograd and differences.

Read next: test_head_work.py (what it costs), test_custom_ops.py (how torch takes it), then
test_kernels_log_softmax.py, which holds the Triton kernels to these equations.
"""

import math

import pytest
import torch

from nanogrpo.model import head as ops
from tests.model.head_inputs import CLIP, D, M, T, V, draw

pytestmark = pytest.mark.usefixtures("reference_ops")


def _plain(logits, targets, v, old, beta, delta, bias, ew, imp):
    """The loss as one would write it in a notebook: the definition, left to autograd."""
    logp_all = torch.log_softmax(logits, -1)
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    logp = logp_all.gather(1, targets[:, None]).squeeze(1)
    ratio = (logp - (logp.detach() if old is None else old)).exp()
    capped = ratio if delta is None else ratio.clamp(max=delta)
    low, high = 1 - CLIP["epsilon"], 1 + CLIP["epsilon_high"]
    l = -torch.min(capped * v["advantage"], ratio.clamp(low, high) * v["advantage"])
    if imp is not None:
        l = l * imp
    x = v["ref"] - logp
    k3 = x.exp() - x - 1
    l = l + beta * (k3 * ratio if bias else k3)
    loss = (l * v["weight"]).sum()
    return loss if ew is None else loss - (ew * entropy).sum()


CASES = [
    dict(old=old, beta=beta, delta=delta, bias=bias, ew=ew, imp=imp)
    for old, beta, delta, bias, ew, imp in [
        (False, 0.0, None, True, False, False),
        (False, 0.1, None, True, True, False),
        (True, 0.0, None, True, False, True),
        (True, 0.0, 1.5, True, False, False),
        (True, 0.1, None, True, False, True),
        (True, 0.1, 1.1, False, True, True),
        (True, 0.1, 1.5, True, True, False),
    ]
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fused_head_and_two_phases_equal_autograd_of_the_definition(case, dtype):
    hidden, head, targets, v = draw(dtype)
    pick = {name: v[name] if case[name] else None for name in ("old", "ew", "imp")}
    knobs = dict(beta=case["beta"], delta=case["delta"])
    expected = _plain(hidden @ head.T / T, targets, v, **pick, **knobs, bias=case["bias"])
    gradients = torch.autograd.grad(3 * expected, (hidden, head))
    settings = dict(
        ref_logp=v["ref"],
        importance=pick["imp"],
        use_bias_correction_kl=case["bias"],
        **knobs,
        **CLIP,
    )
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for chunk in (None, 4):
        args = hidden, head, targets, pick["old"], v["advantage"], v["weight"]
        out = ops.head_policy_loss(
            *args, temperature=T, entropy_weight=pick["ew"], chunk=chunk, **settings
        )
        torch.testing.assert_close(out.loss, expected, rtol=tolerance, atol=tolerance)
        got = torch.autograd.grad(3 * out.loss, (hidden, head))
        torch.testing.assert_close(got, gradients, rtol=tolerance, atol=tolerance)
        logp, entropy = ops.head_logp(hidden, head, targets, T, entropy=True, chunk=chunk)
        loss = ops.policy_loss(logp, pick["old"], v["advantage"], v["weight"], **settings).loss
        if pick["ew"] is not None:
            loss = loss - (pick["ew"] * entropy).sum()
        got = torch.autograd.grad(3 * loss, (hidden, head))
        torch.testing.assert_close(got, gradients, rtol=tolerance, atol=tolerance)


def test_finite_differences():
    hidden, head, targets, v = draw()
    hidden, targets = hidden[:3].detach().requires_grad_(), targets[:3]
    v = {name: vector[:3] for name, vector in v.items()}

    def fused(hidden, head):
        settings = dict(ref_logp=v["ref"], beta=0.1, entropy_weight=v["ew"], temperature=T, **CLIP)
        return ops.head_policy_loss(
            hidden, head, targets, v["old"], v["advantage"], v["weight"], **settings
        ).loss

    assert torch.autograd.gradcheck(fused, (hidden, head))
    assert torch.autograd.gradcheck(
        lambda h, w: ops.head_logp(h, w, targets, T, entropy=True, chunk=2), (hidden, head)
    )
    logits = torch.randn(3, V, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda z: ops.selective_log_softmax(z, targets, T, entropy=True), (logits,)
    )
    logp = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def loss(x):
        vectors = v["old"], v["advantage"], v["weight"]
        return ops.policy_loss(x, *vectors, ref_logp=v["ref"], beta=0.1, **CLIP).loss

    assert torch.autograd.gradcheck(loss, (logp,))


def test_selective_log_softmax_at_the_edges():
    z = torch.randn(7, V)
    z[0] = 1.0  # all equal: entropy log V
    z[1, 4] = 80.0  # p → 1
    z[2] -= 10_000.0  # all far below zero
    z[3, : V // 2] = -math.inf
    z[4] = math.nan  # masked
    targets = torch.tensor([0, 4, V - 1, V - 1, 0, 0, V - 1])
    mask = torch.arange(7) != 4
    z.requires_grad_()
    logp, entropy = ops.selective_log_softmax(z, targets, entropy=True, mask=mask)
    exact = torch.log_softmax(z.detach().double(), -1)
    keep = torch.where(exact > -1e300, exact, 0.0)
    torch.testing.assert_close(
        logp[mask].double(),
        exact.gather(1, targets[:, None]).squeeze(1)[mask],
        rtol=1e-6,
        atol=1e-6,
    )
    torch.testing.assert_close(
        entropy[mask].double(), -(exact.exp() * keep).sum(-1)[mask], rtol=1e-6, atol=1e-6
    )
    assert logp[4] == entropy[4] == 0
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(z.grad).all()
    assert not z.grad[4].any()
    # a shift of a row changes nothing
    torch.testing.assert_close(z.grad.sum(-1), torch.zeros(7), rtol=0, atol=1e-5)
    assert torch.isfinite(logp).all()
    assert ops.selective_log_softmax(z[:0], targets[:0])[0].shape == (0,)


def test_clipping_stops_the_gradient_where_it_should_for_both_signs():
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 9.0, 9.0])
    advantage = torch.tensor([1.0, -1.0] * 4)
    logp = ratio.log().requires_grad_()
    out = ops.policy_loss(logp, torch.zeros(8), advantage, torch.ones(8), delta=4.0, **CLIP)
    (grad,) = torch.autograd.grad(out.loss, logp)
    torch.testing.assert_close(grad, torch.tensor([-0.5, 0.0, -1.0, 1.0, 0.0, 1.5, 0.0, 0.0]))
    assert out.clip.tolist() == [0, -1, 0, 0, 1, 0, 1, 0]
    stats = dict(zip(ops.STATS, out.stats.tolist()))
    assert (stats["tokens"], stats["clip_low"], stats["clip_high"]) == (8, 1, 2)
    assert stats["ratio"] == pytest.approx(ratio.sum().item())
    assert stats["k1"] == pytest.approx(-ratio.log().sum().item())


def test_kl_is_zero_at_equality_and_never_negative():
    x = torch.cat([torch.zeros(1), torch.linspace(-3, 3, 601), 10.0 ** -torch.arange(1.0, 12.0)])
    out = ops.policy_loss(torch.zeros_like(x), None, x, torch.ones_like(x), ref_logp=x, **CLIP)
    assert (out.kl >= 0).all()
    assert out.kl[0] == 0
    exact = torch.expm1(x.double()) - x.double()
    torch.testing.assert_close(out.kl.double(), exact, rtol=1e-3, atol=1e-9)


def test_what_is_masked_may_hold_anything():
    hidden, head, targets, v = draw(torch.float32)
    clean = ops.head_policy_loss(
        hidden,
        head,
        targets,
        v["old"],
        v["advantage"],
        v["weight"],
        ref_logp=v["ref"],
        beta=0.1,
        **CLIP,
    )
    gradients = torch.autograd.grad(clean.loss, (hidden, head))
    dirty = hidden.detach().clone()
    dirty[5] = math.nan
    dirty.requires_grad_()
    for name in ("old", "advantage", "ref"):
        v[name][5] = math.inf
    out = ops.head_policy_loss(
        dirty,
        head,
        targets,
        v["old"],
        v["advantage"],
        v["weight"],
        ref_logp=v["ref"],
        beta=0.1,
        **CLIP,
    )
    assert torch.equal(out.loss, clean.loss)
    assert torch.equal(out.stats, clean.stats)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.loss, (dirty, head)), gradients)
    )
    assert out.logp[5] == out.entropy[5] == out.kl[5] == out.clip[5] == 0


def test_nothing_to_train_gives_zeros():
    hidden, head = torch.randn(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    empty = torch.zeros(0)
    out = ops.head_policy_loss(hidden, head, empty.long(), empty, empty, empty, **CLIP)
    out.loss.backward()
    assert out.loss == 0
    assert head.grad.shape == head.shape
    assert not head.grad.any()
    logp, _ = ops.head_logp(hidden, head, empty.long())
    logp.sum().backward()
    assert not head.grad.any()
    hidden, head, targets, v = draw(torch.float32)
    ops.head_policy_loss(
        hidden, head, targets, None, v["advantage"], torch.zeros(M), **CLIP
    ).loss.backward()
    assert not hidden.grad.any()
    assert not head.grad.any()


def test_mistakes_are_told():
    hidden, head, targets, v = draw(torch.float32)
    with pytest.raises(ValueError, match="ref_logp"):
        ops.policy_loss(v["old"], None, v["advantage"], v["weight"], beta=0.1, **CLIP)
    with pytest.raises(ValueError, match="cast"):
        ops.head_logp(hidden, head.bfloat16(), targets)

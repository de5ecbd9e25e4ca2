"""The operations of nanogrpo/ops.py with the equations of kernels/reference.py: against autograd, finite differences and counts.

Read next: test_kernels_interpreted.py, which holds the Triton kernels to these equations.
"""

import logging
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanogrpo import custom_ops, ops
from nanogrpo.errors import UserError
from nanogrpo.kernels import head as head_loop
from nanogrpo.kernels import reference

M, D, V, T = 13, 7, 29, 0.7
CLIP = dict(epsilon=0.2, epsilon_high=0.28)


@pytest.fixture(autouse=True)
def _reference():
    ops.use("torch")
    yield
    ops.use(None)


def _draw(dtype=torch.float64, seed=0):
    """hidden, head, targets and the vectors of a batch in which every kind of token occurs."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    hidden, head = normal(M, D).requires_grad_(), normal(V, D).requires_grad_()
    targets = torch.randint(V, (M,), generator=g)
    logp = torch.log_softmax(hidden.detach() @ head.detach().T / T, -1).gather(1, targets[:, None]).squeeze(1)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    old, ref = (logp + 0.3 * normal(M)).to(acc), (logp + 0.2 * normal(M)).to(acc)
    advantage, weight, importance = normal(M).to(acc), normal(M).abs().to(acc), normal(M).abs().to(acc)
    advantage[3], weight[5], importance[7] = 0.0, 0.0, 0.0
    entropy_weight = 0.1 * normal(M).abs().to(acc)
    entropy_weight[2] = 0.0
    return hidden, head, targets, dict(old=old, ref=ref, advantage=advantage, weight=weight, imp=importance, ew=entropy_weight)


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
    hidden, head, targets, v = _draw(dtype)
    pick = {name: v[name] if case[name] else None for name in ("old", "ew", "imp")}
    knobs = dict(beta=case["beta"], delta=case["delta"])
    expected = _plain(hidden @ head.T / T, targets, v, **pick, **knobs, bias=case["bias"])
    gradients = torch.autograd.grad(3 * expected, (hidden, head))
    settings = dict(ref_logp=v["ref"], importance=pick["imp"], use_bias_correction_kl=case["bias"], **knobs, **CLIP)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for chunk in (None, 4):
        args = hidden, head, targets, pick["old"], v["advantage"], v["weight"]
        out = ops.head_policy_loss(*args, temperature=T, entropy_weight=pick["ew"], chunk=chunk, **settings)
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
    hidden, head, targets, v = _draw()
    hidden, targets = hidden[:3].detach().requires_grad_(), targets[:3]
    v = {name: vector[:3] for name, vector in v.items()}

    def fused(hidden, head):
        settings = dict(ref_logp=v["ref"], beta=0.1, entropy_weight=v["ew"], temperature=T, **CLIP)
        return ops.head_policy_loss(hidden, head, targets, v["old"], v["advantage"], v["weight"], **settings).loss

    assert torch.autograd.gradcheck(fused, (hidden, head))
    assert torch.autograd.gradcheck(lambda h, w: ops.head_logp(h, w, targets, T, entropy=True, chunk=2), (hidden, head))
    logits = torch.randn(3, V, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: ops.selective_log_softmax(z, targets, T, entropy=True), (logits,))
    logp = torch.randn(3, dtype=torch.float64, requires_grad=True)
    loss = lambda x: ops.policy_loss(x, v["old"], v["advantage"], v["weight"], ref_logp=v["ref"], beta=0.1, **CLIP).loss  # noqa: E731
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
    torch.testing.assert_close(logp[mask].double(), exact.gather(1, targets[:, None]).squeeze(1)[mask], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy[mask].double(), -(exact.exp() * keep).sum(-1)[mask], rtol=1e-6, atol=1e-6)
    assert logp[4] == entropy[4] == 0
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(z.grad).all()
    assert not z.grad[4].any()
    torch.testing.assert_close(z.grad.sum(-1), torch.zeros(7), rtol=0, atol=1e-5)  # a shift of a row changes nothing
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
    hidden, head, targets, v = _draw(torch.float32)
    clean = ops.head_policy_loss(
        hidden, head, targets, v["old"], v["advantage"], v["weight"], ref_logp=v["ref"], beta=0.1, **CLIP
    )
    gradients = torch.autograd.grad(clean.loss, (hidden, head))
    dirty = hidden.detach().clone()
    dirty[5] = math.nan
    dirty.requires_grad_()
    for name in ("old", "advantage", "ref"):
        v[name][5] = math.inf
    out = ops.head_policy_loss(dirty, head, targets, v["old"], v["advantage"], v["weight"], ref_logp=v["ref"], beta=0.1, **CLIP)
    assert torch.equal(out.loss, clean.loss)
    assert torch.equal(out.stats, clean.stats)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.loss, (dirty, head)), gradients))
    assert out.logp[5] == out.entropy[5] == out.kl[5] == out.clip[5] == 0


def _products(function) -> float:
    """Matrix products of M·V·D multiply-adds that a call and its backward take, as the profiler sees them inside the ops."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        loss = function()
        if loss.requires_grad:
            loss.backward()
    first = {"aten::mm": 0, "aten::addmm": 1}  # where the two factors begin among the arguments
    pairs = [e.input_shapes[first[e.name] : first[e.name] + 2] for e in profile.events() if e.name in first]
    return sum(a[0] * a[1] * b[1] for a, b in pairs) / (M * V * D)


def test_three_products_with_gradient_one_without_and_four_in_two_phases():
    hidden, head, targets, v = _draw(torch.float32)
    ones = torch.ones(M)

    def fused(advantage=ones, weight=ones, **more):
        return ops.head_policy_loss(hidden, head, targets, None, advantage, weight, **CLIP, **more).loss

    assert _products(fused) == pytest.approx(3)
    with torch.no_grad():
        assert _products(fused) == pytest.approx(1)
    assert _products(lambda: ops.head_logp(hidden, head, targets)[0].sum()) == pytest.approx(4)
    no_advantage = torch.where(torch.arange(M) < 5, 0.0, 1.0)
    assert _products(lambda: fused(advantage=no_advantage)) == pytest.approx(3 - 2 * 5 / M)  # no backward product for 5 tokens
    assert _products(lambda: fused(advantage=no_advantage, ref_logp=v["ref"], beta=0.1)) == pytest.approx(3)  # the KL needs them
    assert _products(lambda: fused(weight=no_advantage)) == pytest.approx(3 - 3 * 5 / M)  # nothing for them
    assert _products(lambda: (ops.head_logp(hidden, head, targets)[0] * no_advantage).sum()) == pytest.approx(4 - 3 * 5 / M)


class _Largest(TorchDispatchMode):
    """The largest result of any operation, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_logits_are_never_more_than_a_chunk():
    hidden, lm_head = torch.randn(64, 4), torch.randn(512, 4)
    targets, ones = torch.randint(512, (64,)), torch.ones(64)
    o = reference.Objective(0.2, 0.2)
    with _Largest() as largest:
        head_loop.policy_forward(reference, hidden, lm_head, targets, 1.0, None, ones, ones, None, None, ones, o, 8, True, True)
        _, entropy, norm = head_loop.logp_forward(reference, hidden, lm_head, targets, 1.0, 8)
        head_loop.logp_backward(reference, hidden, lm_head, targets, 1.0, 8, norm, entropy, ones, ones)
    assert largest.numbers == 8 * 512


def test_gradient_of_a_bfloat16_head_is_summed_in_float32():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 16, generator=g).bfloat16()
    head = torch.randn(64, 16, generator=g).bfloat16().requires_grad_()
    targets, advantage = torch.randint(64, (256,), generator=g), torch.randn(256, generator=g)

    def gradient(chunk):
        args = hidden, head, targets, None, advantage, torch.ones(256)
        return torch.autograd.grad(ops.head_policy_loss(*args, chunk=chunk, **CLIP).loss, head)[0]

    whole, parts = gradient(256).float(), gradient(8).float()
    # One rounding to bfloat16 at the end, whatever the number of chunks: at most one unit in the last place apart.
    assert ((whole - parts).abs() <= whole.abs() * 2**-7).all()


def test_chunks_do_not_change_the_loss():
    hidden, head, targets, v = _draw(torch.float32)
    args = hidden, head, targets, v["old"], v["advantage"], v["weight"]
    outs = [ops.head_policy_loss(*args, chunk=chunk, **CLIP) for chunk in (1, 4, None)]
    for out in outs[1:]:
        torch.testing.assert_close(out.loss, outs[0].loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out.logp, outs[0].logp, rtol=1e-6, atol=1e-6)


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
    hidden, head, targets, v = _draw(torch.float32)
    ops.head_policy_loss(hidden, head, targets, None, v["advantage"], torch.zeros(M), **CLIP).loss.backward()
    assert not hidden.grad.any()
    assert not head.grad.any()


def test_backward_twice_is_right_and_differentiating_twice_raises():
    hidden, head, targets, v = _draw()
    loss = ops.head_policy_loss(hidden, head, targets, v["old"], v["advantage"], v["weight"], **CLIP).loss
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(hidden.grad, 3 * once)
    logp = torch.zeros(M, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(M, V, dtype=torch.float64, requires_grad=True)
    for loss, x in [
        (ops.head_policy_loss(hidden, head, targets, None, v["advantage"], v["weight"], **CLIP).loss, hidden),
        (ops.head_logp(hidden, head, targets)[0].sum(), hidden),
        (ops.policy_loss(logp, None, v["advantage"], v["weight"], **CLIP).loss, logp),
        (ops.selective_log_softmax(logits, targets)[0].sum(), logits),
    ]:
        (grad,) = torch.autograd.grad(loss**2, x, create_graph=True)
        with pytest.raises(RuntimeError, match="autograd"):
            grad.pow(2).sum().backward()


def test_torch_compile_passes_through_without_a_graph_break():
    hidden, head, targets, v = _draw(torch.float32)
    more = dict(ref_logp=v["ref"], beta=0.1, entropy_weight=v["ew"], importance=v["imp"], temperature=T, **CLIP)

    def step(hidden, head):
        out = ops.head_policy_loss(2 * hidden, head, targets, v["old"], v["advantage"], v["weight"], **more)
        logp, entropy = ops.head_logp(hidden, head, targets, entropy=True)
        other = ops.policy_loss(logp, v["old"], v["advantage"], v["weight"], **CLIP)
        selected, _ = ops.selective_log_softmax(hidden @ head.T, targets)
        return out.loss + other.loss + entropy.mean() + selected.mean()

    gradients = torch.autograd.grad(step(hidden, head), (hidden, head))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, head), step(hidden, head))
    torch.testing.assert_close(torch.autograd.grad(compiled(hidden, head), (hidden, head)), gradients)
    with torch.no_grad():
        assert not compiled(hidden, head).requires_grad


def test_registered_ops_keep_the_rules_of_torch_library():
    hidden, head, targets, v = _draw(torch.float32)
    logits = torch.randn(M, V, requires_grad=True)
    logp = torch.zeros(M, requires_grad=True)
    objective = [0.2, 0.2, math.inf, 0.0, 1.0]
    vectors = v["old"], v["advantage"], v["weight"], v["ref"], None
    for op, args in [
        (custom_ops.log_softmax, (logits, targets, 0.7, None)),
        (custom_ops.policy, (logp, *vectors, objective)),
        (custom_ops.head_logp, (hidden, head, targets, 0.7, 4)),
        (custom_ops.head_policy, (hidden, head, targets, 0.7, *vectors, None, objective, 4, True, True)),
    ]:
        torch.library.opcheck(op, args)


def test_policy_head_is_a_unit_for_fsdp():
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    hidden, head, targets, v = _draw(torch.float32)
    args = targets, v["old"], v["advantage"], v["weight"]
    expected = torch.autograd.grad(ops.head_policy_loss(hidden, head, *args, **CLIP).loss, (hidden, head))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        unit = ops.PolicyHead(torch.nn.Parameter(head.detach().clone()))
        fully_shard(unit, mesh=mesh)
        unit(hidden, *args, **CLIP).loss.backward()
        torch.testing.assert_close(hidden.grad, expected[0])
        torch.testing.assert_close(unit.weight.grad.full_tensor(), expected[1])
    finally:
        dist.destroy_process_group()


def test_implementation_is_chosen_by_device_told_once_and_can_be_forced(caplog, monkeypatch):
    ops.use(None)
    with caplog.at_level(logging.INFO, logger="nanogrpo"):
        assert [ops.implementation("cuda"), ops.implementation("cpu"), ops.implementation("cuda:1")] == [
            "triton",
            "torch",
            "triton",
        ]
        assert len(caplog.records) == 2
        ops.use("torch")
        assert ops.implementation("cuda") == "torch"
        assert "forced" in caplog.text
    ops.use("fast")
    with pytest.raises(UserError, match="NANOGRPO_OPS"):
        ops.implementation("cpu")


def test_mistakes_are_told():
    hidden, head, targets, v = _draw(torch.float32)
    with pytest.raises(ValueError, match="ref_logp"):
        ops.policy_loss(v["old"], None, v["advantage"], v["weight"], beta=0.1, **CLIP)
    with pytest.raises(ValueError, match="cast"):
        ops.head_logp(hidden, head.bfloat16(), targets)


def test_the_bench_is_right_without_a_gpu_and_says_that_it_needs_one(capsys):
    from bench import kernel_speed

    assert kernel_speed.main(["--check"]) == 0
    if not torch.cuda.is_available():
        assert kernel_speed.main([]) == 2
        assert "GPU" in capsys.readouterr().err

"""The policy kernels against the equations in float64: losses of vectors, of rows of logits in one
visit, and in the ops.

In Triton's interpreter where there is no GPU, on the GPU where there is. kernel_inputs.py has the
yardstick. Read next: test_kernels_contracts.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nanogrpo.kernels.reference import Objective

from nanogrpo.kernels import log_softmax, policy, reference, rows
from nanogrpo.model import head as ops
from tests.conftest import DEVICE
from tests.kernels.inputs import (
    FEW,
    KINDS,
    OBJECTIVES,
    ULP,
    UNIT,
    as_exact_as_eager,
    eager_log_softmax,
    placed,
    rows_of_logits,
    token_vectors,
)

# numpy remarks on the 0 · -inf that the kernels provide for
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# ---- vectors -------------------------------------------------------------------------------------


@given(
    objective=OBJECTIVES,
    count=st.integers(8, 200),
    parts=st.tuples(*[st.booleans()] * 3),
    seed=st.integers(0, 99),
)
@settings(FEW, max_examples=25)
def test_policy_loss_gradient_and_statistics(objective, count, parts, seed):
    logp, old, ref, advantage, weight, importance, _ = token_vectors(count, seed)
    old, ref, importance = (v if on else None for v, on in zip((old, ref, importance), parts))
    logp[0] = math.nan  # its weight is 0
    args = advantage, weight, ref, importance
    got = policy.policy_forward(logp, old, *args, objective, block=32)

    def wide(v):
        return None if v is None else v.double()

    exact = reference.policy_forward(wide(logp), wide(old), *map(wide, args), objective)
    eager = reference.policy_forward(logp, old, *args, objective)
    for a, b, c in zip(got, eager, exact):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == torch.int8:
            assert torch.equal(a, b)
        elif a.numel():
            # exp of a clamped log-ratio is 5e8; a float32 of that size has that error
            scale = 8 * ULP * c.abs().max()
            assert ((a.double() - c).abs() <= 2 * (b.double() - c).abs().max() + scale + ULP).all()


def test_kl_is_exact_from_nothing_to_the_clamp():
    x = torch.cat(
        [torch.linspace(-19.9, 19.9, 4001), 10.0 ** -torch.arange(1.0, 15.0), torch.zeros(1)]
    ).to(DEVICE)
    ones = torch.ones_like(x)
    _, grad, _, kl, _ = policy.policy_forward(
        0 * x, None, 0 * x, ones, x, None, Objective(0.2, 0.2, beta=1.0, bias_correction=0.0)
    )
    wide = x.double()
    series = wide**2 / 2 + wide**3 / 6  # float64 itself cancels below 1e-5
    torch.testing.assert_close(
        kl.double(),
        torch.where(wide.abs() < 1e-5, series, torch.expm1(wide) - wide),
        rtol=1e-5,
        atol=0,
    )
    torch.testing.assert_close(grad.double(), -torch.expm1(wide), rtol=1e-5, atol=0)


def test_policy_sums_over_many_blocks_and_over_none():
    count = 70_000  # more rows of the table than the second kernel takes at a time
    ones = torch.ones(count, device=DEVICE)
    loss, grad, _, _, stats = policy.policy_forward(
        -ones, None, ones, ones, None, None, Objective(0.2, 0.2)
    )
    assert loss == -count
    assert stats.tolist() == [count, count, 0, 0, 0, 0]
    assert (grad == -1).all()
    empty = ones[:0]
    loss, grad, clip, kl, stats = policy.policy_forward(
        empty, None, empty, empty, None, None, Objective(0.2, 0.2)
    )
    assert loss == 0
    assert not stats.any()
    assert grad.shape == clip.shape == kl.shape == (0,)


# ---- rows of logits, in one visit ----------------------------------------------------------------


def test_the_whole_vocabulary_of_qwen3():
    z, targets = rows_of_logits(2, 151_936, "normal", torch.bfloat16, 0)
    exact, eager = (
        eager_log_softmax(z.double(), targets, 0.7),
        eager_log_softmax(z.float(), targets, 0.7),
    )
    ones, mine, theirs = torch.ones(2, device=DEVICE), z.clone(), z.double()
    objective = Objective(0.2, 0.2)
    visit = rows.policy_rows_(mine, targets, 0.7, None, ones, ones, None, None, None, objective)
    reference.policy_rows_(
        theirs, targets, 0.7, None, ones.double(), ones.double(), None, None, None, objective
    )
    whole, parts = (
        log_softmax.log_softmax_forward(z, targets, 0.7, few_rows=few_rows) for few_rows in (0, 9)
    )
    for logp, entropy, _ in (visit, whole, parts):
        as_exact_as_eager(logp, eager[0], exact[0])
        as_exact_as_eager(entropy, eager[1], exact[1])
    apart = log_softmax.log_softmax_backward(z, targets, 0.7, whole[2], whole[1], -ones, None)
    for dlogits in (mine, apart):  # on policy, with advantage and weight 1, the loss is -logp
        torch.testing.assert_close(dlogits.double(), theirs, rtol=2**-7, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@given(
    objective=OBJECTIVES,
    vocab=st.integers(1, 120),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    parts=st.tuples(*[st.booleans()] * 4),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
@FEW
def test_one_visit_rows(objective, vocab, kind, dtype, parts, wide, seed):
    z, targets = rows_of_logits(8, vocab, kind, dtype, seed)
    _, old, ref, advantage, weight, importance, entropy_weight = token_vectors(8, seed)
    old = torch.where(old > 40, 0.0, old)  # ratios of e^20 belong to the test above
    old, ref, importance, entropy_weight = (
        v if on else None for v, on in zip((old, ref, importance, entropy_weight), parts)
    )
    # rows 0 and 5 have weight 0; row 7 has both weights
    z[5 if entropy_weight is None else 7] = math.nan
    if entropy_weight is not None:
        entropy_weight[7] = weight[7] = 0.0
    args = targets, 0.7, old, advantage, weight, ref, importance, entropy_weight

    def exactly(v):
        return v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v

    mine, theirs, exact = placed(z, wide), z.float(), z.double()
    got = rows.policy_rows_(mine, *args, objective, lanes=4)
    eager = reference.policy_rows_(theirs, *args, objective)
    truth = reference.policy_rows_(exact, *map(exactly, args), objective)
    for a, b, c in zip(got, eager, truth):
        scale = 8 * ULP * c.abs().max()
        assert ((a.double() - c).abs() <= 2 * (b.double() - c).abs().max() + scale + ULP).all()
    # The gradient is stored in the logits' type, of which float16 ends at 65,504 and begins at
    # 2^-24.
    g = (
        reference.policy_terms(
            *map(exactly, (truth[0], old, advantage, ref, importance)), objective
        )[1]
        * weight
    )
    coefficient = torch.where(weight != 0, g, 0.0).abs().max() + (
        0 if entropy_weight is None else entropy_weight.max()
    )
    slack = (
        (UNIT[dtype] + 8 * ULP) * exact.abs()
        + 2 * (theirs.double() - exact).abs().max()
        + ULP * 8 * coefficient
        + 2.0**-24
    )
    fits = exact.abs() < (6e4 if dtype == torch.float16 else math.inf)
    assert ((mine.double() - exact).abs() <= slack)[fits].all()


def test_the_target_of_a_near_certain_row_keeps_its_gradient():
    z = torch.zeros(1, 64)
    z[0, 3] = 11.0  # p = 0.999: 1 - p must be formed before it is rounded to bfloat16
    z = z.bfloat16().to(DEVICE)
    one = torch.ones(1, device=DEVICE)
    p = torch.softmax(z.double(), -1)[0, 3]
    rows.policy_rows_(
        z, torch.tensor([3]).to(DEVICE), 1.0, None, one, one, None, None, None, Objective(0.2, 0.2)
    )
    assert float(z[0, 3]) == pytest.approx(float(p - 1), rel=2**-7)


# ---- what is not finite --------------------------------------------------------------------------


# on policy, near, and beyond the clamp on either side
@pytest.mark.parametrize("old", [None, -1.0, -30.0, 30.0])
@pytest.mark.parametrize(
    "objective",
    [Objective(0.2, 0.28), Objective(0.2, 0.28, 1.5, 0.1), Objective(0.2, 0.28, 1.5, 0.1, 0.0)],
)
def test_what_is_not_finite_is_seen_exactly_where_the_reference_sees_it(old, objective):
    odd = torch.tensor([math.nan, math.inf, -math.inf, -1.0])
    logp, advantage, ref = (
        v.flatten().to(DEVICE)
        for v in torch.meshgrid(odd, torch.tensor([1.0, -1.0, 0.0]), odd, indexing="ij")
    )
    ones = torch.ones_like(logp)
    old = None if old is None else old * ones
    for ref_logp in (None, ref):
        args = logp, old, advantage, ones, ref_logp, None, objective
        for a, b in zip(policy.policy_forward(*args), reference.policy_forward(*args)):
            assert torch.equal(a.isfinite(), b.isfinite())
    seen = reference.policy_forward(logp, old, advantage, ones, ref, None, objective)[1].isfinite()
    if old is not None:
        assert not seen[logp.isnan()].any()

    z = torch.randn(4, 10).to(DEVICE)
    z[0, 2], z[1, 2], z[2, 4] = math.nan, math.inf, -math.inf  # the target of row 2
    targets, ones = torch.tensor([0, 9, 4, 3]).to(DEVICE), torch.ones(4, device=DEVICE)
    for sign in (1.0, -1.0, 0.0):
        mine, theirs = z.clone(), z.clone()
        args = (
            targets,
            1.0,
            None if old is None else old[:4],
            sign * ones,
            ones,
            -ones,
            None,
            None,
            objective,
        )
        got, expected = rows.policy_rows_(mine, *args), reference.policy_rows_(theirs, *args)
        for a, b in zip((*got, mine), (*expected, theirs)):
            assert torch.equal(a.isfinite(), b.isfinite())
        assert not mine[:2].isfinite().any()


# ---- the ops, with these kernels -----------------------------------------------------------------


@pytest.fixture
def triton_ops():
    ops.use("triton")
    yield
    ops.use(None)


def test_finite_differences_through_the_kernels(triton_ops):
    g = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(DEVICE)

    targets = torch.tensor([0, 6]).to(DEVICE)
    logits = normal(2, 7).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: ops.selective_log_softmax(z, targets, 0.5, entropy=True), (logits,)
    )
    hidden, head = normal(2, 2).requires_grad_(), normal(7, 2).requires_grad_()
    old, advantage, weight, ref, entropy_weight = -normal(5, 2).abs()

    def loss(hidden, head):
        more = dict(
            ref_logp=ref,
            beta=0.1,
            entropy_weight=entropy_weight,
            temperature=0.5,
            epsilon=0.2,
            epsilon_high=0.3,
        )
        return ops.head_policy_loss(hidden, head, targets, old, advantage, weight, **more).loss

    assert torch.autograd.gradcheck(loss, (hidden, head))


def test_ops_with_the_kernels_equal_ops_with_the_reference():
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(9, 5, generator=g).to(DEVICE).requires_grad_()
    head = torch.randn(33, 5, generator=g).to(DEVICE).requires_grad_()
    targets = torch.randint(33, (9,), generator=g).to(DEVICE)
    _, old, ref, advantage, weight, importance, _ = token_vectors(9, 4)
    old = torch.where(old > 10, 0.0, old)

    def step(hidden, head):
        more = dict(
            ref_logp=ref, beta=0.1, importance=importance, epsilon=0.2, epsilon_high=0.3, chunk=4
        )
        out = ops.head_policy_loss(hidden, head, targets, old, advantage, weight, **more)
        logp, entropy = ops.head_logp(hidden, head, targets, 0.7, entropy=True, chunk=4)
        other = ops.policy_loss(logp, old, advantage, weight, epsilon=0.2, epsilon_high=0.3)
        selected, _ = ops.selective_log_softmax(hidden @ head.T, targets)
        return out.loss + other.loss + entropy.sum() + selected.sum()

    results = {}
    for name in ("torch", "triton"):
        ops.use(name)
        for how in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            loss = how(hidden, head)
            results[name, how is step] = (loss.detach(), *torch.autograd.grad(loss, (hidden, head)))
    ops.use(None)
    for result in results.values():
        torch.testing.assert_close(result, results["torch", True], rtol=2e-5, atol=2e-5)

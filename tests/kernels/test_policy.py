"""The policy kernels against the equations in float64: losses of vectors, and rows of logits in one
visit.

They run in Triton's interpreter where there is no GPU, and on the GPU where there is one. inputs.py
has the bound. Read next: test_contracts.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nanogrpo.kernels.reference.policy import Clip, LossInputs, policy_terms
from nanogrpo.kernels.triton import fused_rows, log_softmax

from nanogrpo.kernels import reference
from tests.conftest import DEVICE
from tests.kernels.inputs import (
    CLIP,
    CLIPS,
    DTYPES,
    FEW,
    KINDS,
    ULP,
    UNIT,
    as_exact_as_eager,
    eager_log_softmax,
    placed,
    rows_of_logits,
    small_blocks,
    some_of,
    token_vectors,
)
from tests.kernels.terms import kernel_terms

# numpy warns about the 0 · -inf that the kernels provide for
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _close(got, eager, exact):
    """The bound; exp of a clamped log-ratio is 5e8, and a float32 of that size has that error."""
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype)
    slack = 2 * (eager.double() - exact).abs().max() + 8 * ULP * exact.abs().max() + ULP
    assert ((got.double() - exact).abs() <= slack).all()


# --- vectors ---


@given(
    clip=CLIPS,
    count=st.integers(8, 200),
    present=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 99),
)
@settings(FEW, max_examples=25)
def test_policy_loss_gradient_flags_and_kl(clip, count, present, seed):
    logp, inputs = token_vectors(count, seed)
    inputs = some_of(inputs, present)
    got = kernel_terms(logp, inputs, clip)
    exact = policy_terms(logp.double(), inputs.map(torch.Tensor.double), clip)
    eager = policy_terms(logp, inputs, clip)
    assert torch.equal(got[2], eager[2])
    for a, b, c in ((got[i], eager[i], exact[i]) for i in (0, 1, 3)):
        if c is None:
            assert a is None
        else:
            _close(a, b, c)


def test_kl_is_exact_from_zero_to_the_clamp():
    x = torch.linspace(-19.9, 19.9, 801)
    x = torch.cat([x, 10.0 ** -torch.arange(1.0, 15.0), torch.zeros(1)]).to(DEVICE)
    inputs = LossInputs(0 * x, torch.ones_like(x), ref_logp=x)
    _, grad, _, kl = kernel_terms(0 * x, inputs, Clip(0.2, 0.2, beta=1.0))
    wide = x.double()
    series = wide**2 / 2 + wide**3 / 6  # float64 itself cancels below 1e-5
    exact = torch.where(wide.abs() < 1e-5, series, torch.expm1(wide) - wide)
    torch.testing.assert_close(kl.double(), exact, rtol=1e-5, atol=0)
    # dKL = r·dk3 + dr·k3 = (1 - e^x) + (e^x - x - 1) = -x, where the large terms cancel
    assert ((grad.double() + wide).abs() <= 1e-5 * wide.abs() + 1e-6 * exact).all()


# --- rows of logits, in one visit ---


def test_the_full_vocabulary_of_qwen3():
    z, targets = rows_of_logits(2, 151_936, "normal", torch.bfloat16, 0)
    exact = eager_log_softmax(z.double(), targets, 0.7)
    eager = eager_log_softmax(z.float(), targets, 0.7)
    ones, mine, theirs = torch.ones(2, device=DEVICE), z.clone(), z.double()
    inputs = LossInputs(ones, ones)
    visit = fused_rows.policy_rows_(mine, targets, 0.7, inputs, CLIP)
    reference.policy_rows_(theirs, targets, 0.7, inputs.map(torch.Tensor.double), CLIP)
    full = log_softmax.log_softmax_forward(z, targets, 0.7)
    for logp, entropy in (visit[:2], full[:2]):
        as_exact_as_eager(logp, eager[0], exact[0])
        as_exact_as_eager(entropy, eager[1], exact[1])
    apart = log_softmax.log_softmax_backward_(z, targets, 0.7, full[2], full[1], -ones, 0 * ones)
    for dlogits in (mine, apart):  # on policy, with advantage and weight 1, the loss is -logp
        torch.testing.assert_close(dlogits.double(), theirs, rtol=2**-7, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@given(
    clip=CLIPS,
    vocab=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
    present=st.tuples(*[st.booleans()] * 4),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
@FEW
def test_rows_in_one_visit(clip, vocab, kind, dtype, present, wide, seed):
    z, targets = rows_of_logits(4, vocab, kind, dtype, seed)
    _, inputs = token_vectors(4, seed)
    # ratios of e^20 belong to the test of vectors
    inputs = inputs._replace(old_logp=torch.where(inputs.old_logp > 40, 0.0, inputs.old_logp))
    inputs = some_of(inputs, present)
    wider = inputs.map(torch.Tensor.double)
    mine, theirs, exact = placed(z, wide), z.float(), z.double()
    with small_blocks():
        got = fused_rows.policy_rows_(mine, targets, 0.7, inputs, clip)
    eager = reference.policy_rows_(theirs, targets, 0.7, inputs, clip)
    truth = reference.policy_rows_(exact, targets, 0.7, wider, clip)
    assert torch.equal(got[3], eager[3])
    for a, b, c in ((got[i], eager[i], truth[i]) for i in (0, 1, 2, 4)):
        if c is not None:
            _close(a, b, c)
    # The gradient is stored in the type of the logits; float16 ends at 65,504 and starts at 2^-24.
    coefficient = (wider.weight * policy_terms(truth[0], wider, clip)[1]).abs().max()
    if inputs.entropy_weight is not None:
        coefficient = coefficient + inputs.entropy_weight.max()
    usual = 2 * (theirs.double() - exact).abs().max()
    slack = (UNIT[dtype] + 8 * ULP) * exact.abs() + usual + ULP * 8 * coefficient + 2.0**-24
    fits = exact.abs() < (6e4 if dtype == torch.float16 else math.inf)
    assert ((mine.double() - exact).abs() <= slack)[fits].all()


# --- NaN and infinity ---


# on policy, near, and beyond the clamp on either side
@pytest.mark.parametrize("old", [None, -1.0, -30.0, 30.0])
@pytest.mark.parametrize("clip", [CLIP, Clip(0.2, 0.28, 1.5, 0.1)])
def test_nan_and_inf_appear_exactly_where_they_do_in_the_reference(old, clip):
    odd = torch.tensor([math.nan, math.inf, -math.inf, -1.0])
    logp, advantage, ref = (
        v.flatten().to(DEVICE)
        for v in torch.meshgrid(odd, torch.tensor([1.0, -1.0, 0.0]), odd, indexing="ij")
    )
    ones = torch.ones_like(logp)
    without_kl = LossInputs(advantage, ones, None if old is None else old * ones)
    for inputs in (without_kl, without_kl._replace(ref_logp=ref)):
        expected = policy_terms(logp, inputs, clip)
        for a, b in zip(kernel_terms(logp, inputs, clip), expected):
            assert a is b is None or torch.equal(a.isfinite(), b.isfinite())
    if old is not None:
        assert not expected[1].isfinite()[logp.isnan()].any()

    z = torch.randn(4, 10).to(DEVICE)
    z[0, 2], z[1, 2], z[2, 4] = math.nan, math.inf, -math.inf  # the target of row 2
    targets, ones = torch.tensor([0, 9, 4, 3]).to(DEVICE), torch.ones(4, device=DEVICE)
    for sign in (1.0, -1.0, 0.0):
        inputs = LossInputs(sign * ones, ones, None if old is None else old * ones, -ones)
        mine, theirs = z.clone(), z.clone()
        got = fused_rows.policy_rows_(mine, targets, 1.0, inputs, clip)
        expected = reference.policy_rows_(theirs, targets, 1.0, inputs, clip)
        for a, b in zip((*got[:3], mine), (*expected[:3], theirs)):
            assert torch.equal(a.isfinite(), b.isfinite())
        assert not mine[:2].isfinite().any()

"""The log-softmax kernels, and the equations of kernels/reference/, against autograd in float64.

They run in the interpreter where there is no GPU, and on the GPU where there is one. inputs.py has
the bound. Read next: test_policy.py.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nanogrpo.kernels.triton import log_softmax

from nanogrpo.kernels import reference
from tests.conftest import DEVICE
from tests.kernels.inputs import (
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
)

# numpy warns about the 0 · -inf that the kernels provide for
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kind", KINDS)
@given(
    vocab=st.integers(1, 160),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
@FEW
def test_log_softmax_is_as_exact_as_eager(vocab, kind, dtype, temperature, wide, seed):
    z, targets = rows_of_logits(3, vocab, kind, dtype, seed)
    z = placed(z, wide)
    exact, eager = (
        eager_log_softmax(z.double(), targets, temperature),
        eager_log_softmax(z.float(), targets, temperature),
    )
    for module in (log_softmax, reference):
        with small_blocks():
            logp, entropy, _ = module.log_softmax_forward(z, targets, temperature)
        as_exact_as_eager(logp, eager[0], exact[0])
        as_exact_as_eager(entropy, eager[1], exact[1])
        assert (logp <= ULP).all()
        assert (entropy >= -ULP * 8).all()
        assert (entropy <= math.log(vocab) + ULP * 8).all()


@pytest.mark.parametrize("kind", KINDS)
@given(
    vocab=st.integers(1, 120),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([0.3, 1.0]),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
@FEW
def test_gradient_of_log_softmax(vocab, kind, dtype, temperature, wide, seed):
    z, targets = rows_of_logits(3, vocab, kind, dtype, seed)
    dlogp, dentropy = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    dentropy[0] = dlogp[1] = dentropy[1] = 0.0  # row 1 is not read

    def autograd(dtype):
        leaf = z.to(dtype).requires_grad_()
        out = eager_log_softmax(leaf, targets, temperature)
        return torch.autograd.grad(out, leaf, [dlogp.to(dtype), dentropy.to(dtype)])[0]

    exact, eager = autograd(torch.float64), autograd(torch.float32)
    scale = float(dlogp.abs().max() + dentropy.abs().max()) / temperature
    allowed = (
        2 * (eager.double() - exact).abs().max()
        + ULP * (scale + exact.abs())
        + UNIT[dtype] * exact.abs()
        + 2.0**-24
    )
    for module in (log_softmax, reference):
        got = placed(z, wide)
        _, entropy, norm = module.log_softmax_forward(got, targets, temperature)
        upstream = norm, entropy, dlogp, dentropy
        assert module.log_softmax_backward_(got, targets, temperature, *upstream) is got
        assert not got[1].any()
        assert ((got.double() - exact).abs() <= allowed).all()
        if dtype == torch.float32:
            # adding a number to a row changes nothing
            assert got.sum(-1).abs().max() <= 1e-5 / temperature


@pytest.mark.parametrize(
    ("largest", "temperature"), [(1.48e9, 1.0), (-1.48e9, 1.0), (148.0, 1e-7), (-148.0, 1e-7)]
)
def test_the_edge_of_the_domain(largest, temperature):
    """The largest logit times log2(e) / T is just below 2^31. Its rounding shifts every sum, and
    nothing overflows yet.
    """
    z, targets = torch.full((2, 100), largest, device=DEVICE), torch.tensor([0, 99], device=DEVICE)
    z[:, 1::2] = -math.inf  # half the row, not its targets
    z[1, 99] = largest
    count = torch.tensor([50.0, 51.0], device=DEVICE)
    with small_blocks():
        logp, entropy, norm = log_softmax.log_softmax_forward(z, targets, temperature)
    torch.testing.assert_close(logp, -count.log(), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, count.log(), rtol=0, atol=1e-4)
    ones = torch.ones(2, device=DEVICE)
    dz = (
        log_softmax.log_softmax_backward_(z, targets, temperature, norm, entropy, ones, 0 * ones)
        * temperature
    )
    torch.testing.assert_close(dz[0, 0], 1 - 1 / count[0], rtol=1e-5, atol=0)
    assert not dz[:, 1].any()


def test_no_rows_are_no_error():
    z, targets, none = torch.zeros(0, 53), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    z, targets, none = (x.to(DEVICE) for x in (z, targets, none))
    for module in (log_softmax, reference):
        logp, entropy, norm = module.log_softmax_forward(z, targets, 1.0)
        dz = module.log_softmax_backward_(z, targets, 1.0, norm, entropy, none, none)
        assert (logp.shape, dz.shape) == ((0,), (0, 53))

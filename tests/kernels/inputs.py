"""Inputs for the tests of the Triton kernels, and the bound on their errors.

A kernel may be at most twice as far from float64 as eager PyTorch on the same numbers, plus a few
units in the last place of float32, because eager PyTorch is sometimes exact by luck. Importing this
module also gives the interpreter the GPU's multiply-add. Read next: test_log_softmax.py.
"""

import contextlib
import math

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from nanogrpo.kernels.triton import fused_rows, log_softmax

from tests.conftest import CUDA, DEVICE
from tests.kernels.aot import exact_fma

if not CUDA:
    exact_fma()

# The interpreter is slow: few examples, the same ones each time, and no time spent on shrinking.
FEW = settings(max_examples=6, phases=[Phase.explicit, Phase.generate], derandomize=True)
ULP = 2.0**-22  # two units in the last place of 1.0 in float32
# The rounding error of storing a number in a type. The interpreter truncates to bfloat16 where a
# GPU rounds.
UNIT = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8 if CUDA else 2.0**-7}
DTYPES = list(UNIT)
CLIP = Clip(0.2, 0.28)


def eager_log_softmax(logits, targets, temperature):
    """Return log-prob and entropy as one would write them in PyTorch, in the type given."""
    logp_all = torch.log_softmax(logits / temperature, -1)
    finite = torch.where(logp_all > -math.inf, logp_all, 0.0)
    return logp_all.gather(1, targets[:, None]).squeeze(1), -(logp_all.exp() * finite).sum(-1)


def as_exact_as_eager(got, eager, exact, scale=1.0):
    """Assert the bound. scale: the size of the numbers whose sum these are."""
    error, usual = (got.double() - exact).abs(), (eager.double() - exact).abs().max()
    assert (error <= 2 * usual + ULP * (scale + exact.abs())).all(), (
        f"error {error.max():.3g}, eager's {usual:.3g}"
    )


def rows_of_logits(count, vocab, kind, dtype, seed):
    """Return logits [N, V] of a kind that breaks careless softmaxes, and targets [N]."""
    g = torch.Generator().manual_seed(seed)
    z = 4 * torch.randn(count, vocab, generator=g)
    targets = torch.randint(vocab, (count,), generator=g)
    targets[0], targets[-1] = 0, vocab - 1  # first and last column
    if kind == "dominant":
        z[torch.arange(count), targets] = 60.0
    elif kind == "equal":
        z[:] = 2.5
    elif kind == "far below":
        z -= 10_000.0
    elif kind == "-inf":
        z[torch.rand(count, vocab, generator=g) < 0.4] = -math.inf
        z[torch.arange(count), targets] = 1.0
    return z.to(dtype).to(DEVICE), targets.to(DEVICE)


def placed(z, wide):
    """Return a copy of rows of logits; each row starts at a multiple of 16 bytes, or (wide False)
    does not.
    """
    count, vocab = z.shape
    stride = -(-vocab // 16) * 16 + (0 if wide else 1)
    copy = z.new_empty(count, stride)[:, :vocab]
    return copy.copy_(z)


@contextlib.contextmanager
def small_blocks(lanes=4):
    """Make blocks so small that a row of 100 logits has many of them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (log_softmax, fused_rows):
            patch.setattr(module, "LANES", lanes)
        patch.setattr(log_softmax, "BLOCK", 32)
        yield


KINDS = ["normal", "dominant", "equal", "far below", "-inf"]


def token_vectors(count, seed):
    """Return log-probs [N] and LossInputs [N] with every vector; some are 0, some huge."""
    g = torch.Generator().manual_seed(seed)
    logp, d_old, d_ref, advantage, weight, importance, entropy_weight = torch.randn(
        7, count, generator=g, dtype=torch.float64
    )
    weight[::5], advantage[1::7] = 0.0, 0.0
    if seed % 2:
        d_old[2], d_ref[3] = 150.0, -150.0  # beyond the clamp
    logp = -logp.abs()
    old, ref = logp + 0.4 * d_old, logp + 0.3 * d_ref
    bonus = 0.1 * entropy_weight.abs()
    inputs = LossInputs(advantage, weight.abs(), old, ref, importance.abs(), bonus)
    return logp.float().to(DEVICE), inputs.map(lambda v: v.float().to(DEVICE))


def some_of(inputs, present):
    """Return the inputs without some of the optional vectors; present: four booleans."""
    return LossInputs(*inputs[:2], *(v if p else None for v, p in zip(inputs[2:], present)))


CLIPS = st.builds(
    Clip,
    epsilon=st.just(0.2),
    epsilon_high=st.sampled_from([0.2, 0.28]),
    delta=st.sampled_from([math.inf, 1.5, 1.1]),
    beta=st.sampled_from([0.0, 0.04]),
)

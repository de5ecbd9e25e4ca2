"""The kernels of a decode step: attention over pages against float64, and sampling against the
reference, token by token.

They run in Triton's interpreter where there is no GPU. Read next: tests/engine/test_cache.py.
"""

import pytest
import torch
from nanogrpo.kernels.triton import paged, sample

from nanogrpo.kernels import reference
from tests.conftest import CUDA, DEVICE
from tests.kernels.inputs import ULP, UNIT, as_exact_as_eager
from tests.kernels.masks import PAGE, pages_of

# first token; last place of a page; first place of a page; several pages
POSITIONS = (0, PAGE - 1, PAGE, 3 * PAGE + 5)


def inputs(H, K, E, dtype):
    """Return queries, keys, values, norms and angles, positions, a table, and pages. The pages have
    NaN wherever no token is.
    """
    g, b = torch.Generator().manual_seed(0), len(POSITIONS)
    table, pages = pages_of([torch.randn(2, p, K, E, generator=g) for p in POSITIONS], g)
    # as in a product of q, k and v: the heads of a row are adjacent, rows are further apart
    joint = torch.randn(b, (H + 2 * K) * E, generator=g).to(DEVICE, dtype)
    q, k, v = (x.unflatten(1, (-1, E)) for x in joint.split([H * E, K * E, K * E], dim=1))
    norms = list((1 + torch.randn(2, E, generator=g)).to(DEVICE, dtype)) if K > 1 else [None, None]
    angles = torch.randn(b, 1, E // 2, generator=g).repeat(1, 1, 2).to(DEVICE)
    rest = torch.tensor(POSITIONS), table, *pages.to(dtype)
    rotation = *norms, angles.cos(), angles.sin(), 1e-6
    return q, k, v, rotation, *(x.to(DEVICE) for x in rest)


def cast(value, dtype):
    if isinstance(value, tuple):
        return tuple(cast(x, dtype) for x in value)
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value


@pytest.mark.parametrize("window", [0, 1, PAGE + 6])
@pytest.mark.parametrize("programs", [1, 64])  # one part per row; several, some without pages
@pytest.mark.parametrize(("H", "K", "E"), [(4, 2, 16), (3, 1, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if CUDA else torch.float16])
def test_paged_attention(dtype, H, K, E, programs, window, monkeypatch):
    monkeypatch.setattr(paged, "PROGRAMS", programs)
    got, eager, exact = inputs(H, K, E, dtype), inputs(H, K, E, dtype), inputs(H, K, E, dtype)
    exact = cast(exact, torch.float64)
    y = paged.paged_attention(*got, window)
    expected, truth = (reference.paged_attention(*x, window) for x in (eager, exact))
    assert (y.shape, y.dtype) == (expected.shape, dtype)
    as_exact_as_eager(y, expected, truth, scale=1 + UNIT[dtype] / ULP)
    for mine, theirs in zip(got[-2:], exact[-2:]):  # the newest token is in its page
        torch.testing.assert_close(
            mine.double(), theirs, rtol=4 * UNIT[dtype], atol=1e-6, equal_nan=True
        )


def logits_of(b, V, dtype):
    z = 3 * torch.randn(b, V, generator=torch.Generator().manual_seed(1))
    z[0] = 7.0
    z[1] -= 10_000.0
    z[2, 5] = 40.0  # one token has all the probability
    z[3, :-1] = -torch.inf
    z[4, : V // 2] = -torch.inf  # chunks without any probability
    z[5, V // 2 :] = -torch.inf
    return z.to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 1.0)])
def test_sample_tokens(dtype, temperature, monkeypatch):
    """The kernels sample the reference's tokens. Rounding could change one in a million."""
    monkeypatch.setattr(sample, "BLOCK", 32)
    b, V = 12, 150
    logits = logits_of(b, V, dtype)
    key = torch.arange(b, device=DEVICE) * (1 << 58) + 12345
    counter = torch.arange(b, device=DEVICE) % 5
    # this key gives the random number 0, which must not select a chunk without probability
    key[4], counter[4] = 0x61C8864680B583EB, 0
    token, logp = sample.sample_tokens(logits, key, counter, temperature)
    expected, logp_expected = reference.sample_tokens(logits, key, counter, temperature)
    assert token.tolist() == expected.tolist()
    assert token[3] == V - 1
    assert token[4] == V // 2
    exact = (logits.double() / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0]
    as_exact_as_eager(logp, logp_expected, exact)


def test_logits_that_are_not_numbers_give_a_token_and_no_log_prob(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 32)
    logits = torch.zeros(3, 70, device=DEVICE)
    logits[0, 40], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    token, logp = sample.sample_tokens(logits, zeros, zeros, 1.0)
    assert ((token >= 0) & (token < 70)).all()
    assert not logp.isfinite().any()

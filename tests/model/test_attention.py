"""Attention over packed sequences: the reference equals the equation, and the fastest backend that
can run is chosen.

The key/value cache is tested with the engine that owns it. Read next: test_decoder.py.
"""

import itertools
import sys
import types

import pytest
import torch

from nanogrpo.model import gpu_attention
from nanogrpo.model.attention import Bounds, StripAttention, sdpa
from nanogrpo.model.gpu_attention import flash, varlen
from tests.conftest import (
    COMPLETIONS,
    PROMPT,
    positions_of,
    random_tokens,
    shared_prompt,
    tiny_model,
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def by_hand(q, k, v, lengths, causal=True):
    """Compute softmax(q kᵀ / √E) v over each query's past or, unless causal, its sequence, in
    float64. Query head h reads key head h // (H / K).
    """
    q, k, v = q.double(), k.double(), v.double()
    out, start = torch.zeros_like(q), 0
    for n in lengths:
        for t in range(start, start + n):
            end = t + 1 if causal else start + n
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                weights = (k[start:end, g] @ q[t, h] / q.shape[2] ** 0.5).softmax(0)
                out[t, h] = weights @ v[start:end, g]
        start += n
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (6, 1)])
def test_the_reference_attention_is_the_equation(H, K, causal):
    lengths = [5, 1, 9]
    torch.manual_seed(0)
    q, k, v = (3 * torch.randn(15, heads, 8) for heads in (H, K, K))
    attend = StripAttention(*positions_of(lengths)[1].bounds[:2], causal=causal)
    torch.testing.assert_close(
        attend(0, q, k, v).double(),
        by_hand(q, k, v, lengths, causal),
        rtol=0,
        atol=1e-5,
    )


def test_completions_that_share_a_prompt_equal_those_that_repeat_it():
    """Compares outputs and gradients. The keys of the prompt receive the sum of the completions'
    gradients.
    """
    model = tiny_model()
    prompt, *completions = random_tokens(PROMPT + sum(COMPLETIONS)).split([PROMPT, *COMPLETIONS])
    positions = torch.cat([torch.arange(PROMPT), *(PROMPT + torch.arange(n) for n in COMPLETIONS)])

    def run(tokens, positions, attend, rows):
        model.zero_grad()
        out = model(tokens, positions, attend, torch.cat(rows))
        out.square().sum().backward()
        return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}

    ends = torch.tensor([0, PROMPT, *COMPLETIONS]).cumsum(0).tolist()
    rows = [torch.arange(a, b) for a, b in itertools.pairwise(ends[1:])]
    shared, gradients = run(torch.cat((prompt, *completions)), positions, shared_prompt(), rows)

    lengths = [PROMPT + n for n in COMPLETIONS]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = [torch.arange(end - n, end) for end, n in zip(ends, COMPLETIONS)]
    tokens = torch.cat([torch.cat((prompt, mine)) for mine in completions])
    repeated, expected = run(tokens, *positions_of(lengths), rows)

    torch.testing.assert_close(shared, repeated, rtol=0, atol=1e-5)
    for name in expected:
        assert (gradients[name] - expected[name]).abs().max() <= 1e-5 * expected[
            name
        ].abs().max(), name


# --- the choice of a backend ---


@pytest.fixture
def installed(monkeypatch):
    """Make flash-attn 4 look installed, and return the options of its calls."""
    calls: list[dict] = []

    def function(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        calls.append(options)
        bounds = cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k, options["causal"]
        return sdpa(q, k, v, Bounds(*bounds)), None

    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    gpu_attention.backend.cache_clear()
    yield calls
    gpu_attention.backend.cache_clear()


@pytest.mark.parametrize(("generation", "expected"), [(8, varlen), (9, flash), (12, varlen)])
def test_the_fastest_backend_that_can_run_is_chosen(generation, expected, installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (generation, 0))
    assert gpu_attention.backend("cuda", torch.bfloat16) is expected
    assert gpu_attention.backend("cuda", torch.bfloat16, 256) is varlen
    # the fast ones compute in half precision only, and for some sizes of heads
    assert gpu_attention.backend("cpu", torch.float32) is sdpa
    assert gpu_attention.backend("cuda", torch.float32) is sdpa
    assert gpu_attention.backend("cuda", torch.bfloat16, 12) is sdpa
    # flash-attn 2 has no such module
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    gpu_attention.backend.cache_clear()
    assert gpu_attention.backend("cuda", torch.bfloat16) is varlen


def test_our_call_fits_flash_attn(installed):
    """It is causal unless we say no, and by torch's rule deterministic."""
    attend = shared_prompt()
    q, k, v = (torch.randn(n, h, 8, generator=seeded(n)) for n, h in ((17, 4), (32, 2), (32, 2)))
    try:
        for settings in ({"mode": False}, {"mode": True, "warn_only": True}, {"mode": True}):
            torch.use_deterministic_algorithms(**settings)
            assert torch.equal(flash(q, k, v, attend.bounds), sdpa(q, k, v, attend.bounds))
    finally:
        torch.use_deterministic_algorithms(False)
    flash(q, k, v, attend.bounds._replace(causal=False))
    assert [call["causal"] for call in installed] == [True, True, True, False]
    assert [call["deterministic"] for call in installed] == [False, False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "shared prompt", "both directions"])
@pytest.mark.parametrize("fast", [varlen, flash])
def test_fast_backends_agree_with_the_equation(fast, kind):
    """With grouped queries. flash-attn 4 has no backward before Hopper."""
    if fast is flash:
        pytest.importorskip("flash_attn.cute")
        if torch.cuda.get_device_capability()[0] not in (9, 10, 11):
            pytest.skip("flash-attn 4 needs Hopper or Blackwell")
    torch.manual_seed(0)
    lengths = [130, 1, 77, 300]
    attend = shared_prompt() if kind == "shared prompt" else positions_of(lengths)[1]
    bounds = [x.cuda() if isinstance(x, torch.Tensor) else x for x in attend.bounds]
    bounds = Bounds(*bounds[:-1], kind != "both directions")
    queries, keys = int(bounds.cu_q[-1]), int(bounds.cu_k[-1])
    q, k, v, g = (
        torch.randn(n, heads, 128, device="cuda")
        for n, heads in ((queries, 8), (keys, 2), (keys, 2), (queries, 8))
    )

    def run(backend, dtype):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = backend(*inputs, bounds)
        return [out, *torch.autograd.grad(out, inputs, g.to(dtype))]

    exact, plain = (run(sdpa, dtype) for dtype in (torch.float64, torch.bfloat16))
    for want, eager, got in zip(exact, plain, run(fast, torch.bfloat16)):
        assert (got - want).abs().max() <= 2 * (eager - want).abs().max()

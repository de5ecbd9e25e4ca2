"""Attention over packed sequences: the reference equals the equation, two calls equal one, and a
backend is chosen on request.

The key/value cache is tested with the engine that owns it. Read next: test_decoder.py.
"""

import sys
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nanogrpo import Config
from nanogrpo.extras.sharding import shard
from nanogrpo.extras.two_calls import calls_of, flash2, flash4
from nanogrpo.model import gpu_attention
from nanogrpo.model.gpu_attention import sdpa, triton, varlen
from tests.conftest import SOLO, refused
from tests.kernels.masks import draw, exact, moved, part, products, strip_of
from tests.kernels.traffic import Traffic

# --- the equation ---

ALONE = [[5], [1], [9]]
# plain sequences before, between and after the groups; an empty completion
GROUPS = [[[5, 4, 1, 7]], [[3], [4, 2, 0, 3], [1], [2], [6, 1, 1], [2]], [[3], [1], [4]]]


def seen(cu_q, cu_k, max_q, max_k, dropout, causal, *_):
    """Return which keys each query of a call sees. All calls have as many keys as queries.

    FlashAttention computes at most max_q queries of a sequence.
    """
    assert 1 < cu_q.diff().max() <= max_q
    assert cu_k.diff().max() <= max_k
    assert not dropout
    sequences = torch.arange(len(cu_q) - 1)
    queries, keys = (sequences.repeat_interleave(cu.diff()) for cu in (cu_q, cu_k))
    mask = queries[:, None] == keys
    return mask.tril() if causal else mask


def forward(q, k, v, *at, **_options):
    """Replace torch's FlashAttention. For a query without keys, its log-sum-exp is inf."""
    out, lse = part(q, k, v, seen(*at))
    return out, lse.masked_fill(lse.isinf(), torch.inf), *torch.zeros(3, 1)


def backward(dy, q, k, v, out, lse, *at, **_options):
    """Compute FlashAttention's backward pass, with the probabilities of the given lse."""
    x, dp = products(q, k) / q.shape[2] ** 0.5, products(dy, v)  # [H, Tq, Tk]
    p = (x - lse[..., None]).exp() * seen(*at)
    ds = p * (dp - (dy * out).sum(2).T[..., None]) / q.shape[2] ** 0.5
    groups = q.shape[1] // k.shape[1]
    dq = torch.einsum("hqk,khe->qhe", ds, k.repeat_interleave(groups, 1))
    dk, dv = (
        torch.einsum("hqk,qhe->khe", weights, x).unflatten(1, (-1, groups)).sum(2)
        for weights, x in ((ds, q), (p, dy))
    )
    return dq, dk, dv


@pytest.fixture
def installed(monkeypatch):
    """Replace flash-attn 4 and torch's FlashAttention. Return whether each backward pass of
    flash-attn 4 was deterministic.
    """
    found: list[bool] = []

    def bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, **_options):
        return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal

    def forward4(q, k, v, **options):
        return part(q, k, v, seen(*bounds(**options)))

    def backward4(q, k, v, out, dout, lse, deterministic, **options):
        found.append(deterministic)
        return backward(dout, q, k, v, out, lse, *bounds(**options))

    module = types.SimpleNamespace(flash_attn_varlen_func=forward4, _flash_attn_bwd=backward4)
    for name in ("flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, module)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield found


@pytest.mark.parametrize(
    ("fast", "window"), [(flash2, 0), (flash4, 0), (sdpa, 0), (sdpa, 1), (sdpa, 4)]
)
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("groups", [*GROUPS, ALONE])
def test_attention_in_one_call_and_in_two_is_the_equation(groups, H, K, fast, window, installed):
    """In float64, gradients included."""
    strip = strip_of(groups)
    strip.causal = groups != ALONE
    more = (window,) if window else ()
    q, k, v, dy = (x.double() for x in draw(strip, H, K, 8))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = fast(*inputs, strip, *more)
    expected = exact(q, k, v, dy, strip, window)
    for got, want in zip([out, *torch.autograd.grad(out, inputs, dy)], expected):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for at in calls_of(strip):
        assert at.cu_q[-1] == at.cu_k[-1] == len(q)  # every row gets an output and gradients


@pytest.mark.parametrize(
    ("fast", "name", "count"),
    [
        (flash2, "_flash_attention_forward", 2),
        (flash4, "flash_attn_4", 2),
        (triton, "flash_attn_triton", 1),
    ],
)
@pytest.mark.parametrize(("kind", "times"), [("none", 1), ("full", 2), ("selective", 1)])
@pytest.mark.usefixtures("installed")
def test_selective_recomputation_keeps_the_results_of_all_calls(kind, times, fast, name, count):
    model = types.SimpleNamespace()
    shard(model, Config(model="m", gradient_checkpointing=kind), SOLO)
    strip = strip_of(GROUPS[0])
    inputs = [x.requires_grad_() for x in draw(strip, 4, 2, 16)[:3]]
    with Traffic() as traffic:
        if kind == "none":
            out = fast(*inputs, strip)
        else:
            out = checkpoint(
                fast, *inputs, strip, use_reentrant=False, context_fn=model.sharding.contexts
            )
        out.sum().backward()
    assert traffic.elementwise.names.count(name) == times * count


# --- the choice of a backend ---


def test_a_backend_is_chosen_on_request(monkeypatch):
    chosen = gpu_attention.backend.__wrapped__  # without the cache

    assert chosen("cuda", torch.bfloat16) is varlen
    assert chosen("cpu", torch.float32, 16) is sdpa
    monkeypatch.setenv("NANOGRPO_ATTENTION", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen("cpu", torch.float32, 16) is triton
    for name, fast in (("two-call", flash2), ("flash4", flash4)):
        monkeypatch.setenv("NANOGRPO_ATTENTION", name)
        assert chosen("cuda", torch.bfloat16) is fast
        assert chosen("cuda", torch.bfloat16, 128, 9).func is varlen  # the others have no windows
        # they compute in half precision only, and for some sizes of heads
        assert chosen("cpu", torch.float32) is sdpa
        assert chosen("cuda", torch.float32) is sdpa
        assert chosen("cuda", torch.bfloat16, 12) is sdpa
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert chosen("cuda", torch.float16) is sdpa  # on a T4
    monkeypatch.setenv("NANOGRPO_ATTENTION", "flash")
    with refused(r"^NANOGRPO_ATTENTION is 'flash': use one of torch, "):
        chosen("cuda", torch.bfloat16)


def test_our_call_fits_flash_attn(installed):
    """By torch's rule, it is deterministic."""
    strip = strip_of([[3]])
    try:
        for mode in ("default", "warn", "error"):
            torch.set_deterministic_debug_mode(mode)
            flash4(*(x.requires_grad_() for x in draw(strip, 4, 2, 8)[:3]), strip).sum().backward()
    finally:
        torch.set_deterministic_debug_mode("default")
    assert installed == [False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("fast", "window"), [(varlen, 0), (varlen, 40), (flash2, 0), (flash4, 0), (triton, 0)]
)
def test_fast_backends_agree_with_the_equation(fast, window, shared, causal):
    """With grouped queries. flash-attn 4 has no backward before Hopper."""
    if fast is flash4:
        pytest.importorskip("flash_attn.cute")
        if torch.cuda.get_device_capability()[0] not in (9, 10, 11):
            pytest.skip("flash-attn 4 needs Hopper or Blackwell")
    strip = strip_of([[130, 1, 77], [300]] if causal else [[130], [77]], shared)
    strip.causal = causal
    more = (window,) if window else ()
    truth = exact(*draw(strip, 8, 2, 128), strip, *more)
    moved(strip, "cuda")
    *inputs, dy = (x.cuda().bfloat16().requires_grad_() for x in draw(strip, 8, 2, 128))
    found = []
    for backend in (fast, sdpa):
        out = backend(*inputs, strip, *more)
        found.append([out, *torch.autograd.grad(out, inputs, dy)])
    for want, got, eager in zip(truth, *found):
        error, usual = ((x.cpu() - want).abs().max() for x in (got, eager))
        assert error <= 2 * usual

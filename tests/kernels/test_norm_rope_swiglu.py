"""The decoder's memory-bound kernels (norm, rope, swiglu, gather) and the textbook softmax against
float64: as exact as eager PyTorch.

They run in Triton's interpreter where there is no GPU. Read next: test_log_softmax.py.
"""

import pytest
import torch
import torch.nn.functional as F
from nanogrpo.kernels.triton import gather, norm, rope

from nanogrpo.kernels import reference, triton
from tests.conftest import CUDA, DEVICE

# The interpreter truncates to bfloat16 instead of rounding: twice the error of an element.
ROUND = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8 if CUDA else 2.0**-7}


def _draw(*shape, seed, dtype):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .to(DEVICE)
        .requires_grad_()
    )


def _compare(fused, eager, inputs, dtype):
    """Assert that results and gradients of `fused` are at most twice as far from float64 as eager's
    in the same type, plus one rounding.
    """

    def run(function, inputs):
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        g = torch.Generator().manual_seed(9)
        upstream = [torch.randn(o.shape, generator=g).to(dtype).to(o) for o in out]
        return [*(o.detach() for o in out), *torch.autograd.grad(out, inputs, upstream)]

    wide = [v.detach().double().requires_grad_() for v in inputs]
    for a, b, c in zip(run(fused, inputs), run(eager, inputs), run(eager, wide)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        allowed = 2 * (b.double() - c).abs().max() + ROUND[dtype] * c.abs().max()
        assert (a.double() - c).abs().max() <= allowed


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize(("count", "width"), [(5, 48), (13, 7)])
def test_add_rms_norm(dtype, count, width, monkeypatch):
    monkeypatch.setattr(norm, "PROGRAMS", 8)  # fewer than 13 rows: a program visits several
    x, residual, weight = (
        _draw(*s, seed=i, dtype=dtype)
        for i, s in enumerate([(count, width), (count, width), (width,)])
    )

    def eager(x, residual, weight):
        return F.rms_norm(x + residual, (width,), weight, 1e-6), x + residual

    _compare(lambda *v: norm.add_rms_norm(*v, 1e-6), eager, [x, residual, weight], dtype)
    _compare(
        lambda *v: norm.rms_norm(*v, 1e-6),
        lambda x, weight: F.rms_norm(x, (width,), weight, 1e-6),
        [x, weight],
        dtype,
    )


def _angles(count, size):
    """Return cosines and sines [T, 1, E] with two equal halves. The factor is YaRN's."""
    angles = torch.randn(count, 1, size // 2, generator=torch.Generator().manual_seed(2))
    angles = angles.repeat(1, 1, 2).to(DEVICE)
    return 1.1 * angles.cos(), 1.1 * angles.sin()


def _rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = (t[..., : x.shape[-1] // 2] for t in (cos, sin))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@DTYPES
@pytest.mark.parametrize(("H", "K", "E"), [(4, 2, 16), (3, 1, 12)])
def test_norm_rope(dtype, H, K, E, monkeypatch):
    monkeypatch.setattr(rope, "PROGRAMS", 4)  # fewer than 7 tokens: a program visits several
    q, k = _draw(7, H, E, seed=0, dtype=dtype), _draw(7, K, E, seed=1, dtype=dtype)
    weights = [_draw(E, seed=seed, dtype=dtype) for seed in (2, 3)]
    cos, sin = _angles(7, E)

    def eager(q, k, *weights):
        if weights:
            q, k = (F.rms_norm(x, (E,), w, 1e-6) for x, w in zip((q, k), weights))
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    def fused(q, k, q_weight=None, k_weight=None):
        return rope.norm_rope(q, k, q_weight, k_weight, cos, sin, 1e-6)

    _compare(fused, eager, [q, k, *weights], dtype)
    _compare(fused, eager, [q, k], dtype)  # Qwen2, Llama and Mistral have no such norms


@DTYPES
def test_swiglu(dtype):
    gate, up = _draw(5, 1001, seed=0, dtype=dtype), _draw(5, 1001, seed=1, dtype=dtype)
    _compare(triton.swiglu, lambda g, u: F.silu(g) * u, [gate, up], dtype)


def test_slices_of_a_larger_product_are_read_in_place():
    """Queries and keys, or gate and up, may be computed in one product."""
    qkv, cos_sin = _draw(5, 4 * 8, seed=0, dtype=torch.float32), _angles(5, 8)
    q, k, _ = (x.unflatten(1, (-1, 8)) for x in qkv.split([16, 8, 8], 1))
    rotated = rope.norm_rope(q, k, None, None, *cos_sin, 1e-6)
    copied = rope.norm_rope(q.contiguous(), k.contiguous(), None, None, *cos_sin, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(rotated, copied))
    gate, up = qkv.chunk(2, 1)
    assert torch.equal(triton.swiglu(gate, up), triton.swiglu(gate.contiguous(), up.contiguous()))
    upstream = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (got,) = torch.autograd.grad(triton.swiglu(gate, up), qkv, upstream)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, qkv, upstream)
    torch.testing.assert_close(got, expected)


# --- gathered rows ---

INDEX = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1, 4, 4, 5, 0, 1])  # rows 0 and 1 are shared; no row 6


@pytest.mark.parametrize("functions", [gather, reference])
def test_gathered_rows_sum_their_gradients_in_float32_and_in_order(functions, monkeypatch):
    monkeypatch.setattr(gather, "BLOCK", 16)
    index = INDEX.to(DEVICE)
    x = _draw(7, 2, 12, seed=0, dtype=torch.float32)  # [T, K, E]
    upstream = torch.randn(13, 2, 12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = torch.zeros(7, 24)
    for i, dy in zip(INDEX.tolist(), upstream.cpu().flatten(1)):
        expected[i] += dy
    for order in (None, functions.row_order(index, 7)):
        y = functions.gather_rows(x, index, order)
        assert torch.equal(y, x[index])
        (dx,) = torch.autograd.grad(y, x, upstream)
        assert torch.equal(dx.cpu().flatten(1), expected)


@pytest.mark.parametrize("functions", [gather, reference])
@pytest.mark.parametrize("G", [8, 64])
def test_the_gradient_of_a_shared_row_is_rounded_once(functions, G):
    x = _draw(3, 32, seed=0, dtype=torch.bfloat16)
    index = torch.arange(3).repeat(G).to(DEVICE)
    upstream = _draw(3 * G, 32, seed=1, dtype=torch.bfloat16).detach()
    (dx,) = torch.autograd.grad(functions.gather_rows(x, index), x, upstream)
    exact = upstream.double().view(G, 3, 32).sum(0)
    assert dx.dtype == torch.bfloat16
    assert ((dx.double() - exact).abs() <= ROUND[torch.bfloat16] * exact.abs() + 1e-5).all()


def test_empty_inputs_work():
    empty, weight = (
        torch.zeros(0, 8, device=DEVICE, requires_grad=True),
        torch.ones(8, device=DEVICE, requires_grad=True),
    )
    norm.add_rms_norm(empty, empty, weight, 1e-6)[0].sum().backward()
    assert not weight.grad.any()
    assert triton.swiglu(empty, empty).shape == (0, 8)
    heads, cos = empty.view(0, 1, 8), torch.zeros(0, 1, 8, device=DEVICE)
    q, k = rope.norm_rope(heads, heads, weight, weight, cos, cos, 1e-6)
    (q.sum() + k.sum()).backward()
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    x = torch.ones(3, 8, device=DEVICE, requires_grad=True)
    gather.gather_rows(x, none).sum().backward()
    assert not x.grad.any()

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

    def of_a_product(function):
        """Without norms, as in Qwen2, Llama and Mistral, and on slices of one product."""
        sizes = [H * E, K * E, K * E]
        return lambda qkv: function(*(x.unflatten(1, (-1, E)) for x in qkv.split(sizes, 1)[:2]))

    qkv = _draw(7, (H + 2 * K) * E, seed=4, dtype=dtype)
    _compare(of_a_product(fused), of_a_product(eager), [qkv], dtype)


def _silu_product(gate, up):
    return F.silu(gate) * up


@DTYPES
def test_swiglu(dtype):
    both = _draw(5, 2 * 1001, seed=0, dtype=dtype)
    apart = [x.detach().contiguous().requires_grad_() for x in both.chunk(2, 1)]
    _compare(triton.swiglu, _silu_product, apart, dtype)
    _compare(  # slices of one product
        lambda x: triton.swiglu(*x.chunk(2, 1)),
        lambda x: _silu_product(*x.chunk(2, 1)),
        [both],
        dtype,
    )


# --- gathered rows ---

INDEX = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1, 4, 4, 5, 0, 1])  # rows 0 and 1 are shared; no row 6


@DTYPES
@pytest.mark.parametrize("functions", [gather, reference])
@pytest.mark.parametrize("index", [INDEX, torch.zeros(64, dtype=torch.int64)], ids=len)
def test_gathered_rows_sum_their_gradients_in_float32_and_in_order(
    index, functions, dtype, monkeypatch
):
    """And round the sum once to their own type."""
    monkeypatch.setattr(gather, "BLOCK", 16)
    x = _draw(7, 2, 12, seed=0, dtype=dtype)  # [T, K, E]
    upstream = _draw(len(index), 2, 12, seed=1, dtype=dtype).detach()
    expected = torch.zeros(7, 2, 12, device=DEVICE)
    for i, dy in zip(index.tolist(), upstream):
        expected[i] += dy
    index = index.to(DEVICE)
    for order in (None, functions.row_order(index, 7)):
        y = functions.gather_rows(x, index, order)
        assert torch.equal(y, x[index])
        (dx,) = torch.autograd.grad(y, x, upstream)
        assert dx.dtype == dtype
        rounding = 0.0 if dtype == torch.float32 else ROUND[dtype]
        assert ((dx.float() - expected).abs() <= rounding * expected.abs()).all()


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

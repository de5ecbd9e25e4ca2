"""The decoder's memory-bound kernels (norm, rope, swiglu) and the textbook softmax against float64:
as exact as eager PyTorch.

They run in Triton's interpreter where there is no GPU. Read next: test_log_softmax.py.
"""

import pytest
import torch
import torch.nn.functional as F

from nanogrpo.kernels import norm, reference, rope, swiglu, textbook
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rope(dtype):
    x, weight = _draw(7, 3, 16, seed=0, dtype=dtype), _draw(16, seed=1, dtype=dtype)
    angles = torch.randn(7, 8, generator=torch.Generator().manual_seed(2)).repeat(1, 2).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()

    def eager(x, weight):
        n = F.rms_norm(x, (16,), weight, 1e-6)
        a, b = n.to(cos.dtype if x.dtype != torch.float64 else x.dtype).chunk(2, -1)
        turned = torch.cat((a, b), -1) * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]
        return turned.to(x.dtype)

    _compare(lambda x, weight: rope.norm_rope(x, weight, cos, sin, 1e-6), eager, [x, weight], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype):
    gate, up = _draw(5, 1001, seed=0, dtype=dtype), _draw(5, 1001, seed=1, dtype=dtype)
    _compare(swiglu.swiglu, lambda g, u: F.silu(g) * u, [gate, up], dtype)


def test_empty_inputs_work_and_second_derivatives_raise():
    empty, weight = (
        torch.zeros(0, 8, device=DEVICE, requires_grad=True),
        torch.ones(8, device=DEVICE, requires_grad=True),
    )
    norm.add_rms_norm(empty, empty, weight, 1e-6)[0].sum().backward()
    assert not weight.grad.any()
    assert swiglu.swiglu(empty, empty).shape == (0, 8)
    x = torch.ones(2, 8, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(swiglu.swiglu(x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_textbook_softmax(monkeypatch):
    monkeypatch.setattr(textbook, "BLOCK", 32)
    z, targets = 3 * torch.randn(3, 150, device=DEVICE), torch.tensor([0, 149, 7], device=DEVICE)
    expected = reference.log_softmax_forward(z, targets, 0.7)
    torch.testing.assert_close(
        textbook.textbook_log_softmax(z, targets, 0.7), expected[:2], rtol=1e-5, atol=1e-5
    )

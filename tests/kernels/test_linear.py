"""oneDNN's products against float64, their gradients, and when they are used.

Read next: test_head_work.py (the products of the head).
"""

import pytest
import torch
import torch.nn.functional as F
from nanogrpo.kernels.reference.policy import LossInputs

from nanogrpo.kernels import linear as kernel
from nanogrpo.model import head as ops
from tests.kernels.traffic import Traffic
from tests.model.head_inputs import CLIP

T, I, O = 1000, 64, 192


def onednn_products(seen: Traffic) -> int:
    """Return the number of oneDNN's products. Their name is neither mm nor addmm, so Traffic counts
    them as element-wise.
    """
    return seen.elementwise.names.count("_linear_pointwise")


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [T, 2 * T])
def test_results_and_gradients_are_as_exact_as_the_blas(bias, rows, dtype):
    """Against float64; with rows 2·T every other row of a larger matrix is taken, which is not
    contiguous.
    """
    x, w, b, up = draw(rows, I, seed=0), draw(O, I, seed=1), draw(O, seed=2), draw(T, O, seed=3)

    def both(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in ((x, w, b) if bias else (x, w))]
        y = function(leaves[0][:: rows // T], *leaves[1:])
        return [y, *torch.autograd.grad(y, leaves, up.to(dtype))]

    exact = both(F.linear, torch.float64)
    with Traffic() as seen:
        mine = both(kernel.linear, dtype)
    assert onednn_products(seen) == 3
    for got, blas, true in zip(mine, both(F.linear, dtype), exact, strict=True):
        assert got.dtype == dtype
        error, usual = ((x.double() - true).norm() / true.norm() for x in (got, blas))
        assert error < 2 * usual + 1e-7


def test_only_the_gradients_that_are_needed_are_computed():
    x, w = draw(T, I, seed=0), draw(O, I, seed=1).requires_grad_()
    with Traffic() as seen:
        kernel.linear(x, w).sum().backward()
    assert (
        onednn_products(seen) == 2
    )  # a frozen input has no gradient: the first layer under adapters
    with Traffic() as seen, torch.no_grad():
        kernel.linear(x, w)
    assert onednn_products(seen) == 1


@pytest.mark.parametrize(("frozen", "kept"), [(0, 0), (1, 1)])
def test_inputs_that_no_gradient_needs_are_not_kept(frozen, kept):
    """Under adapters the base is frozen: its input would be kept for nothing."""
    pair = [draw(T, I, seed=0).requires_grad_(), draw(O, I, seed=1).requires_grad_()]
    pair[frozen].requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        kernel.linear(*pair)
    (only,) = saved  # of the other's gradient
    assert only is pair[kept]


def test_everything_else_uses_f_linear():
    x, w = draw(T, I, seed=0), draw(O, I, seed=1)
    assert kernel.by_onednn(x, w)
    assert kernel.by_onednn(x, torch.nn.Parameter(w))
    for other in (
        (x.double(), w.double()),
        (x.bfloat16(), w),
        (x[:8], w),
        (x[None], w),
        (x.to("meta"), w.to("meta")),
    ):
        assert not kernel.by_onednn(*other)
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel.linear(x, w).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert not kernel.by_onednn(x, w)


def test_the_head_uses_the_same_products():
    """Loss, log-probs and gradients of both phases, in chunks that are large enough, against
    float64.
    """
    hidden, head = draw(600, 128, seed=0), 0.1 * draw(512, 128, seed=1)
    targets, advantage = torch.arange(600) % 512, draw(600, seed=2)

    def step(dtype):
        h, w = (t.to(dtype).requires_grad_() for t in (hidden, head))
        inputs = LossInputs(advantage.to(dtype), torch.full((600,), 1 / 600, dtype=dtype))
        loss = ops.head_policy_loss(h, w, targets, inputs, CLIP, chunk=100).loss
        logp, _ = ops.head_logp(h, w, targets, chunk=100)
        return [loss, logp, *torch.autograd.grad(loss + logp.mean(), (h, w))]

    with Traffic() as seen:
        mine = step(torch.float32)
    assert onednn_products(seen) == 6 * (3 + 4)  # of each chunk; every product
    assert seen.products.names == []
    for got, true in zip(mine, step(torch.float64), strict=True):
        assert (got.double() - true).norm() <= 1e-5 * true.norm()
        assert got.is_contiguous()

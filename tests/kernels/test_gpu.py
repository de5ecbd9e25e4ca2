"""Properties of the kernels that only a GPU can show: real sizes, real rounding, determinism, the
memory limit. Marker `gpu`.

`make gpu` runs it. The tests of test_log_softmax.py and test_policy.py also run compiled where
there is a GPU.
"""

import pytest
import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from nanogrpo.kernels.triton import fused_rows, log_softmax

from nanogrpo.kernels import reference
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops

pytestmark = pytest.mark.gpu

V = 151_936
CLIP = Clip(epsilon=0.2, epsilon_high=0.28)


def _draw(count, width, dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(count, width, generator=g, device="cuda").to(dtype).requires_grad_()
    head = (
        (torch.randn(V, width, generator=g, device="cuda") * 3 * width**-0.5)
        .to(dtype)
        .requires_grad_()
    )
    targets = torch.randint(V, (count,), generator=g, device="cuda")
    advantage = torch.randn(count, generator=g, device="cuda")
    weight = torch.full((count,), 1 / count, device="cuda")
    return hidden, head, targets, LossInputs(advantage, weight)


def test_more_rows_than_a_grid_is_high():
    count = 70_000  # blockIdx.y and .z end at 65,535
    z, targets = torch.randn(count, 64, device="cuda"), torch.randint(64, (count,), device="cuda")
    ones, mine, theirs = torch.ones(count, device="cuda"), z.clone(), z.clone()
    args = targets, 1.0, LossInputs(ones, ones), CLIP
    got = fused_rows.policy_rows_(mine, *args)
    expected = reference.policy_rows_(theirs, *args)
    got, expected = (*got[:4], mine), (*expected[:4], theirs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        log_softmax.log_softmax_forward(z, targets, 1.0)[0], expected[0], rtol=1e-5, atol=1e-5
    )


def test_head_in_one_chunk_and_in_several_against_float64(monkeypatch):
    hidden, head, targets, inputs = _draw(300, 256)
    wide = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    monkeypatch.setattr(dispatch, "choice", "torch")
    exact = ops.head_policy_loss(*wide, targets, inputs.map(torch.Tensor.double), CLIP)
    truth = torch.autograd.grad(exact.loss, wide)
    monkeypatch.setattr(dispatch, "choice", "auto")
    for chunk in (None, 64):  # several chunks: float32 sums of bfloat16 products
        out = ops.head_policy_loss(hidden, head, targets, inputs, CLIP, chunk=chunk)
        grads = torch.autograd.grad(out.loss, (hidden, head))
        for got, want in zip(grads, truth):
            assert (got.double() - want).norm() / want.norm() <= 8e-3
        # logits rounded to bfloat16: half a unit at 16 is 0.06
        assert (out.logp.double() - exact.logp).abs().max() <= 0.1


def test_memory_is_a_chunk_of_logits_and_the_gradients():
    hidden, head, targets, inputs = _draw(8192, 1024)
    chunk = 1024
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.head_policy_loss(hidden, head, targets, inputs, CLIP, chunk=chunk).loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    logits, float_head, half_head, states = (
        chunk * V * 2,
        V * 1024 * 4,
        V * 1024 * 2,
        8192 * 1024 * 2,
    )
    # all [M, V] would be 2.5 GB more
    assert peak <= logits + float_head + half_head + 4 * states + 64 * 2**20

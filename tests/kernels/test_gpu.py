"""Properties of the kernels that only a GPU can show: real sizes, real rounding, determinism, the
memory limit. Marker `gpu`.

`make gpu` runs it. The tests of test_log_softmax.py and test_policy.py also run compiled where
there is a GPU.
"""

import pytest
import torch
from nanogrpo.kernels.reference import LossInputs, Objective

from nanogrpo.kernels import fused_rows, log_softmax, reference
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops
from nanogrpo.model import ops as kernel_ops

pytestmark = pytest.mark.gpu

V = 151_936
CLIP = Objective(epsilon=0.2, epsilon_high=0.28)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_log_softmax_at_full_size_is_as_exact_as_eager(dtype):
    z = (3 * torch.randn(600, V, device="cuda")).to(dtype)
    z[1] -= 10_000.0
    z[2, 5] = -torch.inf
    targets = torch.randint(V, (600,), device="cuda")
    exact = reference.log_softmax_forward(z[:64].double(), targets[:64], 0.7)
    eager = torch.log_softmax(z[:64].float() / 0.7, -1).gather(1, targets[:64, None]).squeeze(1)
    allowed = 2 * (eager - exact[0]).abs().max() + 2.0**-21
    logp, entropy, _ = log_softmax.log_softmax_forward(z, targets, 0.7)
    assert (logp[:64] - exact[0]).abs().max() <= allowed
    assert (entropy[:64] - exact[1]).abs().max() <= 1e-5


def test_more_rows_than_a_grid_is_high():
    count = 70_000  # blockIdx.y and .z end at 65,535
    z, targets = torch.randn(count, 64, device="cuda"), torch.randint(64, (count,), device="cuda")
    ones, mine, theirs = torch.ones(count, device="cuda"), z.clone(), z.clone()
    args = targets, 1.0, LossInputs(ones, ones), CLIP
    got = fused_rows.policy_rows_(mine, *args)
    expected = reference.policy_rows_(theirs, *args)
    torch.testing.assert_close((*got, mine), (*expected, theirs), rtol=1e-4, atol=1e-6)
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


def test_twenty_runs_are_the_same_bit_for_bit():
    hidden, head, targets, inputs = _draw(1024, 256)

    def run():
        out = ops.head_policy_loss(hidden, head, targets, inputs, CLIP, chunk=256)
        gradients = torch.autograd.grad(out.loss, (hidden, head))
        return out.loss, out.logp, out.entropy, out.metrics["clip"], *gradients

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


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


def test_loss_takes_two_launches_and_its_gradient_one():
    logp = torch.randn(32_768, device="cuda", requires_grad=True)
    ones = torch.ones_like(logp, requires_grad=False)
    kernel_ops.policy_loss(logp, LossInputs(ones, ones), CLIP)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kernel_ops.policy_loss(logp, LossInputs(ones, ones), CLIP)
        torch.cuda.synchronize()
    assert (
        len([e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]) <= 2
    )


def test_a_compiled_caller_gives_the_same_gradients():
    hidden, head, targets, inputs = _draw(256, 128)

    def step(hidden, head):
        return ops.head_policy_loss(2 * hidden, head, targets, inputs, CLIP).loss

    expected = torch.autograd.grad(step(hidden, head), (hidden, head))
    got = torch.autograd.grad(torch.compile(step)(hidden, head), (hidden, head))
    torch.testing.assert_close(got, expected)

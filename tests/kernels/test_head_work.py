"""What the loop over chunks of kernels/head.py costs and keeps: matrix products, the largest
tensor, the type that it sums in.

Read next: test_custom_ops.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanogrpo.kernels import head as head_loop
from nanogrpo.kernels import reference
from nanogrpo.model import head as ops
from tests.conftest import random_batch, tiny_model
from tests.model.head_inputs import CLIP, D, M, V, draw

pytestmark = pytest.mark.usefixtures("reference_ops")


def _products(function) -> float:
    """Matrix products of M·V·D multiply-adds that a call and its backward take, as the profiler
    sees them inside the ops.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        loss = function()
        if loss.requires_grad:
            loss.backward()
    first = {"aten::mm": 0, "aten::addmm": 1}  # where the two factors begin among the arguments
    pairs = [
        e.input_shapes[first[e.name] : first[e.name] + 2]
        for e in profile.events()
        if e.name in first
    ]
    return sum(a[0] * a[1] * b[1] for a, b in pairs) / (M * V * D)


def test_three_products_with_gradient_one_without_and_four_in_two_phases():
    hidden, head, targets, v = draw(torch.float32)
    ones = torch.ones(M)

    def fused(advantage=ones, weight=ones, **more):
        return ops.head_policy_loss(
            hidden, head, targets, None, advantage, weight, **CLIP, **more
        ).loss

    assert _products(fused) == pytest.approx(3)
    with torch.no_grad():
        assert _products(fused) == pytest.approx(1)
    assert _products(lambda: ops.head_logp(hidden, head, targets)[0].sum()) == pytest.approx(4)
    no_advantage = torch.where(torch.arange(M) < 5, 0.0, 1.0)
    # no backward product for 5 tokens
    assert _products(lambda: fused(advantage=no_advantage)) == pytest.approx(3 - 2 * 5 / M)
    # the KL needs them
    assert _products(
        lambda: fused(advantage=no_advantage, ref_logp=v["ref"], beta=0.1)
    ) == pytest.approx(3)
    # nothing for them
    assert _products(lambda: fused(weight=no_advantage)) == pytest.approx(3 - 3 * 5 / M)
    assert _products(
        lambda: (ops.head_logp(hidden, head, targets)[0] * no_advantage).sum()
    ) == pytest.approx(4 - 3 * 5 / M)


class _Largest(TorchDispatchMode):
    """The largest result of any operation, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_logits_are_never_more_than_a_chunk():
    hidden, lm_head = torch.randn(64, 4), torch.randn(512, 4)
    targets, ones = torch.randint(512, (64,)), torch.ones(64)
    o = reference.Objective(0.2, 0.2)
    with _Largest() as largest:
        head_loop.policy_forward(
            reference,
            hidden,
            lm_head,
            targets,
            1.0,
            None,
            ones,
            ones,
            None,
            None,
            ones,
            o,
            8,
            True,
            True,
        )
        _, entropy, norm = head_loop.logp_forward(reference, hidden, lm_head, targets, 1.0, 8)
        head_loop.logp_backward(
            reference, hidden, lm_head, targets, 1.0, 8, norm, entropy, ones, ones
        )
    assert largest.numbers == 8 * 512


def _largest_allocation(function) -> int:
    """Bytes of the largest piece of memory that a call asks for: the allocator sees inside the ops,
    and the backward.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    return max(e.self_cpu_memory_usage for e in profile.events())


def test_a_whole_step_never_makes_a_tensor_of_all_logits():
    words, batch = 2000, random_batch([(3, 103)] * 2, vocab_size=2000)
    model = tiny_model(vocab_size=words)
    tokens = len(batch.rows)

    def chunked(hidden, weight):
        args = hidden, weight, batch.targets, batch.old_logp, batch.advantage, batch.weight
        return (
            ops.head_policy_loss(*args, chunk=8, **CLIP).loss
            + ops.head_logp(hidden, weight, batch.targets, chunk=8)[0].sum()
        )

    def whole(hidden, weight):
        return ops.selective_log_softmax(hidden @ weight.T, batch.targets)[0].sum()

    one_byte_each = tokens * words  # less than all logits in any type
    assert (
        _largest_allocation(lambda: model.forward_packed(batch, chunked).backward()) < one_byte_each
    )
    # the measure sees it
    assert (
        _largest_allocation(lambda: model.forward_packed(batch, whole).backward())
        >= 4 * one_byte_each
    )


def test_gradient_of_a_bfloat16_head_is_summed_in_float32():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 16, generator=g).bfloat16()
    head = torch.randn(64, 16, generator=g).bfloat16().requires_grad_()
    targets, advantage = torch.randint(64, (256,), generator=g), torch.randn(256, generator=g)

    def gradient(chunk):
        args = hidden, head, targets, None, advantage, torch.ones(256)
        return torch.autograd.grad(ops.head_policy_loss(*args, chunk=chunk, **CLIP).loss, head)[0]

    whole, parts = gradient(256).float(), gradient(8).float()
    # One rounding to bfloat16 at the end, whatever the number of chunks: at most one unit in the
    # last place apart.
    assert ((whole - parts).abs() <= whole.abs() * 2**-7).all()


def test_chunks_do_not_change_the_loss():
    hidden, head, targets, v = draw(torch.float32)
    args = hidden, head, targets, v["old"], v["advantage"], v["weight"]
    outs = [ops.head_policy_loss(*args, chunk=chunk, **CLIP) for chunk in (1, 4, None)]
    for out in outs[1:]:
        torch.testing.assert_close(out.loss, outs[0].loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out.logp, outs[0].logp, rtol=1e-6, atol=1e-6)

"""The cost of the loop over chunks in kernels/head.py: matrix products, the largest tensor, and the
type of its sums.

Read next: tests/model/test_head_autograd.py.
"""

import pytest
import torch
from nanogrpo.kernels.reference.policy import LossInputs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nanogrpo import Config
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import head as ops
from nanogrpo.run import optim
from tests.conftest import random_batch, tiny_model
from tests.model.head_inputs import CLIP, D, M, V, draw

pytestmark = pytest.mark.usefixtures("reference_ops")


def _products(function) -> float:
    """Matrix products of M·V·D multiply-adds that a call and its backward take."""
    with FlopCounterMode(display=False) as counter:
        loss = function()
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops() / (2 * M * V * D)


def test_three_products_with_gradient_and_four_in_two_phases():
    hidden, head, targets, _ = draw(torch.float32)
    ones = torch.ones(M)
    no_5 = torch.where(torch.arange(M) < 5, 0.0, 1.0)

    def fused(head=head):
        return ops.head_policy_loss(hidden, head, targets, LossInputs(ones, ones), CLIP).loss

    def two_phases(factor=ones, head=head):
        return (ops.head_logp(hidden, head, targets)[0] * factor).sum()

    frozen = head.detach()
    for function, products in [
        (fused, 3),
        (lambda: fused(head=frozen), 2),
        (two_phases, 4),
        (lambda: two_phases(head=frozen), 3),
        (lambda: two_phases(no_5), 4 - 3 * 5 / M),
    ]:
        assert _products(function) == pytest.approx(products)
    with torch.no_grad():
        assert _products(fused) == pytest.approx(1)


class _Results(TorchDispatchMode):
    """The sizes and types of all results of torch's operations."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.made.append((out.numel(), out.dtype))
        return out


def test_a_training_step_never_has_all_logits():
    """By default, a chunk has at most 512 rows on a CPU."""
    model, batch, cfg = tiny_model(vocab_size=4096), random_batch([(2, 600)]), Config()
    batch.entropy_weight, optimizer = batch.weight, optim.make_optimizer(model, cfg)
    with _Results() as results:
        model.forward_strip(batch, grpo.objective(batch, cfg)).loss.backward()
        sum(model.forward_strip(batch, grpo.logp_of(batch, cfg))).sum().backward()
        optim.clip_and_step(model, optimizer, 1e-3, 1.0)
    assert max(numel for numel, _ in results.made) == 512 * 4096


def test_the_backward_holds_one_copy_of_a_bfloat16_heads_gradient():
    """The float32 sum lives from the forward to the backward, which adds the bfloat16 result."""
    hidden, head = torch.randn(8, 64).bfloat16(), torch.randn(4096, 64).bfloat16().requires_grad_()
    ones = torch.ones(8)
    inputs = LossInputs(ones, ones)
    with _Results() as forward:
        loss = ops.head_policy_loss(hidden, head, torch.arange(8), inputs, CLIP).loss
    assert (head.numel(), torch.float32) in forward.made
    with _Results() as results:
        loss.backward()
    types = [dtype for numel, dtype in results.made if numel == head.numel()]
    assert set(types) == {torch.bfloat16}

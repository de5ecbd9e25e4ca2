"""The operations as torch takes them: differentiated twice, compiled, sharded, and which
implementation runs where.

Read next: test_kernels_log_softmax.py, where the other implementation is held to the equations.
"""

import logging

import pytest
import torch

from nanogrpo.errors import UserError
from nanogrpo.model import head as ops
from nanogrpo.model.decoder import Head
from tests.conftest import tiny_config
from tests.model.head_inputs import CLIP, D, M, T, V, draw

pytestmark = pytest.mark.usefixtures("reference_ops")


def test_backward_twice_is_right_and_differentiating_twice_raises():
    hidden, head, targets, v = draw()
    loss = ops.head_policy_loss(
        hidden, head, targets, v["old"], v["advantage"], v["weight"], **CLIP
    ).loss
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(hidden.grad, 3 * once)
    logp = torch.zeros(M, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(M, V, dtype=torch.float64, requires_grad=True)
    for loss, x in [
        (
            ops.head_policy_loss(
                hidden, head, targets, None, v["advantage"], v["weight"], **CLIP
            ).loss,
            hidden,
        ),
        (ops.head_logp(hidden, head, targets)[0].sum(), hidden),
        (ops.policy_loss(logp, None, v["advantage"], v["weight"], **CLIP).loss, logp),
        (ops.selective_log_softmax(logits, targets)[0].sum(), logits),
    ]:
        (grad,) = torch.autograd.grad(loss**2, x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.pow(2).sum().backward()


def test_torch_compile_gives_the_same_numbers():
    hidden, head, targets, v = draw(torch.float32)
    more = dict(
        ref_logp=v["ref"],
        beta=0.1,
        entropy_weight=v["ew"],
        importance=v["imp"],
        temperature=T,
        **CLIP,
    )

    def step(hidden, head):
        out = ops.head_policy_loss(
            2 * hidden, head, targets, v["old"], v["advantage"], v["weight"], **more
        )
        logp, entropy = ops.head_logp(hidden, head, targets, entropy=True)
        other = ops.policy_loss(logp, v["old"], v["advantage"], v["weight"], **CLIP)
        selected, _ = ops.selective_log_softmax(hidden @ head.T, targets)
        return out.loss + other.loss + entropy.mean() + selected.mean()

    gradients = torch.autograd.grad(step(hidden, head), (hidden, head))
    compiled = torch.compile(step, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, head), step(hidden, head))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(hidden, head), (hidden, head)), gradients
    )
    with torch.no_grad():
        assert not compiled(hidden, head).requires_grad


def test_the_head_is_a_unit_for_fsdp():
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    hidden, weight, targets, v = draw(torch.float32)
    args = targets, v["old"], v["advantage"], v["weight"]
    expected = torch.autograd.grad(
        ops.head_policy_loss(hidden, weight, *args, **CLIP).loss, (hidden, weight)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        head = Head(tiny_config(vocab_size=V, hidden_size=D))
        head.weight.data.copy_(weight.detach())
        fully_shard(head, mesh=mesh)
        head(
            hidden, lambda hidden, weight: ops.head_policy_loss(hidden, weight, *args, **CLIP)
        ).loss.backward()
        torch.testing.assert_close(hidden.grad, expected[0])
        torch.testing.assert_close(head.weight.grad.full_tensor(), expected[1])
    finally:
        dist.destroy_process_group()


def test_implementation_is_chosen_by_device_told_once_and_can_be_forced(caplog, monkeypatch):
    ops.use(None)
    with caplog.at_level(logging.INFO, logger="nanogrpo"):
        assert [
            ops.implementation("cuda"),
            ops.implementation("cpu"),
            ops.implementation("cuda:1"),
        ] == [
            "triton",
            "torch",
            "triton",
        ]
        assert len(caplog.records) == 2
        ops.use("torch")
        assert ops.implementation("cuda") == "torch"
        assert "forced" in caplog.text
    ops.use("fast")
    with pytest.raises(UserError, match="NANOGRPO_OPS"):
        ops.implementation("cpu")

"""The head operations and torch: differentiated twice, compiled, sharded, and the choice of the
implementation.

Read next: tests/kernels/test_log_softmax.py, which compares the other implementation with the
equations.
"""

import inspect
import sys

import pytest
import torch
from nanogrpo.kernels.reference import LossInputs

import nanogrpo.kernels
from nanogrpo.errors import UserError
from nanogrpo.kernels import fused, reference
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops
from nanogrpo.model import ops as kernel_ops
from nanogrpo.model.decoder import Head
from tests.conftest import tiny_config
from tests.model.head_inputs import CLIP, D, M, T, V, draw

pytestmark = pytest.mark.usefixtures("reference_ops")


def test_backward_twice_is_right_and_differentiating_twice_raises():
    hidden, head, targets, inputs = draw()
    loss = ops.head_policy_loss(hidden, head, targets, inputs, CLIP).loss
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(hidden.grad, 3 * once)
    logp = torch.zeros(M, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(M, V, dtype=torch.float64, requires_grad=True)
    on_policy = LossInputs(inputs.advantage, inputs.weight)
    for loss, x in [
        (ops.head_policy_loss(hidden, head, targets, on_policy, CLIP).loss, hidden),
        (ops.head_logp(hidden, head, targets)[0].sum(), hidden),
        (kernel_ops.policy_loss(logp, on_policy, CLIP).loss, logp),
        (kernel_ops.selective_log_softmax(logits, targets)[0].sum(), logits),
    ]:
        (grad,) = torch.autograd.grad(loss**2, x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.pow(2).sum().backward()


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient_and_upstream_gradients_may_be_strided(frozen):
    hidden, head, targets, inputs = draw()
    upstream = torch.randn(M, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).T

    def gradients(pair):
        loss = ops.head_policy_loss(*pair, targets, inputs, CLIP, temperature=T).loss
        logp, entropy = ops.head_logp(*pair, targets, T)
        torch.autograd.backward((loss, logp, entropy), (torch.ones_like(loss), *upstream))
        return [x.grad for x in pair]

    pair = [x.detach().clone().requires_grad_() for x in (hidden, head)]
    expected = gradients(pair)
    pair = [x.detach().clone().requires_grad_(i != frozen) for i, x in enumerate((hidden, head))]
    got = gradients(pair)
    assert got[frozen] is None
    assert torch.equal(got[1 - frozen], expected[1 - frozen])


def test_torch_compile_gives_the_same_numbers():
    hidden, head, targets, inputs = draw(torch.float32)
    o = CLIP._replace(beta=0.1)

    def step(hidden, head):
        out = ops.head_policy_loss(2 * hidden, head, targets, inputs, o, temperature=T)
        logp, entropy = ops.head_logp(3 * hidden, head, targets)
        return out.loss + logp.mean() + entropy.mean()

    gradients = torch.autograd.grad(step(hidden, head), (hidden, head))
    compiled = torch.compile(step, backend="aot_eager")
    loss = compiled(hidden, head)
    torch.testing.assert_close(loss, step(hidden, head))
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, head)), gradients)
    with torch.no_grad():
        assert not compiled(hidden, head).requires_grad


def test_the_head_is_a_unit_for_fsdp():
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    hidden, weight, targets, inputs = draw(torch.float32)

    def loss(hidden, weight):
        return ops.head_policy_loss(hidden, weight, targets, inputs, CLIP)

    expected = torch.autograd.grad(loss(hidden, weight).loss, (hidden, weight))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        head = Head(tiny_config(vocab_size=V, hidden_size=D))
        head.weight.data.copy_(weight.detach())
        fully_shard(head, mesh=mesh)
        head(hidden, loss).loss.backward()
        torch.testing.assert_close(hidden.grad, expected[0])
        torch.testing.assert_close(head.weight.grad.full_tensor(), expected[1])
    finally:
        dist.destroy_process_group()


def test_the_implementation_follows_the_device_unless_chosen(monkeypatch):
    def names(choice):
        monkeypatch.setattr(dispatch, "choice", choice)
        devices = map(torch.device, ("cuda", "cpu", "cuda:1"))
        return [dispatch.functions_for(d).__name__.split(".")[-1] for d in devices]

    assert names("auto") == ["fused", "reference", "fused"]
    assert names("torch") == ["reference"] * 3
    assert names("triton") == ["fused"] * 3


def test_both_implementations_have_the_same_functions():
    for name in fused.__all__:
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (fused, reference))
        assert [*ours.parameters] == [*theirs.parameters], name


def test_a_missing_triton_is_one_sentence(monkeypatch):
    monkeypatch.setattr(dispatch, "choice", "auto")
    monkeypatch.setitem(sys.modules, "nanogrpo.kernels.fused", None)
    monkeypatch.delattr(nanogrpo.kernels, "fused")
    dispatch._module.cache_clear()
    with pytest.raises(UserError, match=r"--kernels auto needs Triton.* use --kernels torch\.$"):
        dispatch.functions_for(torch.device("cuda"))

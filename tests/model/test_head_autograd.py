"""The head operations and torch: differentiated twice, sharded, and the choice of the
implementation.

Read next: tests/kernels/test_log_softmax.py, which compares the other implementation with the
equations.
"""

import sys

import pytest
import torch

import nanogrpo.kernels
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops
from tests.conftest import refused
from tests.model.head_inputs import CLIP, draw

pytestmark = pytest.mark.usefixtures("reference_ops")


def test_backward_twice_is_right_and_differentiating_twice_raises():
    hidden, head, targets, inputs = draw()
    loss = ops.head_policy_loss(hidden, head, targets, inputs, CLIP).loss
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(hidden.grad, 3 * once)
    for loss in (
        ops.head_policy_loss(hidden, head, targets, inputs, CLIP).loss,
        ops.head_logp(hidden, head, targets)[0].sum(),
    ):
        (grad,) = torch.autograd.grad(loss**2, hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.pow(2).sum().backward()


def test_the_implementation_follows_the_device_unless_chosen(monkeypatch):
    def names(choice):
        monkeypatch.setattr(dispatch, "choice", choice)
        devices = map(torch.device, ("cuda", "cpu", "cuda:1"))
        return [dispatch.functions_for(d).__name__.split(".")[-1] for d in devices]

    assert names("auto") == ["triton", "reference", "triton"]
    assert names("torch") == ["reference"] * 3
    assert names("triton") == ["triton"] * 3


def test_a_missing_triton_is_one_sentence(monkeypatch):
    monkeypatch.setattr(dispatch, "choice", "auto")
    monkeypatch.setitem(sys.modules, "nanogrpo.kernels.triton", None)
    monkeypatch.delattr(nanogrpo.kernels, "triton")
    with refused(r"--kernels auto needs Triton.* use --kernels torch\.$"):
        dispatch.functions_for(torch.device("cuda"))

"""`--head-dtype float32`: the logits of 16-bit weights are rounded neither in the engine nor in the
trainer.

tests/configurations.py has the row for resuming. Read next: tests/vllm/test_client.py (servers).
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from torch import Tensor

from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras import head_dtype
from nanogrpo.extras.bitwise import swapped
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops
from nanogrpo.types import Prompt
from tests.conftest import DEVICE, tiny_model
from tests.engine.small import make_engine

T, M, V, D = 0.7, 40, 300, 64
device = torch.device(DEVICE)


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, LossInputs]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(M, D, generator=g), torch.randn(V, D, generator=g)
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (hidden, 0.5 * weight)]
    advantage = torch.randn(M, generator=g).to(DEVICE)
    targets = torch.randint(V, (M,), generator=g).to(DEVICE)
    weight = torch.ones_like(advantage) / M
    return *leaves, targets, LossInputs(advantage, weight, ref_logp=-weight)


def both_ways(dtype: torch.dtype) -> list[Tensor]:
    """Return the log-probs and the two gradients of the fused head, and of two phases."""
    hidden, weight, targets, inputs = draw(dtype)
    fused = ops.head_policy_loss(
        hidden, weight, targets, inputs, Clip(0.2, 0.2), temperature=T, chunk=16
    )
    logp, entropy = ops.head_logp(hidden, weight, targets, T, chunk=16)
    assert {x.dtype for x in (*fused[:4], logp, entropy)} == {torch.float32}
    loss = -(logp * inputs.advantage * inputs.weight).sum()
    out = []
    for each, x in ((fused.loss, fused.logp), (loss, logp)):
        out += [x.detach(), *torch.autograd.grad(each, (hidden, weight))]
    return out


def in_float32() -> ExitStack:
    return swapped(device, head_dtype.functions(device))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_and_gradients_are_those_of_trl(kernels, dtype, monkeypatch):
    """TRL multiplies float32 copies of the same 16-bit matrices, in both passes. Our gradient of
    the logits is rounded to 16 bits, which adds less error than storing the results in 16 bits.
    """
    from trl.trainer.utils import _ChunkedLogProbFunction

    monkeypatch.setattr(dispatch, "choice", kernels)
    hidden, weight, targets, inputs = draw(dtype)
    copies = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    logp, *_ = _ChunkedLogProbFunction.apply(
        *copies, None, targets, T, 16, None, 1.0, ("log_probs", "entropy")
    )
    loss = -(logp * inputs.advantage * inputs.weight).sum()
    expected = 2 * [logp.detach(), *torch.autograd.grad(loss, copies)]
    usual = both_ways(dtype)
    with in_float32():
        found = both_ways(dtype)
    for i, (got, rounded, theirs) in enumerate(zip(found, usual, expected)):
        assert got.dtype == rounded.dtype
        if i % 3 == 0:  # log-probs
            # logits are up to 26, so in float32 their last bit is 1.9e-6
            torch.testing.assert_close(got, theirs, rtol=1e-6, atol=4e-6)
            assert dtype == torch.float32 or (rounded - theirs).abs().max() > 1e-4
        else:
            error, before, storing = (
                (x - theirs).double().norm() / theirs.norm()
                for x in (got, rounded, theirs.to(dtype))
            )
            assert dtype == torch.float32 or error < before
            # Triton's interpreter truncates to bfloat16, which doubles the error
            assert error < max(1e-6, 2.2 * storing)
    # float32 weights give the same bits
    assert dtype != torch.float32 or all(map(torch.equal, usual, found))
    # afterwards, everything is as before
    assert all(map(torch.equal, usual, both_ways(dtype)))


def test_the_engine_samples_from_unrounded_logits():
    engine = make_engine(tiny_model(std=0.3), max_len=32, dtype=torch.bfloat16)
    head_dtype.HeadDtype().wrap(engine, mock.Mock())
    hidden: list[Tensor] = []
    engine.model.model.register_forward_hook(lambda *call: hidden.append(call[-1]))
    samples = engine.sample([Prompt(0, "", [1])], 8, SamplingParams(max_tokens=24), 0)
    logits = torch.stack(hidden).float() @ engine.model.lm_head.weight.float().T  # [24, 8, V]
    tokens, logp = (
        torch.tensor([getattr(s, name) for s in samples]).T for name in ("token_ids", "logp")
    )
    expected = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(logp, expected, rtol=0, atol=2e-6)

"""Compare a training step with that of another trainer. Read next: test_trl_parity.py."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from nanogrpo import Config
from nanogrpo.extras.objectives import Objectives
from nanogrpo.grpo import loss as grpo
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.head import PolicyOut
from nanogrpo.types import Sample
from tests.conftest import packed


def assert_trains_alike(
    model: Decoder,
    samples: Sequence[Sample],
    cfg: Config,
    loss: Tensor,
    expected: dict[str, Tensor],
    rename: Callable[[str], str] = str,
) -> list[PolicyOut]:
    """Assert that the loss and the gradients of our step are those of the other trainer. Return
    what the loss of each micro-batch returned. rename: from our names to those in `expected`.
    """
    outs = []
    for strip in packed(samples, cfg):
        outs.append(model.forward_strip(strip, grpo.objective(strip, cfg, [Objectives(cfg)])))
        outs[-1].loss.backward()
    total = sum(out.loss.item() for out in outs)
    assert total == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    found = {rename(n): p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    limits = {"rtol": 1e-4, "atol": 2e-6 * max(g.abs().max() for g in expected.values()).item()}
    for name, g in found.items():
        torch.testing.assert_close(
            g.flatten(), expected[name].flatten(), **limits, msg=lambda m, n=name: f"{n}: {m}"
        )
    return outs

"""The gap between trainer and engine: no gap, and the correction against TRL's formula. The figures
of a gap are computed by hand in tests/logs/test_metrics.py.

Read next: docs/metrics.md.
"""

import math

import pytest
import torch

from nanogrpo.extras.importance import correction, measured
from nanogrpo.extras.options import CHOICES
from nanogrpo.grpo import mismatch
from tests.conftest import SOLO

MODES = CHOICES["vllm_importance_sampling_mode"][1:]  # without "off"


def compare(delta: torch.Tensor) -> dict[str, float]:
    """Return the metrics, reduced as `Meter.summary` does."""
    found = mismatch.vectors(delta).items()
    return {name: (x.max() if name.endswith("max") else x.mean()).item() for name, x in found}


def vectors():
    g = torch.Generator().manual_seed(0)
    engine = -3 * torch.rand(64, generator=g)
    sample = torch.arange(8).repeat_interleave(8)
    return engine + 0.5 * torch.randn(64, generator=g), engine, sample


def test_equal_policies_have_no_gap_and_no_correction():
    logp, _, sample = vectors()
    for mode in MODES:
        assert torch.equal(correction(logp, logp, sample, mode, 3.0), torch.ones(64))
    figures = compare(logp - logp) | measured(torch.ones(64), SOLO)
    zeros = ("sampling_logp_difference/mean", "sampling_logp_difference/max", "k3", "masked")
    ones = ("ratio", "ess", *(f"importance_sampling_ratio/{x}" for x in ("min", "mean", "max")))
    assert figures == {f"sampling/{name}": float(name in ones) for name in zeros + ones}


def test_the_share_of_the_tokens_that_count():
    figures = measured(torch.tensor([0.0, 2.0]), SOLO)
    assert (figures["sampling/masked"], figures["sampling/ess"]) == (0.5, 0.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.5, 2.0)])
def test_the_correction_equals_trls(mode, low, high):
    """TRL 1.16 sums Δ·mask of a padded [B, T] per row for the sequence modes, takes exp, and clamps
    or masks.
    """
    trainer, engine, sample = vectors()
    delta = (trainer - engine).view(8, 8)
    if mode.startswith("sequence"):
        delta = delta.sum(-1, keepdim=True)
    ratio = delta.exp()
    if mode.endswith("truncate"):
        expected = ratio.clamp(min=low, max=high)
    else:
        expected = ratio.masked_fill((ratio < (low or 0.0)) | (ratio > high), 0.0)
    got = correction(trainer, engine, sample, mode, high, low)
    torch.testing.assert_close(got, expected.expand(8, 8).reshape(-1), rtol=1e-5, atol=0)
    assert got.requires_grad is False


def test_ratios_beyond_every_bound_stay_finite():
    trainer, engine = torch.tensor([-1.0, -1e4]), torch.tensor([-1e4, -1.0])
    for mode in MODES:
        assert correction(trainer, engine, torch.tensor([0, 1]), mode, 3.0).isfinite().all()
    assert all(math.isfinite(v) for v in compare(trainer - engine).values())

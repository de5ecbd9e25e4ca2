"""The gap between trainer and engine: the correction against TRL's formula. The figures of a gap
are computed by hand in tests/logs/test_metrics.py.

Read next: docs/metrics.md.
"""

import pytest
import torch

from nanogrpo.extras.importance import correction, measured
from nanogrpo.extras.options import CHOICES
from nanogrpo.grpo import mismatch
from tests.conftest import SOLO

MODES = CHOICES["vllm_importance_sampling_mode"][1:]  # without "off"


def vectors():
    g = torch.Generator().manual_seed(0)
    engine = -3 * torch.rand(64, generator=g)
    sample = torch.arange(8).repeat_interleave(8)
    return engine + 0.5 * torch.randn(64, generator=g), engine, sample


def test_the_figures_of_the_weights():
    assert measured(torch.tensor([0.0, 4.0]), SOLO) == {
        "sampling/importance_sampling_ratio/min": 0,
        "sampling/importance_sampling_ratio/mean": 2,
        "sampling/importance_sampling_ratio/max": 4,
        "sampling/masked": 0.5,
        "sampling/ess": 0.5,
    }


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
    assert all(x.isfinite().all() for x in mismatch.vectors(trainer - engine).values())

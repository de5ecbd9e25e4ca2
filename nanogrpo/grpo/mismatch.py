"""How far apart trainer and engine are on the same tokens, and what to do about it: pure functions
of two vectors of log-probs.

In: log-probs of the same M tokens by the trainer (before the first update) and by the engine that
sampled them, both at the sampling temperature. Out: the figures that are logged every step
(`compare`), and a weight for each token's loss (`correction`).

Samples come from μ, the engine, while π, the trainer, is trained as if it had drawn them. The two
hold the same weights, but other kernels, precisions and batch shapes make their log-probs differ a
little; a sync that went wrong makes them differ a lot. So the figures are an alarm first: in
float32 on one machine they are about 1e-6, in bfloat16 a k3 of 1e-3 is usual, and a mean ratio that
grows past 1.02 step after step means that the weights do not arrive. Names and modes are those of
TRL 1.16's `vllm_importance_sampling_*`. Read before: grpo.py. Read next: docs/metrics.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanogrpo.config import CHOICES
from nanogrpo.kernels.reference import LOG_RATIO_MAX

MODES = CHOICES["vllm_importance_sampling_mode"]


def compare(delta: Tensor, weight: Tensor | None = None) -> dict[str, float]:
    """Figures over M tokens. delta: [M], Δ = log π − log μ in float32; weight: [M], of
    `correction`, adds the last lines.

    sampling_logp_difference/mean, max     of |Δ|, as in TRL
    k3                                     mean of e^Δ − 1 − Δ: the KL divergence of μ from π, estimated on μ's own tokens, never
                                           negative (Schulman 2020)
    ratio                                  mean of e^|Δ|: 1 when they agree
    importance_sampling_ratio/min, …       of the weights, as in TRL
    masked                                 share of the tokens that the correction takes out altogether
    ess                                    effective share of the tokens, (Σw)² / (M · Σw²): 1 when all weigh the same
    """
    delta = delta.double()  # a difference of 1e-6 has no digits to lose
    cut = delta.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    out = {
        "sampling_logp_difference/mean": delta.abs().mean().item(),
        "sampling_logp_difference/max": delta.abs().max().item(),
        "k3": (cut.exp() - 1 - cut).mean().item(),
        "ratio": cut.abs().exp().mean().item(),
    }
    if weight is not None:
        w = weight.double()
        squares = (w * w).sum()
        out |= {
            f"importance_sampling_ratio/{how}": getattr(w, how)().item()
            for how in ("min", "mean", "max")
        }
        out["masked"] = (w == 0).double().mean().item()
        out["ess"] = (w.sum() ** 2 / (len(w) * squares)).item() if squares > 0 else 0.0
    return {f"sampling/{k}": v for k, v in out.items()}


def correction(
    trainer_logp: Tensor,
    engine_logp: Tensor,
    sample: Tensor,
    mode: str = "off",
    clip_max: float = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """[M] float32: the factor of each token's loss that makes up for sampling from μ instead of π.
    No gradient flows through it.

    trainer_logp, engine_logp: [M]; sample: [M] int64, which sample a token belongs to. With ρ =
    π/μ, of each token, or of each sample as the product over its tokens (not their mean):

    token_truncate, sequence_truncate    ρ, brought into [clip_min, clip_max]       (TIS: Yao et al. 2025)
    token_mask, sequence_mask            ρ inside [clip_min, clip_max], 0 outside   (IcePop, MIS)
    off                                  1

    clip_min None: 0. ValueError on bounds that no ratio of 1 lies between, and on an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: choose one of {', '.join(MODES)}")
    low = 0.0 if clip_min is None else clip_min
    if not 0 <= low <= 1 <= clip_max < math.inf:
        raise ValueError(
            f"the bounds {low} and {clip_max} must enclose 1: equal policies need no correction"
        )
    delta = (trainer_logp - engine_logp).detach().float()  # [M]
    if mode == "off":
        return torch.ones_like(delta)
    if mode.startswith("sequence"):
        count = int(sample.max()) + 1 if len(sample) else 0
        # [samples]
        sums = torch.zeros(count, dtype=torch.float64, device=delta.device).index_add_(
            0, sample, delta.double()
        )
        delta = sums.float()[sample]  # [M]
    ratio = delta.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(low, clip_max)
    return torch.where((ratio >= low) & (ratio <= clip_max), ratio, 0.0)

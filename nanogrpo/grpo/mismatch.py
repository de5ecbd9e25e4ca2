"""The gap between trainer and engine on the same tokens, and a correction for it: pure functions of
two vectors of log-probs.

In: the log-probs of the same M tokens, as computed by the trainer before the first update and by
the engine that sampled them, both at the sampling temperature. Out: the metrics that are logged
every step (`compare`), and a weight for each token's loss (`correction`).

Samples come from μ, the engine's policy, while π, the trainer's policy, is trained as if it had
sampled them. Both have the same weights. Different kernels, precisions and batch shapes make their
log-probs differ a little; a faulty weight sync makes them differ a lot. So these metrics serve
above all as an alarm. In float32 on one machine they are about 1e-6, and in bfloat16 a k3 of 1e-3
is normal. A mean ratio that grows past 1.02 over many steps means that the engine does not receive
the weights. Names and modes are those of TRL 1.16's `vllm_importance_sampling_*`. Read before:
grpo/loss.py. Read next: docs/metrics.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanogrpo.grpo.spread import Gather, one_rank, spreads
from nanogrpo.kernels.reference import LOG_RATIO_MAX


def compare(
    delta: Tensor, weight: Tensor | None = None, gather: Gather = one_rank
) -> dict[str, float]:
    """Return the metrics over M tokens, which may be divided over the ranks.

    delta: [M] float32, Δ = log π − log μ. weight: [M], from `correction`; without it, the last
    three are left out. gather: World.gather, which every rank must then call.

    sampling_logp_difference/mean, max     mean and maximum of |Δ|, as in TRL
    k3                                     mean of e^Δ − 1 − Δ, never negative: an estimate of
                                           KL(μ‖π) on μ's own tokens (Schulman 2020)
    ratio                                  mean of e^|Δ|: 1 if both policies agree
    importance_sampling_ratio/min, …       minimum, mean and maximum of the weights, as in TRL
    masked                                 share of tokens with weight 0
    ess                                    effective share of the tokens, (Σw)² / (M · Σw²): 1 when
                                           all weights are equal
    """
    delta = delta.double()  # so that a difference of 1e-6 keeps its precision
    clamped = delta.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    terms = {
        "gap": delta.abs(),
        "k3": clamped.exp() - 1 - clamped,
        "ratio": clamped.abs().exp(),
    }
    if weight is not None:
        weight = weight.double()
        terms |= {"weight": weight, "square": weight * weight, "masked": weight == 0}
    found = spreads(terms, gather)
    out = {
        "sampling_logp_difference/mean": found["gap"].mean,
        "sampling_logp_difference/max": found["gap"].most,
        "k3": found["k3"].mean,
        "ratio": found["ratio"].mean,
    }
    if weight is not None:
        w, square = found["weight"], found["square"].mean
        out |= {
            "importance_sampling_ratio/min": w.least,
            "importance_sampling_ratio/mean": w.mean,
            "importance_sampling_ratio/max": w.most,
            "masked": found["masked"].mean,
            # if all weights are 0, so is the result
            "ess": w.mean**2 / square if square > 0 else 0.0,
        }
    return {f"sampling/{name}": value for name, value in out.items()}


def correction(
    trainer_logp: Tensor,
    engine_logp: Tensor,
    sample: Tensor,
    mode: str,
    clip_max: float,
    clip_min: float | None = None,
) -> Tensor:
    """Return the factors of the tokens' losses that correct for sampling from μ instead of π.

    trainer_logp, engine_logp: [M]; sample: [M] int64, the sample each token belongs to. Returns [M]
    float32, without gradient. ρ = π/μ is computed per token, or per sample as the product (not the
    mean) over its tokens. Its bounds are clip_min (None: 0) and clip_max.

    token_truncate, sequence_truncate    ρ clamped to the bounds         (TIS: Yao et al. 2025)
    token_mask, sequence_mask            ρ within the bounds, else 0     (IcePop, MIS)
    """
    delta = (trainer_logp - engine_logp).detach().float()  # [M]
    if mode.startswith("sequence"):
        sums = delta.new_zeros(int(sample.max()) + 1 if len(sample) else 0, dtype=torch.float64)
        delta = sums.index_add_(0, sample, delta.double()).float()[sample]  # [M]
    ratio = delta.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    low = clip_min or 0.0
    if mode.endswith("truncate"):
        return ratio.clamp(low, clip_max)
    return torch.where((ratio >= low) & (ratio <= clip_max), ratio, 0.0)

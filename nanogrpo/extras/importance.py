"""Correct for the gap between the log-probs of trainer and engine. This is done with importance
weights, or by using the engine's log-probs as old log-probs.

The engine's policy μ has sampled the completions, but the trainer's policy π is trained as if it
had sampled them itself. Each token's loss is multiplied by its importance weight ρ = π/μ. The
options and their modes are the same as `vllm_importance_sampling_*` in TRL 1.16.

In: the micro-batches of an optimizer step. Out: their `old_logp` and `importance`. Read before:
grpo/mismatch.py (how large the gap is).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanogrpo.distributed.world import World
from nanogrpo.extras.objectives import Sequences
from nanogrpo.feature import Feature
from nanogrpo.kernels.reference import policy
from nanogrpo.run.setup import Run
from nanogrpo.step import logp
from nanogrpo.types import PackedBatch


class Importance(Feature):
    def __init__(self) -> None:
        self.weights: list[Tensor] = []  # importance weights of the step

    def batches(self, run: Run, batches: Sequence[PackedBatch]) -> None:
        cfg: Any = run.cfg
        for batch in batches:
            if cfg.old_from_engine:
                batch.old_logp = batch.sampling_logp
                continue
            batch.old_logp = logp(run.model, batch, cfg)
            batch.importance = correction(
                batch.old_logp,
                batch.sampling_logp,
                batch.sample,
                cfg.vllm_importance_sampling_mode,
                cfg.vllm_importance_sampling_clip_max,
                cfg.vllm_importance_sampling_clip_min,
            )
            self.weights.append(batch.importance)

    def step(self, run: Run, *_: Any) -> dict[str, float]:
        weights, self.weights = self.weights, []
        return measured(torch.cat([torch.empty(0), *(w.cpu() for w in weights)]), run.world)


def measured(weight: Tensor, world: World) -> dict[str, float]:
    """Return the metrics of the importance weights of all ranks. `weight` [M] are the weights of
    this rank.

    * importance_sampling_ratio/min, mean and max: the range and the mean of the weights, as in TRL.
    * masked: the fraction of tokens with weight 0.
    * ess: the effective sample size as a fraction of the tokens, (Σw)² / (M · Σw²). This fraction
      is 1 if all weights are equal.
    """
    weight = weight.double()
    found = world.spreads({"weight": weight, "square": weight * weight, "masked": weight == 0})
    if not found:  # the engine's log-probs are the old log-probs, or every completion was masked
        return {}
    w, square = found["weight"], found["square"].mean
    return {
        "sampling/importance_sampling_ratio/min": w.min,
        "sampling/importance_sampling_ratio/mean": w.mean,
        "sampling/importance_sampling_ratio/max": w.max,
        "sampling/masked": found["masked"].mean,
        # the result is 0 if all weights are 0
        "sampling/ess": w.mean**2 / square if square > 0 else 0.0,
    }


def correction(
    trainer_logp: Tensor,
    engine_logp: Tensor,
    sample: Tensor,
    mode: str,
    clip_max: float,
    clip_min: float | None = None,
) -> Tensor:
    """Return a factor for each token's loss, to correct for sampling from μ instead of π.

    `trainer_logp` and `engine_logp` are [M]. `sample` [M] int64 has the index of each token's
    sample. Returns [M] float32, without gradient. The ratio ρ = π/μ is computed per token, or per
    sample as the product (not the mean) over its tokens. The bounds of ρ are clip_min (or 0, if it
    is None) and clip_max.

    * token_truncate, sequence_truncate: ρ clamped to the bounds (TIS, Yao et al. 2025).
    * token_mask, sequence_mask: ρ if it is within the bounds, else 0 (IcePop, MIS).
    """
    delta = (trainer_logp - engine_logp).detach().float()  # [M]
    if mode.startswith("sequence"):
        delta = Sequences(sample, torch.ones_like(sample, dtype=torch.bool)).sum(delta)  # [M]
    ratio = policy.exp(delta)
    low = clip_min or 0.0
    if mode.endswith("truncate"):
        return ratio.clamp(low, clip_max)
    return torch.where((ratio >= low) & (ratio <= clip_max), ratio, 0.0)

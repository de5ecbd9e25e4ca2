"""Estimate advantages with RLOO, with MaxRL, or with GDPO (for several rewards).

In: rewards [P, G] (NaN: no reward function applied) and the rewards of each function [P·G, F]. Out:
advantages [P, G]. All functions are pure. The formulas are the same as in TRL 1.16.0, and tests
compare them with TRL's code. Read before: grpo/advantages.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanogrpo.extras.options import EstimatorsOptions
from nanogrpo.feature import Feature
from nanogrpo.grpo.advantages import STD_EPS, centered, group_relative, nanstd


@dataclass
class Estimators(Feature):
    cfg: EstimatorsOptions

    def advantages(self, rewards: Tensor, by_function: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.cfg.multi_objective_aggregation == "normalize_then_sum":
            weights = self.cfg.reward_weights or [1.0] * by_function.shape[1]
            table = by_function.view(*rewards.shape, -1)  # [P, G, F]
            return decoupled(table, torch.tensor(weights, dtype=rewards.dtype))
        if self.cfg.advantage_estimator == "grpo":
            return None
        estimate = maxrl if self.cfg.advantage_estimator == "maxrl" else leave_one_out
        return estimate(rewards), nanstd(centered(rewards), dim=1)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return A = r - (mean reward of the other completions) = n/(n-1)·(r - mean_group).

    RLOO: Ahmadian et al. 2024 (2402.14740).
    """
    n = rewards.isfinite().sum(1, keepdim=True)  # [P, 1]
    return centered(rewards) * n / (n - 1).clamp(min=1)


def maxrl(rewards: Tensor) -> Tensor:
    """Return A = (r - mean_group) / mean_group, or 0 if the mean is not above 0.

    With rewards 0 and 1, training maximizes the log of the success rate instead of the rate
    itself, so a rare success counts more. MaxRL 2026 (2602.02710).
    """
    mean = rewards.nanmean(1, keepdim=True)  # [P, 1]
    # rounding errors can make a mean of 0 slightly positive: 0.1 + 0.2 - 0.3 > 0
    least = 1e-9 * rewards.abs().nan_to_num(0.0).amax(1, keepdim=True)
    return torch.where(mean > least, centered(rewards) / mean, 0.0)


def decoupled(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize each reward within its group, take the weighted sum, and normalize over the batch.

    GDPO (2601.05242): rewards [P, G, F], weights [F] → advantages [P, G], and the standard
    deviation [1, 1] of the sums.
    """
    scaled, _ = group_relative(rewards)
    total = scaled.nan_to_num(0.0) @ weights  # [P, G]
    total = total.masked_fill(rewards.isnan().all(2), torch.nan)
    # The mean of the sums is 0 up to rounding, because it is 0 in each group.
    # The mean is not subtracted, so that a sum of exactly 0 remains exactly 0.
    std = nanstd(total.view(1, -1), dim=1)
    return total / (std + STD_EPS), std

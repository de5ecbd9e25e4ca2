"""Advantages: how much better each completion did than the other completions of its prompt.

In: rewards [P, G], NaN where no reward function applied. Out: advantages [P, G], in which NaN means
"no evidence" until `step_advantages` replaces it with 0. All functions are pure. The formulas are
those of TRL 1.16.0, and tests compare them with TRL's code; docs/equations.md lists the papers.
Adding another estimator takes a few lines (docs/fork.md). Read next: loss.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanogrpo.config import Config

STD_EPS = 1e-4  # added to every standard deviation, as in TRL


def nanstd(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the sample standard deviation of the values that are not NaN.

    It is NaN if there are fewer than two such values.
    """
    n = x.isfinite().sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return torch.where(n > 1, squares / (n - 1).clamp(min=1), torch.nan).sqrt()


def centered(rewards: Tensor) -> Tensor:
    """Return r - mean over dim 1, ignoring NaN. Equal rewards give exactly 0: the lowest reward is
    subtracted first, so the mean has no rounding error.
    """
    lowest = torch.where(rewards.isnan(), torch.inf, rewards).amin(dim=1, keepdim=True)
    return (rewards - lowest) - (rewards - lowest).nanmean(dim=1, keepdim=True)


def group_relative(rewards: Tensor, scale_rewards: str = "group") -> tuple[Tensor, Tensor]:
    """Return A = (r - mean_group) / (std + 1e-4) [P, G], and std [P, 1] or [1, 1].

    Shao et al. 2024 (2402.03300), section 4.1.2. scale_rewards: "group" divides by the standard
    deviation of the group, "batch" divides by that of all P·G rewards (the mean is still that of
    the group), and "none" does not divide (Dr. GRPO, Liu et al. 2025, 2503.20783).
    """
    values = centered(rewards)
    std = nanstd(rewards, dim=(0, 1)) if scale_rewards == "batch" else nanstd(values, dim=1)
    return values if scale_rewards == "none" else values / (std + STD_EPS), std


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return A = r - mean of the other completions = n/(n-1)·(r - mean_group).

    RLOO: Ahmadian et al. 2024 (2402.14740).
    """
    n = rewards.isfinite().sum(1, keepdim=True)  # [P, 1]
    return centered(rewards) * n / (n - 1).clamp(min=1)


def maxrl(rewards: Tensor) -> Tensor:
    """Return A = (r - mean_group) / mean_group, or 0 if the mean is not above 0.

    With rewards 0 and 1, this gives the gradient of the log of the success rate instead of the rate
    itself, so the rarer a success, the more it counts. MaxRL 2026 (2602.02710).
    """
    mean = rewards.nanmean(1, keepdim=True)  # [P, 1]
    # rounding errors can make a mean of 0 slightly positive: 0.1 + 0.2 - 0.3 > 0
    least = 1e-9 * rewards.abs().nan_to_num(0.0).amax(1, keepdim=True)
    return torch.where(mean > least, centered(rewards) / mean, 0.0)


def decoupled(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize each reward within its group, take the weighted sum, and normalize over the batch.

    GDPO (2601.05242). rewards [P, G, F], weights [F] → advantages [P, G], and the standard
    deviation [1, 1] of the sums.
    """
    scaled, _ = group_relative(rewards)
    total = scaled.nan_to_num(0.0) @ weights  # [P, G]
    total = total.masked_fill(rewards.isnan().all(2), torch.nan)
    # The mean of the sums is 0 up to rounding, like that of each group. It is not subtracted, so a
    # completion without signal stays at exactly 0.
    std = nanstd(total.view(1, -1), dim=1)
    return total / (std + STD_EPS), std


def step_advantages(
    rewards: Sequence[float | None], cfg: Config, by_function: Sequence[Sequence[float | None]] = ()
) -> tuple[list[float], Tensor]:
    """Return the advantage of each completion of a step, and the standard deviations.

    rewards: the weighted sums, G consecutive completions per group; None: no reward function
    applied, and the advantage is 0. by_function: the rewards of each function before they were
    summed, which `normalize_then_sum` needs. With several ranks, pass the rewards of all ranks. The
    standard deviations, [P, 1] or [1, 1], show which groups have no learning signal.
    """

    def tensor(values: Sequence) -> Tensor:
        return torch.tensor([torch.nan if r is None else r for r in values], dtype=torch.float64)

    groups = tensor(rewards).view(-1, cfg.num_generations)  # [P, G]
    values, std = group_relative(groups)
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        table = torch.stack([tensor(each) for each in by_function])  # [P·G, F]
        weights = tensor(cfg.reward_weights or [1.0] * table.shape[1])
        values, std = decoupled(table.view(*groups.shape, -1), weights)
    elif cfg.advantage_estimator == "rloo":
        values = leave_one_out(groups)
    elif cfg.advantage_estimator == "maxrl":
        values = maxrl(groups)
    else:
        values, std = group_relative(groups, cfg.scale_rewards)
    return values.nan_to_num(0.0).flatten().tolist(), std

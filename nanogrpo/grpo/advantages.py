"""Advantages: how much better each completion did than the other completions of its prompt.

In: rewards [P, G], NaN where no reward function applied. Out: advantages [P, G]. An advantage that
cannot be computed is NaN, until `step_advantages` replaces it with 0. All functions are pure. The
formulas are the same as in TRL 1.16.0, and tests compare them with TRL's code. The page
docs/equations.md lists the papers. Adding another estimator takes a few lines (docs/fork.md). Read
next: loss.py.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.feature import Feature, first

STD_EPS = 1e-4  # added to every standard deviation, as in TRL


def nanstd(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the sample standard deviation of the values that are not NaN.

    The result is NaN if there are fewer than two such values.
    """
    n = x.isfinite().sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return torch.where(n > 1, squares / (n - 1).clamp(min=1), torch.nan).sqrt()


def centered(rewards: Tensor) -> Tensor:
    """Return r - mean over dim 1, ignoring NaN. Equal rewards give exactly 0, because the lowest
    reward is subtracted before the mean is computed.
    """
    lowest = torch.where(rewards.isnan(), torch.inf, rewards).amin(dim=1, keepdim=True)
    return (rewards - lowest) - (rewards - lowest).nanmean(dim=1, keepdim=True)


def group_relative(rewards: Tensor, scale_rewards: str = "group") -> tuple[Tensor, Tensor]:
    """Return A = (r - mean_group) / (std + 1e-4) [P, G], and std [P, 1] or [1, 1].

    The formula is from Shao et al. 2024 (2402.03300), section 4.1.2. If `scale_rewards` is "group",
    std is the standard deviation of the group. If `scale_rewards` is "batch", std is the standard
    deviation of all P·G rewards, but the mean is still the mean of the group. If `scale_rewards` is
    "none", there is no division (dr_grpo, Liu et al. 2025, 2503.20783).
    """
    values = centered(rewards)
    std = nanstd(rewards, dim=(0, 1)) if scale_rewards == "batch" else nanstd(values, dim=1)
    return values if scale_rewards == "none" else values / (std + STD_EPS), std


def step_advantages(
    rewards: Sequence[float | None],
    cfg: Config,
    by_function: Sequence[Sequence[float | None]] = (),
    features: Sequence[Feature] = (),
) -> tuple[list[float], Tensor]:
    """Return the advantage of each completion of a step, and the standard deviations.

    `rewards` holds the weighted sums of all ranks, with G consecutive completions per group. If no
    reward function applied, the reward is None and the advantage is 0. `by_function` holds the
    rewards of each function before they were summed. If a feature computes advantages, its
    advantages are used instead. If several features compute advantages, the advantages of the first
    feature are used. If a standard deviation is 0, the group ([P, 1]) or the whole step ([1, 1])
    has no learning signal.
    """
    # numpy turns None into NaN
    groups = torch.from_numpy(np.array(rewards, float)).view(-1, cfg.num_generations)  # [P, G]
    table = torch.from_numpy(np.array(by_function, float))  # [P·G, reward functions]
    found = first(feature.advantages(groups, table) for feature in features)
    values, std = found or group_relative(groups, cfg.scale_rewards)
    return values.nan_to_num(0.0).flatten().tolist(), std

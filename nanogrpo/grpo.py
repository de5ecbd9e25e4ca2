"""GRPO itself: advantages of a group, the weight of a token, the objective of a batch. Pure functions, no model, no processes.

In: rewards `[P, G]` and the per-token vectors `[M]` of a PackedBatch. Out: advantages `[P, G]`, and an operation that turns
hidden states into a loss. The formulas are those of TRL 1.16.0 (tests hold them against its code); docs/equations.md lists them
beside their papers. To try another algorithm, replace `objective`: docs/fork.md shows how, in a dozen lines.
Read next: ops.py (what the fused loss computes), packing.py (where weights meet tokens).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanogrpo import ops
from nanogrpo.batch import PackedBatch, Sample
from nanogrpo.config import Config

HeadOp = Callable[[Tensor, Tensor], Any]  # (hidden [M, D], lm_head [V, D]) → anything; what Decoder.score applies

STD_EPS = 1e-4  # added to every standard deviation, as TRL does


def nanstd(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Standard deviation with Bessel's correction over the values that are not NaN; NaN where fewer than two are."""
    n = x.isfinite().sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return torch.where(n > 1, squares / (n - 1).clamp(min=1), torch.nan).sqrt()


def advantages(rewards: Tensor, scale_rewards: str = "group") -> tuple[Tensor, Tensor]:
    """How much better than its group each completion did: A = (r - mean_group) / (std + 1e-4). Shao et al. 2024, section 4.1.2.

    rewards: [P, G] float, NaN where no reward function applied; those are left out of the baseline and get advantage 0.
    scale_rewards: "group" divides by the group's standard deviation, "batch" by that of all P·G rewards (the mean stays the
    group's), "none" does not divide (Liu et al. 2025, Dr. GRPO).
    Returns the advantages [P, G], and the standard deviations [P, 1] or [1, 1] that tell which groups carry no signal.
    """
    lowest = torch.where(rewards.isnan(), torch.inf, rewards).amin(dim=1, keepdim=True)  # [P, 1]
    rewards = rewards - lowest  # changes no result, but equal rewards are now exactly 0, whatever the mean's rounding
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    std = nanstd(rewards + lowest, dim=(0, 1)) if scale_rewards == "batch" else nanstd(rewards, dim=1)
    scaled = centred if scale_rewards == "none" else centred / (std + STD_EPS)
    return scaled.nan_to_num(0.0), std


def step_advantages(rewards: Sequence[float | None], cfg: Config) -> tuple[list[float], Tensor]:
    """The advantage of each completion of a step, groups being G completions in a row; None: no reward function applied.

    Also returns the standard deviations of `advantages`. With many ranks, `rewards` are those of all.
    """
    values = torch.tensor([torch.nan if r is None else r for r in rewards], dtype=torch.float64)  # [P·G]
    scaled, std = advantages(values.view(-1, cfg.num_generations), cfg.scale_rewards)
    return scaled.flatten().tolist(), std


def is_trained(sample: Sample, cfg: Config) -> bool:
    """Whether the tokens of a completion carry loss. One cut at the length limit tells nothing about its end: DAPO masks it."""
    return sample.stopped or not cfg.mask_truncated_completions


def token_weight(length: int, n_samples: int, n_tokens: int, cfg: Config) -> float:
    """The factor of each token of a completion, fixed before the forward so that every split of a step has the same gradient.

    length: trained tokens of this completion; n_samples, n_tokens: completions and trained tokens of the whole optimizer step,
    over all micro-batches and ranks.
    """
    match cfg.loss_type:
        case "grpo":  # mean over completions of the mean over tokens: Shao et al. 2024, equation 3
            return 1.0 / (n_samples * max(length, 1))
        case "dr_grpo":  # a constant, so that length earns nothing: Liu et al. 2025
            return 1.0 / (n_samples * cfg.max_completion_length)
        case _:  # dapo: each token of the step counts the same (Yu et al. 2025, equation 8)
            # bnpo is this mean over one micro-batch. Its dependence on the split is what we do not want: here the two are one.
            return 1.0 / max(n_tokens, 1)


def objective(batch: PackedBatch, cfg: Config) -> HeadOp:
    """The clipped policy gradient of a batch, as a head operation: (hidden [M, D], lm_head [V, D]) → ops.PolicyOut.

    Per token, with ratio w = exp(logp - old_logp), or 1 in value when on policy (old_logp is None):
        l = -min(min(w, delta)·A, clamp(w, 1-ε, 1+ε_high)·A)·importance + β·k3(logp, ref_logp)·w
    and loss = Σ weight·l. Schulman et al. 2017 (clip), Yu et al. 2025 (ε_high), INTELLECT-2 2025 (delta), Schulman 2020 (k3).
    The formula itself stands in `policy_terms` of kernels/reference.py and, for the GPU, in `terms` of kernels/policy.py.
    """
    return functools.partial(
        ops.head_policy_loss,
        targets=batch.targets,
        old_logp=batch.old_logp,
        advantage=batch.advantage,
        weight=batch.weight,
        temperature=cfg.temperature,
        epsilon=cfg.epsilon,
        epsilon_high=cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high,
        delta=cfg.delta,
        ref_logp=batch.ref_logp,
        beta=cfg.beta,
        importance=batch.importance,
        use_bias_correction_kl=cfg.use_bias_correction_kl,
    )


def logp_of(batch: PackedBatch, cfg: Config) -> HeadOp:
    """The log-probs of a batch's targets at the sampling temperature, as a head operation: → (logp [M], None)."""
    return functools.partial(ops.head_logp, targets=batch.targets, temperature=cfg.temperature)

"""GRPO itself: advantages of a group, the weight of a token, the objective of a batch. Pure
functions, no model, no processes.

In: rewards `[P, G]` and the per-token vectors `[M]` of a PackedBatch. Out: advantages `[P, G]`, and
an operation that turns hidden states into a loss. The formulas are those of TRL 1.16.0 (tests hold
them against its code); docs/equations.md lists them beside their papers. Another algorithm is a few
lines: docs/fork.md. Read next: objectives.py (what each loss type is), ops.py (what the fused loss
computes), packing.py (where weights meet tokens).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from nanogrpo.config import CLIPPED, Config
from nanogrpo.grpo import objectives
from nanogrpo.model import head as ops
from nanogrpo.model.head import HeadOp
from nanogrpo.types import PackedBatch, Sample

STD_EPS = 1e-4  # added to every standard deviation, as TRL does


def nanstd(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Standard deviation with Bessel's correction over the values that are not NaN; NaN where fewer
    than two are.
    """
    n = x.isfinite().sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return torch.where(n > 1, squares / (n - 1).clamp(min=1), torch.nan).sqrt()


def centred(rewards: Tensor) -> Tensor:
    """r - mean over dim 1, NaN left out; equal rewards give exactly 0, whatever their mean's
    rounding.
    """
    lowest = torch.where(rewards.isnan(), torch.inf, rewards).amin(dim=1, keepdim=True)
    return (rewards - lowest) - (rewards - lowest).nanmean(dim=1, keepdim=True)


def advantages(rewards: Tensor, scale_rewards: str = "group") -> tuple[Tensor, Tensor]:
    """How much better than its group each completion did: A = (r - mean_group) / (std + 1e-4). Shao
    et al. 2024, section 4.1.2.

    rewards: [P, G] float, NaN where no reward function applied; those are left out of the baseline
    and get advantage 0. scale_rewards: "group" divides by the group's standard deviation, "batch"
    by that of all P·G rewards (the mean stays the group's), "none" does not divide (Liu et al.
    2025, Dr. GRPO). Returns the advantages [P, G], and the standard deviations [P, 1] or [1, 1]
    that tell which groups carry no signal.
    """
    std = (
        nanstd(rewards, dim=(0, 1)) if scale_rewards == "batch" else nanstd(centred(rewards), dim=1)
    )
    scaled = centred(rewards) if scale_rewards == "none" else centred(rewards) / (std + STD_EPS)
    return scaled.nan_to_num(0.0), std


def leave_one_out(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """A = r - mean of the other completions = n/(n-1)·(r - mean_group). RLOO: Ahmadian et al. 2024
    (2402.14740).
    """
    n = rewards.isfinite().sum(1, keepdim=True)  # [P, 1]
    return (centred(rewards) * n / (n - 1).clamp(min=1)).nan_to_num(0.0), nanstd(
        centred(rewards), dim=1
    )


def maxrl(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """A = (r - mean_group) / mean_group, 0 where the mean is not above 0 by more than rounding: the
    fewer succeed, the more a success weighs.

    With rewards 0 and 1, the gradient of the log of the success rate instead of the rate itself:
    MaxRL 2026 (2602.02710).
    """
    mean = rewards.nanmean(1, keepdim=True)  # [P, 1]
    # 0.1 + 0.2 - 0.3 is above 0, too
    least = 1e-9 * rewards.abs().nan_to_num(0.0).amax(1, keepdim=True)
    return torch.where(mean > least, centred(rewards) / mean, 0.0).nan_to_num(0.0), nanstd(
        centred(rewards), dim=1
    )


def decoupled(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Each reward is normalised within its group, then weighted and summed, then normalised over
    the batch: GDPO (2601.05242).

    rewards: [P, G, F], weights: [F] → advantages [P, G], and the standard deviation [1, 1] of the
    sums.
    """
    none = rewards.isnan().all(2)  # [P, G]
    scaled = centred(rewards) / (nanstd(centred(rewards), dim=1) + STD_EPS)
    total = (scaled.nan_to_num(0.0) @ weights).masked_fill(none, torch.nan).view(1, -1)  # [1, P·G]
    std = nanstd(total, dim=1)
    # Their mean is 0 but for rounding, as each group's is: so it is not subtracted, and what has no
    # signal is 0 to the last bit.
    return (total / (std + STD_EPS)).nan_to_num(0.0).view(none.shape), std


def step_advantages(
    rewards: Sequence[float | None], cfg: Config, by_function: Sequence[Sequence[float | None]] = ()
) -> tuple[list[float], Tensor]:
    """The advantage of each completion of a step, groups being G completions in a row; None: no
    reward function applied.

    rewards: the weighted sums; by_function: what they were summed from, for normalize_then_sum.
    With many ranks, those of all. Also returns the standard deviations of `advantages`.
    """

    def tensor(values: Sequence) -> Tensor:
        return torch.tensor([torch.nan if r is None else r for r in values], dtype=torch.float64)

    groups = tensor(rewards).view(-1, cfg.num_generations)  # [P, G]
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        table = torch.stack([tensor(row) for row in by_function])  # [P·G, F]
        weights = tensor(cfg.reward_weights or [1.0] * table.shape[1])
        values, std = decoupled(table.view(*groups.shape, -1), weights)
    elif cfg.advantage_estimator == "rloo":
        values, std = leave_one_out(groups)
    elif cfg.advantage_estimator == "maxrl":
        values, std = maxrl(groups)
    else:
        values, std = advantages(groups, cfg.scale_rewards)
    return values.flatten().tolist(), std


def is_trained(sample: Sample, cfg: Config) -> bool:
    """Whether the tokens of a completion carry loss. One cut at the length limit tells nothing
    about its end: DAPO masks it.
    """
    return sample.stopped or not cfg.mask_truncated_completions


def token_weight(length: int, n_samples: int, n_tokens: int, cfg: Config) -> float:
    """The factor of each token of a completion, fixed before the forward so that every split of a
    step has the same gradient.

    length: trained tokens of this completion; n_samples, n_tokens: completions and trained tokens
    of the whole optimizer step, over all micro-batches and ranks.
    """
    match cfg.loss_type:
        # mean over completions of the mean over tokens: Shao et al. 2024, equation 3
        case "grpo" | "sapo":
            return 1.0 / (n_samples * max(length, 1))
        case "dr_grpo":  # a constant, so that length earns nothing: Liu et al. 2025
            return 1.0 / (n_samples * cfg.max_completion_length)
        case "luspo":  # mean over completions of the sum over tokens: LUSPO 2026 (2602.05261)
            return 1.0 / n_samples
        # dapo and the others: each token of the step counts the same (Yu et al. 2025, equation 8)
        case _:
            # bnpo is this mean over one micro-batch. Its dependence on the split is what we do not
            # want: here the two are one.
            return 1.0 / max(n_tokens, 1)


def objective(batch: PackedBatch, cfg: Config) -> HeadOp:
    """The loss of a batch as a head operation: (hidden [M, D], lm_head [V, D]) → ops.PolicyOut. Its
    value is that of `loss`.

    Terms that each token knows of itself are computed by the fused head, in three matrix products;
    a ratio or a mask of whole sequences needs the log-probs first, and the objectives beside the
    clip are not in the kernel: two phases, four products.
    """
    fused = (
        cfg.loss_type in CLIPPED
        and cfg.importance_sampling_level == "token"
        and cfg.off_policy_mask_threshold is None
    )
    if fused:
        return functools.partial(
            ops.head_policy_loss,
            targets=batch.targets,
            old_logp=batch.old_logp,
            advantage=batch.advantage,
            weight=batch.weight,
            temperature=cfg.temperature,
            epsilon=cfg.epsilon,
            epsilon_high=cfg.upper_epsilon,
            delta=cfg.delta,
            ref_logp=batch.ref_logp,
            beta=cfg.beta,
            use_bias_correction_kl=cfg.use_bias_correction_kl,
            importance=factor(batch),
            entropy_weight=batch.entropy_weight,
        )

    def two_phases(hidden: Tensor, lm_head: Tensor) -> ops.PolicyOut:
        # [M], [M]
        logp, entropy = ops.head_logp(hidden, lm_head, batch.targets, cfg.temperature, entropy=True)
        return loss(logp, entropy, batch, cfg)

    return two_phases


def factor(batch: PackedBatch, importance: bool = True) -> Tensor | None:
    """What multiplies the policy's term of each token, [M]: the correction for the engine's
    log-probs, the entropy mask.
    """
    known = [
        x for x in (batch.importance if importance else None, batch.entropy_mask) if x is not None
    ]
    return functools.reduce(torch.mul, (x.to(batch.weight.dtype) for x in known)) if known else None


def loss(logp: Tensor, entropy: Tensor, batch: PackedBatch, cfg: Config) -> ops.PolicyOut:
    """The whole loss from log-probs and entropies [M] that carry a gradient: what `objective`
    computes, in plain PyTorch.

        loss = Σ weight·(l·factor + β·k3·w) - Σ entropy_weight·H

    l: of objectives.TERMS; w = exp(logp - old_logp), 1 in value on policy (old_logp None), its
    mean's exp for a sequence. The KL is added last and multiplied by none of the masks, as in TRL.
    Tokens of weight 0 count for nothing, whatever they hold.
    """
    trained = batch.weight != 0  # [M]
    masked = lambda x: torch.where(trained, x, 0.0)  # noqa: E731 (before the maths, so that no nan of theirs has a gradient)
    logp, sequences = masked(logp), objectives.Sequences(batch.sample, trained)
    old_logp = logp.detach() if batch.old_logp is None else masked(batch.old_logp)
    log_ratio = logp - old_logp
    by_sequence = cfg.importance_sampling_level == "sequence"
    ratio = objectives.exp(sequences.mean(log_ratio) if by_sequence else log_ratio)
    vectors = (
        old_logp,
        masked(batch.sampling_logp),
        batch.advantage,
        log_ratio,
        ratio,
        batch.importance,
    )
    tokens = objectives.Tokens(logp, *vectors, sequences)
    l, seen = objectives.TERMS[cfg.loss_type](tokens, cfg)  # [M]
    if cfg.off_policy_mask_threshold is not None:
        l = l * objectives.on_policy_enough(tokens, cfg.off_policy_mask_threshold)
    multiplier = factor(batch, importance=cfg.loss_type != "vespo")  # vespo has it inside
    l = l if multiplier is None else l * multiplier
    kl = None
    if batch.ref_logp is not None:
        kl = objectives.k3(logp, masked(batch.ref_logp)) * (
            ratio if cfg.use_bias_correction_kl else 1.0
        )
        l = l + cfg.beta * kl
    total = (batch.weight * masked(l)).sum()
    if batch.entropy_weight is not None:
        total = total - (batch.entropy_weight * masked(entropy)).sum()
    clip = seen.pop("clip", None)
    seen = {name: x.detach().to(logp.dtype) for name, x in seen.items()}
    kl = None if kl is None else kl.detach()
    by_sequence |= cfg.loss_type == "vespo"
    return ops.PolicyOut(
        total, logp.detach(), entropy.detach(), clip, kl, seen=seen, by_sequence=by_sequence
    )


def logp_of(batch: PackedBatch, cfg: Config, entropy: bool = False) -> HeadOp:
    """The log-probs of a batch's targets at the sampling temperature, as a head operation: → (logp
    [M], entropy [M] or None).
    """
    return functools.partial(
        ops.head_logp, targets=batch.targets, temperature=cfg.temperature, entropy=entropy
    )

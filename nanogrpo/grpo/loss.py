"""The GRPO objective of a batch, and the weight of each token. Pure functions: no model, no
processes.

In: the per-token vectors [M] of a `PackedBatch`. Out: an operation that turns hidden states into a
loss. The loss itself is `policy_terms` in kernels/reference.py, about 25 lines:

    r = exp(logp - old_logp)                                    the ratio to the policy that sampled
    l = -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A)        the clipped surrogate
    loss = Σ weight·(l·importance + β·KL) - Σ entropy_weight·H

`objective` runs it through `head_policy_loss`, which also computes the gradient in the same pass
over the logits. That works for the default run and whenever the loss of a token depends on its own
log-prob alone. All other objectives (sequence-level ratios and masks, and loss types other than the
clipped ones) go through `loss` below. It computes the same formula from log-probs that require a
gradient, and autograd computes the derivatives.

The formulas are those of TRL 1.16.0, and tests compare them with TRL's code. docs/equations.md
lists the papers. Adding another algorithm takes a few lines (docs/fork.md). Read next:
kernels/reference.py (the loss of a token), objectives.py (the other loss types), packing.py (which
sets the weights).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nanogrpo.config import CLIPPED, Config
from nanogrpo.grpo import objectives
from nanogrpo.kernels import reference
from nanogrpo.kernels.reference import LossInputs
from nanogrpo.model import head
from nanogrpo.model.head import HeadOp, PolicyOut
from nanogrpo.types import PackedBatch, Sample


def is_trained(sample: Sample, cfg: Config) -> bool:
    """Return whether the tokens of a completion contribute to the loss.

    A completion truncated at the length limit does not show how it would have ended, so DAPO masks
    it.
    """
    return sample.stopped or not cfg.mask_truncated_completions


def has_gradient(sample: Sample, cfg: Config) -> bool:
    """Return whether the loss of a completion depends on the weights.

    With an advantage of 0, it depends on them only through the terms that the advantage does not
    multiply: the KL, the entropy bonus and the penalty of dppo. Under --top-entropy-quantile, its
    entropies also decide which tokens of other completions are trained on.
    """
    others = cfg.beta or cfg.entropy_coef or cfg.use_adaptive_entropy or cfg.dppo_penalty
    return sample.advantage != 0 or bool(others) or cfg.top_entropy_quantile < 1


def token_weight(length: int, n_samples: int, n_tokens: int, cfg: Config) -> float:
    """Return the factor by which each token of a completion is weighted in the loss.

    It is fixed before the forward pass, so the gradient does not depend on how a step is split.
    length: trained tokens of this completion; n_samples, n_tokens: completions and trained tokens
    of the optimizer step, over all micro-batches and ranks.
    """
    match cfg.loss_type:
        # mean over completions of the mean over tokens: Shao et al. 2024, equation 3
        case "grpo" | "sapo":
            return 1.0 / (n_samples * max(length, 1))
        # a constant instead of the length, so length itself is not rewarded: Liu et al. 2025
        case "dr_grpo":
            return 1.0 / (n_samples * cfg.max_completion_length)
        # mean over completions of the sum over tokens: LUSPO 2026 (2602.05261)
        case "luspo":
            return 1.0 / n_samples
        # dapo and the others: all tokens of the step have the same weight (Yu et al. 2025, equation
        # 8). bnpo averages over one micro-batch only. Our gradient must not depend on the split
        # into micro-batches, so here bnpo equals dapo.
        case _:
            return 1.0 / max(n_tokens, 1)


def objective(batch: PackedBatch, cfg: Config) -> HeadOp:
    """Return the loss of a batch as a head operation: (hidden [M, D], lm_head [V, D]) → PolicyOut.

    If each token's loss depends on its own log-prob alone, the fused head computes it in three
    matrix products. Otherwise the log-probs are computed first and the loss second: two phases with
    four matrix products. Both give the same value.
    """
    per_token = cfg.importance_sampling_level == "token" and cfg.off_policy_mask_threshold is None
    if cfg.loss_type in CLIPPED and per_token:
        return functools.partial(
            head.head_policy_loss,
            targets=batch.targets,
            inputs=loss_inputs(batch),
            objective=objectives.constants(cfg),
            temperature=cfg.temperature,
        )

    def two_phases(hidden: Tensor, lm_head: Tensor) -> PolicyOut:
        # [M], [M]
        logp, entropy = head.head_logp(hidden, lm_head, batch.targets, cfg.temperature)
        return loss(logp, entropy, batch, cfg)

    return two_phases


def loss_inputs(batch: PackedBatch, importance: bool = True) -> LossInputs:
    """Return the vectors that the loss reads. The entropy mask becomes part of the importance."""
    factor = batch.importance if importance else None  # [M]
    if batch.entropy_mask is not None:
        mask = batch.entropy_mask.to(batch.weight.dtype)
        factor = mask if factor is None else factor * mask
    vectors = batch.advantage, batch.weight, batch.old_logp, batch.ref_logp
    return LossInputs(*vectors, factor, batch.entropy_weight)


def loss(logp: Tensor, entropy: Tensor, batch: PackedBatch, cfg: Config) -> PolicyOut:
    """Compute the loss of any objective from log-probs and entropies [M] that require a gradient.

        loss = Σ weight·(l·importance + β·KL) - Σ entropy_weight·H

    l is one of objectives.TERMS. Its ratio is exp(logp - old_logp), or exp of the mean of the
    differences over the sequence. On policy (old_logp is None) it is 1, but its gradient is not 0.
    As in TRL, masks do not apply to the KL.
    """
    on = batch.weight != 0  # [M]

    def trained(x: Tensor) -> Tensor:
        """Zero the tokens that are not trained on. Zeroing their loss is not enough: a NaN input
        would still make the gradient NaN, because NaN · 0 is NaN.
        """
        return torch.where(on, x, 0.0)

    by_sequence = cfg.importance_sampling_level == "sequence"
    inputs = loss_inputs(batch, importance=cfg.loss_type != "vespo")  # vespo uses it inside l
    sequences, logp = objectives.Sequences(batch.sample, on), trained(logp)
    log_ratio = logp - (logp.detach() if batch.old_logp is None else trained(batch.old_logp))
    tokens = objectives.Tokens(
        logp=logp,
        sampling_logp=trained(batch.sampling_logp),
        advantage=batch.advantage,
        log_ratio=log_ratio,
        ratio=reference.exp(sequences.mean(log_ratio) if by_sequence else log_ratio),
        importance=batch.importance,
        sequences=sequences,
    )
    l, metrics = objectives.TERMS[cfg.loss_type](tokens, cfg)  # [M]
    if cfg.off_policy_mask_threshold is not None:
        l = l * objectives.on_policy_enough(tokens, cfg.off_policy_mask_threshold)
    if inputs.importance is not None:
        l = l * inputs.importance
    kl = None
    if batch.ref_logp is not None:
        kl = reference.k3(trained(batch.ref_logp) - logp)
        kl = kl * tokens.ratio if cfg.use_bias_correction_kl else kl
        l = l + cfg.beta * kl
        kl = kl.detach()
    total = (batch.weight * trained(l)).sum()
    if batch.entropy_weight is not None:
        total = total - (batch.entropy_weight * trained(entropy)).sum()
    return PolicyOut(
        total,
        logp.detach(),
        entropy.detach(),
        kl,
        metrics={name: x.detach() for name, x in metrics.items()},
        by_sequence=by_sequence or cfg.loss_type == "vespo",
    )


def logp_of(batch: PackedBatch, cfg: Config) -> HeadOp:
    """Return a head operation for the log-probs of the targets at the sampling temperature.

    The operation returns logp [M] and entropy [M].
    """
    return functools.partial(head.head_logp, targets=batch.targets, temperature=cfg.temperature)

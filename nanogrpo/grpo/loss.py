"""The GRPO loss of a batch: which tokens are trained on, the weight of each token, and the
operation that computes the loss. All functions are pure.

In: the per-token vectors [M] of a `PackedBatch`. Out: an operation that turns hidden states into a
loss. The function `policy_terms` in kernels/reference/policy.py computes the loss of a token, in
about 25 lines:

    r = exp(logp - old_logp)                                    the ratio to the sampling policy
    l = -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A)        the clipped surrogate
    KL = r·(e^x - x - 1) with x = ref_logp - logp               the distance to the reference model
    loss = Σ weight·(l·importance + β·KL) - Σ entropy_weight·H

By default, old_logp, ref_logp, importance and entropy_weight are None. Without old_logp, r is 1.
Without importance, the factor importance is 1. The KL needs ref_logp, and the entropy needs
entropy_weight. Names and formulas are the same as in TRL 1.16.0, and tests compare them with TRL's
code. The page docs/equations.md lists the papers, and docs/fork.md says how to change the loss.
Read next: kernels/reference/policy.py (the loss of a token), schedule.py and packing.py (which set
weights).
"""

import functools
import math
from collections.abc import Callable, Sequence

from nanogrpo.config import Config
from nanogrpo.feature import Feature, first
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from nanogrpo.model import head
from nanogrpo.model.head import HeadOp
from nanogrpo.types import Facts, PackedBatch, Sample


def is_trained(sample: Sample | Facts, cfg: Config) -> bool:
    """Return whether the tokens of a completion contribute to the loss.

    DAPO masks a completion that is truncated at the length limit, because its end is unknown.
    """
    return sample.stopped or not cfg.mask_truncated_completions


def has_gradient(sample: Facts, cfg: Config) -> bool:
    """Return whether the loss of a completion depends on the weights.

    If the advantage is 0, only terms without the advantage have a gradient: the KL, or terms that
    an extra adds (`all_gradients`).
    """
    return sample.advantage != 0 or bool(cfg.beta) or sample.all_gradients


# For each loss type: the number by which the loss of each token of a completion is divided.
# `length` is the number of trained tokens of this completion.
# `samples` and `tokens` are the numbers of completions and trained tokens in the optimizer step.
# Both `samples` and `tokens` include all micro-batches and ranks.
DIVISORS: dict[str, Callable[[int, int, int, Config], int]] = {
    # all completions have the same total weight: Shao et al. 2024 (2402.03300), equation 3
    "grpo": lambda length, samples, tokens, cfg: samples * length,
    # the divisor does not depend on the length, so length is not rewarded:
    # Liu et al. 2025 (2503.20783)
    "dr_grpo": lambda length, samples, tokens, cfg: samples * cfg.max_completion_length,
    # all tokens of the step have the same weight: Yu et al. 2025 (2503.14476), equation 8
    "dapo": lambda length, samples, tokens, cfg: tokens,
}


def token_weight(length: int, n_samples: int, n_tokens: int, cfg: Config) -> float:
    """Return the loss weight of each token of a completion.

    The weight is fixed before the forward pass, so the gradient does not depend on how a step is
    split into micro-batches. Other implementations of bnpo average over one micro-batch only; here,
    bnpo is the same as dapo.
    """
    divisor = DIVISORS.get(cfg.loss_type, DIVISORS["dapo"])
    return 1.0 / max(divisor(length, n_samples, n_tokens, cfg), 1)


def clip_of(cfg: Config) -> Clip:
    """Return the constants for clipping and for the KL."""
    return Clip(cfg.epsilon, cfg.upper_epsilon, cfg.delta or math.inf, cfg.beta)


def loss_inputs(batch: PackedBatch) -> LossInputs:
    """Return the vectors [M] of the batch that are the inputs of the loss."""
    return LossInputs(**{name: getattr(batch, name) for name in LossInputs._fields})


def objective(batch: PackedBatch, cfg: Config, features: Sequence[Feature] = ()) -> HeadOp:
    """Return the loss of a batch as a head operation: (hidden [M, D], lm_head [V, D]) → PolicyOut.

    The loss of each token depends only on the log-prob of this token, so the fused head computes
    the gradient in the same pass over the logits. A feature may replace the loss.
    """
    return first(feature.objective(batch, cfg) for feature in features) or functools.partial(
        (batch.head or head).head_policy_loss,
        targets=batch.targets,
        inputs=loss_inputs(batch),
        clip=clip_of(cfg),
        temperature=cfg.temperature,
    )


def logp_of(batch: PackedBatch, cfg: Config) -> HeadOp:
    """Return a head operation for the log-probs of the targets at the sampling temperature.

    The operation returns logp [M] and entropy [M].
    """
    return functools.partial(
        (batch.head or head).head_logp, targets=batch.targets, temperature=cfg.temperature
    )

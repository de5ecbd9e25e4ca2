"""Losses other than the clipped loss per token. Each objective is a short function that computes
what each token contributes to the loss.

In: the M completion tokens of a micro-batch (`Tokens`). Out: terms [M], and metrics [M] for the
log. `loss` multiplies the terms by masks and weights, adds the KL, and sums the results. Autograd
computes the derivatives. This takes two phases and four matrix products with the head. The core's
fused loss takes three products. The gradient flows through `logp`, `log_ratio` and `ratio`. To add
an objective, write a function like those below, and add its name to TERMS and to the choices of
`loss_type` in options.py (docs/fork.md). Names and formulas are those of TRL 1.16.0 where TRL has
them. Read before: grpo/loss.py. Read next: docs/equations.md.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanogrpo.extras.options import CLIPPED, FIELDS, ObjectivesOptions
from nanogrpo.feature import Feature
from nanogrpo.grpo.loss import DIVISORS, clip_of, logp_of
from nanogrpo.kernels.reference import policy
from nanogrpo.kernels.reference.policy import LOG_RATIO_MAX
from nanogrpo.model.head import HeadOp, PolicyOut
from nanogrpo.types import PackedBatch

logger = logging.getLogger("nanogrpo")

CISPO = "--loss-type cispo bounds each weight by --epsilon-high, here 0.2; its paper has 5"
GSPO = "--epsilon 0.2 hardly clips sequence ratios; the paper has 3e-4, and --epsilon-high 4e-4"
LUSPO = "--loss-type luspo has ratios per token; its paper has --importance-sampling-level sequence"
TOP = "--top-entropy-quantile: with sequence ratios, all tokens of a completion have a gradient"

Terms = tuple[Tensor, dict[str, Tensor]]  # the terms [M], and metrics [M] by their name in the log

DIVISORS["sapo"] = DIVISORS["grpo"]
# the mean over completions of the sum over tokens: LUSPO 2026 (2602.05261)
DIVISORS["luspo"] = lambda length, samples, tokens, cfg: samples


class Objectives(Feature):
    def __init__(self, cfg: Any):
        self.all_gradients = cfg.loss_constants.get("dppo_penalty", 0) > 0  # not scaled by A
        # The defaults are the same as in TRL. If a paper has other values, the log says so.
        by_sequence = cfg.importance_sampling_level == "sequence"
        if cfg.upper_epsilon == 0.2 and (by_sequence or cfg.loss_type == "cispo"):
            logger.info(GSPO if by_sequence else CISPO)
        if cfg.loss_type == "luspo" and not by_sequence:
            logger.info(LUSPO)
        if cfg.top_entropy_quantile < 1 and by_sequence:
            logger.info(TOP)

    def objective(self, batch: PackedBatch, cfg: Any) -> HeadOp | None:
        """Return a function that computes the loss in two phases, or None if the core's loss is
        enough.
        """
        if not cfg.needs_two_phases:
            return None

        def op(hidden: Tensor, lm_head: Tensor) -> PolicyOut:
            logp, entropy = logp_of(batch, cfg)(hidden, lm_head)
            return loss(logp, entropy, batch, cfg)

        return op


class Sequences:
    """Sums and means over the trained tokens of each sequence, repeated for all tokens of the
    sequence.

    A sequence is never split between micro-batches, so no data of other micro-batches or ranks
    are needed.
    """

    def __init__(self, sample: Tensor, trained: Tensor):
        ids, self.member = sample.unique(return_inverse=True)  # [S], [M]
        self.trained = trained  # [M]
        self.empty = sample.new_zeros(len(ids), dtype=torch.float64)  # [S]
        self.count = self.sum(trained.double()).clamp(min=1.0)  # [M]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over each sequence, [M] → [M].

        The sum is computed in float64, because thousands of log-ratios near zero lose digits in
        float32.
        """
        kept = torch.where(self.trained, x.double(), 0.0)
        return self.empty.index_add(0, self.member, kept)[self.member].to(x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over each sequence, [M] → [M]."""
        return self.sum(x) / self.count.to(x.dtype)


class Tokens(NamedTuple):
    """The inputs of an objective for M completion tokens, all [M]."""

    logp: Tensor  # log-prob under the policy in training, with a gradient
    sampling_logp: Tensor  # log-prob under the policy that sampled, computed by the engine
    advantage: Tensor
    log_ratio: Tensor  # logp - old_logp
    ratio: Tensor  # exp of log_ratio, or of the mean log_ratio of the sequence
    # part of vespo's terms; for all other objectives, `loss` multiplies the terms by `importance`
    importance: Tensor | None
    sequences: Sequences


def clipped(t: Tokens, cfg: ObjectivesOptions) -> Terms:
    """l = -min(min(w, δ)·A, clamp(w, 1-ε, 1+ε_high)·A): `clipped` of kernels/reference/policy.py.

    Token-level ratios usually go through the fused head, which uses the same formula. In two cases,
    autograd must see all tokens, and this function is used instead: with sequence-level ratios
    (GSPO, Zheng et al. 2025, 2507.18071, and LUSPO 2026, 2602.05261), and with the off-policy mask.
    """
    l, _, clip = policy.clipped(t.ratio, t.advantage, clip_of(cfg))
    return l, {"clip": clip}


def cispo(t: Tokens, cfg: ObjectivesOptions) -> Terms:
    """l = -sg(min(w, ε_high))·A·logp: the weight w is clipped, but every token keeps its gradient.

    MiniMax-M1 2025 (2506.13585), equation 4.
    """
    cut = (t.ratio > cfg.upper_epsilon) & (t.advantage > 0)
    return -t.ratio.detach().clamp(max=cfg.upper_epsilon) * t.advantage * t.logp, {
        "cispo_clip_ratio": cut
    }


def sapo(t: Tokens, cfg: ObjectivesOptions) -> Terms:
    """l = -(4/τ)·σ(τ(w-1))·A, where τ depends on the sign of A: a soft clip. Gao et al. 2025
    (2511.20347).

    The derivative of -l with respect to w is 4σ(1-σ)·A, which equals A at w = 1 and decays on both
    sides.
    """
    given = cfg.loss_constants
    good, bad = given["sapo_temperature_pos"], given["sapo_temperature_neg"]
    tau = torch.where(t.advantage > 0, good, bad)
    return -torch.sigmoid(tau * (t.ratio - 1)) * 4 / tau * t.advantage, {}


def vespo(t: Tokens, cfg: ObjectivesOptions) -> Terms:
    """l = -sg(φ(W))·A·logp, φ(W) = W^k·e^(λ-λW), which is 1 at W = 1.

    W = Π_t w_t·ρ_t over the sequence; (k, λ) depend on the sign of A. Shen et al. 2026
    (2602.10693). The correction ρ for the engine's log-probs is part of W, and does not multiply l.
    """
    floor = math.log(1e-8)
    log_w = t.sequences.sum(t.log_ratio.detach().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))
    if t.importance is not None:
        log_w = log_w + t.sequences.sum(t.importance.log().clamp(floor, LOG_RATIO_MAX))
    log_w = log_w.clamp(floor, LOG_RATIO_MAX)
    good, given = t.advantage >= 0, cfg.loss_constants
    k = torch.where(good, given["vespo_k_pos"], given["vespo_k_neg"])
    decay = torch.where(good, given["vespo_lambda_pos"], given["vespo_lambda_neg"])
    phi = (decay + k * log_w - decay * log_w.exp()).exp()
    return -phi * t.advantage * t.logp, {"vespo/phi_seq_mean": phi}


def dppo(t: Tokens, cfg: ObjectivesOptions) -> Terms:
    """l = -m·w·A + c·(log w)², with m = 0 where the policy has moved far enough: A > 0, p > μ and D
    > ε_high, or A < 0, p < μ and D > ε.

    Qi et al. 2026 (2602.04879). The trust region limits the divergence D between p, the policy in
    training, and μ, the engine that sampled. Both p and μ are distributions over "this token" and
    "any other token". D is |p - μ| for dppo_tv, and D is μ log(μ/p) + (1-μ) log((1-μ)/(1-p)) for
    dppo_kl. So the ratio w may become large for a rare token, but not for a common token. The
    penalty c comes from prime-rl.
    """
    p, mu = (x.detach().exp().clamp(max=1 - 1e-6) for x in (t.logp, t.sampling_logp))
    if cfg.loss_type == "dppo_tv":
        divergence = (p - mu).abs()
    else:
        others = (1 - mu) * (torch.log1p(-mu) - torch.log1p(-p))
        divergence = mu * (t.sampling_logp - t.logp.detach()) + others
    high = (t.advantage > 0) & (p > mu) & (divergence > cfg.upper_epsilon)
    low = (t.advantage < 0) & (p < mu) & (divergence > cfg.epsilon)
    l = torch.where(high | low, 0.0, -t.ratio * t.advantage)
    l = l + cfg.loss_constants["dppo_penalty"] * t.log_ratio.square()
    return l, {"clip": high.to(torch.int8) - low.to(torch.int8)}


TERMS: dict[str, Callable[[Tokens, Any], Terms]] = {
    **dict.fromkeys(CLIPPED, clipped),
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo,
    "dppo_kl": dppo,
}


def add(name: str, term: Callable[[Tokens, Any], Terms], average: str) -> None:
    """Add a --loss-type. Tokens get the same weights as with the built-in loss type `average`. For
    example, "grpo" gives a mean over completions, and "dapo" gives a mean over all tokens.
    """
    TERMS[name], DIVISORS[name] = term, DIVISORS[average]
    option = FIELDS["loss_type"]
    option.metadata = {**option.metadata, "choices": (*option.metadata["choices"], name)}  # type: ignore[assignment]


def on_policy_enough(t: Tokens, threshold: float) -> Tensor:
    """Return a mask [M], which is False for sequences with A < 0 and mean_t(log μ - log π) >
    threshold, and True for all others.

    DeepSeek-V3.2 2025 (2512.02556), equation 9: a bad completion teaches nothing if the policy has
    already moved away from it. A token without a log-prob from the engine (NaN) counts as
    unchanged.
    """
    gap = t.sequences.mean((t.sampling_logp - t.logp.detach()).nan_to_num(0.0))
    return (t.advantage >= 0) | (gap <= threshold)


def loss(logp: Tensor, entropy: Tensor, batch: PackedBatch, cfg: ObjectivesOptions) -> PolicyOut:
    """Compute the loss of any objective from log-probs and entropies [M] that require a gradient.

        loss = Σ weight·(l·importance + β·KL) - Σ entropy_weight·H

    l is one of TERMS. The ratio is exp(logp - old_logp), or exp of the mean of the differences over
    the sequence. On policy (old_logp is None), the ratio is 1, but its gradient is not 0. As in
    TRL, masks do not apply to the KL.
    """
    on = batch.weight != 0  # [M]

    def trained(x: Tensor) -> Tensor:
        """Set the inputs to 0 at tokens that are not trained on. Zeroing the loss is not enough: a
        NaN input would still make the gradient NaN, because NaN · 0 is NaN.
        """
        return torch.where(on, x, 0.0)

    by_sequence = cfg.importance_sampling_level == "sequence"
    sequences, logp = Sequences(batch.sample, on), trained(logp)
    log_ratio = logp - (logp.detach() if batch.old_logp is None else trained(batch.old_logp))
    tokens = Tokens(
        logp=logp,
        sampling_logp=trained(batch.sampling_logp),
        advantage=batch.advantage,
        log_ratio=log_ratio,
        ratio=policy.exp(sequences.mean(log_ratio) if by_sequence else log_ratio),
        importance=batch.importance,
        sequences=sequences,
    )
    l, metrics = TERMS[cfg.loss_type](tokens, cfg)  # [M]
    if cfg.off_policy_mask_threshold is not None:
        l = l * on_policy_enough(tokens, cfg.off_policy_mask_threshold)
    if batch.importance is not None and cfg.loss_type != "vespo":  # vespo's l contains it
        l = l * batch.importance
    kl = None
    if batch.ref_logp is not None:
        kl = policy.k3(trained(batch.ref_logp) - logp)
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

"""The menu: what a token contributes to the loss, one short function an objective. Pure functions
of vectors, no model.

In: `Tokens`, the M completion tokens of a strip. Out: their terms [M], which grpo.loss multiplies
by masks and weights, adds the KL to, and sums; and what the log shows of them. The gradient flows
through `logp` and what is made of it (`ratio`, `log_ratio`). A new one: a function like these, its
name in TERMS and in `CHOICES` of config.py (docs/fork.md); grpo.token_weight says how it is
averaged. Names and formulas are TRL 1.16.0's, where it has them. Read before: grpo.py. Read next:
docs/equations.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanogrpo.config import CLIPPED, Config
from nanogrpo.kernels.reference import LOG_RATIO_MAX

SEEN = tuple[Tensor, dict[str, Tensor]]  # the terms [M], and figures [M] by their name in the log


class Sequences:
    """Which of the M tokens belong together: sums and means over each sequence's trained tokens,
    given back to every token.

    A sequence always lies whole in one strip, so these need no other micro-batch and no other rank.
    """

    def __init__(self, sample: Tensor, trained: Tensor):
        ids, self.member = sample.unique(return_inverse=True)  # [S], [M]
        # [M], [S]
        self.trained, self.empty = (
            trained,
            torch.zeros(len(ids), dtype=torch.float64, device=sample.device),
        )
        self.count = self.sum(trained.double()).clamp(min=1.0)  # [M]

    def sum(self, x: Tensor) -> Tensor:
        """[M] → [M], added in float64: thousands of log-ratios near zero."""
        kept = torch.where(self.trained, x.double(), 0.0)
        return self.empty.index_add(0, self.member, kept)[self.member].to(x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.count.to(x.dtype)


class Tokens(NamedTuple):
    """What an objective sees of M completion tokens, all [M]."""

    logp: Tensor  # of the policy that is trained; carries the gradient
    old_logp: Tensor  # of the policy that sampled, by the trainer
    sampling_logp: Tensor  # the same by the engine
    advantage: Tensor
    log_ratio: Tensor  # logp - old_logp
    # its exp, or with importance_sampling_level sequence that of its mean over the sequence
    ratio: Tensor
    # mismatch.correction, for those that use it inside; grpo.loss multiplies by it for the others
    importance: Tensor | None
    sequences: Sequences


def exp(log_ratio: Tensor) -> Tensor:
    """Log-ratios are cut before exp, as in the kernels: e²⁰ is beyond any bound, and finite."""
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def clipped(t: Tokens, cfg: Config) -> SEEN:
    """l = -min(min(w, δ)·A, clamp(w, 1-ε, 1+ε_high)·A). PPO: Schulman et al. 2017 (1707.06347),
    equation 7.

    ε_high: DAPO, Yu et al. 2025 (2503.14476). δ: INTELLECT-2 2025 (2505.07291). With w of a
    sequence it is GSPO, Zheng et al. 2025 (2507.18071), and averaged as luspo it is LUSPO 2026
    (2602.05261). Per token it runs in the fused kernel, whose specification is `policy_terms` of
    kernels/reference.py.
    """
    low, high = 1 - cfg.epsilon, 1 + cfg.upper_epsilon
    held = t.ratio.clamp(low, high)
    w = t.ratio if cfg.delta is None else t.ratio.clamp(max=cfg.delta)
    clip = ((w > high) & (t.advantage > 0)).to(torch.int8) - ((w < low) & (t.advantage < 0)).to(
        torch.int8
    )
    return -torch.minimum(w * t.advantage, held * t.advantage), {"clip": clip}


def cispo(t: Tokens, cfg: Config) -> SEEN:
    """l = -sg(min(w, ε_high))·A·logp: the weight is cut, not the gradient. MiniMax-M1 2025
    (2506.13585), equation 4.
    """
    cut = (t.ratio > cfg.upper_epsilon) & (t.advantage > 0)
    return -t.ratio.detach().clamp(max=cfg.upper_epsilon) * t.advantage * t.logp, {
        "cispo_clip_ratio": cut
    }


def sapo(t: Tokens, cfg: Config) -> SEEN:
    """l = -(4/τ)·σ(τ(w-1))·A, τ by the sign of A: a clip without an edge. Gao et al. 2025
    (2511.20347).

    Its derivative in w is 4σ(1-σ)·A: A itself at w = 1, and fading on both sides.
    """
    tau = torch.where(t.advantage > 0, cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
    return -torch.sigmoid(tau * (t.ratio - 1)) * 4 / tau * t.advantage, {}


def vespo(t: Tokens, cfg: Config) -> SEEN:
    """l = -sg(φ(W))·A·logp, φ(W) = W^k·e^(λ-λW), which is 1 at W = 1; W = Π_t w_t·ρ_t of the
    sequence; (k, λ) by the sign of A.

    Shen et al. 2026 (2602.10693). ρ, the correction for the engine's log-probs, enters W and is no
    factor of l.
    """
    floor = math.log(1e-8)
    log_w = t.sequences.sum(t.log_ratio.detach().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))
    if t.importance is not None:
        log_w = log_w + t.sequences.sum(t.importance.log().clamp(floor, LOG_RATIO_MAX))
    log_w = log_w.clamp(floor, LOG_RATIO_MAX)
    good = t.advantage >= 0
    k, decay = (
        torch.where(good, cfg.vespo_k_pos, cfg.vespo_k_neg),
        torch.where(good, cfg.vespo_lambda_pos, cfg.vespo_lambda_neg),
    )
    phi = (decay + k * log_w - decay * log_w.exp()).exp()
    return -phi * t.advantage * t.logp, {"vespo/phi_seq_mean": phi}


def dppo(t: Tokens, cfg: Config) -> SEEN:
    """l = -m·w·A + c·(log w)², m = 0 where the step has gone far enough: A > 0, p > μ and D >
    ε_high, or A < 0, p < μ and D > ε.

    Qi et al. 2026 (2602.04879): the trust region is a divergence D from μ, the engine that sampled,
    of the token against all others. dppo_tv: D = |p - μ|.  dppo_kl: D = μ log(μ/p) + (1-μ)
    log((1-μ)/(1-p)).  A rare token may change by any ratio, a common one by little. The penalty c
    is prime-rl's.
    """
    p, mu = (x.detach().exp().clamp(max=1 - 1e-6) for x in (t.logp, t.sampling_logp))
    if cfg.loss_type == "dppo_tv":
        divergence = (p - mu).abs()
    else:
        divergence = mu * (t.sampling_logp - t.logp.detach()) + (1 - mu) * (
            torch.log1p(-mu) - torch.log1p(-p)
        )
    high = (t.advantage > 0) & (p > mu) & (divergence > cfg.upper_epsilon)
    low = (t.advantage < 0) & (p < mu) & (divergence > cfg.epsilon)
    l = (
        torch.where(high | low, 0.0, -t.ratio * t.advantage)
        + cfg.dppo_penalty * t.log_ratio.square()
    )
    return l, {"clip": high.to(torch.int8) - low.to(torch.int8)}


TERMS: dict[str, Callable[[Tokens, Config], SEEN]] = {
    **dict.fromkeys(CLIPPED, clipped),
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo,
    "dppo_kl": dppo,
}


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(π‖ref) estimated on a token of π: e^x - x - 1, x = ref - logp. Never negative. Schulman
    2020 (joschu.net).
    """
    x = (ref_logp - logp).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return torch.expm1(x) - x


def on_policy_enough(t: Tokens, threshold: float) -> Tensor:
    """[M] bool, the same for all tokens of a sequence: False where A < 0 and mean_t(log μ - log π)
    > threshold.

    DeepSeek-V3.2 2025 (2512.02556), equation 9: a bad completion that the policy has already left
    teaches nothing. A token that the engine gave no log-prob for (nan) counts as unchanged.
    """
    gap = t.sequences.mean((t.sampling_logp - t.logp.detach()).nan_to_num(0.0))
    return (t.advantage >= 0) | (gap <= threshold)

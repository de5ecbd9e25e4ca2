"""The gap between trainer and engine on the same tokens.

In: the log-probs of the same M tokens, as computed by the trainer before the first update and by
the engine that sampled them, both at the sampling temperature. Out: the metrics that are logged
every step.

Samples come from μ, the engine's policy, while π, the trainer's policy, is trained as if it had
sampled them. Both have the same weights. Different kernels, precisions and batch shapes make their
log-probs differ a little; a faulty weight sync makes them differ a lot. So these metrics serve
above all as an alarm. In float32 on one machine they are about 1e-6, and in bfloat16 a k3 of 1e-3
is normal. A mean ratio that grows past 1.02 over many steps means that the engine does not receive
the weights. Read before: grpo/loss.py. Read next: docs/metrics.md.
"""

from __future__ import annotations

from torch import Tensor

from nanogrpo.distributed.world import ALONE, World
from nanogrpo.kernels.reference.policy import LOG_RATIO_MAX


def compare(delta: Tensor, world: World = ALONE) -> dict[str, float]:
    """Return the metrics over M tokens, which may be divided over the ranks.

    delta: [M] float32, Δ = log π − log μ. With several ranks, every rank must call it.

    sampling_logp_difference/mean, max     mean and maximum of |Δ|, as in TRL
    k3                                     mean of e^Δ − 1 − Δ, never negative: an estimate of
                                           KL(μ‖π) on μ's own tokens (Schulman 2020)
    ratio                                  mean of e^|Δ|: 1 if both policies agree
    """
    delta = delta.double()  # so that a difference of 1e-6 keeps its precision
    clamped = delta.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    k3 = clamped.exp() - 1 - clamped
    found = world.spreads({"gap": delta.abs(), "k3": k3, "ratio": clamped.abs().exp()})
    return {
        "sampling/sampling_logp_difference/mean": found["gap"].mean,
        "sampling/sampling_logp_difference/max": found["gap"].most,
        "sampling/k3": found["k3"].mean,
        "sampling/ratio": found["ratio"].mean,
    }

"""Compare the log-probs of trainer and engine on the same tokens.

In: the log-probs of M tokens at the sampling temperature, as computed by the engine that sampled
the tokens, and by the trainer before the first update. Out: one vector for each metric that is
logged every step.

Samples come from the engine's policy μ, but are treated as samples of the trainer's policy π. The
two policies have the same weights. Different kernels, precisions and batch shapes change the
log-probs a little; a bug in the weight sync changes them a lot. So the main purpose of these
metrics is to detect bugs. In float32 on one machine, the differences are about 1e-6. In bfloat16, a
k3 of 1e-3 is normal. A mean ratio that grows past 1.02 over many steps means that the engine does
not receive the weights. Read before: grpo/loss.py. Read next: docs/metrics.md.
"""

from torch import Tensor

from nanogrpo.kernels.reference.policy import LOG_RATIO_MAX


def vectors(delta: Tensor) -> dict[str, Tensor]:
    """Return a vector [M] float64 for each metric. The metric is the mean of this vector over the
    tokens of all ranks, or the maximum if the name of the metric says so.

    `delta` is [M] float32: Δ = log π − log μ.

    `sampling_logp_difference` has the mean and the maximum of |Δ|, as in TRL.
    `k3` is the mean of e^Δ − 1 − Δ, which is never negative and estimates KL(μ‖π) on tokens that
    were sampled from μ (Schulman 2020). `ratio` is the mean of e^|Δ|, which is 1 if both policies
    agree.
    """
    delta = delta.double()  # float64 keeps the precision of small differences
    clamped = delta.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return {
        "sampling/sampling_logp_difference/mean": delta.abs(),
        "sampling/sampling_logp_difference/max": delta.abs(),
        "sampling/k3": clamped.exp() - 1 - clamped,
        "sampling/ratio": clamped.abs().exp(),
    }

"""The clipped policy loss of a token and its derivative, as a function that kernels call.

In: a log-prob and its `LossInputs`, float32. Out: the loss, its derivative, the clip flag and the
KL. Read next: fused_rows.py, which applies `terms` to the log-prob of a row of logits.

Equation.   r = exp(logp - old);
            l = -min(min(r, δ) A, clamp(r, 1 - ε, 1 + ε_high) A) · importance + β · KL.
            KL = r · k3, k3 = e^x - x - 1 with x = ref - logp. Log-ratios are clamped to ±20 before
            exp.
Derivation. dr/dlogp = r. The unclipped term min(r, δ) A, called `free` below, has the derivative r
            A if r <= δ, and 0 otherwise. The clipped term clamp(r) A, called `held`, has the
            derivative r A if r is in the clip range, and 0 otherwise. The derivative of the min is
            the derivative of the smaller term (in the clip range, both terms are r A).
            dk3/dlogp = 1 - e^x, so dKL/dlogp = r · (1 - e^x) + r · k3.
NaN.        If a log-prob is NaN, loss and gradient are NaN, as in the reference, so that the
            trainer detects the error. Therefore each comparison tests whether a value is out of
            range. In `where(|d| > 20, 0, r)`, the condition is false for NaN, so NaN is not
            replaced by 0. Every min and max propagates NaN.
Reference.  `policy_terms` in reference/policy.py.
"""

import triton
import triton.language as tl

from ..reference import policy

LOG_RATIO_MAX = tl.constexpr(policy.LOG_RATIO_MAX)
NAN = tl.constexpr(tl.PropagateNan.ALL)  # makes min(NaN, 1) return NaN and not 1


@triton.jit
def growth_and_k3(x):
    """Return e^x - 1 and e^x - x - 1 without cancellation.

    For |x| < 1/2, both results are computed as a series. The first omitted term is less than 1e-8
    of k3.
    """
    series = 1.0 + x / 8.0 * (1.0 + x / 9.0)
    for i in tl.static_range(7, 2, -1):
        series = 1.0 + x / i * series  # 1 + x/3 + x²/12 + …
    small = 0.5 * x * x * series
    e = tl.exp(x)
    near = tl.abs(x) < 0.5
    return tl.where(near, x + small, e - 1.0), tl.where(near, small, e - x - 1.0)


@triton.jit
def clamp(x, low, high):
    """Clamp x to the range from low to high. NaN stays NaN."""
    return tl.minimum(tl.maximum(x, low, NAN), high, NAN)


@triton.jit
def terms(logp, adv, old, ref, imp, low, high, delta, beta):
    """Return l, dl/dlogp, clip flag (int32) and KL of one token, or of a block of them.

    The steps are the same as in `policy_terms` of reference/policy.py. Absent inputs are None.
    """
    zero = tl.zeros_like(logp)
    d = zero
    if old is not None:
        d = logp - old
    r = tl.exp(clamp(d, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    dr = tl.where(tl.abs(d) > LOG_RATIO_MAX, 0.0, r)  # the ratio is constant if clamped
    capped = tl.minimum(r, delta, NAN)
    free = capped * adv
    held = clamp(r, low, high) * adv
    dfree = tl.where(r > delta, 0.0, dr * adv)
    dheld = tl.where((r < low) | (r > high), 0.0, dr * adv)
    l = -tl.minimum(free, held, NAN)
    dl = -tl.where(free < held, dfree, dheld)
    if imp is not None:
        l *= imp
        dl *= imp
    clip = ((capped > high) & (adv > 0)).to(tl.int32) - ((capped < low) & (adv < 0)).to(tl.int32)
    kl = zero
    if ref is not None:
        x = ref - logp
        growth, kl = growth_and_k3(clamp(x, -LOG_RATIO_MAX, LOG_RATIO_MAX))
        dkl = tl.where(tl.abs(x) > LOG_RATIO_MAX, 0.0, -growth)
        dkl = r * dkl + dr * kl
        kl = r * kl
        l += beta * kl
        dl += beta * dkl
    return l, dl, clip, kl


def numbers_of(c: policy.Clip) -> tuple[float, float, float, float]:
    """Return the kernels' arguments low, high, delta and beta."""
    return 1.0 - c.epsilon, 1.0 + c.epsilon_high, c.delta, c.beta

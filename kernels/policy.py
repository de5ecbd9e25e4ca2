"""The clipped-ratio policy loss with masking, its gradient and the step's statistics: one launch
and one small reduction.

In: per-token vectors [M] (log-probs, advantages, weights), float32. Out: the loss, dloss/dlogp [M],
clip flags, KL, six sums. Read next: rows.py, which applies the same `terms` to a row whose logits
are at hand.

Equation.   r = exp(logp - old);  l = -min(min(r, δ) A, clamp(r, 1 - ε, 1 + ε_high) A) · importance + β · KL;  L = Σ weight · l
            KL = k3 = e^x - x - 1 with x = ref - logp, or r · k3 under bias correction. Log-ratios are clamped to ±20 before exp.
Derivation. dr/dlogp = r. The free arm min(r, δ) A has derivative r A while r <= δ, the held arm
clamp(r) A while r lies in the
            clip range; the min passes the smaller arm's derivative (inside the range both arms are r A). dk3/dlogp = 1 - e^x;
            under bias correction r · (1 - e^x) + r · k3.
Nan.        A log-prob that is nan makes loss and gradient nan, as in the reference, so that the trainer sees it. Hence choices
            ask for what lies outside (`where(|d| > 20, 0, r)`: nan does not), and every min and max passes nan on.
Weights.    `weight` is mask × normaliser × whatever else is known beforehand, so that no kernel knows the name of a loss. Tokens
            with weight 0 are chosen away by `where`: they may hold nan or inf.
Bytes.      At most 24 read and 9 written a token: 0.25 µs for M = 32,768 at 4.3 TB/s, less than one launch takes. What is gained
            is launches: 2, where the same equations in eager PyTorch take dozens.
Sums.       Each program writes its seven sums to a row of a table; one more program adds the rows in order. No atomics: the
            result is the same bit for bit each time.
Reference.  `policy_terms`, `policy_forward` in reference.py; registered with a gradient in
nanogrpo/custom_ops.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .reference import Objective

LOG_RATIO_MAX = tl.constexpr(reference.LOG_RATIO_MAX)
NAN = tl.constexpr(tl.PropagateNan.ALL)  # min(nan, 1) is nan; without it a GPU's answer is 1
BLOCK, WARPS = 1024, 4  # tokens and warps of a program
# columns of the table: loss, tokens, ratio, clip low, clip high, KL, k1, and one to fill
SUMS = tl.constexpr(8)


@triton.jit
def growth_and_k3(x):
    """e^x - 1 and e^x - x - 1. Below 1/2 by their series, whose first term left out is under 1e-8
    of k3: no cancellation.
    """
    series = 1.0 + x / 8.0 * (1.0 + x / 9.0)
    for i in tl.static_range(7, 2, -1):
        series = 1.0 + x / i * series  # 1 + x/3 + x²/12 + …
    small = 0.5 * x * x * series
    e = tl.exp(x)
    near = tl.abs(x) < 0.5
    return tl.where(near, x + small, e - 1.0), tl.where(near, small, e - x - 1.0)


@triton.jit
def within(x, low, high):
    """x held between low and high; nan stays nan."""
    return tl.minimum(tl.maximum(x, low, NAN), high, NAN)


@triton.jit
def terms(logp, old, adv, ref, imp, low, high, delta, beta, BIAS: tl.constexpr):
    """The maths of one token (or a block of them): l, dl/dlogp, clip flag (int32), KL, ratio.
    Absent inputs are None.
    """
    zero = tl.zeros_like(logp)
    d = zero
    if old is not None:
        d = logp - old
    r = tl.exp(within(d, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    dr = tl.where(tl.abs(d) > LOG_RATIO_MAX, 0.0, r)  # beyond the clamp the ratio is a constant
    capped = tl.minimum(r, delta, NAN)
    free = capped * adv
    held = within(r, low, high) * adv
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
        growth, kl = growth_and_k3(within(x, -LOG_RATIO_MAX, LOG_RATIO_MAX))
        dkl = tl.where(tl.abs(x) > LOG_RATIO_MAX, 0.0, -growth)
        if BIAS:
            dkl = r * dkl + dr * kl
            kl = r * kl
        l += tl.where(beta != 0.0, beta * kl, 0.0)  # a KL that only is reported may be nan
        dl += tl.where(beta != 0.0, beta * dkl, 0.0)
    return l, dl, clip, kl, r


# ------------------------------------------------------------------------------------------------------------------- forward


@triton.jit
def policy_kernel(
    LOGP,
    OLD,
    ADV,
    WEIGHT,
    REF,
    IMP,
    GRAD,
    CLIP,
    KL,
    TABLE,
    M,
    low,
    high,
    delta,
    beta,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of tokens: gradient, flags and KL of each, and the block's sums into a
    row of TABLE.
    """
    pid = tl.program_id(0).to(tl.int64)
    j = pid * BLOCK + tl.arange(0, BLOCK)
    here = j < M
    logp = tl.load(LOGP + j, mask=here, other=0.0)
    adv = tl.load(ADV + j, mask=here, other=0.0)
    weight = tl.load(WEIGHT + j, mask=here, other=0.0)
    old = None
    ref = None
    imp = None
    k1 = tl.zeros_like(logp)
    if OLD is not None:
        old = tl.load(OLD + j, mask=here, other=0.0)
        k1 = old - logp
    if REF is not None:
        ref = tl.load(REF + j, mask=here, other=0.0)
    if IMP is not None:
        imp = tl.load(IMP + j, mask=here, other=0.0)
    l, dl, clip, kl, r = terms(logp, old, adv, ref, imp, low, high, delta, beta, BIAS)
    on = weight != 0.0
    clip = tl.where(on, clip, 0)
    kl = tl.where(on, kl, 0.0)
    tl.store(GRAD + j, tl.where(on, dl * weight, 0.0), mask=here)
    tl.store(CLIP + j, clip.to(tl.int8), mask=here)
    if REF is not None:
        tl.store(KL + j, kl, mask=here)
    T = TABLE + pid * SUMS
    tl.store(T, tl.sum(tl.where(on, l * weight, 0.0)))
    tl.store(T + 1, tl.sum(on.to(logp.dtype)))
    tl.store(T + 2, tl.sum(tl.where(on, r, 0.0)))
    tl.store(T + 3, tl.sum((clip < 0).to(logp.dtype)))
    tl.store(T + 4, tl.sum((clip > 0).to(logp.dtype)))
    tl.store(T + 5, tl.sum(kl))
    tl.store(T + 6, tl.sum(tl.where(on, k1, 0.0)))
    tl.store(T + 7, 0.0)


@triton.jit
def sum_kernel(TABLE, LOSS, STATS, rows, ROWS: tl.constexpr):
    """One program: adds the rows of TABLE [rows, 8] in a fixed order; the first sum is the loss,
    six are the statistics.
    """
    column = tl.arange(0, SUMS)
    total = tl.zeros((SUMS,), TABLE.dtype.element_ty)
    for start in tl.range(0, rows, ROWS):
        j = start + tl.arange(0, ROWS)
        # [ROWS, 8]
        part = tl.load(
            TABLE + j[:, None] * SUMS + column[None, :], mask=(j < rows)[:, None], other=0.0
        )
        total += tl.sum(part, 0)
    tl.store(LOSS + column, total, mask=column == 0)
    tl.store(STATS + column - 1, total, mask=(column > 0) & (column < 7))


# The backward is `upstream · GRAD`: the gradient was written with the value.


def policy_forward(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    o: Objective,
    *,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss [], dloss/dlogp [M], clip [M] int8, KL [M] (or [0]) and six sums [6]; as
    `reference.policy_forward`.
    """
    vectors = logp, old_logp, advantage, weight, ref_logp, importance
    vectors = [None if v is None else v.contiguous() for v in vectors]
    count = logp.shape[0]
    grad = torch.empty_like(vectors[0])
    clip = torch.empty(count, dtype=torch.int8, device=logp.device)
    kl = torch.empty_like(grad) if ref_logp is not None else grad.new_empty(0)
    blocks = triton.cdiv(count, block)
    table = grad.new_empty(blocks, SUMS.value)
    loss, stats = grad.new_empty(()), grad.new_empty(6)
    if count:
        numbers = count, 1.0 - o.epsilon, 1.0 + o.epsilon_high, o.delta, o.beta
        bias = bool(o.bias_correction)
        policy_kernel[(blocks,)](
            *vectors, grad, clip, kl, table, *numbers, BIAS=bias, BLOCK=block, num_warps=WARPS
        )
    sum_kernel[(1,)](table, loss, stats, blocks, ROWS=32, num_warps=1)
    return loss, grad, clip, kl, stats

"""One visit of each row: log-prob, entropy, clipped loss, and the gradient of the loss written over
the logits.

In: logits [N, V] (overwritten), targets [N], per-token vectors [N]. Out: log-prob, entropy and loss
[N] float32; in the place of the logits, dΣloss/dlogits. Also gathers the row functions of this
folder under the names of reference.py, for custom_ops.py and head.py to use as one module. Read
next: head.py, which calls this on a chunk of logits between two matrix products.

Equation.   (logp, H) = log_softmax.py of the row;  (l, dl) = policy.py `terms` of logp;  loss = weight · l - entropy_weight · H
Derivation. dloss/dx_j = (weight · dl (1[j = y] - p_j) + entropy_weight · p_j (log p_j + H)) / T:
once the row's sums are known,
            its gradient needs nothing from other rows. So the program that has just read the row walks back over it, last
            columns first (they were read last and lie in the nearest cache), and stores the gradient where the logits were.
Bytes.      4·N·V in bfloat16 if the walk back hits the L2 cache (a row of Qwen3 is 304 KB; one a multiprocessor is 40 MB of the
            50 MB of an H200): 1.16 ms for N = 8192 at 4.3 TB/s, against 6·N·V for a forward and a backward kernel.
            Hence 32 warps a program: one row a multiprocessor at a time.
Skipped.    Rows with neither weight are filled with zeros without being read; rows whose coefficients come out as 0 (no
            advantage, or clipped) are filled with zeros without being read again, unless their log-prob is nan.
Reference.  `policy_rows_` in reference.py. Used by head.py through nanogrpo/custom_ops.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .log_softmax import (
    LOG2E,
    accumulator,
    log_softmax_backward,
    log_softmax_forward,
    results,
    row_gradient,
    shape_of_block,
    statistics,
    wide,
)
from .policy import policy_forward, terms
from .reference import Objective

__all__ = ["log_softmax_backward", "log_softmax_forward", "policy_forward", "policy_rows_"]


@triton.jit
def row_kernel(
    LOGITS, TARGETS, OLD, ADV, WEIGHT, REF, IMP, ENTROPY_WEIGHT, LOGP, ENTROPY, LOSS,
    stride, V, k, inv_t, low, high, delta, beta,
    BIAS: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    L = LOGITS + row * stride
    BLOCK: tl.constexpr = R * C
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(V, BLOCK)
    k = tl.full((), k, ACC)
    weight = tl.load(WEIGHT + row).to(ACC)
    entropy_weight = tl.zeros((), ACC)
    if ENTROPY_WEIGHT is not None:
        entropy_weight = tl.load(ENTROPY_WEIGHT + row).to(ACC)
    logp = tl.zeros((), ACC)
    entropy = tl.zeros((), ACC)
    loss = tl.zeros((), ACC)
    dlogp = tl.zeros((), ACC)
    q = tl.zeros((), ACC)
    log_l = tl.zeros((), ACC)
    y = tl.load(TARGETS + row)
    if (weight != 0.0) | (entropy_weight != 0.0):
        zy = tl.load(L + y).to(ACC)  # before it is overwritten
        q, l, s = statistics(L, 0, V, k, WIDE, R, C, ACC)
        logp, entropy, log_l = results(zy, k, q, l, s)
        if weight != 0.0:
            old = None
            ref = None
            imp = None
            if OLD is not None:
                old = tl.load(OLD + row).to(ACC)
            if REF is not None:
                ref = tl.load(REF + row).to(ACC)
            if IMP is not None:
                imp = tl.load(IMP + row).to(ACC)
            loss, dlogp, _, _, _ = terms(
                logp, old, tl.load(ADV + row).to(ACC), ref, imp, low, high, delta, beta, BIAS
            )
            loss *= weight
            dlogp *= weight
        if entropy_weight != 0.0:
            loss -= entropy_weight * entropy
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)
    tl.store(LOSS + row, loss)
    # a row of nan gives nan, as in the reference
    if (dlogp == 0.0) & (entropy_weight == 0.0) & (logp == logp):
        for c in tl.range(0, V, BLOCK):
            tl.store(
                L + (c + lanes), tl.zeros((BLOCK,), LOGITS.dtype.element_ty), mask=c + lanes < V
            )
        return
    # every thread has read the target's logit and finished the sums before any logit is overwritten
    tl.debug_barrier()
    for i in tl.range(0, blocks):
        o = (blocks - 1 - i) * BLOCK + lanes
        x = tl.load(L + o, mask=o < V, other=0.0).to(ACC)
        dz = row_gradient(x, o, y, k, q, log_l, entropy, dlogp, -entropy_weight) * inv_t
        tl.store(L + o, dz.to(LOGITS.dtype.element_ty), mask=o < V)


def shape_of_visit(
    vocab: int, dtype: torch.dtype, wide: bool, lanes: int = 2048
) -> tuple[int, int, int]:
    """Lanes, numbers a lane, warps: twice the lanes of a forward, two a thread, so that one program
    fills a multiprocessor.

    Such a thread has 64 registers. Narrow loads (log_softmax.py, `statistics`) need one each: then
    a lane has 4 numbers at most.
    """
    lanes, per_lane, _ = shape_of_block(vocab, dtype, lanes)
    return lanes, per_lane if wide else min(4, per_lane), max(1, min(32, lanes // 64))


def policy_rows_(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    entropy_weight: Tensor | None,
    o: Objective,
    *,
    lanes: int = 2048,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and loss [N]; logits [N, V] are overwritten by the gradient of Σ loss. As
    `reference.policy_rows_`.
    """
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(
            f"logits have stride {logits.stride()}: the numbers of a row must lie side by side (last stride 1)."
        )
    count, vocab = logits.shape
    dtype, acc = accumulator(logits.dtype)
    out = tuple(torch.empty(count, dtype=dtype, device=logits.device) for _ in range(3))
    if count == 0:
        return out
    vectors = targets, old_logp, advantage, weight, ref_logp, importance, entropy_weight
    vectors = (None if v is None else v.contiguous() for v in vectors)
    WIDE = wide(logits)
    R, C, warps = shape_of_visit(vocab, logits.dtype, WIDE, lanes)
    temperatures = LOG2E.value / temperature, 1.0 / temperature
    numbers = (
        logits.stride(0),
        vocab,
        *temperatures,
        1.0 - o.epsilon,
        1.0 + o.epsilon_high,
        o.delta,
        o.beta,
    )
    shape = dict(BIAS=bool(o.bias_correction), WIDE=WIDE, R=R, C=C, ACC=acc, num_warps=warps)
    row_kernel[(count,)](logits, *vectors, *out, *numbers, **shape)
    return out

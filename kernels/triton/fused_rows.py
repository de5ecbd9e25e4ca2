"""Compute log-prob, entropy and loss for each row of logits, and overwrite the row with the
gradient of the loss. One program processes a row.

In: logits [N, V] (overwritten), targets [N], `LossInputs` [N]. Out: log-prob, entropy and the terms
of the loss [N] float32, and dloss/dlogits in place of the logits. Read next: kernels/head.py, which
calls `policy_rows_` on a chunk of logits between two matrix products.

Equation.   (logp, H) as in log_softmax.py;  (l, dl) = `terms` of policy.py at logp;
            loss = weight · l - entropy_weight · H.
Derivation. dloss/dx_j = (weight · dl (1[j = y] - p_j) + entropy_weight · p_j (log p_j + H)) / T.
            Once the sums of a row are known, its gradient does not depend on other rows. So the
            same program processes the row a second time and overwrites the logits with the
            gradient. The second pass goes from the last column to the first, because the last
            columns were read most recently and are still in the L1 cache.
Bytes.      The kernel moves 4·N·V bytes in bfloat16 if the second pass hits the L2 cache. If the
            second pass misses the L2 cache, the kernel moves 6·N·V bytes, like separate forward and
            backward kernels. A row of Qwen3 has 304 KB, so one row per multiprocessor needs 40 MB
            of the 50 MB L2 cache of an H100. A program has 32 warps, so only one program fits on a
            multiprocessor at a time. On an H100, N = 8192 rows take 2.43 ms, which is the time for
            6·N·V bytes at 3 TB/s. So in practice, even one row per multiprocessor is too much for
            the L2 cache.
Skipped.    If the gradient of a row is 0 (its advantage is 0, or its ratio is clipped), the row is
            filled with zeros and is not read again. A row with a NaN log-prob is an exception.
            kernels/head.py already skips rows whose weight and entropy_weight are both 0.
Reference.  `policy_rows_` in reference/fused_rows.py.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..reference.policy import Clip, LossInputs
from .log_softmax import LOG2E, results, row_gradient, statistics, wide
from .memory import load
from .policy import numbers_of, terms

# There are twice as many lanes as in log_softmax.py, so a program fills a multiprocessor.
# A thread has two lanes and 64 registers.
# Narrow loads (`statistics` in log_softmax.py) take one register per number.
# So with narrow loads, a lane reads only 4 numbers at a time.
LANES, WARPS = 2048, 32


@triton.jit
def row_kernel(
    LOGITS, OUT, TARGETS, ADV, WEIGHT, OLD, REF, IMP, ENTROPY_WEIGHT, LOGP, ENTROPY, LOSS, CLIP, KL,
    stride, V, k, inv_t, low, high, delta, beta,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Each program processes one row."""
    row = tl.program_id(0).to(tl.int64)
    L = LOGITS + row * stride
    D = L
    if OUT is not None:
        D = OUT + row * V
    BLOCK: tl.constexpr = R * C
    weight = tl.load(WEIGHT + row)
    y = tl.load(TARGETS + row)
    zy = tl.load(L + y).to(tl.float32)  # read now, because the row will be overwritten
    q, l, s = statistics(L, V, k, WIDE, R, C)
    logp, entropy, log_l = results(zy, k, q, l, s)
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)
    l = tl.zeros((), tl.float32)
    dlogp, kl = l, l
    clip = l.to(tl.int32)
    if weight != 0.0:
        old = None
        ref = None
        imp = None
        if OLD is not None:
            old = tl.load(OLD + row)
        if REF is not None:
            ref = tl.load(REF + row)
        if IMP is not None:
            imp = tl.load(IMP + row)
        adv = tl.load(ADV + row)
        l, dlogp, clip, kl = terms(logp, adv, old, ref, imp, low, high, delta, beta)
        dlogp *= weight
    tl.store(LOSS + row, l)
    tl.store(CLIP + row, clip)
    if KL is not None:
        tl.store(KL + row, kl)
    dentropy = tl.zeros((), tl.float32)
    if ENTROPY_WEIGHT is not None:
        dentropy = -tl.load(ENTROPY_WEIGHT + row)
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(V, BLOCK)
    # A row with a NaN log-prob gets a NaN gradient, as in the reference.
    if (dlogp == 0.0) & (dentropy == 0.0) & (logp == logp):
        for c in tl.range(0, V, BLOCK):
            o = c + lanes
            tl.store(D + o, 0.0, mask=o < V)
        return
    # All threads must finish reading the logits before any logit is overwritten.
    tl.debug_barrier()
    for i in tl.range(0, blocks):
        o = (blocks - 1 - i) * BLOCK + lanes
        x = load(L + o, o < V)
        dz = row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy) * inv_t
        tl.store(D + o, dz, mask=o < V)


def policy_rows_(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    inputs: LossInputs,
    c: Clip,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return log-prob, entropy, l, clip flag and KL (or None) of each row, all [N], and the
    gradient of the loss [N, V], like `policy_rows_` in reference/fused_rows.py. `out` must be
    contiguous.
    """
    count, vocab = logits.shape
    logp, entropy, loss, kl = (logits.new_empty(count, dtype=torch.float32) for _ in range(4))
    clip = logits.new_empty(count, dtype=torch.int8)
    outputs = logp, entropy, loss, clip, None if inputs.ref_logp is None else kl
    vectors = targets.contiguous(), *inputs.map(Tensor.contiguous)
    numbers = logits.stride(0), vocab, LOG2E.value / temperature, 1.0 / temperature, *numbers_of(c)
    per_lane = 16 // logits.itemsize if wide(logits) else 4
    shape = dict(WIDE=wide(logits), R=LANES, C=per_lane, num_warps=WARPS)
    row_kernel[(count,)](logits, out, *vectors, *outputs, *numbers, **shape)
    return *outputs, logits if out is None else out

"""Selective log-softmax: the log-prob of one target per row, and the row's entropy, in one pass
over the logits.

In: logits [N, V] (bf16, fp16 or fp32; the entries of a row must be adjacent), targets [N] int64,
temperature. Out: log-prob [N] and entropy [N] in nats, both float32. Read next: policy.py, then
fused_rows.py, which combines the two.

Equation.   z = x / T;  logp = z_y - log Σ_j e^{z_j};  H = -Σ_j p_j log p_j.
            Online: keep (q, l, s) with l = Σ e^{z_j - q} and s = Σ e^{z_j - q} (z_j - q) over the
            columns seen. A larger q' rescales both by a = e^{q - q'}:
            l ← l a,  s ← (s + l (q - q')) a.  At the end logp = z_y - q - log l, H = log l - s / l.
            All exponentials are powers of two: k = log2(e) / T folds the temperature into the one
            multiply-add that exp needs anyway.
Lanes.      Every lane (8 adjacent bfloat16 numbers, one 16-byte load) keeps its own (q, l, s).
            Lanes are merged once, at the end of the row. A textbook online softmax merges once per
            block, and its barriers and shuffles take longer than the loads.
Exactness.  q is rounded, but every term uses the same rounded q. So fma(x, k, -q) has one rounding,
            near the result, and a row around -10,000 is as exact as one around 0. An entry of -inf
            has e = 0 but e · t = NaN: such a (rare) row is summed a second time, so the main loop
            needs no instruction for it. A sum of 151,936 terms is computed as a tree over 1024
            lanes, each of which adds 19 sums of 8 terms. The entropy is always computed: it needs
            no further reads, and the instruction count below includes it.
Domain.     |max_j z_j| log2(e) < 2^31: logits around ±1.4e9 at T = 1, or around 100 at T = 1e-7.
            Beyond that, the rounding of q changes e by a factor of more than 2^64, and sums
            overflow. The form (x - max) k has no such limit, but costs one more instruction per
            element.
Derivation. dlogp/dz_j = 1[j = y] - p_j and dH/dz_j = -p_j (log p_j + H). With the upstream
            gradients g of logp and h of H:  dx_j = (g (1[j = y] - p_j) - h p_j (log p_j + H)) / T,
            p_j = 2^{fma(x_j, k, -q) - log2 l}. The forward saves q and log2 l.
Bytes.      Forward 2·N·V in bfloat16: 0.58 ms for N = 8192, V = 151,936 at 4.3 TB/s. Backward
            4·N·V: 1.16 ms.
FLOP.       About 5 per element forward, 6 backward. The limit is the number of instructions that
            can be issued (about 14 per element at that bandwidth);
            tests/kernels/test_contracts.py counts them.
Reference.  `log_softmax_forward`, `log_softmax_backward_` in reference/log_softmax.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Means "nothing seen yet". It is finite, so the difference of two such values is not NaN.
LOWEST = tl.constexpr(-1e30)

# Launch shapes are constants and not chosen by an autotuner, so the tests cover the shapes that
# run. Every lane of the forward kernel processes 16 bytes at a time, which is a single load.
LANES, WARPS = 1024, 8
BLOCK = 4096  # columns per program of the backward


def wide(logits: Tensor) -> bool:
    """Return whether all rows start at multiples of 16 bytes, by Triton's own test for a launch."""
    return logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0


# --- the statistics of a row ---


@triton.jit
def fold(x, q, l, s, k):
    """Fold the block x [R, C] into the lanes' statistics q, l, s [R].

    Axis 1 lies within a thread, so threads exchange no data.
    """
    q_new = tl.maximum(q, tl.max(x, 1) * k)
    a = tl.exp2(q - q_new)
    t = tl.fma(x, k + tl.zeros_like(x), -q_new[:, None] + tl.zeros_like(x))
    e = tl.exp2(t)
    s = (s + l * (q - q_new)) * a + tl.sum(e * t, 1)
    l = l * a + tl.sum(e, 1)
    return q_new, l, s


@triton.jit
def merge(q, l, s):
    """Merge the statistics of all lanes into three scalars."""
    top = tl.max(q, 0)
    a = tl.exp2(q - top)
    return top, tl.sum(l * a, 0), tl.sum((s + l * (q - top)) * a, 0)


@triton.jit
def statistics(L, V, k, WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Return (q, l, s) of the V columns of the row at L.

    WIDE: the C numbers of a lane are adjacent and need one load. If rows do not start at multiples
    of 16 bytes, that load is impossible, and Triton would spread the C numbers over several
    threads. So each lane then takes every R-th number, and adjacent lanes read adjacent numbers.
    The loads are narrow, but threads exchange no data.
    """
    BLOCK: tl.constexpr = R * C
    if WIDE:
        base = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]  # [R, C]
    else:
        base = tl.arange(0, R)[:, None] + tl.arange(0, C)[None, :] * R  # [R, C]
    q = tl.full((R,), LOWEST, tl.float32)
    l = tl.zeros((R,), tl.float32)
    s = tl.zeros((R,), tl.float32)
    tail = V // BLOCK * BLOCK
    for c in tl.range(0, tail, BLOCK):  # full blocks: no mask
        q, l, s = fold(tl.load(L + (c + base)).to(tl.float32), q, l, s, k)
    if tail < V:
        o = tail + base
        x = tl.load(L + o, mask=o < V, other=0.0).to(tl.float32)
        # Pad after the conversion, because float16 cannot represent -1e30. The padding value is
        # below any q even after multiplication by k, so e = 0.
        q, l, s = fold(tl.where(o < V, x, 2.0 * LOWEST / k), q, l, s, k)
    q, l, s = merge(q, l, s)
    if s != s:  # an entry of -inf made 0 · -inf: sum again, without entries of probability 0
        again = tl.zeros((R,), tl.float32)
        for c in tl.range(0, V, BLOCK):
            o = c + base
            x = tl.load(L + o, mask=o < V, other=0.0).to(tl.float32)
            x = tl.where(o < V, x, 2.0 * LOWEST / k)
            t = tl.fma(x, k + tl.zeros_like(x), -q + tl.zeros_like(x))
            e = tl.exp2(t)
            again += tl.sum(tl.where(e > 0, e * t, 0.0), 1)
        s = tl.sum(again, 0)
    return q, l, s


@triton.jit
def results(zy, k, q, l, s):
    """Return log-prob, entropy (nats) and log2 l; zy is the logit of the target."""
    log_l = tl.log2(l)
    return (tl.fma(zy, k, -q) - log_l) * LN2, (log_l - s / l) * LN2, log_l


# --- forward ---


@triton.jit
def forward_kernel(
    LOGITS, TARGETS, LOGP, ENTROPY, NORM, stride, N, V, k,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Each program processes one row."""
    row = tl.program_id(0).to(tl.int64)  # row · V exceeds 2^31 at 14,134 rows of Qwen3
    L = LOGITS + row * stride
    q, l, s = statistics(L, V, k, WIDE, R, C)
    zy = tl.load(L + tl.load(TARGETS + row)).to(tl.float32)
    logp, entropy, log_l = results(zy, k, q, l, s)
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)
    tl.store(NORM + row, q)
    tl.store(NORM + N + row, log_l)


def log_softmax_forward(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob [N], entropy [N], and (q, log2 l) [2, N] for the backward of this file.

    logits [N, V], targets [N]; rows may be strided, but the entries within a row must be adjacent.
    """
    count, vocab = logits.shape
    logp, entropy = (
        torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    norm = torch.empty(2, count, dtype=torch.float32, device=logits.device)
    numbers = logits.stride(0), count, vocab, LOG2E.value / temperature
    shape = dict(WIDE=wide(logits), R=LANES, C=16 // logits.itemsize, num_warps=WARPS)
    forward_kernel[(count,)](logits, targets.contiguous(), logp, entropy, norm, *numbers, **shape)
    return logp, entropy, norm


# --- backward ---


@triton.jit
def row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy):
    """Return dlogp (1[o = y] - p) - dentropy p (log p + H) for the logits x at columns o.

    1 - p is computed in float32.
    """
    t = tl.fma(x, k + tl.zeros_like(x), -q + tl.zeros_like(x)) - log_l  # log2 p
    p = tl.exp2(t)
    dz = tl.where(o == y, 1.0 - p, -p) * dlogp
    if dentropy != 0.0:
        dz -= dentropy * tl.where(p > 0, p * (t * LN2 + entropy), 0.0)
    return dz


@triton.jit
def backward_kernel(
    LOGITS, TARGETS, NORM, ENTROPY, DLOGP, DENTROPY, stride, N, V, k, inv_t,
    blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes one block of a row, with six values that belong to the row."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    o = (pid % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    L = LOGITS + row * stride
    dlogp = tl.load(DLOGP + row)
    dentropy = tl.load(DENTROPY + row)
    if (dlogp == 0.0) & (dentropy == 0.0):  # the gradient of this row is zero: do not read the row
        tl.store(L + o, tl.zeros((BLOCK,), LOGITS.dtype.element_ty), mask=o < V)
        return
    y = tl.load(TARGETS + row)
    x = tl.load(L + o, mask=o < V, other=0.0).to(tl.float32)
    q, log_l, entropy = tl.load(NORM + row), tl.load(NORM + N + row), tl.load(ENTROPY + row)
    dz = row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy) * inv_t
    tl.store(L + o, dz.to(LOGITS.dtype.element_ty), mask=o < V)


def log_softmax_backward_(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
) -> Tensor:
    """Overwrite the logits [N, V] with their gradient, and return them."""
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    vectors = (v.contiguous() for v in (targets, norm, entropy, dlogp, dentropy))
    numbers = logits.stride(0), count, vocab, LOG2E.value / temperature, 1.0 / temperature, blocks
    backward_kernel[(count * blocks,)](logits, *vectors, *numbers, BLOCK=BLOCK, num_warps=WARPS)
    return logits

"""Compute the log-prob of one target per row (selective log-softmax) and the row's entropy, in one
pass over the logits.

In: logits [N, V] (bf16, fp16 or fp32; the entries of a row must be adjacent), targets [N] int64,
temperature. Out: log-prob [N] and entropy [N] in nats, both float32. Read next: policy.py, then
fused_rows.py, which combines this file and policy.py.

Equation.   z = x / T;  logp = z_y - log Σ_j e^{z_j};  H = -Σ_j p_j log p_j.
            Online: keep (q, l, s) with l = Σ e^{z_j - q} and s = Σ e^{z_j - q} (z_j - q) over the
            columns read so far. A larger maximum q' rescales l and s by a = e^{q - q'}:
            l ← l a,  s ← (s + l (q - q')) a.  At the end, logp = z_y - q - log l and H = log l - s
            / l.
            Exponentials are computed as powers of two. The factor k = log2(e) / T includes the
            division by the temperature, so the exponent needs only one multiply-add.
Lanes.      Every lane (8 adjacent bfloat16 numbers, one 16-byte load) keeps its own (q, l, s). The
            lanes are merged once, at the end of the row. A textbook online softmax merges after
            every block, and the barriers and shuffles then take longer than the loads.
Exactness.  q is rounded, but every term uses the same rounded q. So fma(x, k, -q) is rounded only
            once, and a row of logits near -10,000 is as exact as one near 0. For a logit of -inf, e
            = 0 but e · t = NaN. Rows with -inf are rare. A row with -inf is summed a second time,
            so that the main loop needs no extra instruction. A sum of 151,936 terms is computed as
            a tree over 1024 lanes, and each lane adds 19 sums of 8 terms. The entropy is always
            computed, because it needs no further reads.
Domain.     The kernel requires |max_j z_j| log2(e) < 2^31: logits up to ±1.4e9 at T = 1, or about
            ±100 at T = 1e-7. For larger logits, the rounding of q changes e by a factor of more
            than 2^64, and sums overflow. If the exponent were computed as (x - max) k, logits would
            have no limit, but each element would need one more instruction.
Derivation. dlogp/dz_j = 1[j = y] - p_j and dH/dz_j = -p_j (log p_j + H). With the upstream
            gradients g of logp and h of H:  dx_j = (g (1[j = y] - p_j) - h p_j (log p_j + H)) / T,
            where p_j = 2^{fma(x_j, k, -q) - log2 l}. The forward saves q and log2 l.
Bytes.      The forward moves 2·N·V bytes in bfloat16: 0.58 ms for N = 8192, V = 151,936 at 4.3
            TB/s. The backward moves 4·N·V bytes: 1.16 ms.
FLOP.       The forward needs about 5 FLOP per element, and the backward 6. At 4.3 TB/s, a GPU can
            issue only about 14 instructions per element, so a test counts them
            (tests/kernels/test_contracts.py).
Reference.  `log_softmax_forward`, `log_softmax_backward_` in reference/log_softmax.py.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl

from .memory import load

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The initial maximum, which is finite, because -inf - -inf would be NaN.
LOWEST = tl.constexpr(-1e30)

# Launch shapes are constants and not autotuned, so tests cover all shapes that are used.
# In the forward kernel, a lane reads 16 bytes at a time, in a single load.
LANES, WARPS = 1024, 8
BLOCK = 4096  # columns per program of the backward


def wide(logits: Tensor) -> bool:
    """Return whether all rows start at multiples of 16 bytes. Triton uses the same test when it
    launches a kernel.
    """
    return logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0


# --- the statistics of a row ---


@triton.jit
def shifted(x, k, q):
    """Return x k - q, rounded once."""
    return tl.fma(x, k + tl.zeros_like(x), -q + tl.zeros_like(x))


@triton.jit
def padded(L, o, V, k):
    """Return the logits in the columns o of a row. Columns past the vocabulary are far below any q,
    even after multiplication by k, so e = 0.

    They are filled after the conversion to float32, because float16 cannot represent -1e30.
    """
    return tl.where(o < V, load(L + o, o < V), 2.0 * LOWEST / k)


@triton.jit
def fold(x, q, l, s, k):
    """Add the block x [R, C] to the statistics q, l, s [R] of the lanes.

    The C numbers of a lane belong to one thread, so threads exchange no data.
    """
    q_new = tl.maximum(q, tl.max(x, 1) * k)
    a = tl.exp2(q - q_new)
    t = shifted(x, k, q_new[:, None])  # x k - q_new, rounded once
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
def statistics(L, V, k, WIDE, R, C):
    """Return (q, l, s) of the V columns of the row at L.

    If WIDE, the C numbers of a lane are adjacent and need one load. A single load is impossible if
    rows do not start at multiples of 16 bytes, because Triton would then spread the C numbers over
    several threads. So without WIDE, each lane reads every R-th number, and adjacent lanes read
    adjacent numbers. Loads without WIDE are narrow, but threads still exchange no data.
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
        q, l, s = fold(padded(L, tail + base, V, k), q, l, s, k)
    q, l, s = merge(q, l, s)
    if s != s:  # a logit of -inf gave 0 · -inf = NaN: sum again, leaving out probabilities of 0
        again = tl.zeros((R,), tl.float32)
        for c in tl.range(0, V, BLOCK):
            t = shifted(padded(L, c + base, V, k), k, q)
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
    row = tl.program_id(0).to(tl.int64)  # row · V can exceed 2^31
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

    The shapes are logits [N, V] and targets [N]. Rows may be strided, but the entries of a row must
    be adjacent.
    """
    count, vocab = logits.shape
    logp, entropy = (logits.new_empty(count, dtype=torch.float32) for _ in range(2))
    norm = logits.new_empty(2, count, dtype=torch.float32)
    numbers = logits.stride(0), count, vocab, LOG2E.value / temperature
    shape = dict(WIDE=wide(logits), R=LANES, C=16 // logits.itemsize, num_warps=WARPS)
    forward_kernel[(count,)](logits, targets.contiguous(), logp, entropy, norm, *numbers, **shape)
    return logp, entropy, norm


# --- backward ---


@triton.jit
def row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy):
    """Return dlogp (1[o = y] - p) - dentropy p (log p + H) for the logits x at columns o.

    The difference 1 - p is computed in float32.
    """
    t = shifted(x, k, q) - log_l  # log2 p
    p = tl.exp2(t)
    dz = tl.where(o == y, 1.0 - p, -p) * dlogp
    if dentropy != 0.0:
        dz -= dentropy * tl.where(p > 0, p * (t * LN2 + entropy), 0.0)
    return dz


@triton.jit
def backward_kernel(
    LOGITS, OUT, TARGETS, NORM, ENTROPY, DLOGP, DENTROPY, stride, N, V, k, inv_t,
    blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program processes one block of a row."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    o = (pid % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    L = LOGITS + row * stride
    D = L
    if OUT is not None:
        D = OUT + row * V
    dlogp = tl.load(DLOGP + row)
    dentropy = tl.load(DENTROPY + row)
    if (dlogp == 0.0) & (dentropy == 0.0):  # the gradient is zero: do not read the row
        tl.store(D + o, 0.0, mask=o < V)
        return
    y = tl.load(TARGETS + row)
    x = load(L + o, o < V)
    q, log_l, entropy = tl.load(NORM + row), tl.load(NORM + N + row), tl.load(ENTROPY + row)
    dz = row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy) * inv_t
    tl.store(D + o, dz, mask=o < V)


def log_softmax_backward_(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Write the gradient of the logits [N, V] to `out` (contiguous), and return it. By default, it
    overwrites the logits.
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    vectors = (v.contiguous() for v in (targets, norm, entropy, dlogp, dentropy))
    numbers = logits.stride(0), count, vocab, LOG2E.value / temperature, 1.0 / temperature, blocks
    shape = dict(BLOCK=BLOCK, num_warps=WARPS)
    backward_kernel[(count * blocks,)](logits, out, *vectors, *numbers, **shape)
    return logits if out is None else out

"""Selective log-softmax: the log-prob of one target per row, and the row's entropy, in one read of
the logits.

In: logits [N, V] (bf16, fp16, fp32; fp64 for finite differences), targets [N] int64, temperature.
Out: log-prob [N], entropy [N] in nats, both float32. Read next: policy.py, then rows.py, which
joins the two.

Equation.   z = x / T;  logp = z_y - log Σ_j e^{z_j};  H = -Σ_j p_j log p_j.
            Online: keep (q, l, s) with l = Σ e^{z_j - q}, s = Σ e^{z_j - q} (z_j - q) over what was seen. A larger q' rescales
            both by a = e^{q - q'}:  l ← l a,  s ← (s + l (q - q')) a.  At the end logp = z_y - q - log l and H = log l - s / l.
            All in powers of two: k = log2(e) / T folds the temperature into the one multiply-add that exp needs anyway.
Lanes.      Every lane (8 neighbouring bfloat16 numbers, one 16-byte load) keeps its own (q, l, s); lanes meet once, after the
            row. A textbook online softmax meets once a block instead: barriers and shuffles that cost more than the loads.
Exactness.  q is rounded, but the same rounded q stands in every term, so that fma(x, k, -q) has one
rounding, near the result:
            a row around -10,000 is as exact as one around 0. An entry of -inf has e = 0 but e · t = nan; it is met by a second
            visit of that row (rare), not by an instruction in everyone's loop. A sum of 151,936 terms is a tree over 1024 lanes,
            each of which adds 19 sums of 8. Entropy is always computed: it reads nothing more, and its multiply-adds are counted
            in the limit below.
Domain.     |max_j z_j| log2(e) < 2^31: logits around ±1.4e9 at T = 1, or of 100 at T = 1e-7. Beyond, the rounding of q is a shift
            of more than 2^64 in e, and sums overflow. A form without it, (x - max) k, is one instruction more for every element.
Derivation. dlogp/dz_j = 1[j = y] - p_j and dH/dz_j = -p_j (log p_j + H). With upstream gradients g
of logp and h of H:
            dx_j = (g (1[j = y] - p_j) - h p_j (log p_j + H)) / T,  p_j = 2^{fma(x_j, k, -q) - log2 l}; q and log2 l are saved.
Bytes.      Forward 2·N·V in bfloat16: 0.58 ms for N = 8192, V = 151,936 at 4.3 TB/s. Backward 4·N·V: 1.16 ms.
FLOP.       About 5 an element forward, 6 backward; what limits is issue slots (about 14 an element at that bandwidth): the count
            of instructions is held by tests/kernels/test_contracts.py.
Reference.  `log_softmax_forward`, `log_softmax_backward` in reference.py; registered with a
gradient in nanogrpo/custom_ops.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import accumulator, columns_of_part, shape_of_block, shape_of_gradient, wide

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# stands for "nothing seen": finite, so that differences of it are never nan
LOWEST = tl.constexpr(-1e30)

FEW_ROWS = 512  # fewer than this cannot fill the GPU with one program a row: V is split


@triton.jit
def fold(x, q, l, s, k):
    """Takes the block x [R, C] into the lanes' statistics q, l, s [R]. Axis 1 lies within a thread:
    nothing is exchanged.
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
    """The statistics of all lanes (or all parts of a row) together: three scalars."""
    top = tl.max(q, 0)
    a = tl.exp2(q - top)
    return top, tl.sum(l * a, 0), tl.sum((s + l * (q - top)) * a, 0)


@triton.jit
def statistics(
    L, start, stop, k, WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr
):
    """(q, l, s) of the columns start … stop of the row at L. WIDE: a lane's C numbers are
    neighbours, loaded at once.

    Where rows do not begin at multiples of 16 bytes that load is impossible, and Triton would part
    the C numbers of a lane among threads. So a lane then takes every R-th number, and neighbouring
    lanes neighbouring numbers: narrow loads, no exchange.
    """
    BLOCK: tl.constexpr = R * C
    if WIDE:
        base = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]  # [R, C]
    else:
        base = tl.arange(0, R)[:, None] + tl.arange(0, C)[None, :] * R  # [R, C]
    q = tl.full((R,), LOWEST, ACC)
    l = tl.zeros((R,), ACC)
    s = tl.zeros((R,), ACC)
    tail = start + (stop - start) // BLOCK * BLOCK
    for c in tl.range(start, tail, BLOCK):  # whole blocks: no mask
        q, l, s = fold(tl.load(L + (c + base)).to(ACC), q, l, s, k)
    if tail < stop:
        o = tail + base
        x = tl.load(L + o, mask=o < stop, other=0.0).to(ACC)
        # Filled after the conversion (float16 knows no -1e30), with what lies below any q once it
        # is multiplied by k: e = 0.
        q, l, s = fold(tl.where(o < stop, x, 2.0 * LOWEST / k), q, l, s, k)
    q, l, s = merge(q, l, s)
    if s != s:  # an entry of -inf made 0 · -inf: sum again, leaving out what has no probability
        again = tl.zeros((R,), ACC)
        for c in tl.range(start, stop, BLOCK):
            o = c + base
            x = tl.where(
                o < stop, tl.load(L + o, mask=o < stop, other=0.0).to(ACC), 2.0 * LOWEST / k
            )
            t = tl.fma(x, k + tl.zeros_like(x), -q + tl.zeros_like(x))
            e = tl.exp2(t)
            again += tl.sum(tl.where(e > 0, e * t, 0.0), 1)
        s = tl.sum(again, 0)
    return q, l, s


@triton.jit
def results(zy, k, q, l, s):
    """log-prob, entropy (nats) and log2 l from a row's statistics and its target's logit zy."""
    log_l = tl.log2(l)
    return (tl.fma(zy, k, -q) - log_l) * LN2, (log_l - s / l) * LN2, log_l


# ------------------------------------------------------------------------------------------------------------------- forward


@triton.jit
def forward_kernel(
    LOGITS, TARGETS, MASK, LOGP, ENTROPY, NORM, stride, N, V, k,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)  # row · V passes 2^31 at 14,134 rows of Qwen3
    k = tl.full((), k, ACC)
    on = 1
    if MASK is not None:
        on = tl.load(MASK + row).to(tl.int32)
    if on == 0:
        tl.store(LOGP + row, 0.0)
        tl.store(ENTROPY + row, 0.0)
        return
    L = LOGITS + row * stride
    zy = tl.load(L + tl.load(TARGETS + row)).to(ACC)
    q, l, s = statistics(L, 0, V, k, WIDE, R, C, ACC)
    logp, entropy, log_l = results(zy, k, q, l, s)
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)
    tl.store(NORM + row, q)
    tl.store(NORM + N + row, log_l)


@triton.jit
def part_kernel(
    LOGITS,
    PARTS,
    stride,
    V,
    k,
    parts,
    slice,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program a slice of a row, for few rows: (q, l, s) of it into PARTS [N, parts, 3]."""
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % parts).to(tl.int32)
    k = tl.full((), k, ACC)
    start = part * slice
    q, l, s = statistics(
        LOGITS + pid // parts * stride, start, tl.minimum(start + slice, V), k, WIDE, R, C, ACC
    )
    tl.store(PARTS + pid * 3, q)
    tl.store(PARTS + pid * 3 + 1, l)
    tl.store(PARTS + pid * 3 + 2, s)


@triton.jit
def join_kernel(
    LOGITS,
    TARGETS,
    MASK,
    PARTS,
    LOGP,
    ENTROPY,
    NORM,
    stride,
    N,
    k,
    parts,
    PARTS_2: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program a row: its parts (at most PARTS_2, a power of two), always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.full((), k, ACC)
    on = 1
    if MASK is not None:
        on = tl.load(MASK + row).to(tl.int32)
    if on == 0:
        tl.store(LOGP + row, 0.0)
        tl.store(ENTROPY + row, 0.0)
        return
    j = tl.arange(0, PARTS_2)
    P = PARTS + (row * parts + j) * 3
    q, l, s = merge(
        tl.load(P, mask=j < parts, other=LOWEST),
        tl.load(P + 1, mask=j < parts, other=0.0),
        tl.load(P + 2, mask=j < parts, other=0.0),
    )
    zy = tl.load(LOGITS + row * stride + tl.load(TARGETS + row)).to(ACC)
    logp, entropy, log_l = results(zy, k, q, l, s)
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)
    tl.store(NORM + row, q)
    tl.store(NORM + N + row, log_l)


# ------------------------------------------------------------------------------------------------------------------ backward


@triton.jit
def row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy):
    """dlogp (1[o = y] - p) - dentropy p (log p + H) for the logits x at columns o; 1 - p is formed
    in the accumulator's type.
    """
    t = tl.fma(x, k + tl.zeros_like(x), -q + tl.zeros_like(x)) - log_l  # log2 p
    p = tl.exp2(t)
    dz = tl.where(o == y, 1.0 - p, -p) * dlogp
    if dentropy != 0.0:
        dz -= dentropy * tl.where(p > 0, p * (t * LN2 + entropy), 0.0)
    return dz


@triton.jit
def backward_kernel(
    LOGITS, TARGETS, MASK, NORM, ENTROPY, DLOGP, DENTROPY, OUT, stride, stride_out, N, V, k, inv_t, blocks,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program a block of a row: each element depends on itself and six numbers of its row. OUT
    may be LOGITS.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    o = (pid % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    k = tl.full((), k, ACC)
    D = OUT + row * stride_out
    dlogp = tl.load(DLOGP + row).to(ACC)
    dentropy = tl.load(DENTROPY + row).to(ACC)
    if MASK is not None:
        on = tl.load(MASK + row) != 0
        dlogp = tl.where(on, dlogp, 0.0)
        dentropy = tl.where(on, dentropy, 0.0)
    if (dlogp == 0.0) & (dentropy == 0.0):  # nothing to say about this row: it is not even read
        tl.store(D + o, tl.zeros((BLOCK,), OUT.dtype.element_ty), mask=o < V)
        return
    y = tl.load(TARGETS + row)
    x = tl.load(LOGITS + row * stride + o, mask=o < V, other=0.0).to(ACC)
    q, log_l, entropy = tl.load(NORM + row), tl.load(NORM + N + row), tl.load(ENTROPY + row)
    dz = row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy) * inv_t
    tl.store(D + o, dz.to(OUT.dtype.element_ty), mask=o < V)


# ---------------------------------------------------------------------------------------------------------------- the functions


def log_softmax_forward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    mask: Tensor | None = None,
    *,
    lanes: int = 1024,
    few_rows: int = FEW_ROWS,
) -> tuple[Tensor, Tensor, Tensor]:
    """[N, V], [N] → log-prob [N], entropy [N], and (q, log2 l) [2, N] for this file's backward.
    Rows may be strided.

    lanes and few_rows are for the tests, which want many blocks of a small row.
    """
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(
            f"logits have stride {logits.stride()}: the numbers of a row must lie side by side (last stride 1)."
        )
    count, vocab = logits.shape
    dtype, acc = accumulator(logits.dtype)
    logp, entropy = (torch.empty(count, dtype=dtype, device=logits.device) for _ in range(2))
    norm = torch.zeros(2, count, dtype=dtype, device=logits.device)
    if count == 0:
        return logp, entropy, norm
    mask = None if mask is None else mask.contiguous().view(torch.int8)
    targets, k, stride = targets.contiguous(), LOG2E.value / temperature, logits.stride(0)
    R, C, warps = shape_of_block(vocab, logits.dtype, lanes)
    out, shape = (logp, entropy, norm), dict(WIDE=wide(logits), R=R, C=C, ACC=acc, num_warps=warps)
    if count >= few_rows or vocab <= 2 * R * C:
        forward_kernel[(count,)](logits, targets, mask, *out, stride, count, vocab, k, **shape)
        return out
    columns = columns_of_part(R, C)
    parts = triton.cdiv(vocab, columns)
    partial = torch.empty(count, parts, 3, dtype=dtype, device=logits.device)
    part_kernel[(count * parts,)](logits, partial, stride, vocab, k, parts, columns, **shape)
    args = logits, targets, mask, partial, *out, stride, count, k, parts
    join_kernel[(count,)](*args, PARTS_2=triton.next_power_of_2(parts), ACC=acc, num_warps=1)
    return out


def log_softmax_backward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor | None,
    mask: Tensor | None = None,
    *,
    in_place: bool = False,
    block: int = 4096,
) -> Tensor:
    """dlogits [N, V] in the type of logits; in_place writes it over them (for a caller that owns
    the buffer).
    """
    count, vocab = logits.shape
    out = (
        logits if in_place else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    )
    if count == 0:
        return out
    dentropy = torch.zeros_like(dlogp) if dentropy is None else dentropy
    mask = None if mask is None else mask.contiguous().view(torch.int8)
    block, warps = shape_of_gradient(vocab, block)
    blocks = triton.cdiv(vocab, block)
    per_row = (v.contiguous() for v in (norm, entropy, dlogp, dentropy))
    strides = logits.stride(0), out.stride(0)
    numbers = count, vocab, LOG2E.value / temperature, 1.0 / temperature, blocks
    acc = accumulator(logits.dtype)[1]
    args = logits, targets.contiguous(), mask, *per_row, out, *strides, *numbers
    backward_kernel[(count * blocks,)](*args, BLOCK=block, ACC=acc, num_warps=warps)
    return out

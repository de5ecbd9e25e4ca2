"""Selective log-softmax: the log-prob of one target per row, and the row's entropy, in one read of
the logits.

In: logits [N, V] (bf16, fp16, fp32; fp64 for finite differences), targets [N] int64, temperature.
Out: log-prob [N] and entropy [N] in nats, both float32. Read next: policy.py, then fused_rows.py,
which joins the two.

Equation.   z = x / T;  logp = z_y - log Σ_j e^{z_j};  H = -Σ_j p_j log p_j.
            Online: keep (q, l, s) with l = Σ e^{z_j - q} and s = Σ e^{z_j - q} (z_j - q) over the
            columns seen. A larger q' rescales both by a = e^{q - q'}:
            l ← l a,  s ← (s + l (q - q')) a.  At the end logp = z_y - q - log l, H = log l - s / l.
            All in powers of two: k = log2(e) / T folds the temperature into the one multiply-add
            that exp needs anyway.
Lanes.      Every lane (8 adjacent bfloat16 numbers, one 16-byte load) keeps its own (q, l, s).
            Lanes are merged once, after the row. A textbook online softmax merges once per block:
            its barriers and shuffles cost more than the loads.
Exactness.  q is rounded, but every term uses the same rounded q. So fma(x, k, -q) has one rounding,
            near the result, and a row around -10,000 is as exact as one around 0. An entry of -inf
            has e = 0 but e · t = NaN: that (rare) row is summed a second time, and the common loop
            has no instruction for it. A sum of 151,936 terms is a tree over 1024 lanes, each of
            which adds 19 sums of 8. The entropy is always computed: it reads nothing more, and the
            instruction limit below includes it.
Domain.     |max_j z_j| log2(e) < 2^31: logits around ±1.4e9 at T = 1, or around 100 at T = 1e-7.
            Beyond, rounding q shifts e by more than 2^64, and sums overflow. The form
            (x - max) k has no such limit, but costs one more instruction per element.
Derivation. dlogp/dz_j = 1[j = y] - p_j and dH/dz_j = -p_j (log p_j + H). With the upstream
            gradients g of logp and h of H:  dx_j = (g (1[j = y] - p_j) - h p_j (log p_j + H)) / T,
            p_j = 2^{fma(x_j, k, -q) - log2 l}. The forward saves q and log2 l.
Bytes.      Forward 2·N·V in bfloat16: 0.58 ms for N = 8192, V = 151,936 at 4.3 TB/s. Backward
            4·N·V: 1.16 ms.
FLOP.       About 5 per element forward, 6 backward. The limit is issue slots (about 14 per element
            at that bandwidth); tests/kernels/test_contracts.py counts the instructions.
Reference.  `log_softmax_forward`, `log_softmax_backward` in reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Means "nothing seen yet". It is finite, so differences of it are never NaN.
LOWEST = tl.constexpr(-1e30)

FEW_ROWS = 512  # with fewer rows, one program per row cannot fill the GPU: V is split
SLICE = 8192  # columns per part when a row is split


# --- the shapes of a launch: a table, not an autotuner, so tests see the shapes that run ---


def shape_of_block(vocab: int, dtype: torch.dtype, lanes: int = 1024) -> tuple[int, int, int]:
    """Return lanes, numbers per lane (16 bytes: one load) and warps."""
    per_lane = 16 // dtype.itemsize
    lanes = min(lanes, triton.next_power_of_2(triton.cdiv(vocab, per_lane)))
    return lanes, per_lane, max(1, min(8, lanes // 128))


def shape_of_gradient(vocab: int, block: int = 4096) -> tuple[int, int]:
    """Return the columns and warps of a program of the backward."""
    block = min(block, triton.next_power_of_2(vocab))
    return block, max(1, min(8, block // 512))


def columns_of_part(lanes: int, per_lane: int) -> int:
    """Return the columns per part of a split row.

    They depend on V and the type alone, so a row's result does not depend on the batch it is in.
    """
    return max(SLICE if lanes == 1024 else 0, lanes * per_lane)


def wide(logits: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes: Triton asks the same of a launch."""
    return logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0


def accumulator(dtype: torch.dtype) -> tuple[torch.dtype, tl.dtype]:
    """Return the type of the sums, for torch and for Triton."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)


def check_rows(logits: Tensor) -> None:
    """Raise ValueError unless the numbers of each row are contiguous."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(
            f"logits have stride {logits.stride()}: the numbers of a row must be contiguous "
            "(last stride 1)."
        )


# --- the statistics of a row ---


@triton.jit
def fold(x, q, l, s, k):
    """Fold the block x [R, C] into the lanes' statistics q, l, s [R].

    Axis 1 lies within a thread, so threads exchange nothing.
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
    """Merge the statistics of all lanes (or all parts of a row) into three scalars."""
    top = tl.max(q, 0)
    a = tl.exp2(q - top)
    return top, tl.sum(l * a, 0), tl.sum((s + l * (q - top)) * a, 0)


@triton.jit
def statistics(
    L, start, stop, k, WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr
):
    """Return (q, l, s) of the columns start … stop of the row at L.

    WIDE: the C numbers of a lane are adjacent and take one load. If rows do not start at multiples
    of 16 bytes, that load is impossible, and Triton would spread the C numbers over several
    threads. So a lane then takes every R-th number, and adjacent lanes take adjacent numbers:
    narrow loads, no exchange.
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
    for c in tl.range(start, tail, BLOCK):  # full blocks: no mask
        q, l, s = fold(tl.load(L + (c + base)).to(ACC), q, l, s, k)
    if tail < stop:
        o = tail + base
        x = tl.load(L + o, mask=o < stop, other=0.0).to(ACC)
        # Filled after the conversion, because float16 cannot hold -1e30. The filling is below any q
        # even after it is multiplied by k, so e = 0.
        q, l, s = fold(tl.where(o < stop, x, 2.0 * LOWEST / k), q, l, s, k)
    q, l, s = merge(q, l, s)
    if s != s:  # an entry of -inf made 0 · -inf: sum again, without entries of probability 0
        again = tl.zeros((R,), ACC)
        for c in tl.range(start, stop, BLOCK):
            o = c + base
            x = tl.load(L + o, mask=o < stop, other=0.0).to(ACC)
            x = tl.where(o < stop, x, 2.0 * LOWEST / k)
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
def finish_row(LOGITS, TARGETS, LOGP, ENTROPY, NORM, row, stride, N, k, q, l, s, ACC: tl.constexpr):
    """Store the results of a row."""
    zy = tl.load(LOGITS + row * stride + tl.load(TARGETS + row)).to(ACC)
    logp, entropy, log_l = results(zy, k, q, l, s)
    tl.store(LOGP + row, logp)
    tl.store(ENTROPY + row, entropy)
    tl.store(NORM + row, q)
    tl.store(NORM + N + row, log_l)


@triton.jit
def forward_kernel(
    LOGITS, TARGETS, LOGP, ENTROPY, NORM, stride, N, V, k,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)  # row · V exceeds 2^31 at 14,134 rows of Qwen3
    k = tl.full((), k, ACC)
    q, l, s = statistics(LOGITS + row * stride, 0, V, k, WIDE, R, C, ACC)
    finish_row(LOGITS, TARGETS, LOGP, ENTROPY, NORM, row, stride, N, k, q, l, s, ACC)


@triton.jit
def part_kernel(
    LOGITS, PARTS, stride, V, k, parts, slice,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program per part of a row, for few rows: writes its (q, l, s) to PARTS [N, parts, 3]."""
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % parts).to(tl.int32)
    k = tl.full((), k, ACC)
    start = part * slice
    stop = tl.minimum(start + slice, V)
    q, l, s = statistics(LOGITS + pid // parts * stride, start, stop, k, WIDE, R, C, ACC)
    tl.store(PARTS + pid * 3, q)
    tl.store(PARTS + pid * 3 + 1, l)
    tl.store(PARTS + pid * 3 + 2, s)


@triton.jit
def join_kernel(
    LOGITS, TARGETS, PARTS, LOGP, ENTROPY, NORM, stride, N, k, parts,
    PARTS_2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program per row: merges its parts (at most PARTS_2, a power of two) in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.full((), k, ACC)
    j = tl.arange(0, PARTS_2)
    P = PARTS + (row * parts + j) * 3
    q = tl.load(P, mask=j < parts, other=LOWEST)
    l = tl.load(P + 1, mask=j < parts, other=0.0)
    s = tl.load(P + 2, mask=j < parts, other=0.0)
    q, l, s = merge(q, l, s)
    finish_row(LOGITS, TARGETS, LOGP, ENTROPY, NORM, row, stride, N, k, q, l, s, ACC)


def log_softmax_forward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    lanes: int = 1024,
    few_rows: int = FEW_ROWS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob [N], entropy [N], and (q, log2 l) [2, N] for the backward of this file.

    logits [N, V], targets [N]; rows may be strided. The tests change `lanes` and `few_rows` to get
    many blocks from a small row.
    """
    check_rows(logits)
    count, vocab = logits.shape
    dtype, acc = accumulator(logits.dtype)
    logp, entropy = (torch.empty(count, dtype=dtype, device=logits.device) for _ in range(2))
    out = logp, entropy, torch.empty(2, count, dtype=dtype, device=logits.device)
    if count == 0:
        return out
    targets, k, stride = targets.contiguous(), LOG2E.value / temperature, logits.stride(0)
    R, C, warps = shape_of_block(vocab, logits.dtype, lanes)
    shape = dict(WIDE=wide(logits), R=R, C=C, ACC=acc, num_warps=warps)
    if count >= few_rows or vocab <= 2 * R * C:
        forward_kernel[(count,)](logits, targets, *out, stride, count, vocab, k, **shape)
        return out
    columns = columns_of_part(R, C)
    parts = triton.cdiv(vocab, columns)
    partial = torch.empty(count, parts, 3, dtype=dtype, device=logits.device)
    part_kernel[(count * parts,)](logits, partial, stride, vocab, k, parts, columns, **shape)
    args = logits, targets, partial, *out, stride, count, k, parts
    join_kernel[(count,)](*args, PARTS_2=triton.next_power_of_2(parts), ACC=acc, num_warps=1)
    return out


# --- backward ---


@triton.jit
def row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy):
    """Return dlogp (1[o = y] - p) - dentropy p (log p + H) for the logits x at columns o.

    1 - p is formed in the accumulator's type.
    """
    t = tl.fma(x, k + tl.zeros_like(x), -q + tl.zeros_like(x)) - log_l  # log2 p
    p = tl.exp2(t)
    dz = tl.where(o == y, 1.0 - p, -p) * dlogp
    if dentropy != 0.0:
        dz -= dentropy * tl.where(p > 0, p * (t * LN2 + entropy), 0.0)
    return dz


@triton.jit
def backward_kernel(
    LOGITS, TARGETS, NORM, ENTROPY, DLOGP, DENTROPY, OUT, stride, stride_out, N, V, k, inv_t,
    blocks, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program per block of a row: each element depends on itself and six numbers of its row.

    OUT may be LOGITS.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    o = (pid % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    k = tl.full((), k, ACC)
    D = OUT + row * stride_out
    dlogp = tl.load(DLOGP + row).to(ACC)
    dentropy = tl.load(DENTROPY + row).to(ACC)
    if (dlogp == 0.0) & (dentropy == 0.0):  # the gradient of this row is zero: do not read the row
        tl.store(D + o, tl.zeros((BLOCK,), OUT.dtype.element_ty), mask=o < V)
        return
    y = tl.load(TARGETS + row)
    x = tl.load(LOGITS + row * stride + o, mask=o < V, other=0.0).to(ACC)
    q, log_l, entropy = tl.load(NORM + row), tl.load(NORM + N + row), tl.load(ENTROPY + row)
    dz = row_gradient(x, o, y, k, q, log_l, entropy, dlogp, dentropy) * inv_t
    tl.store(D + o, dz.to(OUT.dtype.element_ty), mask=o < V)


def log_softmax_backward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor | None,
    *,
    in_place: bool = False,
    block: int = 4096,
) -> Tensor:
    """Return dlogits [N, V] in the type of logits; `in_place` overwrites the logits with it."""
    count, vocab = logits.shape
    out = logits if in_place else logits.new_empty(logits.shape)
    if count == 0:
        return out
    dentropy = torch.zeros_like(dlogp) if dentropy is None else dentropy
    block, warps = shape_of_gradient(vocab, block)
    blocks = triton.cdiv(vocab, block)
    vectors = (v.contiguous() for v in (targets, norm, entropy, dlogp, dentropy))
    strides = logits.stride(0), out.stride(0)
    numbers = count, vocab, LOG2E.value / temperature, 1.0 / temperature, blocks
    shape = dict(BLOCK=block, ACC=accumulator(logits.dtype)[1], num_warps=warps)
    backward_kernel[(count * blocks,)](logits, *vectors, out, *strides, *numbers, **shape)
    return out

"""Compute QK-norm, rotation and attention of one decode step over a paged cache, in one kernel.

In: query [b, H, E], key and value [b, K, E] and position [b] of the newest token in each of b rows,
and the arguments of `norm_rope` (rope.py). The cache has keys and values [pages, K, PAGE, E], and
`table` lists each row's pages in order. Out: the attention output [b, H, E]. All dtypes are bf16,
fp16 or fp32. For inference only. Read next: sample.py.

Equation.   Over a part p of a row's keys: x = q Kᵀ / √E,  m = max x,  l = Σ exp(x - m),
            out_p = Σ exp(x - m) v / l,  lse_p = m + log l. Then, with the largest lse:
            out = Σ_p exp(lse_p - lse) out_p / Σ_p exp(lse_p - lse)   (flash-decoding, Dao et al.
            2023).
Parts.      The pages of a row are split into parts. If rows were not split into parts, one long row
            would leave most of the GPU idle. The number of parts depends only on b, so a CUDA graph
            is valid for all lengths. The number of pages per part depends on the row's length. The
            program for part 0 also handles the newest token and writes it to its page. Each pair of
            a row and a key head has one program per part. The last of these programs to finish
            combines the parts, in a fixed order. A counter tells a program whether it is the last
            one.
Rotation.   y = u cos + u' sin, where u' = (-b, a) for u = (a, b). Each program normalizes and
            rotates its own queries, which takes less time than the launch of another kernel.
Groups.     The H/K query heads that share a key head form the rows of one matrix product, padded to
            16 rows for the tensor cores. So each key is read only once.
Bytes.      The kernel reads 4·K·E bytes per cached token in bfloat16. A layer of Qwen3-0.6B (K = 8,
            E = 128) reads 105 MB for 64 rows of 400 tokens, which takes 24 µs at 4.3 TB/s. FLOP:
            4·H·E per cached token.
Reference.  `paged_attention` in reference/paged.py.
"""

import functools
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl

from .attention import add_keys, no_keys
from .log_softmax import LOG2E
from .memory import load
from .rope import adjacent

PROGRAMS = 1024  # target number of programs of `attend`: about eight per multiprocessor
PARTS = 32  # maximum number of parts per row


@triton.constexpr_function
def padded(n):
    """Return the size of a block with at least n rows or columns, for the tensor cores."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def rotated(X, WEIGHT, cos, sin, at, here, eps, E):
    """Return the heads [rows, padded(E)] at X + at, normalized and rotated, in the dtype of X."""
    e = tl.arange(0, padded(E))
    other = tl.where(e < E // 2, e + E // 2, e - E // 2)  # the other half
    x = load(X + at + e, here)
    y = load(X + at + other, here)
    if WEIGHT is not None:
        r = (1.0 / tl.sqrt(tl.sum(x * x, 1) / E + eps))[:, None]
        x = x * r * load(WEIGHT + e, e < E)
        y = y * r * load(WEIGHT + other, e < E)
    y = tl.where(e < E // 2, -y, y)
    return (x * cos + y * sin).to(X.dtype.element_ty)


@triton.jit
def attend_kernel(
    Q, K_NEW, V_NEW, WQ, WK, COS, SIN, POSITION, TABLE, KEYS, VALUES, OUTS, Y, LSES, COUNTS,
    q_stride, k_stride, v_stride, table_stride, scale, eps,
    KV: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr,
    PAGE: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (row, k, part) computes a part for the HEADS queries of key head k.

    If there is one part, OUTS is the result, and Y, LSES and COUNTS are None. WQ and WK may be
    None.
    """
    row = tl.program_id(0).to(tl.int64)
    k_head = tl.program_id(1)
    part = tl.program_id(2)
    position = tl.load(POSITION + row).to(tl.int32)
    first = tl.maximum(position + 1 - WINDOW, 0) // PAGE if WINDOW else 0
    pages = tl.cdiv(position, PAGE)
    share = tl.cdiv(pages - first, PARTS)
    first += part * share
    g = tl.arange(0, padded(HEADS))
    e = tl.arange(0, padded(E))
    n = tl.arange(0, PAGE)
    head = k_head * HEADS + g
    mine = (g < HEADS)[:, None] & (e < E)
    cos = load(COS + row * E + e, e < E)
    sin = load(SIN + row * E + e, e < E)
    q = rotated(Q + row * q_stride, WQ, cos, sin, head[:, None] * E, mine, eps, E)
    m, l, o = no_keys(padded(HEADS), padded(E))
    if part == 0:
        only = tl.zeros((1, 1), tl.int32) + k_head * E
        here = (e < E)[None, :]
        k = rotated(K_NEW + row * k_stride, WK, cos, sin, only, here, eps, E).reshape(padded(E))
        v = tl.load(V_NEW + row * v_stride + k_head * E + e, mask=e < E, other=0.0)
        page = tl.load(TABLE + row * table_stride + position // PAGE).to(tl.int64)
        at = ((page * KV + k_head) * PAGE + position % PAGE) * E + e
        tl.store(KEYS + at, k, mask=e < E)
        tl.store(VALUES + at, v, mask=e < E)
        m = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
        l += 1.0
        o += v.to(tl.float32)[None, :]
    for i in tl.range(first, tl.minimum(first + share, pages)):
        page = tl.load(TABLE + row * table_stride + i).to(tl.int64)
        at = ((page * KV + k_head) * PAGE + n) * E
        seen = i * PAGE + n < position
        if WINDOW:
            seen &= i * PAGE + n > position - WINDOW
        there = seen[:, None] & (e < E)
        keys = tl.load(KEYS + at[:, None] + e, mask=there, other=0.0)  # [PAGE, E]
        x = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale  # [HEADS, PAGE]
        x = tl.where(seen[None, :], x, float("-inf"))
        values = tl.load(VALUES + at[:, None] + e, mask=there, other=0.0)
        m, l, o = add_keys(m, l, o, x, values)
    group = row * KV + k_head
    at = (group * HEADS + g) * PARTS + part
    # l is at least 1, except in a part without keys, where it is 0
    tl.store(OUTS + at[:, None] * E + e, o / tl.maximum(l, 1.0)[:, None], mask=mine)
    if PARTS > 1:
        tl.store(LSES + at, m + tl.log2(l), mask=g < HEADS)
        tl.debug_barrier()  # all threads store their results before the counter is increased
        # A program that sees this addition also sees what was stored before it.
        if tl.atomic_add(COUNTS + group, 1, sem="acq_rel") == PARTS - 1:
            tl.store(COUNTS + group, 0)  # for the next launch
            for i in tl.range(HEADS):
                whole = group * HEADS + i
                parts = whole * PARTS + tl.arange(0, PARTS)
                lse = tl.load(LSES + parts)
                a = tl.exp2(lse - tl.max(lse, 0))  # 0 for a part without keys, whose lse is -inf
                outs = tl.load(OUTS + parts[:, None] * E + e, mask=(e < E)[None, :], other=0.0)
                y = tl.sum(outs * a[:, None], 0) / tl.sum(a, 0)
                tl.store(Y + whole * E + e, y, mask=e < E)


@functools.cache
def counters(device: torch.device, count: int) -> Tensor:
    """Return zeros [count] int32. Each launch of the kernel resets them to 0."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Any, ...],
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int = 0,
) -> Tensor:
    """Normalize and rotate q [b, H, E] and k [b, K, E], write k and v to the pages of b rows, and
    return the attention output [b, H, E].

    `rotation` holds the last five arguments of `norm_rope`. The other shapes are positions [b]
    int64, table [B, pages of a row] int32, and keys and values [pages, K, PAGE, E]. The key of row
    r is written to position positions[r] % PAGE of the page table[r, positions[r] // PAGE]. If
    `window` is not 0, a token attends only to itself and the window - 1 tokens before it.
    """
    q, k, v = adjacent(q), adjacent(k), adjacent(v)
    b, H, E = q.shape
    KV, page = keys.shape[1:3]
    parts = min(PARTS, triton.next_power_of_2(max(1, PROGRAMS // (b * KV))))
    y = outs = q.new_empty(b, H, E)
    combined: list[Any] = [None] * 3
    if parts > 1:
        outs = q.new_empty(b, H, parts, E, dtype=torch.float32)
        combined = [y, outs.new_empty(b, H, parts), counters(q.device, b * KV)]
    *norms, eps = rotation
    attend_kernel[(b, KV, parts)](
        *(q, k, v, *norms, positions, table, keys, values, outs, *combined),
        *(x.stride(0) for x in (q, k, v, table)),
        E**-0.5 * LOG2E.value,
        eps,
        KV=KV,
        HEADS=H // KV,
        PAGE=page,
        WINDOW=window,
        E=E,
        PARTS=parts,
        num_warps=4,
    )
    return y

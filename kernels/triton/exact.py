"""Matrix product and attention whose result for a token never depends on the other tokens.

In and out: as in ../exact.py, which explains why bits differ without these kernels. The kernels are
simple: all tile sizes are fixed, and no sum is split over several programs. Read next:
../exact.py.

Product.    y_ij = Σ_k a_ik b_jk. Program (i, j) computes a tile of y, and adds the products of
            blocks of K in their order. A faster library would use small tiles or a split sum for
            few rows, and large tiles for many rows. Split sums and different tile sizes change the
            order in which numbers are added.
Attention.  Program (tile, k) computes 16 queries of a sequence for key head k, with the running
            maximum and sum of ../exact.py. `KEYS_AT` has the address of each key of a sequence, so
            the same kernel reads a strip and the pages of the engine's cache. A decode step has
            one query per sequence, and its other 15 rows are empty.
Bytes.      The product reads each tile of b once for every 64 rows of a. If there are more rows,
            most of these reads hit the L2 cache. Attention reads each key once per 16 queries.
"""

from torch import Tensor

import triton
import triton.language as tl

from ..exact import QUERIES
from .attention import add_keys, no_keys
from .log_softmax import LOG2E
from .paged import padded
from .rope import adjacent


@triton.jit
def product_kernel(
    A, B, Y, rows, columns, K, a_row, a_k, b_row, b_k,
    BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    k = tl.arange(0, BK).to(tl.int64)
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        at_a = A + r[:, None] * a_row + (start + k)[None, :] * a_k
        at_b = B + c[:, None] * b_row + (start + k)[None, :] * b_k
        a = tl.load(at_a, mask=(r < rows)[:, None] & inside[None, :], other=0.0)  # [BR, BK]
        b = tl.load(at_b, mask=(c < columns)[:, None] & inside[None, :], other=0.0)  # [BC, BK]
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    there = (r < rows)[:, None] & (c < columns)[None, :]
    tl.store(Y + r[:, None] * columns + c[None, :], total, mask=there)


def product(a: Tensor, b: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Return a bᵀ: [N, K], [M, K] → [N, M], in the dtype of a. Both may be transposed views."""
    rows, columns = len(a), len(b)
    y = a.new_empty(rows, columns) if buffer is None else buffer[:rows]
    grid = triton.cdiv(rows, 64), triton.cdiv(columns, 128)
    if rows:
        sizes = rows, columns, a.shape[1], *a.stride(), *b.stride()
        product_kernel[grid](a, b, y, *sizes, BR=64, BC=128, BK=32, num_warps=4)
    return y


@triton.jit
def attend_kernel(
    Q, K, V, Y, FIRST, COUNT, SEEN, START, KEYS_AT, q_stride, head_stride, scale,
    HEADS: tl.constexpr, E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (tile, k) computes COUNT queries for key head k. The first query is in row FIRST and
    sees SEEN keys, and each further query sees one key more.
    """
    tile, k_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(COUNT + tile)
    if count == 0:
        return
    seen, start = tl.load(SEEN + tile), tl.load(START + tile)
    ROWS: tl.constexpr = QUERIES * triton.next_power_of_2(HEADS)
    i = tl.arange(0, ROWS)
    query, g = i // (ROWS // QUERIES), i % (ROWS // QUERIES)
    e = tl.arange(0, padded(E))
    n = tl.arange(0, KEYS)
    mine = ((query < count) & (g < HEADS))[:, None] & (e < E)[None, :]
    row = tl.load(FIRST + tile) + query
    head = (k_head * HEADS + g) * E
    q = tl.load(Q + (row * q_stride + head)[:, None] + e[None, :], mask=mine, other=0.0)
    m, l, o = no_keys(ROWS, padded(E))
    for block in range(0, seen + count - 1, KEYS):
        inside = block + n < seen + count - 1
        at = tl.load(KEYS_AT + start + block + n, mask=inside, other=0) + k_head * head_stride
        there = inside[:, None] & (e < E)[None, :]
        keys = tl.load(K + at[:, None] + e[None, :], mask=there, other=0.0)  # [KEYS, E]
        values = tl.load(V + at[:, None] + e[None, :], mask=there, other=0.0)
        x = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale  # [Q, KEYS]
        x = tl.where((block + n)[None, :] < (seen + query)[:, None], x, float("-inf"))
        m, l, o = add_keys(m, l, o, x, values)
    at = (row * tl.num_programs(1) * HEADS * E + head)[:, None] + e[None, :]
    tl.store(Y + at, o / l[:, None], mask=mine)


def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tensor, ...], heads: int, head_stride: int
) -> Tensor:
    """Return the attention output for q [T, H, E], as ../exact.py does."""
    q = adjacent(q)
    y = q.new_empty(q.shape)
    size, group = q.shape[2], q.shape[1] // heads
    args = q, k, v, y, *tiles, q.stride(0), head_stride, size**-0.5 * LOG2E.value
    shape = dict(HEADS=group, E=size, QUERIES=QUERIES, KEYS=32, num_warps=8)
    attend_kernel[(len(tiles[0]), heads)](*args, **shape)
    return y

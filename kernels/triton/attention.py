"""Compute causal attention over the sequences of a strip, which attend to shared prompts in place.

In: q [T, H, E], k and v [T, K, E] in bf16, fp16 or fp32, and the sequences (`Strip` in
reference/attention.py). Out: [T, H, E]. E is 16, 32, 64 or 128, and H is a multiple of K. Read
before: ../sharing.py. Read next: paged.py.

Equation.   Over the keys j that query i sees: x_j = q·k_j / √E,  p_j = exp(x_j - lse) with
            lse = log Σ_j exp(x_j), and y = Σ_j p_j v_j. The derivation is in kernels/README.md.
Example.    In the strip of ../sharing.py, the prompt pqr has the completions a and de. With H = 4
            and K = 2, heads 0 and 1 of d and e form 4 rows: d0 d1 e0 e1. Their program reads the
            keys p q r without a copy, and then d e. It hides the key e from the rows d0 d1. In the
            backward pass, a program of `keys_kernel` has the keys p q r. It visits the rows of p,
            q, r, a, d and e, which are adjacent, and hides each query from later keys. So it adds
            up the gradients over all completions in a fixed order, without atomics or copies.
Rows.       HEADS = H/K query heads share a key head. Query i of the g-th of these heads is row
            i·HEADS + g. A program has ROWS such rows, so each key that it loads serves all heads.
Edges.      Most blocks of keys are visible to all rows of a program. A first loop, without masks,
            processes these blocks. A second loop, with masks, processes the other blocks: the
            end of the prompt, and the last keys of the sequence itself.
Bytes.      In bfloat16, the forward moves 4·T·(H + K)·E and the backward 12·T·(H + K)·E, if the
            L2 cache holds the keys of a group. lse and delta take 4 more bytes per number. No key
            row is copied. With gathered keys, the gathers move 8·Tk·K·E, and the sums of their
            gradients 4·(Tk + T)·K·E. Tk counts the keys of all sequences.
FLOP.       Per head and visible pair of query and key, the forward takes 4·E, and the backward
            14·E. The backward computes q·k and dy·v twice, so that no sum needs atomics.
Reference.  `attention` in reference/attention.py.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import triton
import triton.language as tl

from ..reference.attention import Strip
from ..sharing import sharing
from .log_softmax import LOG2E


@triton.jit
def load(X, at, there, E):
    """Load rows of X [n, E], and zeros where `there` is False."""
    return tl.load(X + (at * E)[:, None] + tl.arange(0, E), mask=there[:, None], other=0.0)


@triton.jit
def store(X, at, x, there, E):
    tl.store(X + (at * E)[:, None] + tl.arange(0, E), x, mask=there[:, None])


@triton.jit
def product(a, b):
    return tl.dot(a.to(b.dtype), b, input_precision="ieee")


@triton.jit
def no_keys(ROWS, E):
    """Return m, l and o of `add_keys` before the first key."""
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    return m, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, E), tl.float32)


@triton.jit
def add_keys(m, l, o, x, v):
    """Add keys with the scores x [rows, keys] in base 2 and the values v [keys, E]. Return the new
    running maximum m and sum l [rows], and the new result o [rows, E].
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - m_new[:, None])
    a = tl.exp2(m - m_new)
    return m_new, l * a + tl.sum(p, 1), o * a[:, None] + product(p, v)


@triton.jit
def place(r, KV, HEADS):
    """Return the query of each row, and the row of its head in a tensor [T · H, E]."""
    i = r // HEADS
    return i, (i * KV + tl.program_id(1)) * HEADS + r % HEADS


@triton.jit
def visible(CU, PROMPTS, HEADS, ROWS, KEYS):
    """Return the range of a program's rows, the keys that all of these rows see, and the keys that
    only some of them see.

    Each set consists of a range of the prompt's keys and a range of the sequence's own keys. It is
    returned as four numbers, the start and the end of both ranges. The last rows of a sequence see
    the most keys, so the first programs process these rows.
    """
    n = tl.program_id(0)
    first = tl.load(CU + n)
    row = first * HEADS + (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS
    stop = tl.minimum(row + ROWS, tl.load(CU + n + 1) * HEADS)
    prompt = tl.load(PROMPTS + 2 * n)
    prompt_end = tl.load(PROMPTS + 2 * n + 1)
    own = first + (row // HEADS + 1 - first) // KEYS * KEYS
    middle = prompt + (prompt_end - prompt) // KEYS * KEYS
    edges = middle, prompt_end, own, (stop - 1) // HEADS + 1
    return row, stop, ((prompt, middle, first, own), edges)


@triton.jit
def count(keys, KEYS):
    return tl.cdiv(keys[1] - keys[0], KEYS) + tl.cdiv(keys[3] - keys[2], KEYS)


@triton.jit
def scores(t, q, i, keys, K, V, KV, E, KEYS, EDGE):
    """Return block t of k and v, and x log2 e [ROWS, KEYS], which is -inf where a key is hidden."""
    start, end, own, own_end = keys
    t_own = t - tl.cdiv(end - start, KEYS)
    j = tl.where(t_own < 0, start + t * KEYS, own + t_own * KEYS) + tl.arange(0, KEYS)
    there = j < tl.where(t_own < 0, end, own_end)
    at = j * KV + tl.program_id(1)
    k, v = load(K, at, there, E), load(V, at, there, E)
    x = product(q, tl.trans(k)) * (E**-0.5 * LOG2E)
    if EDGE:
        last = tl.where(t_own < 0, end - 1, i)
        x = tl.where(j[None, :] <= last[:, None], x, float("-inf"))
    return k, v, x


@triton.jit
def forward_kernel(
    Q, K, V, Y, LSE, CU, PROMPTS, REACH,
    KV: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (n, key head, b) computes y and lse of block b of the rows of sequence n."""
    row, stop, ranges = visible(CU, PROMPTS, HEADS, ROWS, KEYS)
    if row >= stop:
        return
    r = row + tl.arange(0, ROWS)
    i, at = place(r, KV, HEADS)
    q = load(Q, at, r < stop, E)
    m, l, o = no_keys(ROWS, E)
    for EDGE in tl.static_range(2):
        keys = ranges[EDGE]
        for t in tl.range(0, count(keys, KEYS)):
            _, v, x = scores(t, q, i, keys, K, V, KV, E, KEYS, EDGE)
            m, l, o = add_keys(m, l, o, x, v)
    store(Y, at, o / l[:, None], r < stop, E)
    tl.store(LSE + at, m + tl.log2(l), mask=r < stop)


@triton.jit
def queries_kernel(
    Q, K, V, Y, LSE, DY, DQ, DELTA, CU, PROMPTS, REACH,
    KV: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (n, key head, b) computes delta and dq of block b of the rows of sequence n."""
    row, stop, ranges = visible(CU, PROMPTS, HEADS, ROWS, KEYS)
    if row >= stop:
        return
    r = row + tl.arange(0, ROWS)
    i, at = place(r, KV, HEADS)
    q = load(Q, at, r < stop, E)
    dy = load(DY, at, r < stop, E)
    delta = tl.sum(dy.to(tl.float32) * load(Y, at, r < stop, E).to(tl.float32), 1)
    tl.store(DELTA + at, delta, mask=r < stop)
    lse = tl.load(LSE + at, mask=r < stop)
    dq = tl.zeros((ROWS, E), tl.float32)
    for EDGE in tl.static_range(2):
        keys = ranges[EDGE]
        for t in tl.range(0, count(keys, KEYS)):
            k, v, x = scores(t, q, i, keys, K, V, KV, E, KEYS, EDGE)
            p = tl.exp2(x - lse[:, None])
            dx = p * (product(dy, tl.trans(v)) - delta[:, None])
            dq += product(dx, k)
    store(DQ, at, dq * E**-0.5, r < stop, E)


@triton.jit
def keys_kernel(
    Q, K, V, LSE, DY, DELTA, DK, DV, CU, PROMPTS, REACH,
    KV: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (n, key head, b) computes dk and dv of block b of the keys of sequence n.

    The rows that see these keys are adjacent, and end with the last completion. Only the rows of
    the block's own tokens need a mask, because all later rows see every key of the block.
    """
    n = tl.program_id(0)
    first = tl.load(CU + n) + tl.program_id(2) * KEYS
    end = tl.load(CU + n + 1)
    if first >= end:
        return
    j = first + tl.arange(0, KEYS)
    at = j * KV + tl.program_id(1)
    k = load(K, at, j < end, E)
    v = load(V, at, j < end, E)
    dk = tl.zeros((KEYS, E), tl.float32)
    dv = tl.zeros((KEYS, E), tl.float32)
    stop = tl.load(REACH + n) * HEADS
    middle = tl.minimum((first + KEYS) * HEADS, stop)
    ranges = (middle, stop), (first * HEADS, middle)
    for EDGE in tl.static_range(2):
        start, row_end = ranges[EDGE]
        for row in tl.range(start, row_end, ROWS):
            r = row + tl.arange(0, ROWS)
            there = r < stop
            i, out = place(r, KV, HEADS)
            q = load(Q, out, there, E)
            dy = load(DY, out, there, E)
            lse = tl.load(LSE + out, mask=there, other=0.0)
            delta = tl.load(DELTA + out, mask=there, other=0.0)
            x = product(k, tl.trans(q)) * (E**-0.5 * LOG2E)  # [KEYS, ROWS]
            p = tl.exp2(x - lse[None, :])
            if EDGE:
                p = tl.where(j[:, None] <= i[None, :], p, 0.0)
            dv += product(p, dy)
            dx = p * (product(v, tl.trans(dy)) - delta[None, :])
            dk += product(dx, q)
    store(DK, at, dk * E**-0.5, j < end, E)
    store(DV, at, dv, j < end, E)


# The kernels, with their ROWS and KEYS.
KERNELS = (forward_kernel, 128, 64), (queries_kernel, 128, 64), (keys_kernel, 32, 128)


def _launch(number, max_len, at, q, k, *rest):
    kernel, ROWS, KEYS = KERNELS[number]
    _, KV, E = k.shape
    HEADS = q.shape[1] // KV
    # Other GPUs have fewer registers for a product than H100 and B200, and less shared memory.
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] not in (9, 10):
        KEYS //= 2
    blocks = triton.cdiv(max_len * HEADS, ROWS)
    if kernel is keys_kernel:
        blocks = triton.cdiv(max_len, KEYS)
    kernel[len(at[0]) - 1, KV, blocks](
        q,
        k,
        *rest,
        *at,
        KV=KV,
        HEADS=HEADS,
        E=E,
        ROWS=ROWS,
        KEYS=KEYS,
        num_warps=8,
        num_stages=3,
    )


def _forward(q, k, v, *at):
    y, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    _launch(0, *at, q, k, v, y, lse)
    return y, lse


# Selective recomputation can keep the results of operators of torch, but not of other functions.
torch.library.define(
    "nanogrpo::flash_attn_triton",
    "(Tensor q, Tensor k, Tensor v, int max_len, Tensor[] at) -> (Tensor, Tensor)",
)
torch.library.impl("nanogrpo::flash_attn_triton", "default", _forward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, strip):
        q, k, v = map(Tensor.contiguous, (q, k, v))
        ctx.at = strip.max_len, [strip.cu_seqlens, *sharing(strip)]
        y, lse = torch.ops.nanogrpo.flash_attn_triton(q, k, v, *ctx.at)
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        dy, delta = dy.contiguous(), torch.empty_like(lse)
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        _launch(1, *ctx.at, q, k, v, y, lse, dy, dq, delta)
        _launch(2, *ctx.at, q, k, v, lse, dy, delta, dk, dv)
        return dq, dk, dv, None


def attention(q: Tensor, k: Tensor, v: Tensor, strip: Strip) -> Tensor:
    """Return the attention output [T, H, E]. The sequences must be causal, and q must have fewer
    than 2³¹ numbers.
    """
    return _Attention.apply(q, k, v, strip)

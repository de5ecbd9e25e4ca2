"""Sample one token for each row of logits, with three kernels.

In: logits [b, V] (bf16, fp16 or fp32), and each row's random key and counter [b] int64. Out: tokens
[b] int64, and their log-probs [b] float32. Read next: README.md.

Equation.   n_j = ⌊2⁴⁰ softmax(z/T)_j⌋;  u = SplitMix64(key, counter) in [0, 1);  t = ⌊u Σ n⌋;
            token = the first j with n_0 + … + n_j > t.
Chunks.     A row is split into chunks of BLOCK columns, so that even a few rows keep the full GPU
            busy. The first kernel computes the maximum of each chunk and the sum of its
            exponentials. The second kernel computes the integer sum Σ n of each chunk. The third
            kernel finds the chunk with the sampled token, and then the token. Integer sums are
            exact in any order, so splitting a row into chunks does not change the result.
Bytes.      The kernels read each logit twice, 4·b·V bytes in bfloat16. The second read may come
            from the L2 cache. For b = 64, V = 151,936, the kernels read 39 MB. The reference writes
            float32 logits, log-probs, probabilities and sums, 0.7 GB in total.
Reference.  `sample_tokens` in reference/sample.py.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl

BLOCK = 4096  # columns per chunk
SCALE = tl.constexpr(2.0**40)
UNIT = tl.constexpr(2.0**-53)
# the constants of SplitMix64 (Steele, Lea and Flood 2014)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def columns(LOGITS, row, chunk, stride, V, inv_t, BLOCK):
    """Return a chunk of a row divided by the temperature. Columns past the vocabulary are -inf."""
    j = chunk * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(LOGITS + row * stride + j, mask=j < V, other=float("-inf"))
    return z.to(tl.float32) * inv_t


@triton.jit
def of_row(MAXIMA, TOTALS, row, CHUNKS):
    """Return the maximum of a row and the sum of exp(z - maximum)."""
    c = tl.arange(0, triton.next_power_of_2(CHUNKS))
    m = tl.load(MAXIMA + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    l = tl.load(TOTALS + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    top = tl.max(m, 0)
    return top, tl.sum(l * tl.exp(m - top), 0)


@triton.jit
def totals_kernel(
    LOGITS, MAXIMA, TOTALS, stride, V, inv_t, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program processes one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    z = columns(LOGITS, row, chunk, stride, V, inv_t, BLOCK)
    m = tl.max(z, 0)
    tl.store(MAXIMA + row * CHUNKS + chunk, m)
    base = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf would be NaN
    tl.store(TOTALS + row * CHUNKS + chunk, tl.sum(tl.exp(z - base), 0))


@triton.jit
def counts_kernel(
    LOGITS, MAXIMA, TOTALS, COUNTS, stride, V, inv_t,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program sums the integers n of one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    top, total = of_row(MAXIMA, TOTALS, row, CHUNKS)
    z = columns(LOGITS, row, chunk, stride, V, inv_t, BLOCK)
    n = (tl.exp(z - top) / total * SCALE).to(tl.int64)
    tl.store(COUNTS + row * CHUNKS + chunk, tl.sum(n, 0))


@triton.jit
def pick_kernel(
    LOGITS, MAXIMA, TOTALS, COUNTS, KEY, COUNTER, TOKEN, LOGP, stride, V, inv_t,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program draws the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(KEY + row).to(tl.uint64) + (tl.load(COUNTER + row).to(tl.uint64) + 1) * GAMMA
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    u = ((x ^ (x >> 31)) >> 11).to(tl.float64) * UNIT

    c = tl.arange(0, triton.next_power_of_2(CHUNKS))
    counts = tl.load(COUNTS + row * CHUNKS + c, mask=c < CHUNKS, other=0)
    target = (u * tl.sum(counts, 0).to(tl.float64)).to(tl.int64)
    chunk = tl.sum((tl.cumsum(counts, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(c < chunk, counts, 0), 0)

    top, total = of_row(MAXIMA, TOTALS, row, CHUNKS)
    z = columns(LOGITS, row, chunk, stride, V, inv_t, BLOCK)
    n = (tl.exp(z - top) / total * SCALE).to(tl.int64)
    token = chunk * BLOCK + tl.sum((before + tl.cumsum(n, 0) <= target).to(tl.int32), 0)
    token = tl.minimum(token, V - 1)  # the index is too large only if logits are NaN
    tl.store(TOKEN + row, token)
    z = tl.load(LOGITS + row * stride + token).to(tl.float32) * inv_t
    tl.store(LOGP + row, z - top - tl.log(total))


def sample_tokens(
    logits: Tensor, key: Tensor, counter: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return a token [b] int64 and its log-prob [b] float32 for each row of logits [b, V].

    The key and the counter are [b] int64.
    """
    b, vocab = logits.shape
    chunks = triton.cdiv(vocab, BLOCK)
    maxima, totals = (logits.new_empty(b, chunks, dtype=torch.float32) for _ in range(2))
    counts = logits.new_empty(b, chunks, dtype=torch.int64)
    token, logp = torch.empty_like(key), logits.new_empty(b, dtype=torch.float32)
    numbers = logits.stride(0), vocab, 1.0 / temperature
    sums = logits, maxima, totals
    shape = dict(CHUNKS=chunks, BLOCK=BLOCK, num_warps=8)
    totals_kernel[(b, chunks)](*sums, *numbers, **shape)
    counts_kernel[(b, chunks)](*sums, counts, *numbers, **shape)
    pick_kernel[(b,)](*sums, counts, key, counter, token, logp, *numbers, **shape)
    return token, logp

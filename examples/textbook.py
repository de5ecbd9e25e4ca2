"""The textbook online softmax: the rung below kernels/triton/log_softmax.py on the ladder in
kernels/README.md. Only ladder.py and a benchmark use this kernel.

In: logits [N, V] bf16, fp16 or fp32, targets [N] int64. Out: log-prob and entropy [N] float32. Read
next: kernels/triton/log_softmax.py.

Equation.   For each block: m' = max(m, max x);  l ← l 2^{m - m'} + Σ 2^{x - m'}, with x in units of
            log2(e) / T (Milakov and Gimelshein 2018, arXiv 1805.02867). A row has only one m, one l
            and one s, so each block ends with three reductions over all threads. The reductions
            need shuffles within warps, and shared memory and barriers between warps. The speed is
            limited by these reductions, not by bandwidth.
Reference.  `log_softmax_forward` in kernels/reference/log_softmax.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from nanogrpo.kernels.triton.log_softmax import LN2, LOG2E, LOWEST
from torch import Tensor

BLOCK = 1024  # columns that each step of the loop reads


@triton.jit
def textbook_kernel(LOGITS, TARGETS, LOGP, ENTROPY, stride, V, k, BLOCK: tl.constexpr):
    """Each program processes one row."""
    row = tl.program_id(0).to(tl.int64)
    L = LOGITS + row * stride
    m = LOWEST
    l = 0.0
    s = 0.0
    for c in tl.range(0, V, BLOCK):
        o = c + tl.arange(0, BLOCK)
        x = tl.where(o < V, tl.load(L + o, mask=o < V, other=0.0).to(tl.float32) * k, LOWEST)
        top = tl.maximum(m, tl.max(x, 0))
        a = tl.exp2(m - top)
        e = tl.exp2(x - top)
        l = l * a + tl.sum(e, 0)
        s = s * a + tl.sum(e * x, 0)
        m = top
    x = tl.load(L + tl.load(TARGETS + row)).to(tl.float32) * k
    tl.store(LOGP + row, (x - m - tl.log2(l)) * LN2)
    tl.store(ENTROPY + row, (m + tl.log2(l) - s / l) * LN2)


def textbook_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-prob [N] and entropy [N] in nats."""
    count, vocab = logits.shape
    logp, entropy = (
        torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    numbers = logits.stride(0), vocab, LOG2E.value / temperature
    textbook_kernel[(count,)](logits, targets, logp, entropy, *numbers, BLOCK=BLOCK, num_warps=4)
    return logp, entropy

"""Sample one token per row, with filters, random numbers and the inverse CDF.

In: logits `[b, V]`, and each row's random key and counter `[b]`. Out: tokens `[b]` and their
log-probs `[b]` before the filters. The random numbers are counter-based: each one is a hash of the
completion's key and the token's position only. So they are the same in any row, in any batch and on
any rank. The completion is the same, too, unless a different batch rounds its logits differently,
as can happen in bfloat16. Read next: engine/local.py, which calls this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanogrpo.engine.base import SamplingParams

# The constants of SplitMix64 as signed 64-bit integers (0x9E3779B97F4A7C15 and so on).
GAMMA, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return logits [b, V] with -inf where top_k, then top_p, then min_p drop a token."""
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k).values[:, -1:]  # [b, 1]; tokens tied with the k-th are kept
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        # unlikely tokens outside the top_p set
        tail = ascending.softmax(-1).cumsum(-1) <= 1.0 - params.top_p
        tail[:, -1] = False  # the most likely token is kept for every top_p
        logits = logits.masked_fill(tail.scatter(1, order, tail), float("-inf"))
    if params.min_p > 0.0:
        probs = logits.softmax(-1)
        least = params.min_p * probs.amax(-1, keepdim=True)  # [b, 1]
        logits = logits.masked_fill(probs < least, float("-inf"))
    return logits


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """Hash key and counter, [b] int64 each, to [b] float64 in [0, 1), in multiples of 2⁻⁵³.

    This is SplitMix64 (Steele, Lea and Flood 2014). In + and ·, int64 overflows in the same way as
    uint64. Its right shift copies the sign bit, so a mask turns it into a logical shift.
    """

    def xor_shift(z: Tensor, n: int) -> Tensor:
        return z ^ ((z >> n) & ((1 << (64 - n)) - 1))

    z = xor_shift(key + (counter + 1) * GAMMA, 30) * MIX_1
    z = xor_shift(z, 27) * MIX_2
    return ((xor_shift(z, 31) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sample(
    logits: Tensor, key: Tensor, counter: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Sample one token per row: [b, V] logits, [b] int64 key and counter → [b] int64, [b] float32.

    The log-probs are those of softmax(logits / temperature), before the filters.

    The inverse CDF needs one uniform random number per token, while the Gumbel trick needs V. The
    CDF is summed in fixed point (2⁻⁴⁰), and integer sums are exact in any order. So on every device
    the CDF increases only where a probability is positive: neither a filtered token nor an index
    past the end can be sampled, however close to 1 the uniform number is.
    """
    logits = logits.float()
    if params.temperature not in (0, 1):
        logits = logits / params.temperature
    logp = logits.log_softmax(-1)  # [b, V]
    if params.temperature == 0:
        token = logits.argmax(-1, keepdim=True)  # [b, 1]
    else:
        # [b, V] int64
        cdf = (filter_logits(logits, params).softmax(-1) * 2.0**40).long().cumsum(-1)
        target = (uniform(key, counter)[:, None] * cdf[:, -1:]).long()  # [b, 1], below cdf[:, -1]
        token = torch.searchsorted(cdf, target, right=True)  # the first token with CDF > target
        # Only NaN logits give an index beyond the vocabulary. The engine reports them later, so the
        # gather here must not fail.
        token = token.clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], logp.gather(1, token)[:, 0]

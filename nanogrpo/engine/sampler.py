"""Drawing one token a row: the filters, the random numbers, the inverse CDF.

In: logits `[b, V]`, each row's random key and counter `[b]`. Out: tokens `[b]`, and their log-probs
`[b]` before filters. Randomness is counter-based: the number that draws a token is a hash of (the
completion's key, the token's position) and of nothing else, so that a completion is the same in any
row, in any company, on any rank. Read next: local_engine.py (who calls).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanogrpo.engine.base import SamplingParams


def filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """scores: [b, V] logits / temperature. Returns them with -inf where top_k, top_p, then min_p
    drop a token.
    """
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k).values[:, -1:]  # [b, 1]; tokens tied with the k-th stay
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if params.top_p < 1.0:
        ascending, order = scores.sort(dim=-1)
        # the unlikely tokens that top_p can do without
        tail = ascending.softmax(-1).cumsum(-1) <= 1.0 - params.top_p
        tail[:, -1] = False  # the likeliest stays whatever top_p is
        scores = scores.masked_fill(tail.scatter(1, order, tail), float("-inf"))
    if params.min_p > 0.0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(
            probs < params.min_p * probs.amax(-1, keepdim=True), float("-inf")
        )
    return scores


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x  # the int64 with the same 64 bits


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """key, counter: [b] int64 → [b] float64 in [0, 1), multiples of 2⁻⁵³: SplitMix64 (Steele, Lea
    and Flood 2014) of each pair.

    int64 wraps like uint64 under + and ·, and its shift drags the sign along: the mask makes the
    shift a logical one.
    """

    def xor_shift(z: Tensor, n: int) -> Tensor:
        return z ^ ((z >> n) & ((1 << (64 - n)) - 1))

    z = key + (counter + 1) * _signed(0x9E3779B97F4A7C15)
    z = xor_shift(z, 30) * _signed(0xBF58476D1CE4E5B9)
    z = xor_shift(z, 27) * _signed(0x94D049BB133111EB)
    return ((xor_shift(z, 31) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def draw(
    logits: Tensor, key: Tensor, counter: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """One token a row. logits: [b, V]; key, counter: [b] int64. Returns tokens [b] int64, log-probs
    [b] float32.

    Inverse CDF: one uniform a token instead of V Gumbels. The CDF is summed in fixed point (2⁻⁴⁰):
    integer sums are exact in any order, so on every device the CDF rises only where a probability
    is positive, and neither a filtered token nor one past the end can be drawn, however close to 1
    the uniform is. The log-prob is that of softmax(logits / temperature), before filters.
    """
    scores = logits.float() if params.temperature in (0, 1) else logits.float() / params.temperature
    logp = scores.log_softmax(-1)  # [b, V]
    if params.temperature == 0:
        token = scores.argmax(-1, keepdim=True)  # [b, 1]
    else:
        cdf = (filtered(scores, params).softmax(-1) * 2.0**40).long().cumsum(-1)  # [b, V] int64
        # [b, 1], below the last of cdf: see the docstring
        target = (uniform(key, counter)[:, None] * cdf[:, -1:]).long()
        # the first whose CDF exceeds the target
        token = torch.searchsorted(cdf, target, right=True)
        # binds for NaN logits alone, which the engine tells: the gather must live
        token = token.clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], logp.gather(1, token)[:, 0]

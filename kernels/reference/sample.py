"""Sample one token for each row of logits, with counter-based random numbers.

In: logits [b, V], and each row's random key and counter [b] int64. Out: tokens [b] int64 and their
log-probs [b] float32.
"""

import torch
from torch import Tensor

# The constants of SplitMix64 as signed 64-bit integers (0x9E3779B97F4A7C15 and so on).
GAMMA, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """Map each key and counter ([b] int64) to a multiple of 2⁻⁵³ in [0, 1), [b] float64.

    The hash function is SplitMix64 (Steele, Lea and Flood 2014). In sums and products, int64
    overflows to the same bits as uint64. A right shift of int64 fills in copies of the sign bit,
    which a mask removes.
    """

    def xor_shift(z: Tensor, n: int) -> Tensor:
        return z ^ ((z >> n) & ((1 << (64 - n)) - 1))

    z = xor_shift(key + (counter + 1) * GAMMA, 30) * MIX_1
    z = xor_shift(z, 27) * MIX_2
    return ((xor_shift(z, 31) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sample_tokens(
    logits: Tensor, key: Tensor, counter: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample a token [b] int64 from softmax(logits / temperature) for each row of logits [b, V].
    Return the tokens and their log-probs [b] float32. The key and the counter are [b] int64.

    The inverse CDF needs one uniform random number per token, while the Gumbel trick needs V. The
    CDF is summed in fixed point (2⁻⁴⁰), because integer sums are exact in any order. So on every
    device, the CDF increases only at tokens with a positive probability. Hence no token of
    probability 0 is ever sampled, and no index is beyond the vocabulary, even if the uniform number
    is very close to 1.
    """
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    logp = logits.log_softmax(-1)  # [b, V]
    cdf = (logits.softmax(-1) * 2.0**40).long().cumsum(-1)  # [b, V] int64
    target = (uniform(key, counter)[:, None] * cdf[:, -1:]).long()  # [b, 1], below cdf[:, -1]
    token = torch.searchsorted(cdf, target, right=True)  # the first token with CDF > target
    # Only NaN logits lead to an index beyond the vocabulary. The engine reports NaN later.
    token = token.clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], logp.gather(1, token)[:, 0]

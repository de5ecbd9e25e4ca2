"""Apply the filters top_k and top_p, then sample one token per row.

In: logits `[b, V]`, and each row's random key and counter `[b]`. Out: tokens `[b]` and their
log-probs `[b]` after filtering. The random numbers are counter-based: each number is a hash of the
completion's key and the token's position. So the random numbers of a completion are the same in any
row, in any batch and on any rank. The completion is the same, too, if its logits are the same. In
bfloat16, logits may be rounded differently in another batch. Read next: kernels/reference/sample.py
(`sample_tokens`), runner.py, which calls this file.
"""

from torch import Tensor

from nanogrpo.engine.base import SamplingParams
from nanogrpo.model.dispatch import functions_for


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return logits [b, V] after the filters top_k and then top_p: removed tokens have -inf."""
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k).values[:, -1:]  # [b, 1]; tokens tied with the k-th are kept
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1.0:
        ascending, order = logits.float().div(params.temperature or 1).sort()
        # The unlikely tokens that top_p removes. Their shares are integers, because torch has no
        # deterministic `cumsum` of floats on a GPU.
        tail = ascending.softmax(-1).mul(1e18).long().cumsum(-1) <= 1e18 - 1e18 * params.top_p
        tail[:, -1] = False  # always keep the most likely token
        logits = logits.masked_fill(tail.scatter(1, order, tail), float("-inf"))
    return logits


def sample(
    logits: Tensor, key: Tensor, counter: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Sample one token per row. Return tokens [b] int64 and their log-probs [b] float32.

    The inputs are filtered logits [b, V], and key and counter [b] int64. Log-probs are computed
    with softmax(logits / temperature).
    """
    if params.temperature:
        return functions_for(logits.device).sample_tokens(logits, key, counter, params.temperature)
    return logits.argmax(-1), logits.float().log_softmax(-1).amax(-1)

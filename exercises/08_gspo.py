"""Exercise 8: GSPO, from its paper.

GSPO (Zheng et al. 2025, arXiv 2507.18071) has one ratio per completion instead of one per token.
Read section 4.1 of the paper, or these lines from it: the importance ratio of completion i is

    s_i = (π(y_i) / π_old(y_i)) ^ (1 / |y_i|)

where π(y_i) is the probability of the whole completion, the product over its tokens, and |y_i| is
its number of tokens. The objective, to be maximized, is the mean over completions of

    min(s_i · A_i, clamp(s_i, 1 - epsilon, 1 + epsilon) · A_i)

Return the loss, to be minimized. Products of hundreds of probabilities underflow, so stay with
log-probs until the end.

    python -m exercises.check 8
"""

import torch
from torch import Tensor


def loss(logp: list[Tensor], old_logp: list[Tensor], advantage: Tensor, epsilon: float) -> Tensor:
    """logp, old_logp: the log-probs of the tokens of each completion. advantage: [B].

    Returns a number, [], with a gradient to logp.
    """
    ...

"""Exercise 5: find the bugs.

This loss runs, and its gradient looks reasonable, but three bugs are in it. The batch is padded:
row b of `tokens` is a prompt, then a completion, then padding, and `is_completion` is True for the
tokens of the completion. The loss should be the one of exercise 3,

    -(1/M) Σ A · log π(token)

over the M completion tokens of the batch, where π is the softmax of the logits divided by the
temperature, and logits[b, t] is the model's prediction of the token that *follows* tokens[b, t].

Find the bugs and correct them.

    python -m exercises.check 5
"""

import torch
from torch import Tensor


def loss(
    logits: Tensor, tokens: Tensor, is_completion: Tensor, advantage: Tensor, temperature: float
) -> Tensor:
    """logits: [B, T, V], tokens and is_completion: [B, T], advantage: [B]. Returns a number, []."""
    logp_all = logits.log_softmax(dim=-1) / temperature  # [B, T, V]
    logp = logp_all.gather(2, tokens[:, :, None]).squeeze(2)  # [B, T]
    l = -advantage[:, None] * logp
    return (l * is_completion).mean()

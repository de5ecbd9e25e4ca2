"""Solution of exercise 5.

1. The temperature came after the softmax. log_softmax(z) / T is no log-prob: it does not sum to 1.
2. The logits were not shifted. logits[b, t] predicts tokens[b, t + 1], so the first token of a
   completion is predicted by the last token of its prompt. Without the shift, the model is trained
   to repeat the token that it has just read, and the loss still falls.
3. The mean ran over all B·T places, so prompts and padding made the gradient smaller: the same
   completions had a smaller gradient next to a longer prompt.

The project has no padding and no shift by one: `rows` of `PackedBatch` names the row that predicts
each target (exercise 11), and `token_weight` is the 1/M (exercise 7).
"""

from torch import Tensor


def loss(
    logits: Tensor, tokens: Tensor, is_completion: Tensor, advantage: Tensor, temperature: float
) -> Tensor:
    logp_all = (logits / temperature).log_softmax(dim=-1)[:, :-1]  # [B, T-1, V]
    logp = logp_all.gather(2, tokens[:, 1:, None]).squeeze(2)  # [B, T-1]
    l = -advantage[:, None] * logp
    mask = is_completion[:, 1:]
    return (l * mask).sum() / mask.sum()

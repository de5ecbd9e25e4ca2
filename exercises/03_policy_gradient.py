"""Exercise 3: the policy gradient.

A language model is a policy: it reads the text so far and chooses the next token, at random, with
the probabilities π that its softmax gives. The model has sampled M tokens. Token m belongs to a
completion with advantage A_m. An update should make the tokens of good completions more likely and
those of bad completions less likely. It should change the weights in the direction

    (1/M) Σ_m A_m · ∇ log π(token m)

(docs/exercises.md says why it is the logarithm). An optimizer goes *down* the gradient of a loss.
Return a loss such that this leads in the direction above. Only the gradient is checked, because the
value of this loss says nothing about progress.

    python -m exercises.check 3
"""

import torch
from torch import Tensor


def loss(logits: Tensor, tokens: Tensor, advantage: Tensor) -> Tensor:
    """logits: [M, V], tokens: [M] int64, advantage: [M]. Returns a number, [].

    Row m of the logits is the model's prediction of token m.
    """
    ...

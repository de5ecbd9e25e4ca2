"""Solution of exercise 8.

log s is the mean of the log-ratios over the tokens, so s is the geometric mean of the tokens'
ratios. Without the power 1/|y|, a hundred tokens that each move by 1 % would give a ratio of 2.7.

In the project this is --importance-sampling-level sequence: `Sequences.mean` in
and `loss` in nanogrpo/extras/objectives.py. A token's loss then depends on
the other tokens of its completion, so the fused head needs a fourth matrix product (exercise 14).
"""

import torch
from torch import Tensor


def loss(logp: list[Tensor], old_logp: list[Tensor], advantage: Tensor, epsilon: float) -> Tensor:
    s = torch.stack([(new - old).mean().exp() for new, old in zip(logp, old_logp)])  # [B]
    held = s.clamp(1 - epsilon, 1 + epsilon)
    return -torch.minimum(s * advantage, held * advantage).mean()

"""Solution of exercise 4.

With A > 0 the token should become more likely, and once the ratio is above 1 + ε it has. With A < 0
it should become less likely, and below 1 - ε it has. In the other two regions the policy has moved
in the *wrong* direction, so the gradient must stay to bring it back. That is what `min` does: a
clamp without it would have no gradient there either.

The project's function is `clipped` in kernels/reference/policy.py. The metrics clip_ratio/high_mean
and clip_ratio/low_mean count these two regions.
"""

import torch
from torch import Tensor


def loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, epsilon: float) -> Tensor:
    ratio = (logp - old_logp).exp()  # [M]
    free = ratio * advantage
    held = ratio.clamp(1 - epsilon, 1 + epsilon) * advantage
    return -torch.minimum(free, held)


NO_GRADIENT = [("A > 0", "ratio > 1 + epsilon"), ("A < 0", "ratio < 1 - epsilon")]

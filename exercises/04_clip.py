"""Exercise 4: the clip.

After one update, the samples are no longer from the policy that is being trained: an older policy
sampled them. The ratio says how much more likely a token has become since then:

    ratio = π(token) / π_old(token) = exp(logp - old_logp)

The loss of a token is then -ratio · A. To keep the policy from moving far on old samples, PPO's
clip takes the gradient away where the ratio has already moved far enough in the right direction:

    l = -min(ratio · A, clamp(ratio, 1 - epsilon, 1 + epsilon) · A)

1. Write `loss`.
2. Draw l for A = 1 and for A = -1, with the ratio on the x-axis. In which two of the four regions
   is l flat, so that the token has no gradient? Write them into NO_GRADIENT.

    python -m exercises.check 4
"""

import torch
from torch import Tensor


def loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, epsilon: float) -> Tensor:
    """logp, old_logp, advantage: [M]. Returns l for each token, [M]."""
    ...


# a list of two of these:
#     ("A > 0", "ratio > 1 + epsilon"), ("A > 0", "ratio < 1 - epsilon"),
#     ("A < 0", "ratio > 1 + epsilon"), ("A < 0", "ratio < 1 - epsilon")
NO_GRADIENT = ...

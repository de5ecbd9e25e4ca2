"""Exercise 6: estimate a KL divergence.

A KL term keeps the policy π near a reference model. KL(π ‖ ref) is the mean of log π - log ref over
tokens from π. We know these log-probs only for the tokens that were sampled, so each token gives an
estimate. With x = ref_logp - logp, there are two:

    k1 = -x                 the definition; its values can be negative
    k3 = e^x - x - 1        it has the same mean, is never negative, and varies less

1. Write both.
2. Why do they have the same mean? With pen and paper, compute the mean of e^x - 1 over tokens from
   π.

    python -m exercises.check 6
"""

import torch
from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp, ref_logp: [M]. Returns [M]."""
    ...


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp, ref_logp: [M]. Returns [M]."""
    ...


# the mean of e^x - 1 over tokens from π
MEAN_OF_THE_DIFFERENCE = ...

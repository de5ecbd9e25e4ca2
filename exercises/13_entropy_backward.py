"""Exercise 13: the derivative of the entropy.

The loss of a row of logits z depends on the log-prob of its token y and on its entropy H:

    p = softmax(z / T)      logp = log p_y      H = -Σ_j p_j log p_j

Derive dlogp/dz_j and dH/dz_j with pen and paper. The one rule you need is dp_i/dz_j =
p_i (1[i = j] - p_j) / T. Then write the backward: given the gradients dlogp and dH of the loss,
return its gradient for each logit. Do not use autograd.

    python -m exercises.check 13
"""

import torch
from torch import Tensor


def dlogits(z: Tensor, y: Tensor, dlogp: Tensor, dH: Tensor, T: float) -> Tensor:
    """z: [N, V], y: [N] int64, dlogp and dH: [N]. Returns [N, V]."""
    ...

"""RMSNorm, either alone or after adding a residual.

In: x [T, D], optionally a residual [T, D], weight [D]. Out: [T, D], in the dtype of x. Read next:
rope.py.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / √(mean(x²) + ε) · weight for the rows of x [T, D] (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized sum x + residual, and the sum itself [T, D], which is the next
    residual.
    """
    total = residual + x
    return rms_norm(total, weight, eps), total

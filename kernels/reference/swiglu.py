"""The elementwise part of SwiGLU. In: gate and up [T, F]. Out: [T, F]. Read next: gather.py."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up [T, F] (Shazeer 2020)."""
    return F.silu(gate) * up

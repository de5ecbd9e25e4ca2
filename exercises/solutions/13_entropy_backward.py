"""Solution of exercise 13.

dlogp/dz_j = (1/p_y) · dp_y/dz_j = (1[j = y] - p_j) / T.
dH/dz_j = -Σ_i dp_i/dz_j (log p_i + 1) = -(p_j log p_j - p_j Σ_i p_i log p_i) / T
        = -p_j (log p_j + H) / T. The 1 drops out, because Σ_i dp_i/dz_j = 0.

A token whose surprise -log p_j is the entropy H does not change it. More likely tokens lower the
entropy when their logit rises, and less likely ones raise it. The project's function is
`log_softmax_backward_` in kernels/reference/log_softmax.py; on a GPU, `row_gradient` in
kernels/triton/log_softmax.py.
"""

import torch
from torch import Tensor


def dlogits(z: Tensor, y: Tensor, dlogp: Tensor, dH: Tensor, T: float) -> Tensor:
    logp_all = (z / T).log_softmax(dim=-1)  # [N, V]
    p = logp_all.exp()
    H = -(p * logp_all).sum(dim=-1, keepdim=True)  # [N, 1]
    chosen = torch.zeros_like(z).scatter_(1, y[:, None], 1.0)  # 1[j = y]
    dz = dlogp[:, None] * (chosen - p) - dH[:, None] * p * (logp_all + H)
    return dz / T

"""QK-norm and rotary embedding.

In: q [T, H, E], k [T, K, E], the weights [E] of the two norms or None, cos and sin [T, 1, E]. Out:
q and k, in their dtype. Read next: swiglu.py.
"""

import torch
from torch import Tensor

from .norm import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021). As in Hugging Face, dimensions i and i +
    E/2 are rotated as a pair.

    The shapes are x [T, heads, E], and cos and sin [T, 1, E] float32. The computation uses at least
    float32, and the result has the dtype of x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return q [T, H, E] and k [T, K, E], each head normalized and rotated.

    The weights [E] are None if there is no norm, as in all models except Qwen3.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin)

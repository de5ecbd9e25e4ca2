"""Compute the attention of one decode step over a paged cache.

In: query, key and value of the newest token of b rows, before the QK-norm and the rotation, and the
cache with its table of pages. Out: the attention output [b, H, E]. For inference only. Read next:
sample.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rope import norm_rope


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Any, ...],
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int = 0,
) -> Tensor:
    """Normalize and rotate q [b, H, E] and k [b, K, E], write k and v to the pages of b rows, and
    return the attention output [b, H, E].

    `rotation` holds the last five arguments of `norm_rope`. The other shapes are positions [b]
    int64, table [B, pages of a row] int32, and keys and values [pages, K, PAGE, E]. The key of row
    r is written to position positions[r] % PAGE of the page table[r, positions[r] // PAGE]. If
    `window` is not 0, a token attends only to itself and the window - 1 tokens before it.
    """
    q, k = norm_rope(q, k, *rotation)
    (b, K), size = k.shape[:2], keys.shape[2]
    pages = table[:b].long()  # [b, pages of a row]
    newest = pages.gather(1, positions[:, None] // size)[:, 0]  # [b]
    keys[newest, :, positions % size] = k
    values[newest, :, positions % size] = v
    columns = torch.arange(pages.shape[1] * size, device=q.device)
    last = positions[:, None, None]  # [b, 1, 1]
    seen = columns <= last  # [b, 1, S]
    if window:
        seen &= columns > last - window
    # zeros in unused places, because an old NaN in a page would spread to the result
    k, v = (
        x[pages].transpose(1, 2).flatten(2, 3).masked_fill(~seen[..., None], 0.0)  # [b, K, S, E]
        for x in (keys, values)
    )
    q = q.unflatten(1, (K, -1))  # [b, K, H/K, E]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
    return out.flatten(1, 2)

"""Compute forward passes in which the result for a token never depends on the other tokens in the
batch.

In: matrices, or queries, keys and values. Out: as in reference/. With `--bitwise`, these functions
replace those of reference/ (nanogrpo/extras/bitwise.py). The engine decodes one token for each of a
few completions, and the trainer computes whole strips. With these functions, both compute the same
bits.

Why bits differ. Float addition is not associative: (a + b) + c ≠ a + (b + c). A library chooses the
            order of a sum by the shape of a matrix, because the fastest order depends on the shape.
            So if a row is in a batch of a different size, its numbers are added in a different
            order, and the last bits differ. Over all layers, log-probs then differ by about 1e-6 in
            float32, and by 1e-2 in bfloat16.
Remedy.     The order of each sum must depend only on the position of the token in its sequence.
            * A matrix product computes tiles of `ROWS` rows, whatever the number of rows. The last
              tile is filled up with zeros. So the library always sees the same shape.
            * Attention visits the keys in blocks of `KEYS` keys, which start at multiples of `KEYS`
              from the first key of the sequence. A block that a query does not see adds exactly 0,
              so it does not matter how many blocks follow.
            * RMSNorm, rotation and log-softmax already compute each row independently, so they are
              not replaced. PyTorch's silu is replaced: if the number of elements is not a multiple
              of the vector width, silu computes the last elements with a different formula.
            * Sampling and training compute the log-prob with the same function.
Cost.       On one core, a product with tiles of 64 rows takes 1.4 times as long as one product of
            1024 rows. A decode step with fewer than 64 rows computes 64 rows.
Read next: triton/exact.py (the same on a GPU), nanogrpo/extras/bitwise.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import linear

ROWS = 64  # rows of a tile of a product
QUERIES, KEYS = 16, 64  # queries and keys of a tile of attention


def product(a: Tensor, b: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Return a bᵀ: [N, K], [M, K] → [N, M], without autograd. Row i of the result depends only on
    row i of `a`, and on b.
    """
    tiles = F.pad(a, (0, 0, 0, -len(a) % ROWS)).split(ROWS)  # [ROWS, K] each
    return torch.cat([linear.product(tile, b) for tile in tiles])[: len(a)]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up [T, F]."""
    return gate / (1 + (-gate).exp()) * up


def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tensor, ...], heads: int, head_stride: int
) -> Tensor:
    """Return the attention output for q [T, H, E] with `heads` key heads, in tiles of queries.

    `tiles` contains int64 vectors: `first`, `count`, `seen` and `start` have the shape [tiles], and
    `at` has the shape [keys]. The queries of a tile are the rows first … first + count of q. These
    are at most QUERIES rows. The first query of a tile sees `seen` keys, and each further query
    sees one key more. The address of key i of key head h is at[start + i] + h · `head_stride`. An
    address is an index into k and v, which are contiguous.

    Each block of keys updates the running maximum m, sum l and result o (Milakov and Gimelshein
    2018, 1805.02867). The output is o / l.

        m' = max(m, max_j s_j);  p_j = e^{s_j - m'};  l' = l·e^{m - m'} + Σ_j p_j;
        o' = o·e^{m - m'} + Σ_j p_j v_j
    """
    first, count, seen, start = (x[tiles[1] > 0, None] for x in tiles[:4])  # [tiles, 1] each
    i = torch.arange(QUERIES)
    rows = (first + i).clamp(max=len(q) - 1)  # [tiles, QUERIES]
    x = q[rows].unflatten(2, (heads, -1)).transpose(1, 2) * q.shape[2] ** -0.5
    x = x.flatten(2, 3)  # [tiles, K, Q, E] with Q = QUERIES·H/K
    sees = (seen + i).repeat_interleave(q.shape[1] // heads, 1)[
        :, None, :, None
    ]  # [tiles, 1, Q, 1]
    within = torch.arange(heads)[:, None, None] * head_stride + torch.arange(q.shape[2])
    m = x.new_full(x.shape[:3], -torch.inf)
    l, o = torch.zeros_like(m), torch.zeros_like(x)
    for block in range(0, int((seen + count).max()) - 1, KEYS):
        j = block + torch.arange(KEYS)
        at = tiles[4][start + j.minimum(seen + count - 2)]  # [tiles, KEYS]
        keys, values = (y.flatten()[at[:, None, :, None] + within] for y in (k, v))
        s = product_of_tiles(x, keys.transpose(2, 3)).masked_fill(j >= sees, -torch.inf)
        top = m.maximum(s.amax(-1))
        scale, p = (m - top).exp(), (s - top[..., None]).exp()  # [tiles, K, Q], [tiles, K, Q, KEYS]
        l = l * scale + p.sum(-1)
        o = o * scale[..., None] + product_of_tiles(p, values)
        m = top
    o = (o / l[..., None]).unflatten(2, (QUERIES, -1)).transpose(1, 2).flatten(2, 3)
    out = torch.empty_like(q)
    out[rows[i < count]] = o[i < count]
    return out


def product_of_tiles(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix products a b for each tile and key head, [tiles, K, …]."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])

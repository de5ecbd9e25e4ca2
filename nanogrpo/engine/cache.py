"""The cache of the embedded engine on a CPU: the keys and values of the sequences that it is
decoding.

In: the query [b, H, E], key and value [b, K, E] of the newest token of b rows. Out: what each token
attends to in its own sequence, [b, H, E]. A GPU's cache (paged_cache.py) has the same methods:

    fits, fill    start rows with a prompt's keys and values, if there is room for them
    reserve       make room for the next tokens of all rows
    keep          drop rows that have finished, and close the gaps
    begin, call   one decode step: `begin` once, then the cache itself for each layer

Here each row has one stretch of memory, as long as the longest context. A CPU does not use pages,
because matrix products need a row's keys in one place, and copying them there takes longer than
reading them. Read next: scheduler.py (who uses it), paged_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogrpo.model.hf_config import ModelConfig


@dataclass
class Prefix:
    """The keys and values of a prompt without its last token, [L, K, t, E] each."""

    ids: list[int]  # the prompt
    k: Tensor
    v: Tensor
    # in a PagedCache: the full pages while any row uses them, and the number of these rows
    pages: list[int] = field(default_factory=list)
    users: int = 0


class KVCache:
    """Row r is one stretch of memory, [K, S, E] for each layer.

    Row i writes its newest token to column `positions[i]` and attends to the columns up to and
    including it. Only the first `span` columns are read, so short sequences are fast even in a long
    cache. The cache starts with few columns and is widened as sequences grow, because rows that are
    close together in memory are read about 1.5 times as fast.
    """

    def __init__(self, cfg: ModelConfig, B: int, S: int, dtype: torch.dtype, device: torch.device):
        self.S, self.dtype, self.device = S, dtype, device
        self.narrow = cfg.num_hidden_layers, B, cfg.num_key_value_heads, min(S, 64), cfg.head_dim
        self.clear()
        self.columns = torch.arange(S, device=device)  # [S]
        self.index = torch.arange(B, device=device)  # [B]

    def clear(self) -> None:
        """Narrow the cache to its initial width and zero it. A NaN left in a masked column would
        spread, since 0 · NaN is NaN.
        """
        self.k = torch.zeros(self.narrow, dtype=self.dtype, device=self.device)
        self.v = torch.zeros_like(self.k)

    def widen(self, span: int) -> None:
        """Make room for `span` columns, in steps of 64."""
        if span > (width := self.k.shape[3]):
            more = min(-(-span // 64) * 64, self.S) - width
            self.k, self.v = (F.pad(x, (0, 0, 0, more)) for x in (self.k, self.v))

    def fits(self, tokens: int) -> bool:
        return True

    def fill(self, first: int, count: int, prefix: Prefix, ahead: int) -> int:
        """Write a prompt's keys and values to `count` rows from `first` on."""
        end, t = first + count, prefix.k.shape[2]
        self.widen(t)
        self.k[:, first:end, :, :t] = prefix.k[:, None]
        self.v[:, first:end, :, :t] = prefix.v[:, None]
        return count

    def reserve(self, lengths: Iterable[int]) -> bool:
        return True

    def keep(self, rows: Sequence[int], span: int) -> None:
        """Copy the first `span` columns of row rows[i] to row i, for each i. No row that moves is
        overwritten.
        """
        target = [i for i, row in enumerate(rows) if row != i]
        source = [rows[i] for i in target]
        if target:
            self.k[:, target, :, :span] = self.k[:, source, :, :span]
            self.v[:, target, :, :span] = self.v[:, source, :, :span]

    def begin(self, positions: Tensor, span: int) -> None:
        """Prepare a step. positions: [b] int64 with b ≤ B, all below `span`; span: at most S."""
        self.widen(span)
        self.positions, self.span = positions, span
        unseen = self.columns[:span] > positions[:, None]  # [b, span]
        bias = torch.zeros_like(unseen, dtype=self.k.dtype).masked_fill_(unseen, float("-inf"))
        self.bias = bias[:, None, None]  # [b, 1, 1, span]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, H, E = q.shape
        K = k.shape[1]
        keys, values = self.k[layer], self.v[layer]  # [B, K, S, E]
        keys[self.index[:b], :, self.positions] = k
        values[self.index[:b], :, self.positions] = v
        keys, values = keys[:b, :, : self.span], values[:b, :, : self.span]
        # The H/K query heads of a key head act as the query length, so no key must be repeated. Two
        # plain matmuls at these sizes take a third of the time of torch's attention.
        q = q.view(b, K, H // K, E)
        scores = torch.matmul(q * E**-0.5, keys.transpose(-1, -2))  # [b, K, H/K, span]
        out = torch.matmul(scores.add_(self.bias).softmax(-1), values)  # [b, K, H/K, E]
        return out.reshape(b, H, E)

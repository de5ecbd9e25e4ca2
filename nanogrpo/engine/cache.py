"""The local engine's key/value cache on a CPU, for the sequences that are being decoded.

In: the query [b, H, E], key and value [b, K, E] of the newest token in each of b rows. Out: the
attention output [b, H, E], where each token attends to its own sequence. The cache on a GPU
(paged_cache.py) has the same methods:

    `fits` tells whether there is space for another row.
    `fill` assigns rows to the completions of a prompt.
    `write` then writes the keys and values of the prompts.
    `reserve` reserves memory for the next tokens of all rows.
    `keep` drops the finished rows, and moves other rows into the gaps.
    `begin` prepares a decode step.
    Each layer then calls the cache as a function, which computes attention.

In this file, a row is one contiguous block of memory. Pages would be slow on a CPU: a matrix
product needs all keys of a row in one place, and copying the keys there takes longer than reading
them. Read next: scheduler.py, which uses the cache; paged_cache.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogrpo.model.hf_config import ModelConfig


@dataclass
class Prefix:
    """The keys and values of all tokens of a prompt except the last one."""

    ids: list[int]  # the prompt
    kv: Tensor  # [2, L, K, t, E]
    # In a PagedCache: the full pages of the prompt, if any row uses them.
    pages: list[int] = field(default_factory=list)


class KVCache:
    """A cache in which each row has two contiguous blocks of memory for each layer: keys [K, S, E]
    and values [K, S, E].

    The newest token of row i is written to column `positions[i]` and attends to the columns up to
    `positions[i]`. Only the first `span` columns are read, so short sequences are fast even in a
    long cache. The cache starts with few columns and becomes wider as sequences grow. While the
    cache is narrow, rows are close together in memory and are read about 1.5 times as fast.
    """

    def __init__(self, cfg: ModelConfig, B: int, S: int, dtype: torch.dtype, device: torch.device):
        self.S, self.dtype, self.device = S, dtype, device
        self.narrow = 2, cfg.num_hidden_layers, B, cfg.num_key_value_heads, min(S, 64), cfg.head_dim
        self.clear()
        self.index = torch.arange(max(B, S), device=device)

    def clear(self) -> None:
        """Reset the cache to its initial width, and fill it with zeros. A NaN left in a masked
        column would spread, because 0 · NaN is NaN.
        """
        self.kv = torch.zeros(self.narrow, dtype=self.dtype, device=self.device)

    def widen(self, span: int) -> None:
        """Widen the cache to at least `span` columns, in steps of 64."""
        if span > (width := self.kv.shape[4]):
            more = min(-(-span // 64) * 64, self.S) - width
            self.kv = F.pad(self.kv, (0, 0, 0, more))

    def fits(self, tokens: int) -> bool:
        return True

    def fill(self, first: int, count: int, prefix: Prefix, ahead: int) -> int:
        return count

    def write(self, started: Iterable[tuple[int, int, Prefix]]) -> None:
        """Write the keys and values of prompts to the rows that have started. Each item of
        `started` is (first row, number of rows, prompt).
        """
        for first, count, prefix in started:
            t = prefix.kv.shape[3]
            self.widen(t)
            self.kv[:, :, first : first + count, :, :t] = prefix.kv[:, :, None]

    def reserve(self, lengths: Iterable[int]) -> bool:
        return True

    def keep(self, rows: Sequence[int]) -> None:
        """Copy row rows[i] to row i, for each i. No row may be the source of one copy and the
        target of a different copy.
        """
        target = [i for i, row in enumerate(rows) if row != i]
        source = [rows[i] for i in target]
        if target:
            self.kv[:, :, target] = self.kv[:, :, source]

    def begin(self, positions: Tensor) -> None:
        """Prepare a step. `positions` is [b] int64, with b ≤ B and values below S."""
        self.positions = positions
        self.span = span = int(positions.max()) + 1
        self.widen(span)
        unseen = self.index[:span] > positions[:, None, None, None]  # [b, 1, 1, span]
        self.bias = torch.where(unseen, -torch.inf, 0.0).to(self.dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        b, H, E = q.shape
        K = k.shape[1]
        keys, values = self.kv[:, layer, :b, :, : self.span]  # [b, K, span, E] each
        rows = self.index[:b]
        keys[rows, :, self.positions] = k
        values[rows, :, self.positions] = v
        bias = self.bias
        if window:
            unseen = self.index[: self.span] <= self.positions[:, None] - window  # [b, span]
            bias = bias.masked_fill(unseen[:, None, None], -torch.inf)
        # One product computes all H/K query heads that share a key head, so no key is repeated.
        # In a decode step, two matrix products take a third of the time of torch's attention.
        q = q.view(b, K, H // K, E)
        scores = torch.matmul(q * E**-0.5, keys.transpose(-1, -2))  # [b, K, H/K, span]
        out = torch.matmul(scores.add_(bias).softmax(-1), values)  # [b, K, H/K, E]
        return out.reshape(b, H, E)

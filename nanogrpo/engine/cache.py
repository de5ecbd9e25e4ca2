"""The two caches of the embedded engine, which hold the keys and values of the sequences that it is
decoding.

In: the query [b, H, E], key and value [b, K, E] of the newest token of b rows. Out: what each token
attends to in its own sequence, [b, H, E]. The methods are the same:

    fits, fill    start rows with a prompt's keys and values, if there is room for them
    reserve       make room for the next tokens of all rows
    keep          drop rows that have finished, and close the gaps
    begin, call   one decode step: `begin` once, then the cache itself for each layer

`KVCache` (CPU) gives each row one stretch of memory, as long as the longest context. `PagedCache`
(GPU) takes pages of PAGE tokens from one pool. A row then needs memory only for the tokens that it
has, and the completions of a prompt share its full pages. A CPU does not use pages, because matrix
products need a row's keys in one place, and copying them there takes longer than reading them.
Read next: local.py (the scheduler), kernels/paged.py (how a GPU reads the pages).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogrpo.model.dispatch import functions_for

PAGE = 32  # tokens; smaller pages waste less of each row's last page, larger ones take fewer reads


def cache_tokens(slots: int, max_len: int, paged: bool, wanted: int | None = None) -> int:
    """Return how many tokens' keys and values the engine's cache has memory for.

    wanted: the size of a paged cache, as far as it is sensible: it holds at least one context, and
    at most `slots` of them, which is also the default. Each cached token takes 2·K·E numbers in
    each layer. One page more is nobody's (see PagedCache).
    """
    if not paged:
        return slots * max_len
    context = pages_of(max_len)
    most = slots * context
    return PAGE * (1 + (most if wanted is None else max(context, min(wanted // PAGE, most))))


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


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

    def __init__(
        self, layers: int, B: int, K: int, S: int, E: int, dtype: torch.dtype, device: torch.device
    ):
        self.S, self.narrow = S, min(S, 64)
        self.k = torch.zeros(layers, B, K, self.narrow, E, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.columns = torch.arange(S, device=device)  # [S]
        self.index = torch.arange(B, device=device)  # [B]

    @property
    def width(self) -> int:
        return self.k.shape[3]

    def clear(self) -> None:
        """Narrow the cache to its initial width and zero it. A NaN left in a masked column would
        spread, since 0 · NaN is NaN.
        """
        if self.width > self.narrow:
            self.k, self.v = (x[:, :, :, : self.narrow].clone() for x in (self.k, self.v))
        self.k.zero_(), self.v.zero_()

    def widen(self, span: int) -> None:
        """Make room for `span` columns, in steps of 64."""
        if span > self.width:
            more = min(-(-span // 64) * 64, self.S) - self.width
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


class PagedCache:
    """Rows consist of pages of PAGE tokens, which come from one pool per layer.

    `table[r]` lists the pages of row r in order. The page of position p is table[r, p // PAGE]. The
    tensors are never replaced, because CUDA graphs use their addresses. Entries that are not in use
    are 0: page 0 is nobody's, and the rows that only fill up a graph's shape write there.
    """

    def __init__(
        self,
        layers: int,
        B: int,
        K: int,
        S: int,
        E: int,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int | None = None,
    ):
        pages = cache_tokens(B, S, paged=True, wanted=tokens) // PAGE
        self.S = S
        self.k = torch.zeros(layers, pages, K, PAGE, E, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.table = torch.zeros(B, pages_of(S), dtype=torch.int32, device=device)
        self.on_host = torch.zeros(B, pages_of(S), dtype=torch.int32)  # the next table
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self.free = list(range(self.k.shape[1] - 1, 0, -1))  # the last one is taken first
        self.rows: list[tuple[Prefix, list[int]]] = []  # what a row shares, and its own pages
        self.on_host.zero_()

    def fits(self, tokens: int) -> bool:
        """Return whether a row of so many tokens fits that shares no page."""
        return pages_of(min(tokens, self.S)) <= len(self.free)

    def fill(self, first: int, count: int, prefix: Prefix, ahead: int) -> int:
        """Start up to `count` rows with a prompt, with room for `ahead` more tokens. Return how
        many rows fit. The first of them writes the prompt's full pages, and all share them.
        """
        t = prefix.k.shape[2]
        full = t // PAGE
        each = pages_of(min(t + ahead, self.S)) - full  # pages that a row does not share
        count = min(count, (len(self.free) - (0 if prefix.users else full)) // each)
        if count <= 0:
            return 0
        if full and not prefix.users:
            prefix.pages = self._take(full)
            for pool, x in ((self.k, prefix.k), (self.v, prefix.v)):
                paged = x[:, :, : full * PAGE].unflatten(2, (full, PAGE))  # [L, K, full, PAGE, E]
                pool[:, prefix.pages] = paged.transpose(1, 2)
        own = [self._take(each) for _ in range(count)]
        last = [pages[0] for pages in own]  # the page with the rest of the prompt
        self.k[:, last, :, : t - full * PAGE] = prefix.k[:, None, :, full * PAGE :]
        self.v[:, last, :, : t - full * PAGE] = prefix.v[:, None, :, full * PAGE :]
        prefix.users += count
        self.rows += [(prefix, pages) for pages in own]
        lists = [prefix.pages + pages for pages in own]
        self.on_host[first : first + count, : full + each] = torch.tensor(lists).int()
        self.table.copy_(self.on_host)
        return count

    def reserve(self, lengths: Iterable[int]) -> bool:
        """Make room for lengths[r] tokens in each row r. If the pool cannot hold all of them,
        return False and change nothing.
        """
        have = [len(prefix.pages) + len(own) for prefix, own in self.rows]
        more = [max(0, pages_of(n) - m) for n, m in zip(lengths, have)]
        if sum(more) > len(self.free):
            return False
        for row, n in enumerate(more):
            if n:
                pages = self._take(n)
                self.rows[row][1].extend(pages)
                self.on_host[row, have[row] : have[row] + n] = torch.tensor(pages).int()
        self.table.copy_(self.on_host)
        return True

    def keep(self, rows: Sequence[int], span: int) -> None:
        """Make row rows[i] row i, for each i, and drop all other rows. No token is copied."""
        for row in {*range(len(self.rows))} - {*rows}:
            prefix, own = self.rows[row]
            self.free += own
            prefix.users -= 1
            if not prefix.users:
                self.free += prefix.pages
                prefix.pages = []
        self.rows = [self.rows[row] for row in rows]
        self.on_host[: len(rows)] = self.on_host[list(rows)]
        self.on_host[len(rows) :] = 0

    def _take(self, n: int) -> list[int]:
        return [self.free.pop() for _ in range(n)]

    def begin(self, positions: Tensor, span: int) -> None:
        """Prepare a step. positions: [b] int64, in rows 0 … b-1. All seen tokens are read, and no
        others, so `span` does not matter.
        """
        self.positions = positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = self.k[layer], self.v[layer]  # [pages, K, PAGE, E] each
        return functions_for(q.device).paged_attention(q, k, v, self.positions, self.table, *pages)

"""The embedded engine's key/value cache on a GPU, which consists of pages of PAGE tokens.

In and out: as in cache.py. A row needs memory only for the tokens that it has, and the completions
of a prompt share its full pages. Read before: cache.py. Read next: kernels/triton/paged.py (how a
GPU reads the pages).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nanogrpo.engine.cache import Prefix
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.hf_config import ModelConfig

PAGE = 32  # tokens; small pages waste less of each row's last page, large pages need fewer reads


def cache_tokens(slots: int, max_len: int, wanted: int | None = None) -> int:
    """Return the number of tokens whose keys and values fit into the engine's cache.

    The result is `wanted`, but at least one context length and at most `slots` context lengths,
    which is also the default. Each cached token takes 2·K·E numbers in each layer. The cache has
    one more page, page 0, for padding rows (see PagedCache).
    """
    context = pages_of(max_len)
    most = slots * context
    return PAGE * (1 + (most if wanted is None else max(context, min(wanted // PAGE, most))))


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


class PagedCache:
    """A cache in which a row is a list of pages of PAGE tokens, from one pool per layer.

    `table[r]` lists the pages of row r in order. The page of position p is table[r, p // PAGE]. The
    tensors are never replaced, because CUDA graphs use their addresses. Unused entries of the table
    are 0. No row owns page 0: the rows that pad a graph's shape write there.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        B: int,
        S: int,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int | None = None,
    ):
        pages = cache_tokens(B, S, tokens) // PAGE
        self.S = S
        heads = cfg.num_key_value_heads, PAGE, cfg.head_dim
        self.kv = torch.zeros(2, cfg.num_hidden_layers, pages, *heads, dtype=dtype, device=device)
        self.table = torch.zeros(B, pages_of(S), dtype=torch.int32, device=device)
        self.on_host = torch.zeros_like(self.table, device="cpu")  # the next table
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self.free = list(range(self.kv.shape[2] - 1, 0, -1))  # taken from the end
        self.rows: list[tuple[Prefix, list[int]]] = []  # shared prefix and own pages of each row
        self.on_host.zero_()

    def fits(self, tokens: int) -> bool:
        """Return whether the cache has space for a row of this length that shares no pages."""
        return pages_of(min(tokens, self.S)) <= len(self.free)

    def fill(self, first: int, count: int, prefix: Prefix, ahead: int) -> int:
        """Start up to `count` rows with a prompt, with space for `ahead` more tokens each. Return
        how many rows fit. The first row writes the prompt's full pages, which all of these rows
        share.
        """
        t = prefix.kv.shape[3]
        full = t // PAGE
        each = pages_of(min(t + ahead, self.S)) - full  # pages that a row does not share
        first_rows = not prefix.users
        count = min(count, (len(self.free) - full * first_rows) // each)
        if count <= 0:
            return 0
        if first_rows:
            prefix.pages = self._take(full)
        own = [self._take(each) for _ in range(count)]
        last = [pages[0] for pages in own]  # the page with the rest of the prompt
        whole, rest = prefix.kv.split((full * PAGE, t - full * PAGE), dim=3)
        if first_rows:
            paged = whole.unflatten(3, (full, PAGE))  # [2, L, K, full, PAGE, E]
            self.kv[:, :, prefix.pages] = paged.transpose(2, 3)
        self.kv[:, :, last, :, : rest.shape[3]] = rest[:, :, None]
        prefix.users += count
        self.rows += [(prefix, pages) for pages in own]
        lists = [prefix.pages + pages for pages in own]
        self.on_host[first : first + count, : full + each] = torch.tensor(lists)
        self.table.copy_(self.on_host)
        return count

    def reserve(self, lengths: Iterable[int]) -> bool:
        """Reserve pages for lengths[r] tokens in each row r. If there are too few free pages,
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
                self.on_host[row, have[row] : have[row] + n] = torch.tensor(pages)
        self.table.copy_(self.on_host)
        return True

    def keep(self, rows: Sequence[int], span: int) -> None:
        """Renumber row rows[i] to row i for each i, and drop all other rows. No token is copied."""
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
        """Prepare a step for rows 0 … b-1. `positions` is [b] int64. The kernel reads only the
        tokens of each row, so `span` does not matter.
        """
        self.positions = positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        where = self.positions, self.table, *self.kv[:, layer]  # [pages, K, PAGE, E] each
        return functions_for(q.device).paged_attention(q, k, v, *where, window)

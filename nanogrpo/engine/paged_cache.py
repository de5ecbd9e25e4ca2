"""The local engine's key/value cache on a GPU, which consists of pages of PAGE tokens.

In and out: as in cache.py. A row needs memory only for the tokens that it has, and the completions
of a prompt share its full pages. Read before: cache.py. Read next: kernels/triton/paged.py (how a
GPU reads the pages).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogrpo.engine.cache import Prefix
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import moved

PAGE = 32  # tokens; small pages leave less space unused, large pages need fewer reads


def cache_tokens(slots: int, max_len: int, wanted: int | None = None) -> int:
    """Return the number of tokens whose keys and values fit into the engine's cache.

    The result is `wanted`, but at least one context length, and at most `slots` context lengths.
    The default is `slots` context lengths. In each layer, a cached token takes 2·K·E numbers. The
    cache has one more page, page 0, for padding rows (see PagedCache).
    """
    context = pages_of(max_len)
    most = slots * context
    return PAGE * (1 + (most if wanted is None else max(context, min(wanted // PAGE, most))))


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


class PagedCache:
    """A cache in which each row is a list of pages. A page holds PAGE tokens, and each layer has
    its own pool of pages.

    `table[r]` lists the pages of row r in order. The page of position p is table[r, p // PAGE]. The
    tensors are never replaced, because CUDA graphs use their addresses. Unused entries of the table
    are 0. No row owns page 0: the rows that pad a graph's shape write there. Rows that have reached
    their limit also write to page 0, until the host reads their tokens. For these rows, the table
    has one more column, which is 0.
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
        self.table = torch.zeros(B, pages_of(S) + 1, dtype=torch.int32, device=device)
        # the next table; NumPy changes single numbers faster than torch
        self.on_host = torch.zeros_like(self.table, device="cpu").numpy()
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self.free = list(range(self.kv.shape[2] - 1, 0, -1))  # taken from the end
        self.rows: list[tuple[Prefix, list[int]]] = []  # shared prefix and own pages of each row
        self.on_host[:] = 0

    def fits(self, tokens: int) -> bool:
        """Return whether a row of this length would fit without sharing pages with other rows."""
        return pages_of(min(tokens, self.S)) <= len(self.free)

    def fill(self, first: int, count: int, prefix: Prefix, ahead: int) -> int:
        """Start up to `count` rows with a prompt, with space for `ahead` more tokens each. Return
        how many rows fit. These rows share the prompt's full pages.
        """
        t = prefix.kv.shape[3]
        full = t // PAGE
        each = pages_of(min(t + ahead, self.S)) - full  # pages that a row does not share
        shared = full - len(prefix.pages)  # shared pages that are not allocated yet
        count = min(count, (len(self.free) - shared) // each)
        if count <= 0:
            return 0
        prefix.pages += self._take(shared)
        own = [self._take(each) for _ in range(count)]
        self.rows += [(prefix, pages) for pages in own]
        lists = [prefix.pages + pages for pages in own]
        self.on_host[first : first + count, : full + each] = lists
        return count

    def write(self, started: Iterable[tuple[int, int, Prefix]]) -> None:
        """Copy the table to the device, and then do the same as KVCache.write. The indices of pages
        come from the table on the device. If these indices came from the host's table, the host
        would have to wait for the device.
        """
        self.table.copy_(moved(torch.from_numpy(self.on_host), self.table.device))
        for first, count, prefix in started:
            filled = F.pad(prefix.kv, (0, 0, 0, PAGE - prefix.kv.shape[3] % PAGE))
            parts = filled.unflatten(3, (-1, PAGE)).transpose(2, 3)  # [2, L, pages, K, PAGE, E]
            pages = self.table[first : first + count, : parts.shape[2]].long()
            self.kv[:, :, pages] = parts[:, :, None]  # each row also writes the shared pages

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
                self.on_host[row, have[row] : have[row] + n] = pages
        return True

    def keep(self, rows: Sequence[int]) -> None:
        """Move row rows[i] to row i for each i, and drop all other rows. No token is copied."""
        dropped = [self.rows[row] for row in {*range(len(self.rows))} - {*rows}]
        self.rows = [self.rows[row] for row in rows]
        for prefix, own in dropped:
            self.free += own
            if all(other is not prefix for other, _ in self.rows):
                self.free += prefix.pages
                prefix.pages = []
        self.on_host[: len(rows)] = self.on_host[list(rows)]
        self.on_host[len(rows) :] = 0

    def _take(self, n: int) -> list[int]:
        return [self.free.pop() for _ in range(n)]

    def begin(self, positions: Tensor) -> None:
        """Prepare a step for rows 0 … b-1. `positions` is [b] int64."""
        self.positions = positions

    def rotate(self, q: Tensor, k: Tensor, *rotation: Any) -> tuple[Tensor, Tensor]:
        """Leave the norm and the rotation to the attention kernel, which saves a launch."""
        self.rotation = rotation
        return q, k

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        # the shape of each half of kv[:, layer] is [pages, K, PAGE, E]
        where = self.rotation, self.positions, self.table, *self.kv[:, layer]
        return functions_for(q.device).paged_attention(q, k, v, *where, window)

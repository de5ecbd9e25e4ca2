"""Decide which completions are decoded, and which row of the cache each of them uses.

    waiting ──► schedule: give free rows ──► decode: one new token ──► postprocess: append it, ──┐
                to waiting completions       for each active row       free the finished rows    │
                          ▲                                                                      │
                          └──────────────────────────────────────────────────────────────────────┘

In: completions, and a cache (cache.py). Out: the active completions. Active completions are always
in rows 0 … b-1 of the cache, so a step computes only active rows. When a row finishes, a waiting
completion or the last active row takes its place. If the cache of a GPU is full, the youngest
completion returns to the queue. When this completion gets a row again, it continues after the
tokens that it already has. Read next: runner.py (what a row computes).
"""

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanogrpo.engine.cache import KVCache, Prefix
from nanogrpo.engine.paged_cache import PagedCache
from nanogrpo.types import Sample, moved


@dataclass
class Completion:
    """A sample that is being generated."""

    sample: Sample
    limit: int  # maximum number of completion tokens
    key: int  # key of its random stream
    turn: int  # the position among all completions
    # The input tokens to start from. All completions of a prompt share one list of its tokens.
    # If a completion was put back into the queue, it has a new list with all its tokens so far.
    start: list[int]

    @property
    def room(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.limit - len(self.sample.token_ids)

    @property
    def position(self) -> int:
        """The position of the next input token."""
        return len(self.sample.prompt.token_ids) - 1 + len(self.sample.token_ids)


class Scheduler:
    """Assigns rows to completions: row r of the cache and of `state` belongs to active[r]."""

    def __init__(self, cache: KVCache | PagedCache, slots: int, device: torch.device):
        self.cache, self.slots = cache, slots
        self.put_back = 0  # completions put back into the queue since the last `metrics`
        # [3, slots]: each row's next input token, the position of this token, and the random key.
        # The tensor is never replaced, because CUDA graphs use its address.
        # Each step advances it, and `schedule` writes it if rows have started or moved.
        self.state = torch.zeros(3, slots, dtype=torch.int64, device=device)

    def start(self, completions: Iterable[Completion]) -> None:
        """Put these completions into the queue, and drop all others."""
        self.waiting: deque[Completion] = deque(completions)
        self.active: list[Completion] = []
        self.prefixes: dict[int, Prefix] = {}  # by id(completion.start)
        self.changed = False  # whether rows have started or moved
        self.cache.clear()

    def schedule(
        self, prefill: Callable[[Iterable[Completion]], dict[int, Prefix]], ahead: int
    ) -> bool:
        """Reserve memory for the next `ahead` tokens of each row, and assign free rows to waiting
        completions. Return whether any row is active.

        Even the smallest cache has space for one completion of the maximum length. So the oldest
        completion is never put back into the queue, and all completions finish.
        """
        while not self.cache.reserve(c.position + min(ahead, c.room) for c in self.active):
            youngest = max(self.active, key=lambda c: c.turn)
            youngest.start = youngest.sample.prompt.token_ids + youngest.sample.token_ids
            self.waiting.appendleft(youngest)
            self.put_back += 1
            self._keep([r for r, c in enumerate(self.active) if c is not youngest])
        started = []  # (first row, number of rows, prompt)
        while self.waiting and len(self.active) < self.slots:
            ids, first = self.waiting[0].start, len(self.active)
            if id(ids) not in self.prefixes:
                if not self.cache.fits(len(ids) - 1 + ahead):
                    break
                # Completions are queued in order, so older prefixes are no longer needed.
                self.prefixes = prefill(self.waiting)
            free = min(self.slots - first, len(self.waiting))
            group = next((i for i in range(free) if self.waiting[i].start is not ids), free)
            prefix = self.prefixes[id(ids)]
            filled = self.cache.fill(first, group, prefix, ahead)
            if not filled:
                break
            self.active += [self.waiting.popleft() for _ in range(filled)]
            started.append((first, filled, prefix))
        self.cache.write(started)
        if self.active and (started or self.changed):
            rows = [((c.sample.token_ids or c.start)[-1], c.position, c.key) for c in self.active]
            self.state[:, : len(rows)] = moved(torch.tensor(rows), self.state.device).T
        self.changed = False
        return bool(self.active)

    def postprocess(
        self, tokens: Tensor, logp: Tensor, version: int, stops: Container[int]
    ) -> None:
        """Append the new tokens [steps, b] to their samples, then drop the finished rows."""
        for c, ids, values in zip(self.active, tokens.T.tolist(), logp.T.tolist()):
            # tokens after a stop token, or above the limit, are discarded
            ids = ids[: c.room]
            size = next((i + 1 for i, t in enumerate(ids) if t in stops), len(ids))
            c.sample.token_ids += ids[:size]
            c.sample.logp += values[:size]
            c.sample.versions += [version] * size
            c.sample.stopped = ids[size - 1] in stops
        kept = [r for r, c in enumerate(self.active) if c.room and not c.sample.stopped]
        if len(kept) < len(self.active):
            self._keep(kept)

    def _keep(self, kept: list[int]) -> None:
        """Keep only these rows, which are in increasing order. The last rows move into the gaps."""
        rows = list(range(len(kept)))
        gaps = sorted({*rows} - {*kept})
        for gap, row in zip(gaps, kept[len(kept) - len(gaps) :]):
            rows[gap] = row
        self.cache.keep(rows)
        self.active = [self.active[r] for r in rows]
        self.changed = True

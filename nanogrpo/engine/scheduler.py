"""Decide which completions are decoded, and which row of the cache each of them uses.

    waiting ──► schedule: free the finished rows, ──► decode: one new token ──► postprocess: ──┐
                give rows to waiting completions      for each active row       append it      │
                          ▲                                                                    │
                          └────────────────────────────────────────────────────────────────────┘

In: completions, and a cache (cache.py). Out: the active completions. Active completions are always
in rows 0 … b-1 of the cache, so a step computes only active rows. When a row finishes, a waiting
completion or the last active row takes its place. If the cache of a GPU is full, the youngest
completion returns to the queue. When this completion gets a row again, it continues after the
tokens that it already has. Read next: runner.py (what a row computes).
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

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
    # A completion that was put back into the queue has a new list, with all its tokens so far.
    start: list[int]
    row: int = -1  # the row of `state` with the next input; -1 until the completion gets a row

    @property
    def room(self) -> int:
        """The number of tokens that may still be sampled."""
        return 0 if self.sample.stopped else max(0, self.limit - len(self.sample.token_ids))

    @property
    def position(self) -> int:
        """The position of the next input token."""
        return len(self.sample.prompt.token_ids) - 1 + len(self.sample.token_ids)


class Scheduler:
    """Assigns rows to completions: row r of the cache and of `state` belongs to active[r]."""

    def __init__(self, cache: KVCache | PagedCache, slots: int, device: torch.device):
        self.cache, self.slots = cache, slots
        self.put_back = 0  # completions put back into the queue since the last call of `metrics`
        # [3, slots]: each row's next input token, the position of this token, and the random key.
        # The tensor is never replaced, because CUDA graphs use its address. Each step updates it.
        # `schedule` moves rows, and fills in the rows of new completions.
        self.state = torch.zeros(3, slots, dtype=torch.int64, device=device)

    def start(self, completions: Iterable[Completion]) -> None:
        """Put these completions into the queue, and drop all others."""
        self.waiting: deque[Completion] = deque(completions)
        self.active: list[Completion] = []
        self.prefixes: dict[int, Prefix] = {}  # by id(completion.start)
        self.cache.clear()

    def schedule(
        self, prefill: Callable[[Iterable[Completion]], dict[int, Prefix]], ahead: int
    ) -> bool:
        """Free the finished rows, reserve memory for the next `ahead` tokens of the remaining
        rows, and assign free rows to waiting completions. Return whether any row is active.

        Even the smallest cache has space for one completion of the maximum length. So the oldest
        completion is never put back into the queue, and all completions finish.
        """
        while True:
            # Rows from the end take the places of the finished rows.
            kept = [r for r, c in enumerate(self.active) if c.room]
            rows = [r if self.active[r].room else kept.pop() for r in range(len(kept))]
            self.cache.keep(rows)
            self.active = [self.active[r] for r in rows]
            if self.cache.reserve(c.position + min(ahead, c.room) for c in self.active):
                break
            youngest = max(self.active, key=lambda c: c.turn)
            ids = youngest.sample.prompt.token_ids + youngest.sample.token_ids
            if len(ids) == len(youngest.start):  # no new token: reuse the prefill if it exists
                ids = youngest.start
            self.waiting.appendleft(replace(youngest, start=ids, row=-1))
            youngest.limit = 0  # discard the tokens that the host has not read yet
            self.put_back += 1
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
        rows = [*range(len(self.active))]
        if [c.row for c in self.active] != rows:
            # The host may not have read the newest tokens yet, so the device moves them.
            inputs = [(c.row, c.start[-1], c.position, c.key) for c in self.active]
            x = moved(torch.tensor(inputs), self.state.device).T  # [4, b]
            self.state[:, : len(rows)] = torch.where(x[0] < 0, x[1:], self.state[:, x[0]])
            for row, c in enumerate(self.active):
                c.row = row
        return bool(rows)

    def postprocess(
        self,
        version: int,
        stops: Container[int],
        rows: Sequence[Completion],
        tokens: Tensor,
        logp: Tensor,
    ) -> None:
        """Append the new tokens [steps, b] to the samples of these rows."""
        for ids, values in zip(tokens.tolist(), logp.tolist()):
            for c, token, value in zip(rows, ids, values):
                if c.room:  # 0 if the completion is finished or was put back
                    c.sample.token_ids.append(token)
                    c.sample.logp.append(value)
                    c.sample.versions.append(version)
                    c.sample.stopped = token in stops

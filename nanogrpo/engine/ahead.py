"""Sampling ahead of training, by a bounded number of steps: the next generation is sampled while
this one trains.

In: an engine that can sample in a thread, the prompts of each step, a bound S. Out: the samples of
each step, in order.

    S = 0    sample 0 │ train 0 │ sync │ sample 1 │ train 1 │ sync │ …             synchronous: what it trains on is always fresh
    S = 1    sample 0 │ train 0 ────────── sync │ train 1 ────────── sync │ …      the server never waits for the trainer,
                      │ sample 1 ──────────┼────│ sample 2 ───── …                 the weights may change in mid-completion

The bound holds by admission, not by throwing finished work away: the samples of step t are asked
for only once step t − S has begun to train, so that the weights which start them are those after t
− S steps, or newer. Every token carries the version that wrote it, and `take` asserts the bound on
each of them (AReaL's admission rule, arXiv:2505.24298, counted in whole steps). What a completion
has cached when the weights change it keeps: it goes on from keys that are partly one version older.
Read before: vllm_engine.py. Read next: train.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from nanogrpo.engine.base import Engine, SamplingParams, Served
from nanogrpo.types import Prompt, Sample


class Ahead:
    """Samples up to S steps ahead. Any engine can do it for S = 0; for more it must be a
    rollout.Served.

    >>> ahead = Ahead(engine, lambda step: data.draw(prompts, P, seed, step), G, params, start, cfg.max_steps, max_staleness=1)
    >>> for step in range(start, cfg.max_steps):
    ...     engine.load(model, version=step)            # also while the server samples
    ...     samples = ahead.take(step)                  # waits for the samples of this step; those of the next are under way
    ...     ...                                         # train
    """

    def __init__(
        self,
        engine: Engine | Served,
        draw: Callable[[int], Sequence[Prompt]],  # all prompts of a step
        n: int,
        params: SamplingParams,
        start: int,  # the first step: after a resume the count starts again, with nothing under way
        stop: int,  # one past the last: nothing is sampled that nobody trains on
        max_staleness: int = 0,
        # this rank's part of them: World.part
        share: Callable[[Sequence[Prompt]], Sequence[Prompt]] = lambda prompts: prompts,
        main: bool = True,  # whether this rank asks for all
    ):
        self.engine, self.draw, self.share, self.n, self.params = engine, draw, share, n, params
        self.stop, self.bound = stop, max_staleness
        self.next = start  # the first step that has not been asked for
        self.waiting: deque[tuple[int, Sequence[Prompt], Future]] = deque()
        # One thread: the steps are asked for in their order, and a step's own groups fill the
        # servers.
        here = max_staleness > 0 and main
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sample") if here else None

    def take(self, step: int) -> list[Sample]:
        """The samples of a step, on every rank; each step once, in order. Raises what sampling
        raised.
        """
        if self.bound == 0:
            samples = self.engine.sample(self.share(self.draw(step)), self.n, self.params, step)
        else:
            # With `step` steps trained, steps up to step + S may have been asked for: started <
            # trained + S + 1.
            while self.next < min(step + self.bound + 1, self.stop):
                prompts = self.draw(self.next)
                self.waiting.append((self.next, prompts, self._ask(prompts, self.next)))
                self.next += 1
            asked, prompts, future = self.waiting.popleft()
            if asked != step:
                raise RuntimeError(
                    f"the samples of step {asked} are next, not those of step {step}"
                )
            samples = self.engine.scatter(lambda: future.result(), self.share(prompts), self.n)
        oldest = min((v for s in samples for v in s.versions), default=step)
        if oldest < step - self.bound:
            raise AssertionError(
                f"a token of step {step} was written by version {oldest}: older than --max-staleness {self.bound}"
            )
        return samples

    def _ask(self, prompts: Sequence[Prompt], step: int) -> Future | None:
        return self.pool and self.pool.submit(
            self.engine.request, prompts, self.n, self.params, step
        )

    def close(self) -> None:
        """Forgets what is under way. Call it before the engine's `close`."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def staleness(versions: Sequence[Counter[int]], step: int) -> dict[str, float]:
    """How many versions behind a step's tokens are: mean and maximum, and the share of completions
    that mix versions.

    versions: of each completion, how many of its tokens each version wrote.
    """
    tokens = sum((Counter(v) for v in versions), Counter())
    mean = sum((step - v) * n for v, n in tokens.items()) / tokens.total()
    mixed = sum(len(v) > 1 for v in versions) / len(versions)
    return {"staleness/mean": mean, "staleness/max": step - min(tokens), "staleness/mixed": mixed}

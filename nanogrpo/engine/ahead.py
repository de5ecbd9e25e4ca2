"""Sample ahead of training: a wrapper around an engine that runs in other processes (a vLLM
server).

In: the engine, the prompts of each step, and a bound S (--max-staleness). Out: the samples of each
step, in order. With S = 0 it only checks the versions of the tokens.

    S = 0    sample 0 │ train 0 │ sync │ sample 1 │ train 1 │ sync │ …   always the newest weights
    S = 1    sample 0 │ train 0 ────────── sync │ train 1 ───────── sync │ …
                      │ sample 1 ──────────┼────│ sample 2 ──── …        the server never waits

The bound is enforced before sampling, so finished samples are never discarded: the samples of step
t are requested only once the training of step t − S begins. Their sampling therefore starts with
the weights after t − S steps, or newer ones. This is AReaL's admission rule (arXiv:2505.24298),
counted in steps.

Weights may change in the middle of a completion. It then continues with its cached keys and values,
some of which were computed with older weights. Each token is labelled with the version of the
weights that sampled it, and `sample` checks the bound for each token. Read before: base.py,
vllm/client.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

from nanogrpo.distributed.world import World
from nanogrpo.engine.base import Engine, SamplingParams, Served, Wrapper
from nanogrpo.types import Prompt, Sample


class AheadEngine(Wrapper):
    """An engine that samples up to `bound` steps ahead of the step that trains.

    draw: a function that returns the prompts of a step for all ranks. n, params: the number of
    completions per prompt and the sampling parameters of training; any other request, such as an
    evaluation, goes straight to the engine. stop: the number of steps of the run, beyond which
    nothing is requested. With a bound above 0, the engine must be a `Served`.
    """

    def __init__(
        self,
        engine: Engine,
        draw: Callable[[int], Sequence[Prompt]],
        n: int,
        params: SamplingParams,
        stop: int,
        bound: int,
        world: World,
    ):
        self.engine, self.draw, self.n, self.params = engine, draw, n, params
        self.stop, self.bound, self.world = stop, bound, world
        # The steps in progress, oldest first, each with a Future of its samples (None except on
        # rank 0).
        self.requested: deque[tuple[int, Future | None]] = deque()
        # A single thread, so steps are requested in order. Rank 0 sends the requests for all ranks.
        self.pool = ThreadPoolExecutor(1, "sample") if bound and world.main else None

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
    ) -> list[Sample]:
        """Return the samples of `step`. Steps must come in order. Raises sampling errors."""
        if (n, params) != (self.n, self.params):
            return self.engine.sample(prompts, n, params, step)
        if self.bound:
            samples = self._take(prompts, step)
        else:
            samples = self.engine.sample(prompts, n, params, step)
        oldest = min((min(s.versions) for s in samples), default=step)
        if oldest < step - self.bound:
            raise AssertionError(
                f"a token of step {step} was written by version {oldest}, which is older than "
                f"--max-staleness {self.bound} allows"
            )
        return samples

    def _take(self, prompts: Sequence[Prompt], step: int) -> list[Sample]:
        following = self.requested[-1][0] + 1 if self.requested else step
        for ahead in range(following, min(step + self.bound + 1, self.stop)):
            self.requested.append((ahead, self._request(ahead)))
        first, future = self.requested.popleft()
        if first != step:
            raise RuntimeError(f"the samples of step {first} are next, not those of step {step}")
        return cast(Served, self.engine).scatter(
            lambda: future.result() if future else [], prompts, self.n
        )

    def _request(self, step: int) -> Future | None:
        if self.pool is None:
            return None
        request = cast(Served, self.engine).request
        return self.pool.submit(request, self.draw(step), self.n, self.params, step)

    def close(self) -> None:
        """Drop the steps in progress, then close the engine."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
        super().close()


def staleness(versions: Sequence[Counter[int]], step: int) -> dict[str, float]:
    """Return by how many versions the tokens lag behind `step`, and the share of mixed completions.

    versions: one counter per completion, with the number of its tokens that each version sampled. A
    mixed completion has tokens of more than one version.
    """
    tokens = sum((Counter(v) for v in versions), Counter())
    mean = sum((step - v) * n for v, n in tokens.items()) / tokens.total()
    mixed = sum(len(v) > 1 for v in versions) / len(versions)
    return {"staleness/mean": mean, "staleness/max": step - min(tokens), "staleness/mixed": mixed}

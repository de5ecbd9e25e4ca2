"""Sampling ahead of training: a wrapper around an engine that samples in other processes (vLLM).

In: the engine, the prompts of each step, and a bound S (--max-staleness). Out: the samples of each
step, in order.

    no wrapper   sample 0 │ train 0 │ sync │ sample 1 │ train 1 │ sync │ …   the newest weights
    S = 1        sample 0 │ train 0 ────────── sync │ train 1 ───────── sync │ …
                          │ sample 1 ──────────┼────│ sample 2 ──── …        the server never waits

The bound is enforced before sampling, so finished samples are never discarded. The samples of step
t are requested only when the training of step t − S begins. So the sampling of step t starts with
the weights after t − S training steps, or with newer weights. This rule for the bound comes from
AReaL (arXiv:2505.24298). In this file, the bound S counts training steps.

Weights may change in the middle of a completion. The completion then continues with its cached
keys and values, some of which were computed with older weights. Each token is labelled with the
version of the weights that sampled it, and `sample` checks the bound for each token. Read before:
wrapper.py, vllm/client.py.
"""

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.errors import UserError
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.run.setup import Run
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm.client import VLLMEngine


class Ahead(Feature):
    """Wrap a run's engine in `AheadEngine`, and log how stale its samples are (--max-staleness)."""

    def wrap(self, engine: Any, run: Run) -> Engine:
        return AheadEngine(engine, run)

    def step(self, run: Run, step: int, samples: list[Sample]) -> dict[str, float]:
        return staleness(run.world.concat([Counter(s.versions) for s in samples]), step)


class AheadEngine(Wrapper):
    """An engine that samples up to --max-staleness steps ahead of training.

    A thread calls the wrapped engine while the loop trains. So the engine must sample in other
    processes. Only samples for training are drawn ahead. All other requests, such as evaluations,
    go directly to the wrapped engine.
    """

    engine: VLLMEngine

    def __init__(self, engine: VLLMEngine, run: Run):
        cfg: Any = run.cfg
        self.engine, self.run, self.bound = engine, run, cfg.max_staleness
        # steps in progress, oldest first; on rank 0, each has a Future of its samples
        self.requested: deque[tuple[int, Future | None]] = deque()
        # Rank 0 sends the requests of all ranks, on one thread, so the steps keep their order.
        self.pool = ThreadPoolExecutor(1, "sample")

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Return the samples of `step`. Steps must come in order. Raises sampling errors."""
        run, engine = self.run, self.engine
        if (n, params) != (run.cfg.num_generations, run.sampling):
            return engine.sample(prompts, n, params, step)
        following = self.requested[-1][0] + 1 if self.requested else step
        for ahead in range(following, min(step + self.bound + 1, run.cfg.max_steps)):
            self.requested.append((ahead, self._request(ahead)))
        _, future = self.requested.popleft()
        samples = engine.scatter(lambda: future.result() if future else [], prompts, n)
        oldest = min((min(s.versions) for s in samples), default=step)
        if oldest < step - self.bound:
            raise UserError(
                f"--max-staleness {self.bound}: a token of step {step} was sampled with version "
                f"{oldest} of the weights, which is too old: report this error, and use --resume."
            )
        return samples

    def _request(self, step: int) -> Future | None:
        run, request = self.run, self.engine.request
        if not run.world.main:
            return None
        prompts = run.draw(run.cfg.seed, step)
        return self.pool.submit(request, prompts, run.cfg.num_generations, run.sampling, step)

    def close(self) -> None:
        """Drop the samples of steps in progress, then close the engine."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        super().close()


def staleness(versions: Sequence[Counter[int]], step: int) -> dict[str, float]:
    """Return the mean and largest lag of the tokens, and the fraction of mixed completions.

    A token's lag is `step` minus the version of the weights that sampled it. `versions` has one
    Counter per completion, with the number of tokens that each version sampled. A mixed completion
    has tokens of more than one version.
    """
    tokens = sum(versions, Counter())
    mean = sum((step - v) * n for v, n in tokens.items()) / tokens.total()
    mixed = sum(len(v) > 1 for v in versions) / len(versions)
    return {"staleness/mean": mean, "staleness/max": step - min(tokens), "staleness/mixed": mixed}

"""Engines that wrap other engines, and the protocol of an engine that runs in other processes.

    ahead.py              samples steps ahead of training
    tools/turns.py        a function decides on the turns of a completion
    vllm/sleeping.py      frees the memory of a server while the trainer trains

In: an engine (engine/base.py). Out: an engine, which the training loop uses in the same way. Read
next: ahead.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.types import Prompt, Sample


class Served(Engine, Protocol):
    """An engine that runs in other processes, so a thread can use it while the loop trains.

    Sampling ahead (--max-staleness, ahead.py) requires such an engine.
    """

    def request(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Sample for the prompts of all ranks. Only rank 0 calls this, from a thread."""
        ...

    def scatter(
        self, requested: Callable[[], list[Sample]], prompts: Sequence[Prompt], n: int
    ) -> list[Sample]:
        """Call `requested` on rank 0 and return, on each rank, the samples of that rank's prompts.

        `requested` returns the samples of all ranks, in rank order. An exception that it raises is
        raised on every rank.
        """
        ...


class Wrapper:
    """An engine around another one. Subclasses define `sample` and pass all other calls on."""

    engine: Engine

    @property
    def version(self) -> int:
        return self.engine.version

    def load(self, model: nn.Module, version: int) -> None:
        self.engine.load(model, version)

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    def close(self) -> None:
        self.engine.close()

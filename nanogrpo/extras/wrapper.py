"""Engines that wrap other engines.

* ahead.py samples steps ahead of training.
* tools/turns.py lets a user's function control the turns of a completion.
* vllm/sleeping.py frees the GPU memory of a vLLM server while the trainer trains.

In: an engine (engine/base.py). Out: an engine that the training loop uses in the same way. Read
next: ahead.py.
"""

from torch import nn

from nanogrpo.engine.base import Engine


class Wrapper:
    """A wrapper around another engine. Subclasses define `sample`, with the arguments of
    `Engine.sample`, and pass on all other calls.
    """

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

"""Engines that wrap other engines.

* ahead.py samples steps ahead of training.
* tools/turns.py lets a user's function control the turns of a completion.
* vllm/sleeping.py frees the GPU memory of a vLLM server while the trainer trains.

In: an engine (engine/base.py). Out: an engine that the training loop uses in the same way. Read
next: ahead.py.
"""

from typing import Any

from nanogrpo.engine.base import Engine


class Wrapper:
    """A wrapper around another engine. Subclasses define `sample`, with the arguments of
    `Engine.sample`. All other attributes are those of the other engine.
    """

    engine: Engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

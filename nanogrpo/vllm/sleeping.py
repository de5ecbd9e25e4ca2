"""A wrapper around the engine. It lets trainer and vLLM take turns on one GPU
(--vllm-enable-sleep-mode).

    gather │ wake, send the weights, sample, sleep │ score, train │ gather │ …
    memory:│ the server has its share              │ the server has released its share

A server that sleeps (vLLM's level 2) has neither weights nor a KV cache. So the weights are sent
each time the server wakes, even if the trainer's weights have not changed (for example, after an
evaluation). The server stays awake for one call of `sample`, including any calls of tools. Read
before: client.py. Read next: sync.py (the order of the requests), extras/memory.py (the memory of
each turn).
"""

from dataclasses import dataclass
from typing import Any

from nanogrpo.engine.base import Engine
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.types import Sample
from nanogrpo.vllm.client import VLLMEngine


@dataclass
class SleepingEngine(Wrapper):
    """An engine whose servers sleep while it does not sample.

    `engine` is the engine that samples, possibly a wrapper. `client` is the VLLMEngine inside.
    """

    engine: Engine
    client: VLLMEngine

    def sample(self, *how: Any, **more: Any) -> list[Sample]:
        self.client.wake()
        samples = self.engine.sample(*how, **more)
        self.client.sleep()
        return samples

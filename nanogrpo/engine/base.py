"""The protocol of sampling engines, and the random stream that all of them share.

In: prompts. Out: `Sample`s (types.py), grouped by prompt in the order given.

The training loop uses all engines in the same way. local.py samples from our own decoder, in this
process. Read next: local.py; for engines around an engine, extras/wrapper.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from nanogrpo.types import Prompt, Sample


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled.

    Log-probs are always those of softmax(logits / temperature) over the full vocabulary. The
    filters top_k and top_p are applied after the temperature, in this order, as in transformers.
    """

    temperature: float = 1.0  # 0: greedy, with log-probs at temperature 1
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this total probability
    max_tokens: int = 256  # maximum number of completion tokens, including the stop token
    stop_token_ids: Sequence[int] = ()
    seed: int = 0


class Engine(Protocol):
    """The only interface through which the training loop samples. docs/fork.md shows how to write
    an engine.

    Every rank has an engine, and the ranks call each method together. `prompts` are this rank's
    share, which may be empty.
    """

    @property
    def version(self) -> int:
        """The version of the weights that it samples with; -1 before the first `load`."""
        ...

    def load(self, model: nn.Module, version: int) -> None:
        """Copy the model's current weights. New samples have this `version`.

        It must be a copy, because training changes the originals while the engine samples.
        """
        ...

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Return n completions of each prompt, prompt by prompt, with indices 0 … n-1 for each
        prompt.

        Sets these fields of a Sample: prompt, index, token_ids (at least one), one log-prob and
        one version for each token, and `stopped` (whether the last token is one of
        params.stop_token_ids). The random numbers of a completion are a function of
        `stream(params.seed, step, prompt.id, index)`. A completion has at most prompt.max_tokens
        tokens, or else params.max_tokens.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics that this engine adds to the log of a step. Every rank must call."""
        ...

    def close(self) -> None:
        """Release all resources. No method is called afterwards."""
        ...


def stream(seed: int, step: int, prompt: int, sample: int) -> int:
    """Return the key of a completion's random stream: a 63-bit hash, the same on every machine.

    It depends only on these arguments, so a resumed run repeats the interrupted one, and neither
    batching nor the number of ranks changes the random numbers of a sample. (In bfloat16, batching
    can still change a sample, because it changes how logits are rounded.)
    """
    digest = hashlib.blake2b(f"{seed},{step},{prompt},{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

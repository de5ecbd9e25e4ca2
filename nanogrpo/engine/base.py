"""The interface of all sampling engines, and the random numbers that all of them use.

In: prompts. Out: the `Sample`s (types.py), grouped by prompt, in the order of the prompts.

The training loop uses all engines in the same way. The engine in local.py samples from our own
decoder, in this process. Read next: local.py, extras/wrapper.py (engines that wrap another engine).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from nanogrpo.types import Prompt, Sample


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled.

    Log-probs are computed with softmax(logits / temperature). As in transformers, this softmax
    includes only the tokens that remain after top_k and then top_p.
    """

    temperature: float = 1.0  # 0 means greedy sampling, with log-probs at temperature 1
    top_k: int = 0  # keep the k most likely tokens; 0 means all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this total probability
    max_tokens: int = 256  # maximum number of completion tokens, including the stop token
    stop_token_ids: Sequence[int] = ()
    seed: int = 0


class Engine(Protocol):
    """The training loop samples only through this interface. docs/fork.md shows how to write an
    engine.

    Every rank has an engine, and all ranks call each method together. `prompts` is this rank's
    share of the prompts, which may be empty.
    """

    @property
    def version(self) -> int:
        """The version of the weights that the engine samples with; -1 before the first `load`."""

    def load(self, model: nn.Module, version: int) -> None:
        """Copy the model's current weights. New samples have this `version`.

        The engine needs a copy of the weights, because training may change the original weights
        during sampling.
        """

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Return n completions of each prompt, prompt by prompt. The completions of a prompt have
        the indices 0 … n-1.

        In each Sample, this method sets prompt, index, token_ids, logp, versions and `stopped`.
        There is at least one token, and each token has a log-prob and a version. `stopped` is True
        if the last token is one of params.stop_token_ids. The random numbers of a completion are a
        function of `stream(params.seed, step, prompt.id, index)`. A completion has at most
        prompt.max_tokens tokens, or params.max_tokens if the prompt has no limit.
        """

    def metrics(self) -> dict[str, float]:
        """Return the metrics that this engine adds to a step's log. Every rank must call this."""

    def close(self) -> None:
        """Release all resources. No method is called afterwards."""


def stream(seed: int, step: int, prompt: int, sample: int) -> int:
    """Return the key of a completion's random numbers: a 63-bit hash that is the same on all
    machines.

    The key depends only on these arguments, so a resumed run draws the same random numbers as the
    interrupted run. The random numbers of a sample do not depend on batching or on the number of
    ranks. In bfloat16, batching can still change the sample, because it changes how logits are
    rounded.
    """
    digest = hashlib.blake2b(f"{seed},{step},{prompt},{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

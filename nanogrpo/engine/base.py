"""What every engine is: something that samples completions and takes new weights. And the random
stream they share.

In: prompts. Out: `Sample`s (batch.py), grouped by prompt in the order asked. local_engine.py
samples from our own decoder in this process; vllm_engine.py asks a vLLM server; turns.py puts a
function of the user's in front of either. The loop uses all alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from nanogrpo.types import Prompt, Sample


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Log-probs are always those of softmax(logits / temperature) over
    the whole vocabulary.

    Filters (top_k, top_p, min_p) are applied after the temperature, in that order, as transformers
    and vLLM do.
    """

    temperature: float = 1.0  # 0: greedy; log-probs are then those at temperature 1
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    max_tokens: int = 256  # completion tokens, the stop token included
    stop_token_ids: Sequence[int] = ()
    ignore_stop: bool = False  # never stop early: for benches
    seed: int = 0


class Engine(Protocol):
    """All that the loop asks of what samples. One of your own is made in `make_engine` of run.py;
    docs/fork.md shows one.

    Every rank has one, and calls each method together with the others; `prompts` are its own, and
    may be none.
    """

    version: int  # of the weights it samples from; -1 before the first `load`

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
        limits: Sequence[int] | None = None,
    ) -> list[Sample]:
        """n completions of each prompt, ordered prompt by prompt, index 0 … n-1 within each.

        Of a Sample it fills prompt, index, token_ids (at least one), logp and versions (one for
        each token) and stopped: whether the last token is of params.stop_token_ids. The draws are a
        function of `stream(params.seed, step, prompt.id, index)`. limits: [len(prompts)], a
        max_tokens for each prompt's completions instead of that of `params`.
        """
        ...

    def load(self, model: nn.Module, version: int) -> None:
        """Takes the model's current weights, by a copy (lora.full_parameters): the model goes on
        being trained.

        Samples drawn from now on carry `version`.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds; nothing is called afterwards."""
        ...


class Served(Engine, Protocol):
    """An engine of other processes, that a thread may ask while the loop trains: what
    --max-staleness takes (staleness.py).
    """

    restarts: int  # of its servers, since the run began: for the log

    def request(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """`sample` for the prompts of all ranks, on the main rank's thread, without a word to the
        others.
        """
        ...

    def scatter(
        self, requested: Callable[[], list[Sample]], prompts: Sequence[Prompt], n: int
    ) -> list[Sample]:
        """Every rank calls: of what `requested` returns on the main rank, in the order of ranks,
        those of this rank's prompts.

        What it raises there is raised on every rank.
        """
        ...


def stream(seed: int, step: int, prompt: int, sample: int) -> int:
    """The key of a completion's random stream: a 63-bit hash of (seed, step, prompt, sample), equal
    on every machine.

    So a resumed run repeats the interrupted one, whatever the batching, the engine's slots or the
    number of ranks.
    """
    digest = hashlib.blake2b(f"{seed},{step},{prompt},{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""Completions in several turns: a function of the user's decides when the model writes and what it
is told in between.

    def rollout(samples, turns):                                       # --rollout file.py:rollout, or package.module:rollout
        while samples := turns.generate(samples, stop=("=",)):         # the model writes until "=", or its end, or its limit
            for s in samples:                                          # those that stopped at "="
                turns.observe(s, str(calculate(turns.text(s))))        # a tool's answer: seen by the model, never trained on

In: the samples of a step, empty. Out: the same, filled: `token_ids` of both kinds, `is_model_token` for which
the model wrote, `logp` and `versions` for each (0 where it did not). A function may also fill them
itself, from an engine of its own. All of a completion, tool answers included, is at most
max_completion_length tokens. nanogrpo/engine/calculator.py is an example.

The ranks of a run sample together (a vLLM server is asked by rank 0 for all), but their
conversations have different numbers of turns: so each turn begins with a word between them, and a
rank that has finished keeps taking part until all have. Read before: rollout.py. Read next:
packing.py (how a completion is trained whose tokens are not all the model's).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from nanogrpo.engine.base import Engine, SamplingParams, stream
from nanogrpo.errors import UserError
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt, Sample

Rollout = Callable[[list[Sample], "Turns"], None]


class Turns:
    """What a rollout function is given: the model, and the means to talk to it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        n: int,
        params: SamplingParams,
        step: int,
        gather: Callable,
    ):
        self.engine, self.tokenizer, self.n, self.params, self.step, self.gather = (
            engine,
            tokenizer,
            n,
            params,
            step,
            gather,
        )
        # id(sample) → tokens at most, where it is not params.max_tokens
        self.limits: dict[int, int] = {}
        self.count: dict[int, int] = {}  # id(sample) → turns so far: part of the random key

    def generate(self, samples: Sequence[Sample], stop: Sequence[str] = ()) -> list[Sample]:
        """One turn of the model in each sample that has room left. Returns the samples that ended
        it at one of `stop`.

        stop: texts of one token each, which end a turn beside the end of the completion; the token
        is part of the turn.
        """
        stops = tuple(self._token(text) for text in stop)
        todo = [s for s in samples if self.room(s) > 0]
        self._turn(todo, stops)
        return [s for s in todo if s.token_ids[-1] in stops and not s.stopped and self.room(s) > 0]

    def observe(self, sample: Sample, answer: str | Sequence[int]) -> None:
        """Appends what the model is told: text or token ids. What does not fit any more is cut off.

        Special tokens written in a text stay text: a tool that answers "<|im_end|>" must not end
        the turn. A function that wants them, for the frame around an answer, gives ids:
        turns.tokenizer.encode("<|im_end|>").
        """
        ids = (
            self.tokenizer.encode(answer, special=False)
            if isinstance(answer, str)
            else list(answer)
        )
        ids = ids[: self.room(sample)]
        sample.token_ids += ids
        sample.logp += [0.0] * len(ids)
        sample.versions += [self.engine.version] * len(ids)
        sample.is_model_token += [False] * len(ids)

    def text(self, sample: Sample) -> str:
        """The completion so far, without special tokens."""
        return self.tokenizer.decode(sample.token_ids)

    def room(self, sample: Sample) -> int:
        """Tokens that still fit."""
        return self.limits.get(id(sample), self.params.max_tokens) - len(sample.token_ids)

    def _token(self, text: str) -> int:
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(
                f"--rollout stops at {text!r}, which is {len(ids)} tokens: choose a text that is one token."
            )
        return ids[0]

    def _turn(
        self, samples: Sequence[Sample], stops: Sequence[int] = (), over: bool = False
    ) -> bool:
        """Appends one turn to each sample; returns whether any rank is still at work. Every rank
        calls.
        """
        groups = len(samples) % self.n == 0 and all(
            s.prompt is samples[i - i % self.n].prompt for i, s in enumerate(samples)
        )  # whole ones: a function may also give some of the samples, or in another order
        fresh = groups and not self.count and all(not s.token_ids for s in samples)
        said = self.gather("over" if over else "fresh" if fresh else "going on")
        if all(x == "over" for x in said):
            return False
        params = dataclasses.replace(
            self.params, stop_token_ids=(*self.params.stop_token_ids, *stops)
        )
        if "going on" not in said:  # groups, which share the computation of their prompt
            asked = [s.prompt for s in samples[:: self.n]]
            limits = [self.room(s) for s in samples[:: self.n]]
            written = self.engine.sample(asked, self.n, params, self.step, limits)
        else:  # one by one; the key of a turn takes the place of the prompt's
            keys = [stream(s.prompt.id, s.index, self.count.get(id(s), 0), 0) for s in samples]
            asked = [
                Prompt(key, "", s.prompt.token_ids + s.token_ids) for key, s in zip(keys, samples)
            ]
            written = self.engine.sample(
                asked, 1, params, self.step, [self.room(s) for s in samples]
            )
        for sample, turn in zip(samples, written):
            sample.token_ids += turn.token_ids
            sample.logp += turn.logp
            sample.versions += turn.versions
            sample.is_model_token += [True] * len(turn.token_ids)
            sample.stopped = turn.token_ids[-1] in self.params.stop_token_ids
            self.count[id(sample)] = self.count.get(id(sample), 0) + 1
        return True


class TurnsEngine:
    """An engine (rollout.Engine) whose completions are written by a rollout function."""

    def __init__(
        self,
        engine: Engine,
        function: Rollout,
        tokenizer: Tokenizer,
        vocab_size: int,
        gather: Callable[[object], list],
    ):
        """gather: what every rank gave, on every rank (World.gather)."""
        self.engine, self.function, self.tokenizer = engine, function, tokenizer
        self.vocab_size, self.gather = vocab_size, gather

    def __getattr__(self, name: str) -> object:
        """Everything else is the engine's: version, load, close."""
        return getattr(self.engine, name)

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
        limits: Sequence[int] | None = None,
    ) -> list[Sample]:
        """n completions of each prompt, in order. UserError when the function raises or what it
        wrote cannot be trained on.
        """
        samples = [
            Sample(p, j, [], [], False, [], is_model_token=[]) for p in prompts for j in range(n)
        ]
        turns = Turns(self.engine, self.tokenizer, n, params, step, self.gather)
        if limits is not None:
            turns.limits = {id(s): limits[i // n] for i, s in enumerate(samples)}
        try:
            self.function(list(samples), turns)
        except (UserError, FloatingPointError):
            raise
        except Exception as e:  # the user's code may raise anything
            raise UserError(
                f"--rollout: {name(self.function)} raised {type(e).__name__}: {e}; mend the function."
            ) from e
        while turns._turn((), over=True):  # the other ranks' turns
            pass
        for s in samples:
            self._check(s, turns.limits.get(id(s), params.max_tokens))
        return samples

    def _check(self, s: Sample, limit: int) -> None:
        sizes = {len(s.token_ids), len(s.logp), len(s.versions), len(s.is_model_token)}
        where = f"--rollout: {name(self.function)} left sample {s.index} of prompt {s.prompt.id}"
        if len(sizes) > 1:
            raise UserError(
                f"{where} with token_ids, logp, versions and is_model_token of different lengths: one entry a token each."
            )
        if not any(s.is_model_token):
            raise UserError(
                f"{where} without a token of the model's own: call turns.generate on every sample."
            )
        if any(version != self.engine.version for version in s.versions):
            raise UserError(
                f"{where} with versions other than {self.engine.version}: give turns.engine.version for each token."
            )
        if len(s.token_ids) > limit:
            raise UserError(
                f"{where} with {len(s.token_ids)} tokens; --max-completion-length {limit} counts tool answers too."
            )
        if not all(0 <= t < self.vocab_size for t in s.token_ids):
            raise UserError(f"{where} with token ids outside the vocabulary of {self.vocab_size}.")
        if not all(math.isfinite(x) and x <= 1e-3 for x in s.logp):
            raise UserError(
                f"{where} with a logp that is no log-probability: each is finite and at most 0."
            )


def name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)

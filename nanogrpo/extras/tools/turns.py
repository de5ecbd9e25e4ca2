"""Completions in several turns: a user's function decides when the model writes, and what the
model reads in between, such as a tool's answers.

    def rollout(samples, turns):                              # --rollout file.py:rollout
        while samples := turns.generate(samples, stop=("=",)):    # samples that stopped at "="
            for s in samples:
                turns.observe(s, calculate(turns.text(s)))        # read, but not trained on

In: the samples of a step, without tokens. Out: the same samples with token_ids, is_model_token
(false for tool output), logp (0 for tool output) and versions. A rollout function may also set
these fields itself, if it samples with a different engine. A completion, including tool answers,
has at most max_completion_length tokens. A complete example is examples/calculator.py.

The ranks of a run sample together, because rank 0 sends the requests of all ranks to the vLLM
servers. But the conversations of different ranks have different numbers of turns. So the ranks
exchange their states before each turn, and a rank that has finished still takes part until all have
finished. Read before: ../wrapper.py. Read next: grpo/packing.py (how a completion that contains
tool output is trained on).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanogrpo.engine.base import Engine, SamplingParams, stream
from nanogrpo.errors import UserError
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.call import name_of, users_code
from nanogrpo.types import Prompt, Sample

Rollout = Callable[[list[Sample], "Turns"], None]


@dataclass
class Turns:
    """The model, as a rollout function uses it.

    `n` is the number of samples per prompt, and `gather` is World.gather.
    """

    engine: Engine
    tokenizer: Tokenizer
    n: int
    params: SamplingParams
    step: int
    gather: Callable[[str], list[str]]
    # id(sample) → its number of turns so far, which is part of the random key
    count: Counter[int] = field(default_factory=Counter)

    def generate(self, samples: Sequence[Sample], stop: Sequence[str] = ()) -> list[Sample]:
        """Let the model write one turn of each sample that is not yet at the length limit.

        A turn ends where the completion ends, or at one of the strings in `stop`. Each string must
        be a single token, which becomes part of the turn. Return the samples that stopped at one of
        these tokens and are not yet at the length limit.
        """
        stops = tuple(self._token(text) for text in stop)
        todo = [s for s in samples if self.room(s) > 0]
        self.turn(todo, stops)
        return [s for s in todo if s.token_ids[-1] in stops and not s.stopped and self.room(s) > 0]

    def observe(self, sample: Sample, answer: str | Sequence[int]) -> None:
        """Append text or token ids that the model did not write, truncated at the length limit of
        the completion.

        Special tokens in text are encoded as ordinary text, so a tool that answers "<|im_end|>"
        cannot end the turn. To add special tokens around an answer, pass ids:
        turns.tokenizer.encode("<|im_end|>").
        """
        if isinstance(answer, str):
            answer = self.tokenizer.encode(answer, special=False)
        ids = list(answer)[: self.room(sample)]
        n = len(ids)
        _append(sample, ids, [0.0] * n, [self.engine.version] * n, is_model_token=False)

    def text(self, sample: Sample) -> str:
        """Return the completion so far, without special tokens."""
        return self.tokenizer.decode(sample.token_ids)

    def room(self, sample: Sample) -> int:
        """Return how many more tokens fit into the completion."""
        return self.params.max_tokens - len(sample.token_ids)

    def _token(self, text: str) -> int:
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(
                f"--rollout stops at {text!r}, which is {len(ids)} tokens: choose a string that "
                "is a single token."
            )
        return ids[0]

    def turn(self, samples: Sequence[Sample], stops: Sequence[int], done: bool = False) -> bool:
        """Append one turn to each sample. Every rank must call this method. `done` says that this
        rank has no more samples.

        Return whether any rank still has turns to sample.
        """
        # The first turns of a group can share the computation of their prompt.
        # Sharing requires that the function passes complete groups in the original order.
        groups = len(samples) % self.n == 0 and all(
            s.prompt is samples[i - i % self.n].prompt for i, s in enumerate(samples)
        )
        first = groups and not self.count and not any(s.token_ids for s in samples)
        states = self.gather("done" if done else "first turn" if first else "later turn")
        if all(state == "done" for state in states):
            return False
        params = dataclasses.replace(
            self.params, stop_token_ids=(*self.params.stop_token_ids, *stops)
        )
        # In a later turn, each sample becomes a prompt.
        # The id of this prompt is the key for the turn's random numbers (`stream`).
        if "later turn" in states:
            n = 1
            prompts = [
                Prompt(
                    stream(s.prompt.id, s.index, self.count[id(s)], 0),
                    "",
                    s.prompt.token_ids + s.token_ids,
                    max_tokens=self.room(s),
                    inputs=s.prompt.inputs,
                )
                for s in samples
            ]
        else:
            n, prompts = self.n, [s.prompt for s in samples[:: self.n]]
        for s, turn in zip(samples, self.engine.sample(prompts, n, params, self.step)):
            _append(s, turn.token_ids, turn.logp, turn.versions, is_model_token=True)
            s.stopped = turn.token_ids[-1] in self.params.stop_token_ids
            self.count[id(s)] += 1
        return True


def _append(
    s: Sample, ids: list[int], logp: list[float], versions: list[int], *, is_model_token: bool
) -> None:
    s.token_ids += ids
    s.logp += logp
    s.versions += versions
    s.is_model_token = [*(s.is_model_token or []), *[is_model_token] * len(ids)]


def spans(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, end) of each run of consecutive indices: [2, 3, 7] → [(2, 4), (7, 8)]."""
    known = {*indices}
    starts = (i for i in indices if i - 1 not in known)
    return [*zip(starts, (i + 1 for i in indices if i + 1 not in known))]


@dataclass
class TurnsEngine(Wrapper):
    """A wrapper around an engine, in which a rollout function writes the completions (see the
    module docstring).
    """

    engine: Engine
    function: Rollout
    tokenizer: Tokenizer
    vocab_size: int
    gather: Callable[[str], list[str]]

    @property
    def name(self) -> str:
        # `ToolCalls` is a rollout function, too
        return getattr(self.function, "option", f"--rollout: {name_of(self.function)}")

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Return n completions of each prompt, in order.

        Raises UserError if the function raises an exception, or writes tokens that cannot be
        trained on.
        """
        samples = [
            Sample(p, j, [], [], False, [], is_model_token=[]) for p in prompts for j in range(n)
        ]
        turns = Turns(self.engine, self.tokenizer, n, params, step, self.gather)
        try:
            with users_code():
                self.function(list(samples), turns)
        except (UserError, FloatingPointError):
            raise
        # The user's code may raise any exception, and sys.exit(0) must not look like success.
        except (Exception, SystemExit) as e:
            kind, text = type(e).__name__, str(e)
            raise UserError(f"{self.name} raised {kind}: {text}; fix the function.") from e
        while turns.turn([], [], done=True):  # wait while other ranks have more turns
            pass
        for s in samples:
            self._check(s, params.max_tokens)
            s.arguments["turns"] = spans(s.model_token_indices)
        return samples

    def _check(self, s: Sample, limit: int) -> None:
        flags, version = s.is_model_token or [], self.engine.version
        where = f"{self.name} left sample {s.index} of prompt {s.prompt.id} with"
        if not any(flags):
            raise UserError(
                f"{where} no token that the model wrote: call turns.generate on every sample."
            )
        if not (
            len(s.token_ids) == len(s.logp) == len(s.versions) == len(flags) <= limit
            and {*s.versions} == {version}
            and all(0 <= t < self.vocab_size for t in s.token_ids)
            and all(-math.inf < x <= 1e-3 for x in s.logp)
        ):
            raise UserError(
                f"{where} tokens that cannot be trained on: give each token an id of the model's "
                f"tokenizer, a log-probability, turns.engine.version ({version}) and is_model_token"
                f", and stay within --max-completion-length {limit}, tool answers included."
            )

"""Score the samples of a step: run each reward function in the right process and sum the results.

In: samples with their decoded `text`. Out: for each sample, `rewards[name]`, their weighted sum
`reward`, and `extra`. Read next: rewards/call.py (the signature of a function), rewards/builtin.py
(the built-in functions), grpo/advantages.py (rewards → advantages).

Built-in functions run in the trainer. The user's functions run in a process that can be killed
(rewards/process.py). A function is called once for all samples of the step:

    In time:         The function returns within --reward-timeout seconds, and its rewards are used.
    Hang or crash:   The call counts as lost, and all rewards of this rank's samples are set to
                     None. So the advantages of these samples are 0. A reward of 0 instead of None
                     would train the model as if the completion were bad. The run logs a warning,
                     counts the prompts in `rewards/failures`, and starts the process again. After
                     three lost steps in a row, the run stops.
    Mistake:         An exception, a wrong number of values, or a value that is not a number stops
                     the run immediately, because the function would fail in the same way again.
"""

import functools
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.feature import Feature, first
from nanogrpo.rewards.builtin import NEED_ANSWERS, is_empty, is_users, load_function
from nanogrpo.rewards.call import TrainerState, call, name_of, unwrap
from nanogrpo.rewards.process import CallLost, RewardProcess
from nanogrpo.types import Prompt, Sample

logger = logging.getLogger("nanogrpo")

MAX_LOST = 3  # after this many lost steps in a row, the run ends
START = TrainerState()
# Maximum absolute value of a reward; with this bound, advantages are finite in float32.
MAX_REWARD = 1e30
# Columns that the completions table always has (extras/completions.py).
COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "stopped")


class Scorer:
    """The reward functions of a run.

    >>> runner = Scorer(Config(reward_funcs=("accuracy", "my_rewards.py:brevity"), …))
    >>> runner.score(samples, TrainerState(global_step=3, max_steps=100, epoch=0.1))
    """

    def __init__(
        self,
        cfg: Config,
        device: torch.device,
        features: Sequence[Feature] = (),
        given: Sequence[str | Callable] = (),
    ):
        """Import the functions. Raises UserError for an unknown name.

        `given` replaces --reward-funcs with names or functions. Functions run in this process.
        """
        self.cfg = cfg
        found: list[Any] = []  # named functions run in the reward process
        for function in given or cfg.reward_funcs:
            if isinstance(function, str):
                function = first(each.reward(function, device) for each in features) or function
            if isinstance(function, str) and not (cfg.reward_timeout and is_users(function)):
                function = load_function(function)
            found.append(function)
        self.local = [function for function in found if callable(function)]
        own = [name for name in found if isinstance(name, str)]
        self.process = RewardProcess(own, cfg.reward_timeout) if own else None
        # the keys are names in the logs; duplicate names get the suffixes _2, _3, …
        self.calls: dict[str, Callable] = {}
        for function in found:
            if self.process and isinstance(function, str):
                base = self.process.names[function]
                run = functools.partial(self.process.call, function)
            else:
                base, run = name_of(function), functools.partial(call, function)
            name, suffix = base, itertools.count(2)
            while name in self.calls:
                name = f"{base}_{next(suffix)}"
            self.calls[name] = run
        self.weights = dict(zip(self.calls, cfg.reward_weights or itertools.repeat(1.0)))
        self.lost = 0  # number of lost steps in a row
        # since the last call of `metrics`:
        self.failures = 0  # prompts with lost rewards
        self.logged: list = []  # (name, value) of each log_metric call

    def check(self, prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> None:
        """Check that the data has reference answers if a function needs them."""
        need = [f.__name__ for f in map(unwrap, self.local) if f in NEED_ANSWERS]
        for option, given in (("--data", prompts), ("--eval-data", eval_prompts)):
            cells = [p.columns.get(column) for column in ("solution", "answer") for p in given]
            is_missing = all(is_empty(cell) or isinstance(cell, list | dict) for cell in cells)
            # held-out prompts need no answers if other functions can score them
            needed = need if option == "--data" else len(need) == len(self.calls)
            if needed and given and is_missing:
                raise UserError(
                    f"{option} has no text or number in the columns solution and answer, but "
                    f"{need[0]} needs a reference answer: name its column with --answer-column, or "
                    "choose other --reward-funcs."
                )

    def score(self, samples: Sequence[Sample], state: TrainerState = START) -> None:
        """Fill each sample's `rewards`, `reward` (None if no function applies) and `extra`.

        Raise UserError if a reward function raises an exception or returns an invalid value.
        """
        if not samples:
            return
        arguments, shared = _arguments(samples, state)
        for sample in samples:
            sample.rewards, sample.token_rewards, sample.extra = dict.fromkeys(self.calls), {}, {}
        try:
            for name, run in self.calls.items():
                rewards, columns, logged = run(arguments, shared)
                for sample, reward in zip(samples, rewards):
                    if isinstance(reward, list) and len(reward) == len(sample.token_ids):
                        sample.token_rewards[name] = [_number(r, name, sample) for r in reward]
                        given = [r for r in reward if r is not None]
                        reward = sum(given) if given else None
                    sample.rewards[name] = _number(reward, name, sample)
                for column, values in columns:
                    if column in (*COLUMNS, *self.calls, *samples[0].extra):
                        raise UserError(
                            f"log_extra({column!r}, …): the completions table already has this "
                            "column; choose another name"
                        )
                    for sample, value in zip(samples, values):
                        sample.extra[column] = value
                self.logged += logged
            self.lost = 0
        except CallLost as lost:
            self.lost += 1
            if self.lost == MAX_LOST:
                raise UserError(
                    f"{lost}, and the {MAX_LOST - 1} steps before were lost, too: fix the hang or "
                    f"crash, or raise --reward-timeout ({self.cfg.reward_timeout:g})"
                ) from lost
            logger.warning("%s; the %d completions get no rewards", lost, len(samples))
            self.failures += len({sample.prompt.id for sample in samples})
            for sample in samples:
                sample.rewards, sample.token_rewards = dict.fromkeys(self.calls), {}
        for sample in samples:
            terms = [self.weights[name] * r for name, r in sample.rewards.items() if r is not None]
            sample.reward = sum(terms) if terms else None
            sample.arguments = {}  # no longer needed, and pickle may not support them

    def metrics(self, gather: Callable[[Any], list]) -> dict[str, float]:
        """Return the number of lost prompts and the means of log_metric since the last call.

        The results cover all ranks (`gather` is `World.gather`), so every rank must call this
        method.
        """
        failures, logged = zip(*gather((self.failures, self.logged)))
        self.failures, self.logged = 0, []
        values = defaultdict(list)
        for name, value in itertools.chain(*logged):
            values[name].append(value)
        out: dict[str, float] = {"rewards/failures": sum(failures)} if self.process else {}
        return out | {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _number(reward: Any, name: str, sample: Sample) -> float | None:
    """Check a reward. An invalid value raises an error, because replacing it with 0 would train the
    model as if the function had returned 0.
    """
    if reward is None:
        return None
    if isinstance(reward, int | float) and abs(reward) <= MAX_REWARD:  # which NaN is not
        return float(reward)
    raise UserError(
        f"the reward function {name} returned {reward!s:.100} for sample {sample.index} of "
        f"prompt {sample.prompt.id}; it must return a number from -{MAX_REWARD:g} to "
        f"{MAX_REWARD:g}, or None where it does not apply, or a list with such a number or None "
        f"for each of the {len(sample.token_ids)} tokens"
    )


def _arguments(samples: Sequence[Sample], state: TrainerState) -> tuple[dict, dict]:
    """Return two dicts of keyword arguments for reward functions: the first is copied for each
    function, and the second is shared.
    """

    def columns(of: list[dict]) -> dict[str, list]:
        names = dict.fromkeys(itertools.chain(*of))  # in the order of first appearance
        return {name: [each.get(name) for each in of] for name in names}

    arguments = dict(
        prompts=[sample.prompt.text for sample in samples],
        completions=[
            s.conversation.messages
            if s.conversation
            else s.text
            if isinstance(s.prompt.text, str)
            else [{"role": "assistant", "content": s.text}]
            for s in samples
        ],
        completion_ids=[sample.token_ids for sample in samples],
        trainer_state=state,
        **columns([sample.prompt.columns for sample in samples]),
    )
    return arguments, columns([sample.arguments for sample in samples])

"""The rewards of a step's samples: which function runs where, their weighted sum, and what a lost
call costs.

In: samples with their decoded `text`. Out: `sample.rewards[name]`, their weighted sum
`sample.reward`, `sample.extra`. Read next: reward_call.py (the signature of a function), rewards.py
(the built-in ones), grpo.py (rewards → advantages).

The built-in functions and reward models run here, the user's in a process that can be killed
(reward_process.py):
    in time            a function is called once for all samples of the step, and has --reward-timeout seconds
    hang or crash      The call is lost. The process is started anew and the groups are tried one by one, with another
                       --reward-timeout for all: each gets an equal part of what is left. So the guilty groups alone are lost, and
                       a function takes at most twice its limit, and the starts.
    a lost group       is out of the step: the rewards of its samples are None, so that it has no advantage and no gradient. It
                       is told in a warning and counted in `rewards/failures`. A 0 would be trained on as if it were a judgement.
    nothing but loss   in three calls in a row: the run stops.
    a mistake          An exception, a wrong count, or a value that is no number stops the run at once: the function is wrong, and
                       will be wrong again.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nanogrpo.errors import UserError
from nanogrpo.rewards.builtin import is_ours, load_function
from nanogrpo.rewards.call import COLUMNS, LARGEST, Functions, Returned, TrainerState
from nanogrpo.rewards.model import RewardModel
from nanogrpo.rewards.process import Lost, RewardProcess
from nanogrpo.types import Sample

log = logging.getLogger("nanogrpo")

PATIENCE = 3  # calls in a row of which every group is lost


class Unit(NamedTuple):
    """What is called together: one function, or all the async ones of a process."""

    where: Functions | RewardProcess
    which: list[tuple[int, str]]  # (index there, name)

    @property
    def title(self) -> str:
        names = [name for _, name in self.which]
        return f"the reward function{'s' * (len(names) > 1)} {', '.join(names)}"


class Runner:
    """The reward functions of a run.

    >>> runner = Runner(["accuracy", "my_rewards.py:brevity"], weights=[1.0, 0.2], timeout=60.0)
    >>> runner.score(samples, TrainerState(global_step=3, max_steps=100, epoch=0.1))
    """

    def __init__(
        self,
        specs: Sequence[str | Callable],
        weights: Sequence[float] = (),
        *,
        timeout: float = 0.0,
        max_completion_length: int = 512,
        device: torch.device | str = "cpu",
    ):
        """specs: names (see rewards.py; model:FOLDER is a reward model, on `device`), or functions,
        which run here.

        weights: empty: 1 each; timeout: 0: all run here. UserError when a name is none of a
        function.
        """
        if isinstance(specs, str) or not specs:
            raise UserError(
                f"reward_funcs is {specs!r}: name a list of at least one function, e.g. accuracy"
            )
        self.weights = list(weights) or [1.0] * len(specs)
        if len(self.weights) != len(specs):
            raise UserError(
                f"reward_weights has {len(weights)} values for {len(specs)} reward functions; give one for each"
            )
        away = [bool(timeout) and isinstance(spec, str) and not is_ours(spec) for spec in specs]
        home = [spec for spec, far in zip(specs, away) if not far]

        def load(spec: str | Callable) -> Callable:
            if isinstance(spec, str) and spec.startswith("model:"):
                return RewardModel.load(spec.removeprefix("model:"), device)
            return load_function(spec, max_completion_length) if isinstance(spec, str) else spec

        self.here = Functions([load(spec) for spec in home])
        self.process = (
            RewardProcess([spec for spec, far in zip(specs, away) if far]) if any(away) else None
        )
        self.timeout = timeout
        # in logs: the function's, with _2, _3 … where two would coincide
        self.names: list[str] = []
        self.units: list[Unit] = []
        index = {True: itertools.count(), False: itertools.count()}
        for far in away:
            where, i = self.process if far else self.here, next(index[far])
            base = name = where.names[i]
            for count in itertools.count(2):
                if name not in self.names:
                    break
                name = f"{base}_{count}"
            self.names.append(name)
            partner = [
                u
                for u in self.units
                if u.where is where and where.awaited[i] and where.awaited[u.which[0][0]]
            ]
            if partner:
                partner[0].which.append((i, name))
            else:
                self.units.append(Unit(where, [(i, name)]))
        self.in_vain = [0] * len(self.units)  # calls in a row of which nothing came back
        self.failures = 0  # groups lost since the last `metrics`
        self.logged: dict[str, list[float]] = {}  # what log_metric was given since then

    @property
    def models(self) -> list[RewardModel]:
        """The reward models, for the table of memory."""
        return [function for function in self.here.functions if isinstance(function, RewardModel)]

    @property
    def longest(self) -> float:
        """Seconds that a step may spend on functions with a limit, starts of the process aside."""
        return 2 * self.timeout * sum(unit.where is self.process for unit in self.units)

    def score(self, samples: Sequence[Sample], state: TrainerState | None = None) -> None:
        """Fills each sample's `rewards`, `reward` (the weighted sum of those that are numbers, None
        if none is) and `extra`.

        UserError, and no sample is touched, on a function's mistake (see the top of the file).
        """
        state = state or TrainerState()
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.id, []).append(sample)
        rewards: dict[int, dict[str, float | None]] = {id(sample): {} for sample in samples}
        extra: dict[int, dict[str, Any]] = {id(sample): {} for sample in samples}
        for number, unit in enumerate(self.units):
            came_back: set[int] = set()
            for part, returned in self._call(unit, list(groups.values()), state):
                came_back |= {sample.prompt.id for sample in part}
                for (_, name), values in zip(unit.which, returned.rewards):
                    for sample, value in zip(part, values):
                        rewards[id(sample)][name] = value
                for column, values in returned.extra:
                    if column in (*COLUMNS, *self.names):
                        raise UserError(
                            f"log_extra({column!r}, …): the table has that column for itself, choose another name"
                        )
                    for sample, value in zip(part, values):
                        if column in extra[id(sample)]:
                            raise UserError(
                                f"log_extra({column!r}, …) was called twice for one sample: name the columns apart"
                            )
                        extra[id(sample)][column] = value
                for name, value in returned.metrics:
                    self.logged.setdefault(name, []).append(value)
            self.failures += len(groups) - len(came_back)
            self.in_vain[number] = 0 if came_back or not groups else self.in_vain[number] + 1
            if self.in_vain[number] == PATIENCE:
                raise UserError(
                    f"{unit.title} gave nothing in {PATIENCE} calls in a row, whichever the prompt: mend what makes them hang or "
                    f"crash, or raise --reward-timeout ({self.timeout:g})"
                )
            groups = {i: group for i, group in groups.items() if i in came_back}
        found = [
            {
                name: rewards[id(s)].get(name) if s.prompt.id in groups else None
                for name in self.names
            }
            for s in samples
        ]
        sums = [self._weighted_sum(given, sample) for given, sample in zip(found, samples)]
        for sample, given, total in zip(samples, found, sums):
            sample.rewards, sample.reward, sample.extra = given, total, extra[id(sample)]

    def metrics(self, gather: Callable[[Any], list]) -> dict[str, float]:
        """Since the last time, over all ranks (`World.gather`; every rank must call): lost groups,
        and log_metric's numbers.
        """
        mine, self.failures, self.logged = (self.failures, self.logged), 0, {}
        everyone = gather(mine)
        out: dict[str, float] = (
            {"rewards/failures": sum(failures for failures, _ in everyone)} if self.process else {}
        )
        for name in dict.fromkeys(name for _, logged in everyone for name in logged):
            values = [value for _, logged in everyone for value in logged.get(name, [])]
            out[name] = sum(values) / len(values)
        return out

    def _call(
        self, unit: Unit, groups: list[list[Sample]], state: TrainerState
    ) -> Iterator[tuple[list[Sample], Returned]]:
        """What a unit gives, in parts of whole groups. A group that is lost is in none of them."""
        if not groups:
            return
        everyone = [sample for group in groups for sample in group]
        if unit.where is self.here:
            yield everyone, self.here.call(unit.which, *_given(everyone, state))
            return
        try:
            returned = self.process.call(unit.which, *_given(everyone, state), limit=self.timeout)
        except Lost as why:
            if len(groups) == 1:
                return self._warn(unit, why, groups[0])
            log.warning(
                "%s %s for %d prompts: they are tried one by one.", unit.title, why, len(groups)
            )
        else:
            yield everyone, returned
            return
        self.process.revive()
        deadline = time.monotonic() + self.timeout
        for k, group in enumerate(groups):
            if (begun := time.monotonic()) < deadline:
                self.process.revive()
                # the imports: not at the cost of the groups that come after
                deadline += time.monotonic() - begun
            left = (deadline - time.monotonic()) / (len(groups) - k)
            try:
                if left <= 0:
                    raise Lost("had no time left")
                returned = self.process.call(unit.which, *_given(group, state), limit=left)
            except Lost as why:
                self._warn(unit, why, group)
            else:
                yield group, returned

    def _warn(self, unit: Unit, why: Lost, group: list[Sample]) -> None:
        prompt = group[0].prompt.id
        log.warning(
            "%s %s for prompt %s: its %d completions are left out.",
            unit.title,
            why,
            prompt,
            len(group),
        )

    def _weighted_sum(self, rewards: dict[str, float | None], sample: Sample) -> float | None:
        terms = [w * r for w, r in zip(self.weights, rewards.values()) if r is not None]
        if not abs(total := sum(terms)) <= LARGEST:
            raise UserError(
                f"reward_weights make {total} of the rewards {rewards} for sample {sample.index} of prompt {sample.prompt.id}; "
                f"make them smaller, for a sum must not be beyond {LARGEST:g}"
            )
        return total if terms else None


def _given(samples: Sequence[Sample], state: TrainerState) -> tuple[dict[str, Any], list[str]]:
    """What a function is called with, and how errors name the samples."""
    # the union, in order of appearance
    keys = dict.fromkeys(key for sample in samples for key in sample.prompt.columns)
    arguments = dict(
        prompts=[sample.prompt.text for sample in samples],
        completions=[_as_completion(sample) for sample in samples],
        completion_ids=[sample.token_ids for sample in samples],
        trainer_state=state,
        **{key: [sample.prompt.columns.get(key) for sample in samples] for key in keys},
    )
    return arguments, [f"sample {sample.index} of prompt {sample.prompt.id}" for sample in samples]


def _as_completion(sample: Sample) -> str | list[dict]:
    return (
        sample.text
        if isinstance(sample.prompt.text, str)
        else [{"role": "assistant", "content": sample.text}]
    )

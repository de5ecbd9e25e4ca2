"""Score the samples of a step: run each reward function in the right process and sum the results.

In: samples with their decoded `text`. Out: `sample.rewards[name]`, their weighted sum
`sample.reward`, and `sample.extra`. Read next: rewards/call.py (the signature of a function),
rewards/builtin.py (the built-in ones), grpo/advantages.py (rewards → advantages).

Built-in functions and reward models run in the trainer. The user's functions run in a process that
can be killed (rewards/process.py):
    in time            A function is called once for all samples of the step, within the timeout
                       (--reward-timeout).
    hang or crash      The call is lost. The process is restarted and the groups are tried one by
                       one, within one more timeout: each group may use an equal part of the time
                       that is left. So only the groups that cause the problem are lost, and a
                       function takes at most twice its timeout, plus restarts.
    a lost group       does not take part in the step: the rewards of its samples are None, so it
                       has no advantage and no gradient. A warning names it, and `rewards/failures`
                       counts it. A 0 would be trained on as if it were a judgement.
    every group lost   in three consecutive calls: the run stops.
    a mistake          An exception, a wrong number of values, or a value that is not a number stops
                       the run immediately, because the function would fail in the same way again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanogrpo.errors import UserError
from nanogrpo.rewards.builtin import full_name, is_users, load_function
from nanogrpo.rewards.call import MAX_REWARD, CallResult, Functions, TrainerState
from nanogrpo.rewards.model import RewardModel
from nanogrpo.rewards.process import CallLost, RewardProcess
from nanogrpo.types import Sample

logger = logging.getLogger("nanogrpo")

MAX_LOST_CALLS = 3  # consecutive calls in which every group is lost
# Columns of the completions table other than those of the functions (logs/completions.py).
COLUMNS = ("step", "prompt", "images", "completion", "reward", "advantage", "stopped")


@dataclasses.dataclass
class Job:
    """Functions that are called together: a single one, or all async functions of one process."""

    backend: Functions | RewardProcess
    functions: list[tuple[int, str]]  # (index in the backend, name in logs)
    lost_calls: int = 0  # consecutive calls in which every group was lost

    def __str__(self) -> str:
        names = [name for _, name in self.functions]
        return f"the reward function{'s' if names[1:] else ''} {', '.join(names)}"


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
        environment: str = "",
        env: Sequence[str] = (),
    ):
        """Import the functions.

        specs: names (see rewards/builtin.py; model:FOLDER is a reward model on `device`), or
        functions, which run in this process; weights: 1 each if empty; timeout: seconds per call of
        the user's functions; 0 runs them in this process; environment: the class of the objects
        that they receive as `environments`; env: environment variables with secrets that they may
        read. Raises UserError for an unknown name.
        """

        def load(spec: str | Callable) -> Callable:
            if not isinstance(spec, str):
                return spec
            if spec.startswith("model:"):
                return RewardModel.load(spec.removeprefix("model:"), device)
            return load_function(spec, max_completion_length)

        specs = [full_name(spec) if isinstance(spec, str) else spec for spec in specs]
        remote: list = [s for s in specs if timeout and isinstance(s, str) and is_users(s)]
        local = [s for s in specs if s not in remote]
        self.timeout, self.local = timeout, Functions([load(spec) for spec in local])
        self.process = RewardProcess(remote, environment, env) if remote else None
        self.names: list[str] = []  # as in the logs; duplicates get the suffixes _2, _3, …
        self.weights = weights or [1.0] * len(specs)
        jobs: dict[tuple, Job] = {}
        for spec in specs:
            backend = self.process if self.process and spec in remote else self.local
            i = (local if backend is self.local else remote).index(spec)
            name = base = backend.names[i]
            suffix = itertools.count(2)
            while name in self.names:
                name = f"{base}_{next(suffix)}"
            self.names.append(name)
            key = backend, None if backend.is_async[i] else name
            jobs.setdefault(key, Job(backend, [])).functions.append((i, name))
        self.jobs = list(jobs.values())
        self.failures = 0  # groups lost since the last `metrics`
        self.logged: dict[str, list[float]] = {}  # values of log_metric since the last `metrics`

    @property
    def models(self) -> list[RewardModel]:
        """The reward models, whose memory the estimate includes."""
        return [function for function in self.local.functions if isinstance(function, RewardModel)]

    @property
    def longest(self) -> float:
        """The maximum number of seconds that a step can spend in the reward process, without
        restarts.
        """
        return 2 * self.timeout * sum(job.backend is self.process for job in self.jobs)

    def score(self, samples: Sequence[Sample], state: TrainerState | None = None) -> None:
        """Fill each sample's `rewards`, `reward` (None if no function applies) and `extra`.

        If a reward function makes a mistake, raise UserError.
        """
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.id, []).append(sample)
            sample.rewards, sample.extra = dict.fromkeys(self.names), {}
        for job in self.jobs:
            results = self._call(job, list(groups.values()), state or TrainerState())
            for part, result in results:
                for (_, name), values in zip(job.functions, result.rewards):
                    for sample, value in zip(part, values):
                        sample.rewards[name] = value
                for column, values in result.extra:
                    if column in (*COLUMNS, *self.names, *part[0].extra):
                        raise UserError(
                            f"log_extra({column!r}, …): the completions table already has this "
                            "column; choose another name"
                        )
                    for sample, value in zip(part, values):
                        sample.extra[column] = value
                for name, value in result.metrics:
                    self.logged.setdefault(name, []).append(value)
            job.lost_calls = 0 if results or not groups else job.lost_calls + 1
            if job.lost_calls == MAX_LOST_CALLS:
                raise UserError(
                    f"{job} returned nothing in {MAX_LOST_CALLS} calls in a row, for any prompt: "
                    f"fix the hang or crash, or raise --reward-timeout ({self.timeout:g})"
                )
            scored = {sample.prompt.id for part, _ in results for sample in part}
            self.failures += len(groups) - len(scored)
            groups = {i: group for i, group in groups.items() if i in scored}
        for sample in samples:
            if sample.prompt.id not in groups:
                sample.rewards = dict.fromkeys(self.names)
            sample.reward = self._weighted_sum(sample)
            if sample.conversation is not None:  # not needed any more, and perhaps not picklable
                sample.conversation.environment = None

    def metrics(self, gather: Callable[[Any], list]) -> dict[str, float]:
        """Return the number of lost groups and the means of log_metric since the last call.

        They cover all ranks (`gather` is `World.gather`), so every rank must call.
        """
        ranks = gather((self.failures, self.logged))
        self.failures, self.logged = 0, {}
        out: dict[str, float] = {}
        if self.process:
            out["rewards/failures"] = sum(failures for failures, _ in ranks)
        for name in dict.fromkeys(name for _, logged in ranks for name in logged):
            values = [value for _, logged in ranks for value in logged.get(name, [])]
            out[name] = sum(values) / len(values)
        return out

    def _call(
        self, job: Job, groups: list[list[Sample]], state: TrainerState
    ) -> list[tuple[list[Sample], CallResult]]:
        """Call a job for all groups at once or, if that call is lost, for one group at a time.

        Returns the samples and the result of each call that was not lost.
        """

        def call(samples: list[Sample], timeout: float) -> tuple[list[Sample], CallResult]:
            arguments, labels = _arguments(samples, state), list(map(_label, samples))
            return samples, job.backend.call(job.functions, arguments, labels, timeout)

        if len(groups) > 1:
            try:
                return [call(list(itertools.chain(*groups)), self.timeout)]
            except CallLost as reason:
                logger.warning(
                    "%s %s for %d prompts; trying them one by one", job, reason, len(groups)
                )
        results, left = [], self.timeout
        for k, group in enumerate(groups):
            begun, limit = time.monotonic(), left / (len(groups) - k)
            try:
                results.append(call(group, limit))
            except CallLost as reason:
                logger.warning(
                    "%s %s for prompt %s; its %d completions are left out of the step",
                    job,
                    reason,
                    group[0].prompt.id,
                    len(group),
                )
            # Restarting the process takes time too, but not out of the time allotted to the other
            # groups.
            left -= min(time.monotonic() - begun, limit)
        return results

    def _weighted_sum(self, sample: Sample) -> float | None:
        rewards = sample.rewards
        terms = [w * r for w, r in zip(self.weights, rewards.values()) if r is not None]
        total = sum(terms)
        if not abs(total) <= MAX_REWARD:
            raise UserError(
                f"the weighted sum of the rewards {rewards} for {_label(sample)} is {total}, which "
                f"is beyond the limit of {MAX_REWARD:g}; lower --reward-weights"
            )
        return total if terms else None


def _label(sample: Sample) -> str:
    return f"sample {sample.index} of prompt {sample.prompt.id}"


def _arguments(samples: Sequence[Sample], state: TrainerState) -> dict[str, Any]:
    """Return the keyword arguments of a reward function for these samples."""
    # The columns of all samples, in order of appearance.
    columns = dict.fromkeys(name for sample in samples for name in sample.prompt.columns)
    out = dict(
        prompts=[sample.prompt.text for sample in samples],
        completions=[_completion(sample) for sample in samples],
        completion_ids=[sample.token_ids for sample in samples],
        trainer_state=state,
        **{name: [sample.prompt.columns.get(name) for sample in samples] for name in columns},
    )
    environments = [sample.conversation and sample.conversation.environment for sample in samples]
    if any(environment is not None for environment in environments):
        out["environments"] = environments
    return out


def _completion(sample: Sample) -> str | list[dict]:
    if sample.conversation is not None:
        return sample.conversation.messages
    message = {"role": "assistant", "content": sample.text}
    return sample.text if isinstance(sample.prompt.text, str) else [message]

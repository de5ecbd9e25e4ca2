"""One call of reward functions: what they are given, and a check of everything that they return.

In: functions and the arguments of B samples. Out: `Returned`, plain numbers; or a UserError that
names function and sample. It runs in the trainer for the built-in functions and in the reward
process for the user's, and so imports neither torch nor anything that does. Read next:
reward_process.py.

A reward function has TRL's signature, so that functions written for either run in both. It is
called once for all B samples:
    def my_reward(completions, **kwargs) -> list[float | None]        # B results; None: this function does not apply here
with the keyword arguments, lists of length B each but for the last three,
    prompts          as in the data: text, or messages
    completions      text for a text prompt, [{"role": "assistant", "content": text}] for messages
    completion_ids   token ids, the stop token included
    <column>         one for each other column of the data; None where a row lacks it
    trainer_state    .global_step (steps finished), .max_steps, .epoch: for rewards that change while training goes on
    log_extra        log_extra(column, B values): a column of the completions table
    log_metric       log_metric(name, number): a metric of the step, mean over its calls
`async def` is as good: such functions are awaited together, on one event loop that lives as long as
the process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import pickle
import traceback
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from nanogrpo.errors import UserError

# names of a line of the log; log.py knows the others
TAKEN = ("run", "step", "after", "eval/after", "rewards/failures")
# Of the completions table, beside the functions' own.
COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "stopped")
# of a reward or a sum, either sign: well inside float32, in which the advantages that it makes are
# trained on
LARGEST = 1e30


class TrainerState(NamedTuple):
    """TRL's names; a step is a generation, as in --max-steps."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


class Returned(NamedTuple):
    rewards: list[list[float | None]]  # of each function, B
    extra: list[tuple[str, list]]  # (column, B values), as log_extra was given them
    metrics: list[tuple[str, float]]


class Functions:
    """Reward functions that live in this process."""

    def __init__(self, functions: Sequence[Callable]):
        self.functions = list(functions)
        self.names = [_name(function) for function in functions]
        self.awaited = [_is_async(function) for function in functions]
        # one for all calls: a client's open connections belong to a loop
        self.loop: asyncio.AbstractEventLoop | None = None

    def call(
        self, which: Sequence[tuple[int, str]], arguments: dict[str, Any], places: Sequence[str]
    ) -> Returned:
        """which: (index, the name for errors) of each function; places: how errors name each
        sample.

        UserError when a function raises or calls sys.exit, returns the wrong count, or a value that
        is not a number of at most LARGEST: a 0 in its place would be trained on as if it were a
        judgement.
        """
        extra: list[tuple[str, list]] = []
        metrics: list[tuple[str, float]] = []

        def log_extra(column: str, values: Sequence) -> None:
            if not isinstance(column, str) or len(values) != len(places):
                raise ValueError(
                    f"log_extra({column!r}, …) has {len(values)} values for {len(places)} completions"
                )
            extra.append((column, [_plain(value) for value in values]))

        def log_metric(name: str, value: float) -> None:
            if not isinstance(name, str) or not math.isfinite(float(value)):
                raise ValueError(
                    f"log_metric({name!r}, {value!r}) needs a name and a finite number"
                )
            if name in TAKEN:
                raise ValueError(
                    f"log_metric({name!r}, …): the log has that name for itself, choose another"
                )
            metrics.append((name, float(value)))

        # Copies (by pickle, which is faster than deepcopy): what a function edits must not reach
        # the next. Token ids are most of it, and are only copied as lists: 262,144 new ints would
        # take longer than all the rest.
        ids = arguments.get("completion_ids", ())
        rest = pickle.dumps(
            {name: value for name, value in arguments.items() if name != "completion_ids"}
        )

        def given() -> dict[str, Any]:
            own = {
                "completion_ids": [list(row) for row in ids],
                "log_extra": log_extra,
                "log_metric": log_metric,
            }
            return {**pickle.loads(rest), **own}

        results = {i: _attempt(self.functions[i], given()) for i, _ in which if not self.awaited[i]}
        if waiting := [i for i, _ in which if self.awaited[i]]:
            self.loop = self.loop or asyncio.new_event_loop()
            found = self.loop.run_until_complete(
                _together([(self.functions[i], given()) for i in waiting])
            )
            results |= dict(zip(waiting, found))
        return Returned([_checked(results[i], name, places) for i, name in which], extra, metrics)


def _name(function: Callable) -> str:
    """Its __name__ (of what a partial wraps), or its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _is_async(function: Callable) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 (it is called only if it is async)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


# What a function gave, or the exception that it raised: sys.exit(0) would look like the run's end.


def _attempt(function: Callable, given: dict[str, Any]) -> Any:
    try:
        return function(**given)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        return error


async def _together(calls: Sequence[tuple[Callable[..., Awaitable], dict[str, Any]]]) -> list:
    async def attempt(function: Callable[..., Awaitable], given: dict[str, Any]) -> Any:
        try:
            return await function(**given)
        # the last by the function itself: a timeout of its own
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return error

    return await asyncio.gather(*(attempt(function, given) for function, given in calls))


def _checked(result: Any, name: str, places: Sequence[str]) -> list[float | None]:
    B = len(places)
    if isinstance(result, BaseException):
        # [0] is the call above, [1] the line of the user's function
        frames = traceback.extract_tb(result.__traceback__)
        where = (
            f"{Path(frames[1].filename).name}:{frames[1].lineno}" if len(frames) > 1 else "its call"
        )
        prompts = list(dict.fromkeys(place.partition(" of ")[2] for place in places))
        raise UserError(
            f"the reward function {name} raised {type(result).__name__}: {result} (at {where}, given {B} completions of "
            f"{', '.join(prompts[:4])}{', …' if len(prompts) > 4 else ''}); mend the function"
        ) from result
    values = result.tolist() if hasattr(result, "tolist") else result  # numpy and torch
    if not isinstance(values, list | tuple) or len(values) != B:
        got = (
            f"{len(values)} values"
            if isinstance(values, list | tuple)
            else f"a {type(result).__name__}"
        )
        raise UserError(
            f"the reward function {name} returned {got} for {B} completions; it must return a list, one each"
        )
    return [_number(value, name, place) for value, place in zip(values, places)]


def _number(value: Any, name: str, place: str) -> float | None:
    if value is None:
        return None
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # a numpy or torch scalar
    # One comparison refuses NaN, both infinities and integers beyond float. A bool is a Real: True
    # counts 1.
    if not isinstance(number, Real) or not abs(number) <= LARGEST:
        raise UserError(
            f"the reward function {name} returned {value!r} for {place}; it must return a number of at most {LARGEST:g}, or None "
            "where it does not apply"
        )
    return float(number)


def _plain(value: Any) -> Any:
    """A value for a table, of a kind that any process and any file can hold."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)

"""Call a reward function on B samples, in the trainer or in the reward process.

In: a function and its arguments. Out: its rewards as plain values, or a `UserError` that names the
function and its line. Built-in functions are called in the trainer, and the user's functions in the
reward process. The reward process does not need torch, so this file imports neither torch nor
modules that import it. Read next: rewards/process.py, and rewards/scorer.py, which checks the
rewards and sums them.

Reward functions have TRL's signature, so the same function works in both projects. A function is
called once for all B samples:

    def my_reward(completions, **kwargs) -> list[float | None]    # B values; None: does not apply

A value may also be a list, with a number or None for each token of the completion. The sum of the
numbers is then the reward.

The keyword arguments are lists of length B, except for the last three:

    `prompts` are as in the data: strings, or lists of messages.
    `completions` are strings; for prompts of messages, [{"role": "assistant", "content": string}].
    `completion_ids` are token ids, including the stop token.
    Each other column of the data is an argument, too. If a record lacks the column, the value is
    None. `trainer_state` has .global_step (finished steps), .max_steps and .epoch, e.g. for a
    curriculum. `log_extra(column, B values)` adds a column to the completions table.
    `log_metric(name, number)` adds a metric, which is averaged over the calls of a step.

An `async def` function is awaited on an event loop that exists until the process ends. The event
loop has its own thread, because a notebook already runs another event loop in the main thread.
"""

import asyncio
import contextlib
import functools
import inspect
import os
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanogrpo.errors import UserError


class TrainerState(NamedTuple):
    """The progress of training, with field names from TRL. As in --max-steps, a step is one
    generation.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Run the user's code. If this code forks, the child process must not return into the training
    loop, because the child would become a second trainer. So the child exits when it leaves this
    block.
    """
    me, status = os.getpid(), 1
    try:
        yield
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else bool(error.code)
        raise
    finally:
        if os.getpid() != me:
            os._exit(status)


def call(function: Callable, arguments: dict, shared: dict) -> tuple[list, list, list]:
    """Return the B rewards of a function, (column, B values) of each log_extra call, and (name,
    value) of each log_metric call.

    The rewards are plain values. They are checked later (rewards/scorer.py).

    The function gets a copy of `arguments`, so its changes do not affect the samples or the next
    function. The values in `shared` are not copied, because some of them cannot be copied.

    Raises UserError if the function raises or calls sys.exit, or does not return B values.
    """
    name, size = name_of(function), len(arguments["completions"])
    extra: list = []
    metrics: list = []

    def log_extra(column: str, values: Sequence) -> None:
        if len(values) != size:
            raise ValueError(f"log_extra({column!r}, …) has {len(values)} values, not {size}")
        extra.append((str(column), list(map(_plain, values))))

    def log_metric(name: str, value: float) -> None:
        # The metrics of evaluations have names that begin with "eval/".
        # The limit of 1e300 keeps the mean of many values finite.
        if name.startswith("eval/") or not abs(value) < 1e300:
            raise ValueError(
                f"log_metric({name!r}, {value}) needs a number below 1e300, and a name that does "
                "not begin with eval/"
            )
        metrics.append((name, float(value)))

    try:
        own = pickle.loads(pickle.dumps(arguments))  # faster than deepcopy
        with users_code():
            result = function(**own, **shared, log_extra=log_extra, log_metric=log_metric)
        if inspect.isawaitable(result):
            result = asyncio.run_coroutine_threadsafe(_await(result), own_loop()).result()
            if isinstance(result, BaseException):
                raise result
        values = _plain(result)
        is_list = isinstance(values, list)
    # sys.exit(0) must not end the run as if it had succeeded
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        lines = (
            f"{Path(frame.f_code.co_filename).name}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if not frame.f_globals.get("__name__", "").startswith("nanogrpo.")
        )
        raise UserError(
            f"the reward function {name} raised {type(error).__name__}: {error} (at "
            f"{next(lines, 'its call')}); fix the function"
        ) from error
    if not is_list or len(values) != size:
        what = f"{len(values)} values" if is_list else f"a {type(result).__name__}"
        raise UserError(
            f"the reward function {name} returned {what}; it must return a list of {size} values, "
            "one for each completion"
        )
    return values, extra, metrics


def name_of(function: Callable) -> str:
    """Return the name of a function, or the class name of a callable object."""
    function = unwrap(function)
    return getattr(function, "__name__", type(function).__name__)


def unwrap(function: Callable) -> Callable:
    """Return the function inside a functools.partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def start_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in its own thread."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run, name="async", daemon=True).start()
    return loop


# All calls use the same event loop, because open HTTP connections belong to a loop.
own_loop = functools.cache(start_loop)


async def _await(result: Awaitable) -> Any:
    """Return a result, or the exception that was raised. SystemExit is returned too, because it
    would end the loop.
    """
    try:
        return await result
    except BaseException as error:  # the user's code may raise anything
        return error


def _plain(value: Any) -> Any:
    """Convert a value to a number, a string, None or a list of these, which JSON can represent."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # of numpy or torch
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return float(value) if hasattr(value, "__float__") else str(value)  # such as a Decimal

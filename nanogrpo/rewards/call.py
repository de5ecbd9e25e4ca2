"""Call reward functions on B samples and check everything they return.

In: functions and their arguments. Out: a `CallResult` of plain numbers, or a `UserError` that names
the function and the sample. The trainer runs this code for built-in functions and the reward
process runs it for the user's functions, so it imports neither torch nor anything that does.
Read next: rewards/process.py.

Reward functions have TRL's signature, so the same function works in both projects. A function is
called once for all B samples:
    def my_reward(completions, **kwargs) -> list[float | None]    # B values; None: does not apply
Its keyword arguments are lists of length B, except for the last three:
    prompts          as in the data: text, or messages
    completions      text for a text prompt, [{"role": "assistant", "content": text}] for messages;
                     with tools, these are all messages, including the tools' answers
    completion_ids   token ids, including the stop token
    environments     with --environment-factory, the objects that the completions have used
    <column>         one for each other column of the data; None where a record lacks it
    trainer_state    .global_step (finished steps), .max_steps, .epoch, e.g. for a curriculum
    log_extra        log_extra(column, B values) adds a column to the completions table
    log_metric       log_metric(name, number) adds a metric, averaged over the calls of a step
`async def` functions are awaited together, on one event loop that lives as long as the process.
It has a thread of its own, because a notebook already runs another loop in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from nanogrpo.errors import UserError, text_of

# Names that log_metric may not use, because the log uses them itself. logs/console.py checks the
# names of the metrics.
RESERVED_METRICS = ("run", "step", "after", "eval/after", "rewards/failures")
# Bound on the size of a reward and of a weighted sum. It is far below float32's largest value, so
# the advantages stay finite too.
MAX_REWARD = 1e30


class TrainerState(NamedTuple):
    """The progress of training, with field names from TRL. A step is a generation, as in
    --max-steps.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


class CallResult(NamedTuple):
    rewards: list[list[float | None]]  # for each function, B values
    extra: list[tuple[str, list]]  # (column, B values) of each log_extra call
    metrics: list[tuple[str, float]]  # (name, value) of each log_metric call


class Functions:
    """Reward functions that run in this process."""

    def __init__(self, functions: Sequence[Callable]):
        self.functions = functions
        unwrapped = [_unwrap(function) for function in functions]
        self.names = [getattr(f, "__name__", type(f).__name__) for f in unwrapped]
        self.is_async = [_is_async(f) for f in unwrapped]
        # Use one event loop for all calls, because an HTTP client's open connections are bound to
        # the loop that opened them.
        self.loop: asyncio.AbstractEventLoop | None = None

    def call(
        self,
        functions: Sequence[tuple[int, str]],
        arguments: dict[str, Any],
        labels: Sequence[str],
        timeout: float = 0.0,
    ) -> CallResult:
        """Call one synchronous function, or several async ones together.

        functions: an (index, name for error messages) pair for each function; labels: a name for
        each of the B samples, also for error messages; timeout: ignored, because only a process can
        be killed.

        Raises UserError if a function raises or calls sys.exit, returns the wrong number of values,
        or a value that is not a number within ±MAX_REWARD. Replacing it with 0 would train the
        model as if the function had returned 0.
        """
        extra: list[tuple[str, list]] = []
        metrics: list[tuple[str, float]] = []

        def log_extra(column: str, values: Sequence) -> None:
            if not isinstance(column, str) or len(values) != len(labels):
                raise ValueError(
                    f"log_extra({column!r}, …) has {len(values)} values "
                    f"for {len(labels)} completions"
                )
            extra.append((column, [_plain(value) for value in values]))

        def log_metric(name: str, value: float) -> None:
            if not isinstance(name, str) or not math.isfinite(value := float(value)):
                raise ValueError(f"log_metric({name!r}, {value}) needs a name and a finite number")
            if name in RESERVED_METRICS:
                raise ValueError(f"log_metric({name!r}, …): the log already uses this name")
            metrics.append((name, value))

        # Each function gets its own copy, so the changes it makes affect neither the next function
        # nor the samples. Pickle is faster than deepcopy. Most of the data are token ids, for which
        # it is enough to copy each list.
        # Environments are shared, as in TRL, because some cannot be copied.
        ids, kept = arguments["completion_ids"], {}
        if "environments" in arguments:
            kept["environments"] = _unpacked(arguments["environments"])
        others = pickle.dumps({**arguments, "completion_ids": None, "environments": None})
        calls = []
        for i, _ in functions:
            own = pickle.loads(others) | {"log_extra": log_extra, "log_metric": log_metric}
            del own["environments"]
            own |= {"completion_ids": list(map(list, ids)), **kept}
            calls.append((self.functions[i], own))
        if self.is_async[functions[0][0]]:
            self.loop = self.loop or start_loop()
            results = asyncio.run_coroutine_threadsafe(_await_together(calls), self.loop).result()
        else:
            results = [_attempt(*call) for call in calls]
        rewards = [_check(result, name, labels) for result, (_, name) in zip(results, functions)]
        return CallResult(rewards, extra, metrics)


def start_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread of its own, whatever its tasks do."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while not loop.is_closed():
            # A task that calls sys.exit or loop.stop ends the loop. It runs again, because the code
            # that awaits the task gets the exception, and we wait for that code.
            with contextlib.suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=run, name="async", daemon=True).start()
    return loop


def packed(environments: Sequence) -> bytes:
    """Return environments in a form that can be sent to the reward process.

    Raises UserError if they cannot be copied.
    """
    try:
        return pickle.dumps(environments)
    except BaseException as e:  # the user's class may raise anything
        raise _not_copied(e) from e


def _unpacked(environments: bytes | Sequence) -> Sequence:
    if not isinstance(environments, bytes):
        return environments
    try:
        return pickle.loads(environments)
    except BaseException as e:  # the user's class may raise anything
        raise _not_copied(e) from e


def _not_copied(error: BaseException) -> UserError:
    return UserError(
        f"--environment-factory: the environments cannot be copied to the process of the reward "
        f"functions ({type(error).__name__}: {text_of(error)}): use --reward-timeout 0, or "
        "__getstate__"
    )


def _unwrap(function: Callable) -> Callable:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: Callable) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 (an instance may have an async method)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


# An exception is returned, not raised, whatever it is: a function that calls sys.exit(0) must not
# end the run as if it had succeeded, and one that raises KeyboardInterrupt must not end it as if
# somebody had pressed Ctrl-C.


def _attempt(function: Callable, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except BaseException as error:  # the user's code may raise anything
        # In a training run and in the reward process, Ctrl-C raises nothing; elsewhere it does.
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if isinstance(error, KeyboardInterrupt) and default:
            raise
        return error


async def _await_together(calls: Sequence[tuple[Callable, dict[str, Any]]]) -> list:
    async def attempt(function: Callable, arguments: dict[str, Any]) -> Any:
        try:
            return await function(**arguments)
        # Ctrl-C is raised in the main thread only, so here it is the user's code that raises
        except BaseException as error:
            return error

    return await asyncio.gather(*(attempt(*call) for call in calls))


def _check(result: Any, name: str, labels: Sequence[str]) -> list[float | None]:
    """Return a function's result as B floats or Nones."""
    try:
        return _read(result, name, labels)
    except UserError:
        raise
    except BaseException as error:  # the result may be an object of the user
        raise UserError(
            f"the reward function {name} returned a {type(result).__name__} that cannot be read "
            f"({type(error).__name__}: {text_of(error)}); it must return a list of numbers"
        ) from error


def _read(result: Any, name: str, labels: Sequence[str]) -> list[float | None]:
    count = len(labels)
    if isinstance(result, BaseException):
        # frames[0] is the call in this file, frames[1] is the line in the user's function.
        frames = traceback.extract_tb(result.__traceback__)
        line = f"{Path(frames[1].filename).name}:{frames[1].lineno}" if frames[1:] else "its call"
        raise UserError(
            f"the reward function {name} raised {type(result).__name__}: {text_of(result)} (at "
            f"{line}, called with {count} completions, the first is {labels[0]}); fix the function"
        ) from result
    values = result.tolist() if hasattr(result, "tolist") else result  # numpy and torch
    is_list = isinstance(values, list | tuple)
    if not is_list or len(values) != count:
        got = f"{len(values)} values" if is_list else f"a {type(result).__name__}"
        raise UserError(
            f"the reward function {name} returned {got} for {count} completions; "
            "it must return a list with one value for each"
        )
    return [_number(value, name, label) for value, label in zip(values, labels)]


def _number(value: Any, name: str, label: str) -> float | None:
    value = _scalar(value)
    if value is None:
        return None
    # The comparison also refuses NaN, infinities, and integers too large for a float. A bool is a
    # Real, so True counts as 1.
    is_number = isinstance(value, Real)
    if not is_number or not abs(value) <= MAX_REWARD:
        raise UserError(
            f"the reward function {name} returned {value!r} for {label}; it must return a number "
            f"of at most {MAX_REWARD:g}, or None where it does not apply"
        )
    return float(value)


def _plain(value: Any) -> Any:
    """Return a table value as something that JSON can represent."""
    value = _scalar(value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _scalar(value: Any) -> Any:
    """Convert a numpy or torch scalar to a Python number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value

"""Reward functions that work, hang, crash, or are wrong. Tests name them; no test imports this."""

import asyncio
import contextlib
import enum
import functools
import os
import re
import signal
import sys
import time


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def calls(prompts, **kwargs):
    calls.n = getattr(calls, "n", 0) + 1
    return [calls.n] * len(prompts)


def pid(prompts, **kwargs):
    return [os.getpid()] * len(prompts)


def fails_on_prompt_3(name, fail):
    def function(prompts, **kwargs):
        if "3" in prompts:
            fail()
        return [1.0] * len(prompts)

    function.__name__ = name
    return function


# in C, while it holds the interpreter's lock
backtracks = fails_on_prompt_3("backtracks", lambda: re.match("(a+)+$", "a" * 60 + "b"))
exits = fails_on_prompt_3("exits", lambda: os._exit(7))
segfaults = fails_on_prompt_3("segfaults", lambda: os.kill(os.getpid(), signal.SIGSEGV))
raises = fails_on_prompt_3("raises", lambda: 1 / 0)
calls_exit = fails_on_prompt_3("calls_exit", lambda: sys.exit(3))


def throw(error):
    raise error


class Unprintable(Exception):
    """An exception without a message: making it fails."""

    def __str__(self):
        raise SystemExit(0)


class Unreadable(list):
    """A list that cannot be read."""

    def __len__(self):
        raise KeyboardInterrupt


raises_interrupt = fails_on_prompt_3("raises_interrupt", lambda: throw(KeyboardInterrupt("no")))
raises_generator_exit = fails_on_prompt_3("raises_generator_exit", lambda: throw(GeneratorExit()))
raises_unprintable = fails_on_prompt_3("raises_unprintable", lambda: throw(Unprintable()))


def unreadable(prompts, **kwargs):
    return Unreadable()


async def awaits_and_interrupts(prompts, **kwargs):
    await asyncio.sleep(0)
    raise KeyboardInterrupt


def too_long_for_json(prompts, log_extra, **kwargs):
    log_extra("digits", [10**5000] * len(prompts))
    return [1.0] * len(prompts)


def write_to_connection(data):
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no longer open, or only for reading
            if descriptor > 2:
                os.write(descriptor, data)


def writes_to_its_connection(prompts, **kwargs):
    write_to_connection(b"hello\n")
    return [1.0] * len(prompts)


def forges(name, reward):
    def function(prompts, **kwargs):
        rewards = ", ".join([reward] * len(prompts))
        write_to_connection(f'[1, "done", [[[{rewards}]], [], []]]\n'.encode())
        if name != "answers_twice":
            time.sleep(1000)
        return [2.0] * len(prompts)

    function.__name__ = name
    return function


forges_a_text = forges("forges_a_text", '"1"')
forges_a_nan = forges("forges_a_nan", "NaN")
forges_another_shape = forges("forges_another_shape", "1.0, 1.0")
answers_twice = forges("answers_twice", "1.0")


def writes_without_end(prompts, **kwargs):
    while True:
        write_to_connection(b"1" * 10_000)


def always_hangs(prompts, **kwargs):
    time.sleep(1000)


def nan(prompts, **kwargs):
    return [1.0] * (len(prompts) - 1) + [float("nan")]


def short(prompts, **kwargs):
    return [1.0]


def logs(completions, log_extra, log_metric, trainer_state, **kwargs):
    log_extra("letters", [len(c) for c in completions])
    log_extra("object", [object] * len(completions))
    log_metric("mine/step", trainer_state.global_step)
    log_metric("mine/step", trainer_state.max_steps + 2 * trainer_state.epoch)
    return [None] * len(completions)


async def waits_for_the_other(prompts, **kwargs):
    """Wait until the function runs a second time, so it only ends if two calls run at once."""
    state = waits_for_the_other
    state.running = getattr(state, "running", 0) + 1
    while state.running % 2:
        await asyncio.sleep(0.001)
    state.loops = getattr(state, "loops", set()) | {id(asyncio.get_running_loop())}
    return [len(state.loops)] * len(prompts)


class Verdict(str, enum.Enum):
    GOOD = "good"


def verdicts(completions, log_extra, **kwargs):
    log_extra("verdict", [Verdict.GOOD] * len(completions))
    return [1.0] * len(completions)


def forks(prompts, **kwargs):
    os.fork()  # the child is never ended and returns as well
    return [float(p) for p in prompts]


async def awaits_and_is_cancelled(prompts, **kwargs):
    raise asyncio.CancelledError("judge")


class Judge:
    def __init__(self, value):
        self.value = value

    async def __call__(self, prompts, **kwargs):
        await waits_for_the_other(prompts)
        return [self.value] * len(prompts)


judge = Judge(0.25)
part = functools.partial(fails_on_prompt_3("part", lambda: None), unused=1)


async def awaits_and_hangs(prompts, **kwargs):
    if "3" in prompts:
        await asyncio.sleep(1000)
    return [2.0] * len(prompts)


async def awaits_and_raises(prompts, **kwargs):
    await asyncio.sleep(0)
    raise KeyError("no such judge")


def closes_its_connection(prompts, **kwargs):
    os.closerange(3, 1 << 16)
    time.sleep(1000)


def dies_but_leaves_a_child(prompts, **kwargs):
    if os.fork() == 0:
        time.sleep(1000)  # holds every open file, including the connection to the trainer
    os._exit(1)

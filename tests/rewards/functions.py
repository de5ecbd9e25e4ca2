"""Reward functions that work, hang, crash, or are wrong. Tests name them; no test imports this."""

import asyncio
import contextlib
import functools
import os
import re
import signal
import subprocess
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


def write_to_connection(data):
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no longer open, or only for reading
            if descriptor > 2:
                os.write(descriptor, data)


def writes_to_its_connection(prompts, **kwargs):
    write_to_connection(b"hello\n")
    time.sleep(1000)


def writes_without_end(prompts, **kwargs):
    while True:
        write_to_connection(b"1" * 10_000)


def nan(prompts, **kwargs):
    return [1.0] * (len(prompts) - 1) + [float("nan")]


def logs(completions, log_extra, log_metric, trainer_state, **kwargs):
    log_extra("letters", [len(c) for c in completions])
    log_extra(("a", 1), [object] * len(completions))
    log_metric("mine/step", trainer_state.global_step)
    log_metric("mine/step", trainer_state.max_steps + 2 * trainer_state.epoch)
    return [None] * len(completions)


def logs_in_eval(log_metric, **kwargs):
    log_metric("eval/reward", 0.5)


def logs_too_much(log_metric, **kwargs):
    log_metric("large", 1e308)


async def awaits(prompts, **kwargs):
    await asyncio.sleep(0.001)
    awaits.loops = getattr(awaits, "loops", set()) | {id(asyncio.get_running_loop())}
    return [len(awaits.loops)] * len(prompts)


class Judge:
    def __init__(self, value):
        self.value = value

    async def __call__(self, prompts, **kwargs):
        await awaits(prompts)
        return [self.value] * len(prompts)


judge = Judge(0.25)
part = functools.partial(fails_on_prompt_3("part", lambda: None), unused=1)


async def awaits_and_hangs(prompts, **kwargs):
    if "3" in prompts:
        await asyncio.sleep(1000)
    return [1.0] * len(prompts)


async def awaits_and_raises(prompts, **kwargs):
    await asyncio.sleep(0)
    raise KeyError("no such judge")


async def awaits_and_is_cancelled(prompts, **kwargs):
    raise asyncio.CancelledError("judge")


def child(prompts, **kwargs):
    return [subprocess.Popen(["sleep", "1000"]).pid] * len(prompts)


def dies_but_leaves_a_child(prompts, **kwargs):
    if os.fork() == 0:
        os.setsid()
        time.sleep(20)  # holds every open file, including the connection to the trainer
    os._exit(1)

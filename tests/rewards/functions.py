"""Reward functions that work, hang, crash, or are wrong: what test_reward_process.py names.
Imported by no test.
"""

import asyncio
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


def guilty(name, what):
    def function(prompts, **kwargs):
        if "3" in prompts:
            what()
        return [1.0] * len(prompts)

    function.__name__ = name
    return function


sleeps = guilty("sleeps", lambda: time.sleep(1000))
# in C, with the interpreter's lock held
backtracks = guilty("backtracks", lambda: re.match("(a+)+$", "a" * 60 + "b"))
exits = guilty("exits", lambda: os._exit(7))
segfaults = guilty("segfaults", lambda: os.kill(os.getpid(), signal.SIGSEGV))
out_of_memory = guilty("out_of_memory", lambda: os.kill(os.getpid(), signal.SIGKILL))
raises = guilty("raises", lambda: 1 / 0)
leaves = guilty("leaves", lambda: sys.exit(3))


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


async def meets(prompts, **kwargs):
    meets.here = getattr(meets, "here", 0) + 1
    while meets.here % 2:  # until the other has come: only when both run at once
        await asyncio.sleep(0.001)
    meets.loops = getattr(meets, "loops", set()) | {id(asyncio.get_running_loop())}
    return [len(meets.loops)] * len(prompts)


class Verdict(str, enum.Enum):
    GOOD = "good"


def verdicts(completions, log_extra, **kwargs):
    log_extra("verdict", [Verdict.GOOD] * len(completions))
    return [1.0] * len(completions)


def forks(prompts, **kwargs):
    os.fork()  # and forgets to end the child, which returns as well
    return [float(p) for p in prompts]


async def awaits_and_is_cancelled(prompts, **kwargs):
    raise asyncio.CancelledError("judge")


class Judge:
    def __init__(self, value):
        self.value = value

    async def __call__(self, prompts, **kwargs):
        await meets(prompts)
        return [self.value] * len(prompts)


judge = Judge(0.25)
part = functools.partial(guilty("part", lambda: None), unused=1)


async def awaits_and_hangs(prompts, **kwargs):
    if "3" in prompts:
        await asyncio.sleep(1000)
    return [2.0] * len(prompts)


async def awaits_and_raises(prompts, **kwargs):
    await asyncio.sleep(0)
    raise KeyError("no such judge")


def child(prompts, **kwargs):
    if os.fork() == 0:
        time.sleep(1000)  # holds every open file, the connection to the trainer too
    os._exit(1)

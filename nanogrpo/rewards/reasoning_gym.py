"""The reward function `reasoning_gym`: score an answer with the verifier of its own data set.

In: completions, and the column `reasoning_gym` that data/gym.py writes. Out: a score for each, from
0 to 1. Read next: data/gym.py, rewards/builtin.py.

Some verifiers of reasoning-gym give the answer to Python's `eval`, or to sympy, which evaluates it
too. An answer could then run code, fill the memory, or compute 9**9**9 for hours. So the answers
are scored in a child process, forked for each call from the process of the user's functions. It has
limits on time and memory, and an audit hook limits what it may do to the machine. An answer that
breaks a limit gets the score 0. This keeps out accidents and reward hacking. It is not a sandbox
against an attack on Python itself.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nanogrpo.data import gym
from nanogrpo.distributed.parent import killed_with
from nanogrpo.rewards.builtin import extract_answer

SECONDS = 2.0  # for one answer; the verifiers take milliseconds
MEMORY = 1 << 30  # bytes that the child may allocate
# Audit events of imports, of evaluating an expression, and of introspection. All others, such as
# starting a program or opening a connection, are refused; files may be opened for reading only.
ALLOWED = {"import", "open", "compile", "exec", "marshal.loads", "object.__getattr__"}
ALLOWED |= {"code.__new__", "os.listdir", "os.scandir", "sys._getframe", "builtins.id"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# (verifier, problem, answer)
Job = tuple[Callable[[str, dict], float], dict, str]


def reasoning_gym_reward(
    completions: list, reasoning_gym: list | None = None, **kwargs: Any
) -> list[float | None]:
    """Return the score of each completion's answer, as `extract_answer` finds it; 0 without one.

    The reward is None for the prompts of other sources.
    """
    rewards: list[float | None] = []
    jobs: list[Job] = []
    scored = []  # the index of the completion of each job
    for i, (completion, origin) in enumerate(zip(completions, reasoning_gym or [])):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        answer = extract_answer(text)
        rewards.append(None if origin is None else 0.0)
        if origin is not None and answer is not None:
            verifier = gym.dataset(origin["source"]).score_answer
            jobs.append((verifier, origin["problem"], answer))
            scored.append(i)
    for i, score in zip(scored, scores(jobs)):
        rewards[i] = score
    return rewards or [None] * len(completions)


def scores(jobs: list[Job]) -> list[float]:
    """Return the score of each job, computed in a child process."""
    context = multiprocessing.get_context("fork")  # a new interpreter would import for seconds
    done: list[float] = []
    while len(done) < len(jobs):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(jobs[len(done) :], theirs, os.getpid()))
        child.start()
        theirs.close()
        # if the child has died, `poll` returns True and `recv_bytes` raises EOFError
        with contextlib.suppress(EOFError, ValueError):
            while len(done) < len(jobs) and ours.poll(SECONDS):
                done.append(_checked(ours.recv_bytes(64)))
        if len(done) < len(jobs):
            done.append(0.0)  # this answer broke a limit; a new child scores the others
        child.kill()
        child.join()
        ours.close()
    return done


def _checked(message: bytes) -> float:
    score = float(message)
    return score if math.isfinite(score) else 0.0


# --- in the child ---


def _child(jobs: list[Job], pipe: Connection, parent: int) -> None:
    killed_with(parent)
    _close_files(pipe.fileno())
    used = _memory()
    for kind, limit in ((resource.RLIMIT_AS, used + MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(kind, (limit, limit))
    sys.addaudithook(_refuse)
    for verifier, problem, answer in jobs:
        try:
            score = float(verifier(answer, problem))
        # an answer can make the verifier raise anything, also SystemExit and MemoryError
        except BaseException:
            score = 0.0
        pipe.send_bytes(repr(score).encode())


def _refuse(event: str, arguments: tuple) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
    if event not in ALLOWED or writes:
        raise PermissionError(f"{event} is not allowed while an answer is scored")


def _close_files(kept: int) -> None:
    """Close inherited files, such as the connection to the trainer."""
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _memory() -> int:
    """Return the size of this process's address space in bytes; 0 if it is unknown."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0

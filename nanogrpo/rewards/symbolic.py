"""Ask math-verify whether two answers are equal, such as (x+1)^2 and x^2+2x+1.

In: pairs of an answer and a reference, as texts. Out: True or False for each, or None for a pair
that was not tried. Read next: rewards/process.py, which starts and kills the process that this code
runs in.

A completion may contain any expression, and algebra on some of them never ends or needs more memory
than there is: 10^{10^{10}}, or 9!!!!!. So math-verify runs in a process of its own. For each pair,
the operating system allows this process SECONDS of processor time and MEMORY bytes. If the process
exceeds the time, it is killed, also inside C code; the pair then counts as different, and the next
pair starts a new process. math-verify's own limits are signals and wall-clock time. Signals would
work only in the trainer's main thread, and with wall-clock time a busy machine could change a
verdict. Several processes share the work if there are many pairs.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from nanogrpo.errors import UserError
from nanogrpo.rewards.process import CallLost, RewardProcess

logger = logging.getLogger("nanogrpo")

SECONDS = 2  # of processor time for a pair; usual ones need a few milliseconds
MEMORY = 2 << 30  # bytes of address space
MAX_LOST = 20  # pairs that may exceed their limits in one call, in each process
TIMEOUT = 60.0  # seconds for a pair that waits instead of computing
PROCESSES = min(4, os.cpu_count() or 1)
PAIRS_PER_PROCESS = 16  # with fewer, starting another process would take longer than it saves

Pair = tuple[str, str]


def check_installed(spec: str) -> None:
    if find_spec("math_verify") is None:
        raise UserError(
            f"--reward-funcs {spec} needs the package math-verify: pip install math-verify."
        )


# Threads that live as long as the trainer, because a process also ends with the thread that started
# it. Each of them has a process of its own.
THREADS = ThreadPoolExecutor(PROCESSES, "math-verify")
PROCESS_OF: dict[int, RewardProcess] = {}  # by the id of the thread


def equal(pairs: Sequence[Pair]) -> list[bool | None]:
    """Return whether each (answer, reference) is equal; None for those that were not tried.

    A pair that exceeds its limits counts as different. After MAX_LOST of them, no more pairs are
    tried in this call.
    """
    unique = list(dict.fromkeys(pairs))  # a group often repeats an answer
    n = min(PROCESSES, -(-len(unique) // PAIRS_PER_PROCESS))
    verdicts: dict[Pair, bool | None] = {}
    for part in THREADS.map(_judge_all, [unique[k::n] for k in range(n)]):
        verdicts |= part
    return [verdicts[pair] for pair in pairs]


def _judge_all(pairs: Sequence[Pair]) -> dict[Pair, bool | None]:
    """Return the verdicts, on one of THREADS."""
    verdicts: dict[Pair, bool | None] = dict.fromkeys(pairs)
    lost = 0
    for pair in pairs:
        if lost >= MAX_LOST:
            break
        try:
            verdicts[pair] = _ask(pair)
        except CallLost:
            verdicts[pair], lost = False, lost + 1
    if lost:
        logger.warning("math-verify gave up on %d answers, which count as wrong", lost)
    if left := sum(verdict is None for verdict in verdicts.values()):
        logger.warning("math-verify did not get to %d answers, which get no reward", left)
    return verdicts


def _ask(pair: Pair) -> bool:
    """Return the verdict of math-verify. Raises CallLost if the pair exceeds the limits."""
    me = threading.get_ident()
    process = PROCESS_OF.get(me) or PROCESS_OF.setdefault(me, RewardProcess([f"{__name__}:judge"]))
    arguments = {"completions": [pair[0]], "solution": [pair[1]], "completion_ids": [[]]}
    job = [(0, "math-verify")], arguments, ["the answer"]
    try:
        result = process.call(*job, timeout=TIMEOUT)
    except CallLost as reason:
        # A process that reaches its limit is ended with SIGXCPU. SIGKILL came from elsewhere,
        # perhaps before this call, so the pair is tried once more.
        if "SIGKILL" not in str(reason):
            raise
        result = process.call(*job, timeout=TIMEOUT)
    return result.rewards[0] == [1.0]


# --- in the process ---


def judge(completions: list[str], solution: list[str], **kwargs) -> list[float]:
    """Return 1 for each completion that equals its solution, in the form of a reward function."""
    verify = _verifier()
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS + 1)
    return [float(verify(answer, wanted)) for answer, wanted in zip(completions, solution)]


def _limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))


@functools.cache
def _verifier() -> Callable[[str, str], bool]:
    """Import math-verify, limit the memory of this process, and return the comparison."""
    import math_verify

    _limit(resource.RLIMIT_AS, MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    faulthandler.unregister(signal.SIGUSR1)
    reading = {
        "extraction_config": [math_verify.LatexExtractionConfig(boxed_match_priority=0)],
        "extraction_mode": "first_match",
        "parsing_timeout": None,
    }

    def verify(*texts: str) -> bool:
        try:
            answer, wanted = (math_verify.parse(rf"\boxed{{{text}}}", **reading) for text in texts)
            return math_verify.verify(wanted, answer, timeout_seconds=None)
        except (Exception, MemoryError, RecursionError):  # any answer must get a verdict
            return False

    return verify

"""Ask math-verify whether two answers are equal, such as (x+1)^2 and x^2+2x+1.

In: pairs of an answer and a reference, as texts. Out: True or False for each, or None for a pair
that was not tried. Read next: rewards/process.py, which starts and kills the process that this code
runs in.

A completion may contain any expression, and computer algebra may take forever or all memory on one
of them: 10^{10^{10}}, or 9!!!!!. So math-verify runs in a process of its own. For each pair the
kernel gives it SECONDS of processor time and MEMORY bytes. If it exceeds the time, the kernel ends
it, also inside C code, the pair counts as different, and the next pair starts a new process. This
uses no signal handlers in the trainer, where they would only work on the main thread. It measures
processor time, so that a busy machine does not change a verdict. (math-verify's own limits are
signals and wall-clock time.) Several processes share the work if there are many pairs.
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
# Seconds that the pairs that exceed their limits may take in one call, in each process.
LOST_SECONDS = 60.0
PROCESSES = min(4, os.cpu_count() or 1)
PAIRS_PER_PROCESS = 16  # with fewer, another process would take longer to start than it saves
CACHE: dict[tuple[str, str], bool] = {}  # verdicts; a group often repeats an answer
CACHE_SIZE = 100_000


def check_installed(spec: str) -> None:
    if find_spec("math_verify") is None:
        raise UserError(
            f"--reward-funcs {spec} needs the package math-verify: pip install math-verify."
        )


# Threads that live as long as the trainer, because a process also ends with the thread that started
# it. Each of them has a process of its own.
THREADS = ThreadPoolExecutor(PROCESSES, "math-verify")
OWN: dict[int, RewardProcess] = {}  # thread → its process


def equal(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Return whether each (answer, reference) is equal; None for those that were not tried.

    A pair that exceeds its limits counts as different. Pairs are not tried if such pairs have used
    up LOST_SECONDS in this call.
    """
    new = [pair for pair in dict.fromkeys(pairs) if pair not in CACHE]
    n = min(PROCESSES, -(-len(new) // PAIRS_PER_PROCESS))
    lost = sum(THREADS.map(_judge_all, [new[k::n] for k in range(n)]))
    if lost:
        logger.warning("math-verify gave up on %d answers, which count as wrong", lost)
    verdicts = [CACHE.get(pair) for pair in pairs]
    if None in verdicts:
        logger.warning(
            "math-verify did not get to %d answers, which get no reward", verdicts.count(None)
        )
    while len(CACHE) > CACHE_SIZE:  # the oldest first
        del CACHE[next(iter(CACHE))]
    return verdicts


def _judge_all(pairs: Sequence[tuple[str, str]]) -> int:
    """Fill the cache on one of THREADS, and return the number of pairs that were lost."""
    lost, seconds = 0, 0.0
    for pair in pairs:
        begun = time.monotonic()
        if seconds >= LOST_SECONDS:
            break
        try:
            CACHE[pair] = _ask(pair)
        except CallLost:
            CACHE[pair], lost = False, lost + 1
            seconds += time.monotonic() - begun
    return lost


def _ask(pair: tuple[str, str]) -> bool:
    """Return the verdict of math-verify. Raises CallLost if the pair exceeds the limits."""
    me = threading.get_ident()
    process = OWN.get(me) or OWN.setdefault(me, RewardProcess([f"{__name__}:judge"]))
    arguments = {"completions": [pair[0]], "solution": [pair[1]], "completion_ids": [[]]}
    job = [(0, "math-verify")], arguments, ["the answer"]
    try:
        result = process.call(*job, timeout=LOST_SECONDS)
    except CallLost as reason:
        # The kernel ends a process at its limit with SIGXCPU. SIGKILL came from elsewhere, perhaps
        # before this call.
        if "SIGKILL" not in str(reason):
            raise
        result = process.call(*job, timeout=LOST_SECONDS)
    return result.rewards[0] == [1.0]


# --- in the process ---


def judge(completions: list[str], solution: list[str], **kwargs) -> list[float]:
    """Return 1 for each completion that equals its solution, in the form of a reward function."""
    verify = _verifier()
    limit = int(time.process_time()) + SECONDS + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard < 0 else min(limit, hard), hard))
    return [float(verify(answer, wanted)) for answer, wanted in zip(completions, solution)]


@functools.cache
def _verifier() -> Callable[[str, str], bool]:
    """Import math-verify, limit the memory of this process, and return the comparison."""
    import latex2sympy2_extended
    import math_verify

    for kind, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    faulthandler.unregister(signal.SIGUSR1)

    config = math_verify.LatexExtractionConfig(
        normalization_config=latex2sympy2_extended.NormalizationConfig(
            units=True, malformed_operators=True, nits=True
        ),
        boxed_match_priority=0,
    )

    def parse(answer: str) -> list:
        return math_verify.parse(
            rf"\boxed{{{answer}}}", [config], extraction_mode="first_match", parsing_timeout=None
        )

    def verify(answer: str, wanted: str) -> bool:
        try:
            return math_verify.verify(parse(wanted), parse(answer), timeout_seconds=None)
        except (Exception, MemoryError, RecursionError):  # any answer must get a verdict
            return False

    return verify

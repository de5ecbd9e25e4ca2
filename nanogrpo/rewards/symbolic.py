"""Use math-verify to decide whether two answers are equal, such as (x+1)^2 and x^2+2x+1.

In: pairs of an answer and a reference, as strings. Out: for each pair, True or False, or None if
the pair was not compared. Read next: rewards/process.py, which starts and kills the process of this
code.

A completion may contain an expression such as 10^{10^{10}} or 9!!!!!, which takes too much time or
memory to compute. So math-verify runs in its own process, which can be killed. For each pair, the
operating system limits this process to SECONDS of processor time and MEMORY bytes. A process that
exceeds the time limit is killed, even inside C code. If the process is killed, its pair counts as
different, and the next pair starts a new process. Math-verify's own time limit is not used, for two
reasons. Math-verify's limit depends on signals, which work only in a main thread. The limit also
applies to wall-clock time, so the load of the machine could change a result.
"""

import contextlib
import functools
import logging
import resource
import time

from nanogrpo.rewards.answers import latex, without_label
from nanogrpo.rewards.process import CallLost, RewardProcess

logger = logging.getLogger("nanogrpo")

SECONDS = 2  # processor time in seconds for a pair; most pairs need milliseconds
MEMORY = 2 << 30  # bytes of address space
MAX_LOST = 20  # maximum number of pairs that exceed their limits in one call
JUDGE = f"{__name__}:judge"

Pair = tuple[str, str]


def equal(pairs: list[Pair]) -> dict[Pair, bool | None]:
    """For each pair (answer, reference), return whether the two are equal, or None if they were not
    compared.

    A pair that exceeds its limits counts as different. After MAX_LOST pairs that exceeded their
    limits, no more pairs are compared in this call.
    """
    verdicts: dict[Pair, bool | None] = dict.fromkeys(pairs)
    lost = 0
    for answer, wanted in verdicts:
        if lost == MAX_LOST:
            break
        texts = {"completions": [latex(answer)], "solution": [latex(without_label(wanted))]}
        try:
            verdicts[answer, wanted] = _process().call(JUDGE, texts, {})[0] == [1.0]
        except CallLost:
            verdicts[answer, wanted] = False
            lost += 1
    if lost:
        logger.warning("math-verify gave up on %d answers, which count as wrong", lost)
    return verdicts


@functools.cache
def _process() -> RewardProcess:
    return RewardProcess([JUDGE], None)


# --- in the process ---


def judge(completions: list[str], solution: list[str], **kwargs) -> list[float]:
    """A reward function for one completion: return 1 if the completion equals its solution."""
    import math_verify

    limits = {
        resource.RLIMIT_CPU: int(time.process_time()) + SECONDS + 1,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        with contextlib.suppress(ValueError):  # if a lower hard limit already applies
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning about time limits
    reading = {
        "extraction_config": [math_verify.LatexExtractionConfig(boxed_match_priority=0)],
        "extraction_mode": "first_match",
        "parsing_timeout": None,
    }
    try:
        answer, wanted = (
            math_verify.parse(rf"\boxed{{{text}}}", **reading) for text in completions + solution
        )
        # The reference may be an interval while the answer is an inequality.
        options = {"timeout_seconds": None, "allow_set_relation_comp": True}
        return [float(math_verify.verify(wanted, answer, **options))]
    except Exception:  # an answer that causes an exception counts as wrong
        return [0.0]

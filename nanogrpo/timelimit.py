"""Limit the time of a call.

In: a function and a number of seconds. Out: its result, or TimeoutError. Used for tools
(engine/tools.py) and for records of data (data/prompts.py). Read next: errors.py.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

TRIES, PAUSE = 5, 1.0  # how many times to interrupt a function, and the seconds in between


class Overtime(BaseException):
    """Raised in a function when its time is over. It is no subclass of Exception, because many
    functions catch these.
    """


def limited(
    function: Callable[[], Any],
    seconds: float,
    give_up: Callable[[float, FrameType | None], None] | None = None,
) -> Any:
    """Call a function. If it has not returned after `seconds`, end it and raise TimeoutError. 0: no
    limit.

    A signal interrupts Python code and waiting for input, but a computation in C only when it
    returns. Only the main thread can use signals. If the function catches TRIES interrupts and
    continues, `give_up` is called with `seconds` and the frame that is running.
    """
    if not seconds:
        return function()
    tries = itertools.count(1)

    def over(_: int, frame: FrameType | None) -> None:
        if next(tries) > TRIES and give_up:
            give_up(seconds, frame)
        raise Overtime

    begun = time.monotonic()
    before = signal.signal(signal.SIGALRM, over)
    left, every = signal.getitimer(signal.ITIMER_REAL)  # a timer that runs already; restored below
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, PAUSE)
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Overtime:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the line above may have been interrupted
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if left:
            rest = max(left - (time.monotonic() - begun), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, rest, every)

"""Limit the time of a call.

In: a function and a number of seconds. Out: its result, or TimeoutError. Read before: calls.py.
"""

import signal
from collections.abc import Callable
from typing import Any

from nanogrpo.rewards.call import users_code


class Overtime(KeyboardInterrupt):
    """Raised in a function when its time is up. `except Exception` does not catch this class."""


@users_code()
def limited(function: Callable[[], Any], seconds: float) -> Any:
    """Call a function. If the function has not returned after `seconds`, end it and raise
    TimeoutError. With 0 seconds, there is no limit.

    A signal interrupts Python code, and code that waits for input. A computation in C is
    interrupted only when it returns. Only the main thread can use signals. If a function catches
    the interrupt, it continues without a time limit.
    """
    if not seconds:
        return function()

    def over(*_: object) -> None:
        raise Overtime

    before = signal.signal(signal.SIGALRM, over)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Overtime:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)

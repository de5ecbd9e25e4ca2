"""End all ranks of a run together, without ever hanging.

    normally     every rank exits after the same step
    on request   SIGTERM or Ctrl-C at any rank: `asked` is set; at the end of the step the ranks
                 agree to stop, save and exit
    on failure   the failing rank writes its error to the store that all ranks share, and exits.
                 The others lose their connection to it, or torchrun ends them. They find the error
                 in the store and exit with the same status, so only the first error is printed.
    on silence   a rank that hangs or is suspended closes no connection. The others fail when they
                 have waited for it for --ddp-timeout.

In: signals and exceptions. Out: exit statuses. 0: done, or stopped on request; 2: a user's mistake;
1: a bug, or a lost process; 128 + n: a second signal. Read before: world.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed as dist

from nanogrpo.errors import UserError, first_sentence

log = logging.getLogger("nanogrpo")

# Shared by the ranks, for the first error. None: the run has one process. `world.join` sets it.
store: dist.Store | None = None


def end(error: BaseException) -> NoReturn:
    """Report the error, unless another rank failed first, and exit without waiting for the others.

    Call it where raising the error would not end all ranks.
    """
    rank, status, message = os.environ.get("RANK", "0"), 1, str(error)
    if isinstance(error, (UserError, FloatingPointError)):
        status = 2
    elif isinstance(error, dist.DistError) or "gloo" in message:
        # no exception type distinguishes a lost peer from a bug in a collective
        message = (
            f"rank {rank} lost its connection to another process ({first_sentence(error)}): find "
            "out what ended it, then continue with --resume."
        )
    else:
        traceback.print_exception(error)
        message = f"rank {rank} failed: {type(error).__name__}: {error}"
    # two ranks may have the same message
    first = mine = f"{status} {rank} {message}"
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the process that holds the store is gone
            first = store.compare_set("failed", "", mine).decode()
    if first == mine:
        print(f"error: {message}", file=sys.stderr)
    leave(int(first.split()[0]))


def leave(status: int) -> NoReturn:
    """Exit immediately. An ordinary exit would destroy the process group, which waits for ranks
    that have already ended.
    """
    for stream in (sys.stdout, sys.stderr):
        # a closed pipe, or a flush that a signal interrupted
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            stream.flush()
    os._exit(status)


# --- stop on request ---

# Set by the first signal. Code that waits for something may then give up, so the run can save.
asked = threading.Event()
SIGNALS = signal.SIGTERM, signal.SIGINT


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Let a signal ask the run to stop: `with stoppable() as asked: … if asked.is_set(): …`.

    A second signal exits immediately. Signals within one second count as one, because schedulers
    signal every process, and torchrun forwards the signals it receives.
    """
    first = 0.0

    def handle(number: int, _frame: object) -> None:
        nonlocal first
        if not asked.is_set():
            first = time.monotonic()
            asked.set()
            log.warning(
                "%s: finishing and saving this step, then the run ends; send it again to exit "
                "at once.",
                signal.Signals(number).name,
            )
        elif time.monotonic() - first > 1.0:
            leave(128 + number)

    # Python allows signal handlers in the main thread only; elsewhere nothing asks for a stop.
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in SIGNALS if main}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        asked.clear()

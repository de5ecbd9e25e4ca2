"""End all ranks of a run together, without ever hanging.

    Normally:     Every rank exits after the same step.
    On request:   A signal such as Ctrl-C sets the event `asked` on the rank that receives it. At
                  the end of the step, all ranks agree to stop, save and exit.
    On failure:   The failing rank writes its error to a store that all ranks share, and exits.
                  The other ranks lose their connection to the failing rank, or torchrun ends them.
                  All ranks exit with the same status, and only the first error is printed.
    On silence:   A rank that hangs or is suspended does not close its connections. The other ranks
                  wait for the rank that hangs, and fail after --ddp-timeout seconds.

In: signals and exceptions. Out: the exit status. The exit status is 0 if the run finished or was
asked to stop, 2 after a user's mistake, 1 after a bug or the loss of a process, and 128 + n after a
second signal n. Read before: world.py.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import NoReturn

import torch.distributed as dist

from nanogrpo.distributed.parent import Console
from nanogrpo.errors import UserError, first_sentence

logger = logging.getLogger("nanogrpo")

# All ranks share this store, which holds the first error. None if the run has only one process.
store: dist.Store | None = None


def end(error: BaseException) -> NoReturn:
    """Report the error, unless another rank failed first. Exit without waiting for the other ranks.

    Use this function if raising the error would not end all ranks.
    """
    rank, status, message = os.environ.get("RANK", "0"), 1, str(error)
    if isinstance(error, (UserError, FloatingPointError)):
        status = 2
    elif isinstance(error, dist.DistError) or "gloo" in message:
        # a lost process and a bug in a collective raise exceptions of the same type
        message = (
            f"rank {rank} lost its connection to another process ({first_sentence(error)}): find "
            "out what ended it, then continue with --resume."
        )
    else:
        traceback.print_exception(error)
        message = f"rank {rank} failed: {type(error).__name__}: {error}"
    # the rank number is included, because two ranks may have the same message
    first = mine = f"{status} {rank} {message}"
    if store is not None:
        with contextlib.suppress(RuntimeError):  # raised if the process with the store has ended
            first = store.compare_set("failed", "", mine).decode()
    if first == mine:
        print(f"error: {message}", file=sys.stderr)
    # an ordinary exit would destroy the process group, and so wait for ranks that have ended
    os._exit(int(first.split()[0]))


# --- stop on request ---

# Set by the first signal. Code that waits can check this event and stop waiting.
asked = threading.Event()
# SIGHUP: the terminal or its connection was closed. Batch systems send the last three signals.
SIGNALS = (
    signal.SIGHUP,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Set the event `asked` when one of SIGNALS arrives, as in `with stoppable() as asked: …`.
    Within this block, the run also survives the loss of its console.

    A second signal exits immediately. Signals within one second count as one signal, because a
    process may get the same signal from the scheduler and from torchrun.
    """
    first, me = 0.0, os.getpid()

    def handle(number: int, _frame: object) -> None:
        nonlocal first
        if os.getpid() != me:  # this is a process that the user's code forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not asked.is_set():
            first = time.monotonic()
            asked.set()
            logger.warning(
                "%s: finishing and saving this step, then the run ends; send it again to exit "
                "at once.",
                signal.Signals(number).name,
            )
        elif time.monotonic() - first > 1.0:
            os._exit(128 + number)

    # Python allows signal handlers only in the main thread.
    main = threading.current_thread() is threading.main_thread()
    # `nohup` makes a process ignore SIGHUP, the first of SIGNALS
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {n: signal.signal(n, handle) for n in (SIGNALS[nohup:] if main else ())}
    try:
        with redirect_stdout(Console(sys.stdout)), redirect_stderr(Console(sys.stderr)):
            yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        asked.clear()

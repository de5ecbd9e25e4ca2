"""End a process when the process that started it ends, for whatever reason.

In: a process id. Out: nothing; the effect comes when that process ends.

There are two functions because no single mechanism covers both cases. `killed_with` asks the kernel
to kill us. It works even if C code never releases Python's global lock, but only for our direct
parent. `on_end` waits on a thread. It works for any process, and lets the caller choose what to do.

Standard library only: vLLM's interpreter imports this file too. Used by serve.py, vllm/worker.py
and rewards/process.py.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable


def killed_with(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(0)


def on_end(pid: int, then: Callable[[], object], pipe: int | None = None) -> None:
    """Call `then` on a thread once process `pid` ends, or the other end of `pipe` is closed.

    Each of the two detects cases that the other misses: some containers forbid `pidfd_open`, and a
    child forked by the process keeps its end of the pipe open.
    """
    watched = [] if pipe is None else [pipe]
    try:
        watched.append(os.pidfd_open(pid))
    except ProcessLookupError:  # it has already ended
        watched = []
    except (AttributeError, OSError):  # not on Linux, or not permitted
        if pipe is None:
            raise

    def wait() -> None:
        while watched:
            readable, _, _ = select.select(watched, [], [])
            if pipe is None or readable != [pipe] or not os.read(pipe, 4096):
                break
        then()

    threading.Thread(target=wait, daemon=True).start()

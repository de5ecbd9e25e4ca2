"""End a process when the process that started it ends, for whatever reason. Kill a process group.

In: a process id. Out: nothing; the effect comes when that process ends, or at once.

`killed_with` and `on_end` watch another process. There are two because no single mechanism covers
both cases. `killed_with` asks the kernel to kill us. It works even if C code never releases
Python's global lock, but only for our direct parent. `on_end` waits on a thread. It works for any
process, and lets the caller choose what to do.

Standard library only: vLLM's interpreter imports this file too. Used by serve.py, vllm/server.py,
vllm/worker.py and rewards/process.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path


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


def kill_workers(leader: int) -> None:
    """Kill the other processes of a process group, except multiprocessing's resource tracker.

    When all of them have ended, the tracker removes their shared memory and semaphores, and ends.
    Linux only: it reads /proc.
    """
    done = {leader}
    while found := _members(leader) - done:  # a process may start another one before it is killed
        for pid in found:
            with contextlib.suppress(OSError):  # it has just ended
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                spared = b"multiprocessing.resource_tracker" in command
                # if the group is suspended, the tracker must go on
                os.kill(pid, signal.SIGCONT if spared else signal.SIGKILL)
        done |= found


def _members(group: int) -> set[int]:
    """Return the ids of the processes of a group that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, own = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(own) == group and state not in b"ZX":
                found.add(int(path.parent.name))
    return found

"""End a process when the process that started it ends, for whatever reason. Kill the workers of a
process.

In: a process id. Out: nothing. `kill_workers` acts at once, the others when that process ends.

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

    Once the leader has ended, too, the tracker removes the group's shared memory and semaphores,
    and ends. If processes cannot be listed, the whole group is killed.
    """
    done = {leader}
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            raise OSError("this is the /proc of another namespace, with other ids")
        while found := _members(leader) - done:  # one may start another before it is killed
            for pid in found:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    # a tracker that is suspended with its group has to go on
                    os.kill(pid, signal.SIGCONT if _is_tracker(pid) else signal.SIGKILL)
            done |= found
    except OSError:  # no /proc, no free file descriptor, …
        # PermissionError: on macOS, if all have ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _members(group: int) -> set[int]:
    """Return the ids of the processes of a group."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        # it has ended, or is another user's
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if int(_stat(name)[2]) == group:
                found.add(int(name))
    return found


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _is_tracker(pid: int) -> bool:
    fields = _stat(pid)
    state, threads = fields[0], fields[17]
    # Reading the command of a process in state D (it hangs in the kernel) may block, so it counts
    # as a worker. The tracker has one thread.
    command = Path(f"/proc/{pid}/cmdline")
    return state != b"D" and threads == b"1" and b"resource_tracker" in command.read_bytes()

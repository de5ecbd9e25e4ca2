"""The processes of a server: kill all of them, or end them when the process that started them ends.

In: a process id. Out: nothing. This file is used by serve.py, server.py and worker.py. The file
needs only the standard library, because vLLM's interpreter imports it, too.
"""

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path


def on_end(pid: int, then: Callable[[], object]) -> None:
    """When process `pid` ends for any reason, call `then` on a thread. Linux only.

    The kernel can also kill a process when its parent ends (distributed/parent.py). However, the
    kernel considers the thread that started the process to be its parent. This thread may end while
    the run continues.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:  # it has already ended
        then()
        return

    def wait() -> None:
        select.select([process], [], [])
        then()

    threading.Thread(target=wait, daemon=True).start()


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address. Raises OSError if the port is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def kill_group(leader: int) -> None:
    """Kill the processes of a group, the leader last. Multiprocessing's resource tracker is not
    killed: the tracker removes the shared memory of the other processes and then ends.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGCONT)  # a suspended tracker must continue
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            group = (folder / "stat").read_text().rpartition(")")[2].split()[2]
            tracker = b"resource_tracker" in (folder / "cmdline").read_bytes()
            if int(group) == leader != int(folder.name) and not tracker:
                os.kill(int(folder.name), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)

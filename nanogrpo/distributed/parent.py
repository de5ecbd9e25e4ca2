"""Handle the end of a process that this process depends on.

If the parent of a process ends, the process ends, too. If the reader of a process's output ends,
the process continues without output. Standard library only. Used by rewards/process.py,
world.py and failure.py.
"""

import ctypes
import os
import signal
import sys
from typing import Any


def signaled_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the Linux kernel send a signal to this process when its parent ends. On other systems,
    do nothing. SIGKILL works even if C code never releases Python's global lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent has already ended
            os._exit(0)


class Console:
    """A standard stream whose reader may end before the run ends, for example `tee` after Ctrl-C.
    After the end of its reader, the stream drops all output and raises no error.
    """

    def __init__(self, stream: Any):
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115 (None: it is closed)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            # also drops what is still in a buffer, and the output of C code
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

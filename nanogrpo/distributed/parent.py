"""End a process when its parent process ends for any reason.

In: the id of the parent. Out: nothing. Standard library only. Used by rewards/process.py.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def killed_with(parent: int) -> None:
    """Make the Linux kernel send SIGKILL to this process when its parent ends. On other systems, do
    nothing. The signal works even if C code never releases Python's global lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent has already ended
            os._exit(0)

"""End a process when the process that started it ends, for whatever reason.

In: the id of the parent. Out: nothing. Standard library only. Used by rewards/process.py.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def killed_with(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. Linux only.

    It works even if C code never releases Python's global lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(0)

"""The end of a child process with its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: a new child must not import anything.
_LIBC = ctypes.CDLL(None, use_errno=True)


def exit_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> bool:
    """Ask the kernel (Linux) to send this process a signal when its parent ends.

    Return False when the parent with the id `parent` has ended already. On other systems nothing is sent; a closed
    channel then ends the process later.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return parent is None or os.getppid() == parent

"""The priority of a process's session, as Linux schedules it (sched(7), autogroup)."""

from __future__ import annotations

import os
from pathlib import Path


def session_niceness(pid: int | str) -> int | None:
    """Return the niceness of the session of a process; None where the kernel does not share cores by sessions."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except OSError:
        return None


def child_pids() -> list[str]:
    """Return the ids of the processes that this process's main thread has started (Linux)."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

"""A gate at which the thread that trains on a CPU yields while another thread does what cannot wait.

Both threads need the interpreter's lock hundreds of times in a round. The training thread has a low priority
(niceness), so it may lose its core while it holds that lock. The other thread, for which peers wait, would then wait
too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from peer.training.time_breakdown import Activity, TimeBreakdown


class YieldGate:
    """An event that is open at first. A step calls `wait` often; a request closes the gate for its duration."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._why = Activity.APPLYING

    def wait(self, times: TimeBreakdown | None = None) -> None:
        """Block until the gate is open. `times`, the calling thread's, count the wait as the request's activity."""
        if not self._open.is_set():
            with times.during(self._why, time.monotonic) if times else nullcontext():
                self._open.wait()

    @contextmanager
    def closed(self, why: Activity) -> Iterator[None]:
        """Keep the gate closed for the block. One thread at a time closes it."""
        self._why = why
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

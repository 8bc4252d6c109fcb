"""CPU time, for tests that something costs little."""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 3


def is_done_within(seconds: float, act: Callable[[], object]) -> bool:
    """Return whether one of three tries takes less CPU time of this thread.

    A garbage collection of the whole test process may fall into a single one: it took two seconds.
    """
    for _ in range(TRIES):
        began = time.thread_time()
        act()
        if time.thread_time() - began < seconds:
            return True
    return False

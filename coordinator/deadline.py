"""`asyncio.wait_for` without a task of its own.

Its task's error is lost, and complained of in the log, when the caller leaves at the same moment; strangers would fill
logs with that. It also costs more than many of the calls that it is put around. (Python 3.11 has `asyncio.timeout`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of the work. Raises asyncio.TimeoutError when it is not there in time: it is cancelled then."""
    task = asyncio.current_task()
    over = False

    def end() -> None:
        nonlocal over
        over = True
        if task is not None:
            task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        return await work
    except asyncio.CancelledError:
        # `uncancel` (3.11) says how many others want the task to end, which is more than this timer then.
        others = getattr(task, "uncancel", lambda: 0)() if over else 0
        if not over or others:
            raise
        raise asyncio.TimeoutError from None
    finally:
        timer.cancel()

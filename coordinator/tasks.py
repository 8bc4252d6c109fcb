"""Background work of the coordinator: it waits for news, and continues after a fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set; set it when the time is over.

    Unlike `asyncio.wait_for` before Python 3.12, this never swallows a cancellation that arrives at the very moment
    when the event is set.
    """
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


async def supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run the work for ever, after each end and each fault again after RETRY_SECONDS."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s: a fault of the coordinator; it continues in %.0f s", name, RETRY_SECONDS)
        await asyncio.sleep(RETRY_SECONDS)

"""Background work of the coordinator: it waits for news, and continues after a fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

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


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which goes on though the caller is cancelled. Then its failure is logged."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("after its caller was gone, a call failed: %s", error)


async def supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run the work for ever, after each end and each fault again after RETRY_SECONDS."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s: a fault of the coordinator; it continues in %.0f s", name, RETRY_SECONDS)
        await asyncio.sleep(RETRY_SECONDS)

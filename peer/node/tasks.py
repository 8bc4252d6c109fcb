"""Background tasks of a node: how they start, how their errors end the node, and how they are cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """The tasks of one node. The first unexpected error in one of them becomes `failure`, which ends the node."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task; `name` is for the log."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self.failure.done():
            log.error("%s: %s", task.get_name(), error)
        else:
            self.failure.set_exception(error)

    def stop_reporting(self) -> None:
        """Log the errors of tasks from here on instead of ending the node: it is ending anyway."""
        if not self.failure.done():
            self.failure.cancel()

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they are over."""
        await cancel_and_wait(self._tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel these tasks and wait until they are over.

    A task is cancelled up to five times: hivemind uses `asyncio.wait_for`, which before Python 3.12 swallows a
    cancellation that arrives at the same moment as its result.
    """
    left = {t for t in tasks if not t.done()}
    for _ in range(5):
        for task in left:
            task.cancel()
        if not left:
            return
        _, left = await asyncio.wait(left, timeout=1.0)
    if left:
        log.error("these tasks did not end and are abandoned: %s", ", ".join(str(t) for t in left))

"""Background tasks that a test can wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from peer.node.tasks import Tasks


class RecordedTasks(Tasks):
    """The tasks of a node, with all that were ever spawned."""

    def __init__(self) -> None:
        super().__init__()
        self.spawned: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = super().spawn(work, name)
        self.spawned.append(task)
        return task

    async def finish(self) -> None:
        """Wait for the tasks that were spawned up to now."""
        await asyncio.gather(*self.spawned)

"""How a node's tasks end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("peer.node")


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel these and wait until they are over. Not only once: hivemind waits with `asyncio.wait_for`, which before
    Python 3.12 swallows a cancellation that comes in the instant of its result."""
    left = {t for t in tasks if not t.done()}
    for _ in range(5):
        for task in left:
            task.cancel()
        if not left:
            return
        _, left = await asyncio.wait(left, timeout=1.0)
    log.error("still at work, and left behind: %s", ", ".join(str(t) for t in left))

"""The running event loop's time: in tests one of its own."""

from __future__ import annotations

import asyncio


def clock() -> float:
    """Seconds, from any beginning."""
    return asyncio.get_running_loop().time()

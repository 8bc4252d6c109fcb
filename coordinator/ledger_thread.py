"""The ledger's own thread: SQLite blocks, and the event loop must not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from coordinator.errors import TooManyError
from coordinator.ledger import Ledger
from protocol.ids import RunId

T = TypeVar("T")
MAX_WAITING = 1000


class LedgerThread:
    """Runs what it is given with the ledger, one after the other, in the order of asking."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._ledger: Ledger | None = None
        self._waiting = 0

    async def open(self, path: Path, run: RunId) -> None:
        """Raises LedgerError."""
        self._ledger = await asyncio.get_running_loop().run_in_executor(self._pool, Ledger, path, run)

    async def run(self, work: Callable[[Ledger], T]) -> T:
        """The result of `work(ledger)`. A caller that is cancelled leaves the work to be done all the same.

        Raises TooManyError when too much is waiting already, and whatever the work raises.
        """
        ledger = self._ledger
        if ledger is None:
            raise RuntimeError("the ledger is not open")
        if self._waiting >= MAX_WAITING:
            raise TooManyError("the coordinator is busy: try again in 5 s")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, ledger)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Finishes what was asked, then closes the file."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await asyncio.get_running_loop().run_in_executor(self._pool, ledger.close)
        self._pool.shutdown(wait=False)

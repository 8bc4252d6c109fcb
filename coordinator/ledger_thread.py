"""The ledger's own threads: databases block, and the event loop must not.

One thread writes. It runs all waiting jobs in one transaction, and answers when that is on disk (group commit): a disk
that syncs a hundred times a second carries thousands of admissions. Another thread only reads, and sees what was
committed; reads never delay a write.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from coordinator.errors import LedgerError, TooManyError
from coordinator.ledger import Ledger
from protocol.spec import RunSpec

T = TypeVar("T")
MAX_WAITING = 1000
MAX_GROUP = 256
"""Jobs in one transaction."""


class _Job:
    """A job and its waiting caller."""

    def __init__(self, work: Callable[[Ledger], Any]):
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.result: Any = None
        self.error: BaseException | None = None

    def answer(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class LedgerThread:
    """Runs jobs with the ledger, one after the other, in the order of the calls."""

    def __init__(self):
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")
        self._ledger: Ledger | None = None
        self._reader: Ledger | None = None
        self._waiting = 0

    async def open(self, where: str | Path, spec: RunSpec, now: Callable[[], float] = time.time) -> None:
        """Open the ledger for writing and for reading. Raises LedgerError."""
        ledger = await asyncio.to_thread(Ledger, where, spec, now=now)
        try:
            self._reader = await asyncio.to_thread(Ledger, where, spec, reader=True)
        except BaseException:
            ledger.close()
            raise
        self._ledger = ledger
        self._thread = threading.Thread(target=self._write_on, args=(ledger,), name="ledger", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[Ledger], T]) -> T:
        """Return the result of `work(ledger)` when what it wrote is on disk; `work` must not keep the ledger.

        If the caller is cancelled, the work is done all the same. Raises TooManyError when too many jobs wait already,
        whatever the work raises, and LedgerError if the commit failed.
        """
        self._check()
        job = _Job(work)
        self._jobs.put(job)
        return await self._answered(job.future)

    async def read(self, work: Callable[[Ledger], T]) -> T:
        """Return the result of `work(ledger)`, which only reads: it sees what is committed, and waits for no write."""
        self._check()
        if (reader := self._reader) is None:
            raise RuntimeError("the ledger is not open")
        return await self._answered(asyncio.get_running_loop().run_in_executor(self._reading, work, reader))

    def _check(self) -> None:
        if self._ledger is None:
            raise RuntimeError("the ledger is not open")
        # A caller that is gone waits no more, but its job does.
        if max(self._waiting, self._jobs.qsize()) >= MAX_WAITING:
            raise TooManyError("the coordinator is busy: try again in 5 s")

    async def _answered(self, future: Any) -> Any:
        self._waiting += 1
        try:
            return await future
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Finish the waiting jobs, then close the database."""
        ledger, self._ledger = self._ledger, None
        reader, self._reader = self._reader, None
        if ledger is not None and self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)
        if reader is not None:
            self._reading.submit(reader.close)  # in the reader's thread, after a read in progress
        await asyncio.to_thread(self._reading.shutdown)

    def _write_on(self, ledger: Ledger) -> None:
        last = False
        while not last:
            group = [self._jobs.get()]
            with suppress(queue.Empty):
                while len(group) < MAX_GROUP:
                    group.append(self._jobs.get_nowait())
            jobs = [job for job in group if job is not None]
            last = len(jobs) < len(group)
            if jobs:
                write_group(ledger, jobs)
        ledger.close()


def write_group(ledger: Ledger, jobs: list[_Job]) -> None:
    """Do the jobs in one transaction, then answer each: never before the commit."""
    try:
        with ledger.group():
            for job in jobs:
                try:
                    with ledger.part():
                        job.result = job.work(ledger)
                except Exception as e:  # passed to the caller
                    job.error = e
                    if ledger.broken:
                        raise
    except Exception as e:  # noqa: BLE001 - nothing of the group is on disk
        reported = e if isinstance(e, LedgerError) else LedgerError(f"{ledger.where}: {e!r}: its log has the reason")
        for job in jobs:
            job.error = job.error or reported
    for job in jobs:
        job.answer()

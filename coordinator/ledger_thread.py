"""The ledger's own threads: databases block, and the event loop must not.

One thread writes. It takes all that waits, does it in one transaction, and answers when that is on disk (group commit):
so a disk that syncs a hundred times a second carries thousands of admissions. Another thread only reads, and sees what
was committed; reads never hold up a write.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from asyncio.subprocess import PIPE
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
"""Pieces of work in one transaction."""


class _Job:
    """A piece of work and who waits for it."""

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
    """Runs what it is given with the ledger, one after the other, in the order of asking."""

    def __init__(self):
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-reader")
        self._ledger: Ledger | None = None
        self._reader: Ledger | None = None
        self._where: tuple[str | Path, RunSpec] | None = None
        self._waiting = 0

    async def open(self, where: str | Path, spec: RunSpec, now: Callable[[], float] = time.time) -> None:
        """Raises LedgerError."""
        ledger = await asyncio.to_thread(Ledger, where, spec, now=now)
        try:
            self._reader = await asyncio.to_thread(Ledger, where, spec, reader=True)
        except BaseException:
            ledger.close()
            raise
        self._ledger, self._where = ledger, (where, spec)
        self._thread = threading.Thread(target=self._write_on, args=(ledger,), name="ledger", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[Ledger], T]) -> T:
        """The result of `work(ledger)`, when what it wrote is on disk. It must be done with when it returns.

        A caller that is cancelled leaves the work to be done all the same. Raises TooManyError when too much is waiting
        already, and whatever the work raises; LedgerError when it could not be put on disk.
        """
        self._check()
        job = _Job(work)
        self._jobs.put(job)
        return await self._answered(job.future)

    async def read(self, work: Callable[[Ledger], T]) -> T:
        """As `run`, for what writes nothing: it sees what is committed, and waits for no write."""
        self._check()
        if (reader := self._reader) is None:
            raise RuntimeError("the ledger is not open")
        return await self._answered(asyncio.get_running_loop().run_in_executor(self._reading, work, reader))

    async def check(self) -> list[str]:
        """Where the whole ledger differs from what it should be (`Ledger.check`); it may take minutes, in a process of
        its own. Raises LedgerError when it cannot be read."""
        if self._where is None:
            raise RuntimeError("the ledger is not open")
        where, spec = self._where
        command = [sys.executable, "-m", "coordinator.ledger"]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            found, error = await process.communicate(f"{where}\n".encode() + spec.canonical())
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode:
            raise LedgerError(error.decode(errors="replace").strip()[-1000:] or f"{command} failed")
        return found.decode(errors="replace").splitlines()

    def _check(self) -> None:
        if self._ledger is None:
            raise RuntimeError("the ledger is not open")
        if self._waiting >= MAX_WAITING:
            raise TooManyError("the coordinator is busy: try again in 5 s")

    async def _answered(self, future: Any) -> Any:
        self._waiting += 1
        try:
            return await future
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Finishes what was asked, then closes the database."""
        ledger, self._ledger = self._ledger, None
        reader, self._reader = self._reader, None
        if ledger is not None and self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)
        # A read goes on when who asked for it has left: the connection must outlive it.
        await asyncio.to_thread(self._reading.shutdown, wait=True, cancel_futures=True)
        if reader is not None:
            reader.close()

    # -- in the thread ---------------------------------------------------------------------------------------

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
    """Do the jobs in one transaction, then tell each how it went: never before the commit."""
    try:
        with ledger.group():
            for job in jobs:
                try:
                    with ledger.part():
                        job.result = job.work(ledger)
                except Exception as e:  # told to whoever asked
                    job.error = e
                    if ledger.broken:
                        raise
    except Exception as e:  # noqa: BLE001 - nothing of the group is on disk
        told = e if isinstance(e, LedgerError) else LedgerError(f"{ledger.where}: {e!r}: its log has the reason")
        for job in jobs:
            job.error = job.error or told
    for job in jobs:
        job.answer()

"""The ledger's threads: waiting entries are committed together, and no result is returned before they are on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from coordinator.errors import LedgerConflictError, LedgerError, TooManyError
from coordinator.ledger import AdmissionRow, Ledger
from coordinator.ledger.database import Database
from coordinator.ledger_thread import MAX_WAITING, LedgerThread
from tests.support.coordinator_fakes import make_credits, make_spec, peer
from tests.support.waiting import LIMIT, ended, until

SPEC = make_spec()
Query = Callable[..., list]
ENDS = {"COMMIT", "ROLLBACK"}


@pytest.fixture
async def thread(ledger_place):
    opened = LedgerThread()
    await opened.open(ledger_place, SPEC)
    yield opened
    await opened.close()


def admitted(n: int) -> AdmissionRow:
    return AdmissionRow(peer(n).key, f"p{n}", 1, 1, 10, b"x")


def before_each_query(monkeypatch: pytest.MonkeyPatch, work: Callable[[Query, str, Sequence], object]) -> None:
    """Have `work` called before each query of a database: with its `query`, the statement and the values."""

    def replaced(query: Query) -> Query:
        def both(db: Database, sql: str, values: Sequence = ()) -> list:
            work(partial(query, db), sql, values)
            return query(db, sql, values)

        return both

    for kind in Database.__subclasses__():
        monkeypatch.setattr(kind, "query", replaced(kind.query))


class Held:
    """A lock on the writer, so that requests meanwhile wait for one group."""

    def __init__(self, thread: LedgerThread):
        self._go, self._begun = threading.Event(), threading.Event()
        self.task = asyncio.ensure_future(thread.run(self._hold))

    def _hold(self, _: Ledger) -> None:
        self._begun.set()
        self._go.wait(LIMIT)

    async def begun(self) -> None:
        await until(self._begun.is_set, "the writer is held")

    async def release(self) -> None:
        await asyncio.sleep(0)
        self._go.set()
        await self.task


async def test_writes_that_wait_are_one_transaction(thread: LedgerThread, monkeypatch):
    ended_by: list[str] = []
    before_each_query(monkeypatch, lambda _, sql, values: ended_by.append(sql) if sql in ENDS else None)
    held = Held(thread)
    await held.begun()
    writes = [asyncio.ensure_future(thread.run(lambda db, n=n: db.add_admission(admitted(n)))) for n in range(100)]
    await held.release()
    await asyncio.gather(*writes)
    assert ended_by == ["COMMIT"] * 2  # the one that was held, and all that waited
    assert len(await thread.read(lambda db: db.admissions())) == 100


async def test_one_that_fails_takes_no_other_with_it(thread: LedgerThread):
    rounds = make_credits(3)
    held = Held(thread)
    good = [asyncio.ensure_future(thread.run(lambda db, a=a: db.post(a))) for a in rounds[:1]]
    gap = asyncio.ensure_future(thread.run(lambda db: db.post(rounds[2])))
    fault = asyncio.ensure_future(thread.run(lambda db: (db.post(rounds[1]), 1 / 0)))
    good += [asyncio.ensure_future(thread.run(lambda db, a=a: db.post(a))) for a in rounds[1:]]
    await held.release()
    assert await asyncio.gather(*good) == [True] * 3
    with pytest.raises(LedgerConflictError):
        await gap
    with pytest.raises(ZeroDivisionError):
        await fault
    assert await thread.run(lambda db: db.check()) == []


async def test_the_fold_is_read_again_only_after_a_failure_that_may_have_changed_it(thread: LedgerThread, monkeypatch):
    rounds, reads, read = make_credits(3), [], Ledger.read_fold
    monkeypatch.setattr(Ledger, "read_fold", lambda self, run: reads.append(run) or read(self, run))
    assert await thread.run(lambda db: db.post(rounds[0])) and len(reads) == 1

    async def fails(work: Callable[[Ledger], object]) -> None:
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda db: (work(db), 1 / 0))

    await fails(lambda db: db.add_admission(admitted(1)))
    await fails(lambda db: db.current_balances())
    assert await thread.run(lambda db: db.post(rounds[1])) and len(reads) == 1
    await fails(lambda db: db.post(rounds[2]))
    assert await thread.run(lambda db: db.post(rounds[2])) and len(reads) == 2
    assert await thread.run(lambda db: db.check()) == []


async def test_only_the_balances_of_those_asked_for_are_read(thread: LedgerThread, monkeypatch):
    read: list[int] = []
    rounds = make_credits(2)
    for credits in rounds:
        await thread.run(lambda db, c=credits: db.note_first_seen(c.record, c.round, 1000.0))
        await thread.run(lambda db, c=credits: db.post(c))
    before_each_query(monkeypatch, lambda query, sql, values: read.append(len(query(sql, values)))
                      if "balances" in sql else None)  # fmt: skip
    monkeypatch.setattr("coordinator.ledger.queries.MAX_ASKED", 1)
    some = [rounds[0].lines[0].peer, peer(77).key]
    found = await thread.run(lambda db: db.active_since(dict.fromkeys(some, lambda: 5.0)))
    assert found == {some[0]: 1000.0, some[1]: 5.0}
    assert sum(read) == 1 < len(rounds[0].lines)


async def test_nobody_is_told_of_what_was_not_committed(thread: LedgerThread, monkeypatch):
    full = True

    def fail(_: Query, sql: str, values: Sequence) -> None:
        if full and sql == "COMMIT":
            raise LedgerError("the disk is full")

    before_each_query(monkeypatch, fail)
    results = await asyncio.gather(
        thread.run(lambda db: db.post(make_credits(1)[0])), thread.run(lambda db: db.add_admission(admitted(1))),
        return_exceptions=True,
    )  # fmt: skip
    assert all(isinstance(r, LedgerError) for r in results)
    assert await thread.read(lambda db: (db.size(), db.admissions())) == (0, [])
    full = False
    assert await thread.run(lambda db: db.post(make_credits(1)[0]))
    assert await thread.run(lambda db: db.check()) == []


async def test_a_database_that_ends_the_transaction_by_itself_fails_all_of_the_group(thread: LedgerThread, monkeypatch):
    def fail(query: Query, sql: str, values: Sequence) -> None:
        if bytes(peer(2).key) in values:
            query("ROLLBACK")  # as SQLite does when the disk is full
            raise LedgerError("the disk is full")

    before_each_query(monkeypatch, fail)
    held = Held(thread)
    jobs = [thread.run(lambda db, n=n: db.add_admission(admitted(n))) for n in (1, 2, 3)]
    told = asyncio.ensure_future(asyncio.gather(*jobs, return_exceptions=True))
    await asyncio.gather(held.release(), return_exceptions=True)
    assert [type(r) for r in await told] == [LedgerError] * 3
    assert await thread.read(lambda db: db.admissions()) == []


async def test_a_reader_sees_what_is_committed_and_waits_for_no_write(thread: LedgerThread):
    await thread.run(lambda db: db.add_admission(admitted(1)))
    held = Held(thread)
    assert len(await ended(thread.read(lambda db: db.admissions()))) == 1
    await held.release()
    with pytest.raises(LedgerError):
        await thread.read(lambda db: db.add_admission(admitted(2)))


async def test_it_is_not_closed_under_a_read_whose_asker_has_left(ledger_place):
    opened, begun, go, seen = LedgerThread(), threading.Event(), threading.Event(), []
    await opened.open(ledger_place, SPEC)

    def slow(db: Ledger) -> None:
        begun.set()
        go.wait(LIMIT)
        seen.append(db.size())

    gone = asyncio.ensure_future(opened.read(slow))
    await until(begun.is_set, "the read has begun")
    gone.cancel()
    closing = asyncio.ensure_future(opened.close())
    await asyncio.sleep(0.1)  # time in which it could close the database, and must not
    go.set()
    await ended(closing)
    assert len(seen) == 1  # it was read, not refused by a closed database


async def test_too_much_that_waits_is_refused(thread: LedgerThread):
    held = Held(thread)
    waiting = [asyncio.ensure_future(thread.run(lambda _: None)) for _ in range(MAX_WAITING - 1)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyError):
        await thread.run(lambda _: None)
    await held.release()
    await asyncio.gather(*waiting)


async def test_the_jobs_of_callers_that_are_gone_count_until_they_are_done(thread: LedgerThread):
    held = Held(thread)
    await held.begun()
    for _ in range(2):
        gone = [asyncio.ensure_future(thread.run(lambda _: None)) for _ in range(MAX_WAITING // 2)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
    last = asyncio.ensure_future(thread.run(lambda _: None))
    await held.release()
    with pytest.raises(TooManyError):
        await last


async def test_a_caller_that_is_gone_leaves_the_work_to_be_done(thread: LedgerThread):
    held = Held(thread)
    gone = asyncio.ensure_future(thread.run(lambda db: db.add_admission(admitted(1))))
    await asyncio.sleep(0)
    gone.cancel()
    await held.release()
    assert len(await thread.run(lambda db: db.admissions())) == 1

"""The ledger as the coordinator uses it: the state of one run's credits, in a database.

Each method is one transaction; within `group` several are, and each still fails by itself. A posted round is compared,
not added again. So a coordinator that was killed at any moment restarts, reads where the ledger ends, and appends what
follows on the chain. Synchronous and used by one thread at a time: see `ledger_thread`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import writes
from coordinator.ledger.database import Database, SqliteDatabase
from coordinator.ledger.integrity import check_all, check_opened
from coordinator.ledger.queries import LedgerQueries
from coordinator.ledger.rows import AdmissionRow, BindingRow, RefusedUpdate, TreeHeadRow
from coordinator.ledger.schema import migrate
from protocol.errors import LedgerRuleError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.accounts import AccountBalance
from protocol.ledger.credits import CreditRule, RoundCredits
from protocol.ledger.entries import encode_line
from protocol.ledger.state import LedgerState, PostedEntry
from protocol.spec import RunSpec


def connect(where: str | Path, spec: RunSpec, *, reader: bool = False) -> Database:
    """Return the database at a path (SQLite) or a postgresql:// URL. Raises LedgerError."""
    if isinstance(where, str) and where.startswith(("postgresql://", "postgres://")):
        try:
            from coordinator.ledger.postgres import PostgresDatabase
        except ImportError as e:
            raise LedgerError("a ledger in PostgreSQL needs psycopg: pip install 'cairn[postgres]'") from e
        return PostgresDatabase(where, spec.run_id, reader=reader)
    if isinstance(where, str) and "://" in where:
        raise LedgerError(f"{where.split('://')[0]}:// is no address of a ledger: want a file, or postgresql://...")
    return SqliteDatabase(Path(where), reader=reader)


class Ledger(LedgerQueries):
    """The database of one run. Every method raises LedgerError.

    `where` is a file or a postgresql:// URL, `now` gives unix seconds for the times of entries. A `reader` cannot
    write.
    """

    def __init__(self, where: str | Path, spec: RunSpec, *, now: Callable[[], float] = time.time, reader: bool = False):
        self.run = spec.run_id
        self._spec = spec
        self._rule = CreditRule.of(spec)
        self._now = now
        self._grouped = False
        self._books: LedgerState | None = None
        self._numbers: writes.PeerNumbers | None = None
        super().__init__(connect(where, spec, reader=reader))
        try:
            if not reader:
                migrate(self._db, self.run)
                check_opened(self._db, spec)
        except BaseException:
            self._db.close()
            raise

    @property
    def where(self) -> str:
        """The file or the address, without a password."""
        return self._db.where

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Put everything within into one transaction: it is on disk when the context ends without an error."""
        try:
            with self._db.transaction():
                self._grouped = True
                yield
        except BaseException:
            self._forget()
            raise
        finally:
            self._grouped = False

    @contextmanager
    def part(self) -> Iterator[None]:
        """Make a section of a group that fails by itself."""
        try:
            with self._db.savepoint():
                yield
        except BaseException:
            self._forget()
            raise

    @property
    def broken(self) -> bool:
        """Within a group: whether the database has ended the transaction by itself, and all of it is lost."""
        return self._grouped and not self._db.in_transaction

    @contextmanager
    def _writing(self) -> Iterator[tuple[LedgerState, writes.PeerNumbers]]:
        try:
            with self._db.savepoint() if self._grouped else self._db.transaction():
                yield self._current()
        except LedgerRuleError as e:
            raise LedgerConflictError(f"{e}. Credits stand as they are in {self.where}") from e
        except BaseException:
            self._forget()
            raise

    def _current(self) -> tuple[LedgerState, writes.PeerNumbers]:
        """Return the state, which is read again if another process has written meanwhile."""
        if self._books is None or self._numbers is None or self._books.size != self.size():
            self._books = self.read_state(self.run, self._rule, self._spec.owner_key)
            self._numbers = writes.PeerNumbers(self._db)
        return self._books, self._numbers

    def _forget(self) -> None:
        """Drop the state in memory, since it may differ from the database."""
        self._books = self._numbers = None

    def post(self, account: RoundCredits, *, finalization: bytes | None = None) -> bool:
        """Append a final round and the entries that it makes due; return False if the round is posted already.

        `finalization` is the owner's, an envelope. Raises LedgerConflictError if another record of this round is
        posted, or if the round before is another's parent.
        """
        with self._writing() as (books, numbers):
            if account.round < books.rounds:
                self._check_same(account, books)
                return False
            made = books.post_round(account, int(self._now() * 1000))
            seen_at = self.first_seen_at(account.record)
            for posted in made:
                writes.write(self._db, posted)
                if posted.lines:
                    writes.write_round(self._db, numbers, posted, account, seen_at, finalization)
                writes.write_transfers(self._db, numbers, posted)
            self._write_balances(books, numbers, made)
            writes.write_last_seen(self._db, numbers, (e.peer for e in account.lines), seen_at)
            writes.forget_first_seen(self._db, account.round)
        return True

    def _check_same(self, account: RoundCredits, books: LedgerState) -> None:
        record = books.record_of(account.round)
        if record != account.record:
            raise LedgerConflictError(
                f"round {account.round} is settled with record {record.short}, but the chain now says "
                f"{account.record.short}: a final was reverted. Credits stand as settled; keep {self.where} and find "
                "out who signed two finals with the run's key before going on"
            )
        if self.lines(books.entry_of(account.round)) != [encode_line(e) for e in account.lines]:
            raise LedgerConflictError(
                f"the ledger's lines for round {account.round} are not what record {record.short} earns: the "
                f"model's parameters or the credit rule are not those of this run, or {self.where} was altered"
            )

    def void(self, void_order: bytes) -> int:
        """Void a pending line by a void order of the owner; return the entry's sequence. Raises LedgerConflictError."""
        with self._writing() as (books, numbers):
            posted = books.void(void_order, int(self._now() * 1000))
            writes.write(self._db, posted)
            writes.write_transfers(self._db, numbers, posted)
            self._write_balances(books, numbers, [posted])
            return posted.entry.sequence

    def rollback(self, record: Digest, round_: Round, directive: bytes) -> bool:
        """Take the run back to a record of the branch; return False if the log has this rollback already.

        Raises LedgerConflictError if the branch has no such round, or the owner's directive does not say so.
        """
        with self._writing() as (books, numbers):
            if books.has_rollback(directive):
                return False
            posted = books.rollback(record, round_, directive, int(self._now() * 1000))
            writes.write(self._db, posted)
            writes.forget_rounds_after(self._db, round_)
        return True

    def _write_balances(self, books: LedgerState, numbers: writes.PeerNumbers, made: list[PostedEntry]) -> None:
        peers = {t.target.peer for posted in made for t in posted.transfers if t.target.peer is not None}
        writes.write_balances(self._db, numbers, books, sorted(peers))

    def check(self) -> list[str]:
        """Return where the ledger differs from what it should be, as of the moment of the call; empty if it is whole.

        Replays and reads everything.
        """
        with nullcontext() if self._grouped else self._db.snapshot():
            return list(check_all(self._db, self._spec))

    def current_balances(self) -> dict[PeerKey, AccountBalance]:
        """Return the balances in memory, within a transaction in progress."""
        return dict(self._current()[0].balances)

    def holds(self, record: Digest) -> bool:
        """Return whether a record's credit is pending: posted, and within the hold."""
        return any(h.record == record for h in self._current()[0].pending)

    def add_refusal(self, refusal: RefusedUpdate) -> bool:
        """Store an announced update that its round left out; return False if it is stored already."""
        with self._writing():
            return writes.add_refusal(self._db, refusal)

    def add_head(self, head: TreeHeadRow) -> None:
        with self._writing():
            writes.add_head(self._db, head)

    def add_binding(self, binding: BindingRow) -> None:
        with self._writing():
            writes.add_binding(self._db, binding)

    def note_first_seen(self, record: Digest, round_: Round, seen_at: float) -> None:
        """Note when a record that is not final yet was first seen (unix seconds)."""
        with self._writing():
            writes.note_first_seen(self._db, record, round_, seen_at)

    def add_admission(self, admitted: AdmissionRow) -> None:
        """Store the newest admission of a peer; the time of its first one stays."""
        with self._writing():
            writes.add_admission(self._db, admitted)

    def forget_admissions(self, peers: Sequence[PeerKey]) -> None:
        """Delete the admissions of these peers."""
        if peers:
            with self._writing():
                writes.forget_admissions(self._db, peers)

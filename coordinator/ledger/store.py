"""The ledger as the coordinator uses it: the state of one run's credits, in a database.

Each method is one transaction; within `group` several are, and each still fails by itself. A posted round is compared,
not added again. So a coordinator that was killed at any moment restarts, reads where the ledger ends, and appends what
follows on the chain. Synchronous and used by one thread at a time: see `ledger_thread`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import queries, writes
from coordinator.ledger.database import Database, SqliteDatabase
from coordinator.ledger.integrity import check_all, check_opened
from coordinator.ledger.rows import AdmissionRow, BindingRow, CreditedLine, RefusedUpdate, RoundRow, TreeHeadRow
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


class Ledger:
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
        self._db = connect(where, spec, reader=reader)
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
            self._books = queries.read_state(self._db, self.run, self._rule, self._spec.owner_key)
            self._numbers = writes.PeerNumbers(self._db)
        return self._books, self._numbers

    def _forget(self) -> None:
        """Drop the state in memory, since it may differ from the database."""
        self._books = self._numbers = None

    # -- writing ---------------------------------------------------------------------------------------------

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
            seen_at = queries.first_seen_at(self._db, account.record)
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

    # -- the log ---------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the number of entries in the log."""
        return queries.size(self._db)

    def entries(self, first: int, limit: int) -> list[bytes]:
        """Return entries as they were written, in order."""
        return queries.entries(self._db, first, limit)

    def leaf(self, index: int) -> bytes:
        """Return the leaf hash of an entry. Raises IndexError."""
        return queries.node(self._db, 0, index)

    def node(self, level: int, index: int) -> bytes:
        """Return the hash over the 2^level leaves from index * 2^level on, if all of them exist. Raises IndexError."""
        return queries.node(self._db, level, index)

    def root(self, size: int | None = None) -> Digest:
        """Return the root of the tree over the first `size` entries (all). Raises IndexError."""
        return queries.root(self._db, self.size() if size is None else size)

    def lines(self, sequence: int) -> list[bytes]:
        """Return the lines under a round entry, as they were written, in order; none for other entries."""
        return queries.lines(self._db, sequence)

    def entry_of(self, record: Digest) -> int | None:
        """Return the sequence of the round entry of a record."""
        return queries.entry_of(self._db, record)

    def check(self) -> list[str]:
        """Return where the ledger differs from what it should be, as of the moment of the call; empty if it is whole.

        Replays and reads everything.
        """
        with nullcontext() if self._grouped else self._db.snapshot():
            return list(check_all(self._db, self._spec))

    # -- rounds and balances ---------------------------------------------------------------------------------

    def last(self) -> tuple[Round, Digest] | None:
        """Return the newest round of the branch, and its record."""
        return queries.last(self._db)

    def newest_finalization(self) -> bytes | None:
        """Return the finalization (an envelope) of the newest round of the branch that has one."""
        return queries.newest_finalization(self._db)

    def rounds(self, *, after: int = -1, limit: int = 1000) -> list[RoundRow]:
        """Return rounds of the branch in ascending order, from the one after `after`."""
        return queries.rounds(self._db, after, limit)

    def accounts(self, *, after: int = -1, limit: int = 100) -> list[RoundCredits]:
        """Return rounds of the branch with their lines, in ascending order, from the one after `after`."""
        return queries.accounts(self._db, after, limit)

    def history_of(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[CreditedLine]:
        """Return a peer's lines with their status, newest first; of entries before `before`."""
        return queries.history_of(self._db, peer, before, limit)

    def balances(self) -> dict[PeerKey, AccountBalance]:
        """Return the balances of every peer, from the derived table."""
        return queries.read_balances(self._db)

    def current_balances(self) -> dict[PeerKey, AccountBalance]:
        """Return the balances in memory, within a transaction in progress."""
        return dict(self._current()[0].balances)

    def holds(self, record: Digest) -> bool:
        """Return whether a record's credit is pending: posted, and within the hold."""
        return any(h.record == record for h in self._current()[0].pending)

    def active_since(self, peers: Iterable[PeerKey]) -> dict[PeerKey, float]:
        """Return when the newest posted record with each peer was seen.

        For peers in none it is when they were first admitted. Times are unix seconds, as observed here; peers that were
        only seen by others are left out.
        """
        return queries.active_since(self._db, peers)

    # -- refusals, tree heads, bindings: append-only ---------------------------------------------------------

    def add_refusal(self, refusal: RefusedUpdate) -> bool:
        """Store an announced update that its round left out; return False if it is stored already."""
        with self._writing():
            return writes.add_refusal(self._db, refusal)

    def refusals(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[tuple[int, RefusedUpdate]]:
        """Return a peer's refused updates, newest first, each with its number; of those before number `before`."""
        return queries.refusals(self._db, peer, before, limit)

    def refused(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[tuple[int, RefusedUpdate]]:
        """Return a peer's refused updates in posted rounds, newest first, with the round's entry.

        Only entries before `before` are searched.
        """
        return queries.refused(self._db, peer, before, limit)

    def posted(self) -> int:
        """Return the number of round entries in the log."""
        return queries.posted(self._db)

    def first_since(self, time: int) -> int:
        """Return the first entry of a time (unix milliseconds) or later; the log's size if there is none."""
        return queries.first_since(self._db, time)

    def earned(self, first: int, end: int, upto: int) -> list[tuple[PeerKey, float, int]]:
        """Return peers, times (unix seconds, by the hour) and micro-credits of the round entries of a range.

        Amounts that entries before `upto` voided are subtracted.
        """
        return queries.earned(self._db, first, end, upto)

    def add_head(self, head: TreeHeadRow) -> None:
        """Store a signed tree head."""
        with self._writing():
            writes.add_head(self._db, head)

    def heads(self, limit: int = 1, before: int | None = None) -> list[TreeHeadRow]:
        """Return signed tree heads, newest first; of those over fewer than `before` entries."""
        return queries.heads(self._db, limit, before)

    def add_binding(self, binding: BindingRow) -> None:
        """Store a binding of a peer to an account."""
        with self._writing():
            writes.add_binding(self._db, binding)

    def bindings(self) -> list[BindingRow]:
        """Return all bindings, oldest first."""
        return queries.bindings(self._db)

    # -- when records were seen, who was admitted: not the ledger's ------------------------------------------

    def note_first_seen(self, record: Digest, round_: Round, seen_at: float) -> None:
        """Note when a record that is not final yet was first seen (unix seconds)."""
        with self._writing():
            writes.note_first_seen(self._db, record, round_, seen_at)

    def first_seen(self) -> dict[Digest, float]:
        """Return when records that are not final yet were first seen (unix seconds)."""
        return queries.first_seen(self._db)

    def add_admission(self, admitted: AdmissionRow) -> None:
        """Store the newest admission of a peer; the time of its first one stays."""
        with self._writing():
            writes.add_admission(self._db, admitted)

    def admissions(self) -> list[AdmissionRow]:
        """Return the newest admission of every peer."""
        return queries.admissions(self._db)

    def forget_admissions(self, before: int) -> int:
        """Delete admissions that ended before a time, of peers without credits; return their number."""
        with self._writing():
            return writes.forget_admissions(self._db, before)

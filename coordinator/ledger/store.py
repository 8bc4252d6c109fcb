"""The ledger as the coordinator uses it: one run's books, written down.

Each method is one transaction; within `group` several are, and each still fails by itself. A round that is there
already is checked, not added again. So a coordinator that was killed at any moment starts again, reads where the
ledger ends, and appends from the chain what follows. Synchronous and used by one thread at a time: see `ledger_thread`.
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
from protocol.errors import BooksError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.accounts import Standing
from protocol.ledger.books import Books, Posted
from protocol.ledger.credits import CreditRule, RoundAccount
from protocol.ledger.entries import encode_line
from protocol.spec import RunSpec


def connect(where: str | Path, spec: RunSpec, *, reader: bool = False) -> Database:
    """The database at a path (SQLite) or a postgresql:// URL. Raises LedgerError."""
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
    """The database of one run. Raises LedgerError for all that goes wrong with it.

    `where`: a file, or a postgresql:// URL; `now`: unix seconds, for the times of entries; `reader`: to look only.
    """

    def __init__(self, where: str | Path, spec: RunSpec, *, now: Callable[[], float] = time.time, reader: bool = False):
        self.run = spec.run_id
        self._spec = spec
        self._rule = CreditRule.of(spec)
        self._now = now
        self._grouped = False
        self._books: Books | None = None
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
        """All that is done within is one transaction: when this ends without an error, all of it is on disk."""
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
        """A part of a group, that fails by itself."""
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
    def _writing(self) -> Iterator[tuple[Books, writes.PeerNumbers]]:
        try:
            with self._db.savepoint() if self._grouped else self._db.transaction():
                yield self._current()
        except BooksError as e:
            raise LedgerConflictError(f"{e}. Credits stand as they are in {self.where}") from e
        except BaseException:
            self._forget()
            raise

    def _current(self) -> tuple[Books, writes.PeerNumbers]:
        """The books, read again when another process has written meanwhile."""
        if self._books is None or self._numbers is None or self._books.size != self.size():
            self._books = queries.read_state(self._db, self.run, self._rule, self._spec.owner_key)
            self._numbers = writes.PeerNumbers(self._db)
        return self._books, self._numbers

    def _forget(self) -> None:
        """What was in memory may not be in the database: read it again."""
        self._books = self._numbers = None

    # -- writing ---------------------------------------------------------------------------------------------

    def post(self, account: RoundAccount, *, finalization: bytes | None = None) -> bool:
        """Append a final round, and what it settles; False when it is there already. `finalization`: the owner's, signed.

        Raises LedgerConflictError when another record of this round is there, or the round before is another's parent.
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
            writes.write_last_seen(self._db, numbers, (e.peer for e in account.entries), seen_at)
            writes.forget_first_seen(self._db, account.round)
        return True

    def _check_same(self, account: RoundAccount, books: Books) -> None:
        record = books.record_of(account.round)
        if record != account.record:
            raise LedgerConflictError(
                f"round {account.round} is settled with record {record.short}, but the chain now says "
                f"{account.record.short}: a final was reverted. Credits stand as settled; keep {self.where} and find "
                "out who signed two finals with the run's key before going on"
            )
        if self.lines(books.entry_of(account.round)) != [encode_line(e) for e in account.entries]:
            raise LedgerConflictError(
                f"the ledger's lines for round {account.round} are not what record {record.short} earns: the "
                f"model's parameters or the credit rule are not those of this run, or {self.where} was altered"
            )

    def void(self, verdict: bytes) -> int:
        """Void a pending line by a verdict of the owner. Returns the entry's sequence. Raises LedgerConflictError."""
        with self._writing() as (books, numbers):
            posted = books.void(verdict, int(self._now() * 1000))
            writes.write(self._db, posted)
            writes.write_transfers(self._db, numbers, posted)
            self._write_balances(books, numbers, [posted])
            return posted.entry.sequence

    def rollback(self, record: Digest, round_: Round, directive: bytes) -> bool:
        """Take the run back to a record of the branch; False when the log has this rollback already.

        Raises LedgerConflictError when the branch has no such round, or the owner's directive does not say so.
        """
        with self._writing() as (books, numbers):
            if books.has_done(directive):
                return False
            posted = books.rollback(record, round_, directive, int(self._now() * 1000))
            writes.write(self._db, posted)
            writes.forget_rounds_after(self._db, round_)
        return True

    def _write_balances(self, books: Books, numbers: writes.PeerNumbers, made: list[Posted]) -> None:
        peers = {t.target.peer for posted in made for t in posted.transfers if t.target.peer is not None}
        writes.write_balances(self._db, numbers, books, sorted(peers))

    # -- the log ---------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Entries in the log."""
        return queries.size(self._db)

    def entries(self, first: int, limit: int) -> list[bytes]:
        """Entries as they were written, in order."""
        return queries.entries(self._db, first, limit)

    def leaf(self, index: int) -> bytes:
        """The leaf hash of an entry. Raises IndexError."""
        return queries.node(self._db, 0, index)

    def node(self, level: int, index: int) -> bytes:
        """The hash over the 2^level leaves from index * 2^level on, when all of them are there. Raises IndexError."""
        return queries.node(self._db, level, index)

    def root(self, size: int | None = None) -> Digest:
        """The root of the tree over the first `size` entries (all). Raises IndexError."""
        return queries.root(self._db, self.size() if size is None else size)

    def lines(self, sequence: int) -> list[bytes]:
        """The lines under a round entry, as they were written, in order; none for other entries."""
        return queries.lines(self._db, sequence)

    def entry_of(self, record: Digest) -> int | None:
        """The sequence of the round entry of a record."""
        return queries.entry_of(self._db, record)

    def check(self) -> list[str]:
        """Where the ledger differs from what it should be; replays and reads everything. Empty: it is whole.

        Of a ledger that others write to, it is of the moment when this begins.
        """
        with nullcontext() if self._grouped else self._db.snapshot():
            return list(check_all(self._db, self._spec))

    # -- rounds and balances ---------------------------------------------------------------------------------

    def last(self) -> tuple[Round, Digest] | None:
        """The newest round of the branch, and its record."""
        return queries.last(self._db)

    def newest_finalization(self) -> bytes | None:
        """The signed final of the newest round of the branch for which the owner made one."""
        return queries.newest_finalization(self._db)

    def rounds(self, *, after: int = -1, limit: int = 1000) -> list[RoundRow]:
        """Rounds of the branch in ascending order, from the one after `after`."""
        return queries.rounds(self._db, after, limit)

    def accounts(self, *, after: int = -1, limit: int = 100) -> list[RoundAccount]:
        """Rounds of the branch with their lines, in ascending order, from the one after `after`."""
        return queries.accounts(self._db, after, limit)

    def history_of(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[CreditedLine]:
        """A peer's lines with where they stand, newest first; of entries before `before`."""
        return queries.history_of(self._db, peer, before, limit)

    def balances(self) -> dict[PeerKey, Standing]:
        """What every peer has pending, settled and voided; from a derived table, so it is quick."""
        return queries.read_balances(self._db)

    def current_balances(self) -> dict[PeerKey, Standing]:
        """The same from memory, within what is being written."""
        return dict(self._current()[0].standings)

    def holds(self, record: Digest) -> bool:
        """Whether a record's credit is pending: posted, and not settled."""
        return any(h.record == record for h in self._current()[0].held)

    def active_since(self, peers: Iterable[PeerKey]) -> dict[PeerKey, float]:
        """When the newest posted record with a peer in it was seen; of those in none, when they were first admitted.

        In unix seconds, as this coordinator saw it; who was seen by others only is left out.
        """
        return queries.active_since(self._db, peers)

    # -- refusals, tree heads, bindings: append-only ---------------------------------------------------------

    def add_refusal(self, refusal: RefusedUpdate) -> bool:
        """Note an announced update that its round left out; False when it is noted already."""
        with self._writing():
            return writes.add_refusal(self._db, refusal)

    def refusals(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[tuple[int, RefusedUpdate]]:
        """A peer's refusals, newest first, each with its number; of those before number `before`."""
        return queries.refusals(self._db, peer, before, limit)

    def refused(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[tuple[int, RefusedUpdate]]:
        """A peer's refusals in rounds that are posted, newest first, each with the round's entry; of those before entry
        `before`."""
        return queries.refused(self._db, peer, before, limit)

    def posted(self) -> int:
        """Round entries in the log."""
        return queries.posted(self._db)

    def first_since(self, time: int) -> int:
        """The first entry of a time (unix milliseconds) or later; the log's size when there is none."""
        return queries.first_since(self._db, time)

    def earned(self, first: int, end: int, upto: int) -> list[tuple[PeerKey, float, int]]:
        """Who was credited how many micro-credits by the round entries of a range, less what entries before `upto`
        voided of them; and at about which times (unix seconds, by the hour)."""
        return queries.earned(self._db, first, end, upto)

    def add_head(self, head: TreeHeadRow) -> None:
        """Keep a signed tree head."""
        with self._writing():
            writes.add_head(self._db, head)

    def heads(self, limit: int = 1, before: int | None = None) -> list[TreeHeadRow]:
        """Signed tree heads, newest first; of those of fewer than `before` entries."""
        return queries.heads(self._db, limit, before)

    def add_binding(self, binding: BindingRow) -> None:
        """Keep a word on the account of a peer."""
        with self._writing():
            writes.add_binding(self._db, binding)

    def bindings(self) -> list[BindingRow]:
        """All words on accounts, oldest first."""
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
        """Keep the newest admission of a peer; when it was first admitted stays."""
        with self._writing():
            writes.add_admission(self._db, admitted)

    def admissions(self) -> list[AdmissionRow]:
        """The newest admission of every peer that is kept."""
        return queries.admissions(self._db)

    def forget_admissions(self, before: int) -> int:
        """Drop admissions that ended before a time, of peers without credits. Returns how many."""
        with self._writing():
            return writes.forget_admissions(self._db, before)

"""The ledger: who earned what in every final round, in SQLite (https://sqlite.org/wal.html), append-only.

One transaction a round; a round that is already there is checked, not added again. So a coordinator that was killed at
any moment starts again, reads where the ledger ends, and appends from the chain what follows. Synchronous and used by
one thread at a time: `service` gives it a thread of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.credits import Balance, Entry, RoundAccount
from coordinator.errors import LedgerConflictError, LedgerError
from protocol.ids import Digest, PeerKey, Round, RunId

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class SettledRound:
    """A final round as the ledger holds it, without its entries."""

    round: Round
    record: Digest
    base_state: Digest
    loss: float
    tokens: int
    seen_at: float | None


@dataclass(frozen=True, slots=True)
class SettledEntry:
    """One peer's share in one final round."""

    round: Round
    record: Digest
    peer: PeerKey
    windows: int
    tokens: int
    micro_credits: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The newest admission of a peer."""

    peer: PeerKey
    name: str
    first_at: int
    not_before: int
    not_after: int
    sent: bytes


class Ledger:
    """The database of one run. Raises LedgerError for all that goes wrong with the file."""

    def __init__(self, path: Path, run: RunId):
        self.path = path
        self._run = bytes(run)
        with self._explained():
            # Autocommit: transactions are begun by hand, so that there is never one open by accident.
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
        try:
            with self._explained():
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
                self._db.execute("PRAGMA trusted_schema = OFF")
                self._prepare()
        except LedgerError:
            self._db.close()
            raise

    def _prepare(self) -> None:
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                # Not executescript: that would commit before the schema is whole.
                for statement in _statements((Path(__file__).parent / "schema.sql").read_text()):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise LedgerError(
                    f"{self.path} is a ledger of form {version}, and this Cairn keeps form {SCHEMA_VERSION}: "
                    "start the version that made it, or move the file away (credits are computed again from the chain)"
                )

    def close(self) -> None:
        self._db.close()

    # -- the ledger ------------------------------------------------------------------------------------------

    def settle(self, account: RoundAccount, *, final: bytes | None = None) -> bool:
        """Append a final round; False when it is there already. `final`: the owner's signed final for this round.

        Raises LedgerConflictError when another record of this round is there, or the round before is another's parent.
        """
        key = (self._run, account.round)
        with self._transaction():
            row = self._db.execute("SELECT record FROM rounds WHERE run = ? AND round = ?", key).fetchone()
            if row is not None:
                self._check_same(account, Digest(row[0]))
                return False
            last = self._last()
            if account.round != (last[0] + 1 if last else 0) or (last and last[1] != account.parent):
                where = f"ends with round {last[0]}, record {last[1].short}" if last else "is empty"
                raise LedgerConflictError(
                    f"round {account.round} (record {account.record.short}, parent {account.parent.short}) does not "
                    f"follow the ledger, which {where}"
                )
            seen = self._db.execute(
                "SELECT seen_at FROM sightings WHERE run = ? AND record = ?", (self._run, account.record)
            ).fetchone()
            self._db.execute(
                "INSERT INTO rounds (run, round, record, parent, base_state, loss, tokens, seen_at, final) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*key, account.record, account.parent, account.base_state, account.loss, account.tokens,
                 seen[0] if seen else None, final),
            )  # fmt: skip
            self._db.executemany(
                "INSERT INTO credits (run, round, record, peer, windows, tokens, micro_credits) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(*key, account.record, e.peer, e.windows, e.tokens, e.micro_credits) for e in account.entries],
            )
            self._db.execute("DELETE FROM sightings WHERE run = ? AND round <= ?", key)
        return True

    def _check_same(self, account: RoundAccount, record: Digest) -> None:
        if record != account.record:
            raise LedgerConflictError(
                f"round {account.round} is settled with record {record.short}, but the chain now says "
                f"{account.record.short}: a final was reverted. Credits stand as settled; keep {self.path} and find "
                "out who signed two finals with the run's key before going on"
            )
        rows = self._db.execute(
            "SELECT peer, windows, tokens, micro_credits FROM credits WHERE run = ? AND round = ? ORDER BY peer",
            (self._run, account.round),
        ).fetchall()
        if rows != [(bytes(e.peer), e.windows, e.tokens, e.micro_credits) for e in account.entries]:
            raise LedgerConflictError(
                f"the ledger's entries for round {account.round} are not what record {record.short} earns: the "
                f"model's parameters or the credit rule are not those of this run, or {self.path} was altered"
            )

    def last(self) -> tuple[Round, Digest] | None:
        """The newest final round and its record."""
        with self._explained():
            return self._last()

    def _last(self) -> tuple[Round, Digest] | None:
        row = self._db.execute(
            "SELECT round, record FROM rounds WHERE run = ? ORDER BY round DESC LIMIT 1", (self._run,)
        ).fetchone()
        return (Round(row[0]), Digest(row[1])) if row else None

    def newest_final(self) -> bytes | None:
        """The signed final of the newest round for which the owner made one."""
        with self._explained():
            row = self._db.execute(
                "SELECT final FROM rounds WHERE run = ? AND final IS NOT NULL ORDER BY round DESC LIMIT 1", (self._run,)
            ).fetchone()
        return row[0] if row else None

    def rounds(self, *, after: int = -1, limit: int = 1000) -> list[SettledRound]:
        """Final rounds in ascending order, from the one after `after`."""
        with self._explained():
            rows = self._db.execute(
                "SELECT round, record, base_state, loss, tokens, seen_at FROM rounds "
                "WHERE run = ? AND round > ? ORDER BY round LIMIT ?",
                (self._run, after, limit),
            ).fetchall()
        return [SettledRound(Round(r[0]), Digest(r[1]), Digest(r[2]), *r[3:]) for r in rows]

    def accounts(self, *, after: int = -1, limit: int = 100) -> list[RoundAccount]:
        """Final rounds with their entries, in ascending order, from the one after `after`."""
        with self._explained():
            rows = self._db.execute(
                "SELECT round, record, parent, base_state, loss FROM rounds WHERE run = ? AND round > ? "
                "ORDER BY round LIMIT ?",
                (self._run, after, limit),
            ).fetchall()
            shares = self._db.execute(
                "SELECT round, peer, windows, tokens, micro_credits FROM credits "
                "WHERE run = ? AND round BETWEEN ? AND ? ORDER BY round, peer",
                (self._run, after + 1, rows[-1][0] if rows else after),
            ).fetchall()
        entries: dict[int, list[Entry]] = {r[0]: [] for r in rows}
        for round_, peer, *numbers in shares:
            entries[round_].append(Entry(PeerKey(peer), *numbers))
        return [
            RoundAccount(Round(r[0]), Digest(r[1]), Digest(r[2]), Digest(r[3]), r[4], tuple(entries[r[0]]))
            for r in rows
        ]

    def newest_entries(self, peer: PeerKey, limit: int = 50) -> list[SettledEntry]:
        """A peer's newest entries, newest first."""
        with self._explained():
            rows = self._db.execute(
                "SELECT round, record, peer, windows, tokens, micro_credits FROM credits "
                "WHERE run = ? AND peer = ? ORDER BY round DESC LIMIT ?",
                (self._run, peer, limit),
            ).fetchall()
        return [_entry(r) for r in rows]

    def balances(self) -> dict[PeerKey, Balance]:
        """What every peer has settled. Reads the whole ledger: for the start, and for whoever checks."""
        with self._explained():
            rows = self._db.execute(
                "SELECT peer, sum(micro_credits), sum(tokens), count(*) FROM credits WHERE run = ? GROUP BY peer",
                (self._run,),
            ).fetchall()
        return {PeerKey(r[0]): Balance(*r[1:]) for r in rows}

    # -- when records were seen ------------------------------------------------------------------------------

    def saw(self, record: Digest, round_: Round, seen_at: float) -> None:
        """Note when a record that is not final yet was first seen."""
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO sightings (run, record, round, seen_at) VALUES (?, ?, ?, ?)",
                (self._run, record, round_, seen_at),
            )

    def sightings(self) -> dict[Digest, float]:
        """When records that are not final yet were first seen."""
        with self._explained():
            rows = self._db.execute("SELECT record, seen_at FROM sightings WHERE run = ?", (self._run,)).fetchall()
        return {Digest(r[0]): r[1] for r in rows}

    # -- admissions ------------------------------------------------------------------------------------------

    def admit(self, admitted: Admitted) -> None:
        """Keep the newest admission of a peer; when it was first admitted stays."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO admissions (run, peer, name, first_at, not_before, not_after, sent) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run, peer) DO UPDATE SET "
                "name = excluded.name, not_before = excluded.not_before, not_after = excluded.not_after, "
                "sent = excluded.sent",
                (self._run, admitted.peer, admitted.name, admitted.first_at, admitted.not_before, admitted.not_after,
                 admitted.sent),
            )  # fmt: skip

    def admissions(self) -> list[Admitted]:
        """The newest admission of every peer that is kept."""
        with self._explained():
            rows = self._db.execute(
                "SELECT peer, name, first_at, not_before, not_after, sent FROM admissions WHERE run = ?", (self._run,)
            ).fetchall()
        return [Admitted(PeerKey(r[0]), *r[1:]) for r in rows]

    def forget_admissions(self, before: int) -> int:
        """Drop admissions that ended before a time, of peers without credits. Returns how many."""
        with self._transaction():
            cursor = self._db.execute(
                "DELETE FROM admissions WHERE run = ? AND not_after < ? AND NOT EXISTS "
                "(SELECT 1 FROM credits c WHERE c.run = admissions.run AND c.peer = admissions.peer)",
                (self._run, before),
            )
        return cursor.rowcount

    # -- the file --------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            raise LedgerError(f"{self.path}: {e}: {_remedy(e)}") from e


def _entry(row: tuple) -> SettledEntry:
    return SettledEntry(Round(row[0]), Digest(row[1]), PeerKey(row[2]), *row[3:])


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _remedy(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text:
        return "another coordinator uses this folder: stop it first"
    if "full" in text:
        return "free some disk space and start again; nothing that was settled is lost"
    if "unable to open" in text or "readonly" in text:
        return "check that the folder exists and that you may write there"
    return "restore the file from a copy, or move it away: credits are computed again from the chain"

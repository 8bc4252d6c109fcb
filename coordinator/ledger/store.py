"""The ledger as the coordinator uses it: the fold over one run's final records, indexed in a database.

The index can be thrown away: it is rebuilt from the certificates. Each method is one transaction; within `group`
several are, and each still fails by itself. A posted round is compared, not added again. So a coordinator that was
killed at any moment restarts, reads where the index ends, and appends what follows on the chain. Synchronous and used
by one thread at a time: see `ledger_thread`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator.errors import LedgerConflictError, LedgerError
from coordinator.ledger import schema
from coordinator.ledger.database import Database, SqliteDatabase
from coordinator.ledger.queries import BALANCES, LedgerQueries
from coordinator.ledger.rows import AdmissionRow, BindingRow, RefusedUpdate
from protocol import extras
from protocol.errors import LedgerRuleError, MalformedError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import CreditRule, PeerBalances, RoundCredits
from protocol.ledger.fold import CreditFold, FoldStep
from protocol.messages import Rollback, Verdict
from protocol.spec import RunSpec

MAX_REFUSALS_OF_PEER = 200
"""Refused updates that are kept of each peer, the newest ones."""

MAX_REFUSALS = 1_000_000
"""Refused updates that are kept in all, the newest ones: about 300 MB."""

CHECKED_LINES = 200_000
"""Maximum number of lines of a ledger that is checked completely at each start."""

CHECKED_ROUNDS = 32
"""Newest rounds of a larger one that are checked."""


def connect(where: str | Path, spec: RunSpec, *, reader: bool = False) -> Database:
    """Return the database at a path (SQLite) or a postgresql:// URL. Raises LedgerError."""
    if isinstance(where, str) and where.startswith(("postgresql://", "postgres://")):
        try:
            from coordinator.ledger.postgres import PostgresDatabase
        except ImportError as e:
            raise LedgerError(f"a ledger in PostgreSQL needs psycopg: {extras.install('postgres')}") from e
        return PostgresDatabase(where, spec.run_id, reader=reader)
    if isinstance(where, str) and "://" in where:
        raise LedgerError(f"{where.split('://')[0]}:// is no address of a ledger: want a file, or postgresql://...")
    return SqliteDatabase(Path(where), reader=reader)


class Ledger(LedgerQueries):
    """The database of one run. Every method raises LedgerError.

    `where` is a file or a postgresql:// URL, `now` gives unix seconds for the times of rounds. A `reader` cannot write.
    """

    def __init__(self, where: str | Path, spec: RunSpec, *, now: Callable[[], float] = time.time, reader: bool = False):
        self.run = spec.run_id
        self._now = now
        self._grouped = False
        self._fold: CreditFold | None = None
        self._fold_changes = 0
        """How often the fold was changed: after a failure it may differ from the database if it was since."""
        self._ids: dict[PeerKey, int] = {}
        super().__init__(connect(where, spec, reader=reader), CreditRule.of(spec))
        try:
            if not reader:
                schema.prepare(self._db, self.run)
                try:
                    found = self.check(CHECKED_LINES)
                except (MalformedError, IndexError, TypeError, ValueError) as e:
                    found = [f"it cannot be read: {e!r}"]
                if found:
                    raise LedgerError(f"{self.where} is damaged: {'; '.join(found[:3])}: {schema.REMEDY}")
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
            with self._fold_as_stored(), self._db.transaction():
                self._grouped = True
                yield
        finally:
            self._grouped = False

    @contextmanager
    def part(self) -> Iterator[None]:
        """Make a section of a group that fails by itself."""
        with self._fold_as_stored(), self._db.savepoint():
            yield

    @contextmanager
    def _fold_as_stored(self) -> Iterator[None]:
        """Forget the fold after an error if it was changed within: the database has taken that back."""
        before = self._fold_changes
        try:
            yield
        except BaseException:
            if self._fold_changes != before:
                self._fold = None
            raise

    @property
    def broken(self) -> bool:
        """Within a group: whether the database has ended the transaction by itself, and all of it is lost."""
        return self._grouped and not self._db.in_transaction

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._fold_as_stored(), self._db.savepoint() if self._grouped else self._db.transaction():
                yield
        except LedgerRuleError as e:
            raise LedgerConflictError(f"{e}. Credits stand as they are in {self.where}") from e

    def _current(self) -> CreditFold:
        """Return the fold, which is read again if another process has written meanwhile, or commits were lost."""
        if self._fold is None or (self._fold.count, self._fold.epoch) != (self.size(), self.epoch()):
            fold = self.read_fold(self.run)
            self._ids = {PeerKey(bytes(key)): n for n, key in self._db.query("SELECT id, peer FROM peers")}
            self._fold = fold
        return self._fold

    # -- the index -------------------------------------------------------------------------------------------

    def post(self, credits: RoundCredits, *, finalization: bytes | None = None) -> bool:
        """Fold in a final round; return False if it is posted already.

        `finalization` is the owner's, an envelope. Raises LedgerConflictError if another record of this round is
        posted, or if its parent is not the newest posted record.
        """
        with self._writing():
            fold = self._current()
            if credits.round < fold.rounds and credits.rollback is None:
                self._check_same(credits, fold)
                return False
            if credits.round < fold.rounds and fold.record_of(credits.round) == credits.record:
                self._check_same(credits, fold)
                return False
            epoch = fold.epoch
            self._fold_changes += 1
            step = fold.add(credits)
            if fold.epoch != epoch:
                self._cut_branch(credits.round, fold.epoch)
            self._write(credits, step, finalization)
            self._write_balances(step.peers, fold)
            seen_at = self.first_seen_at(credits.record)
            rows = [(seen_at, bytes(line.peer)) for line in credits.lines]
            self._db.many("UPDATE balances SET last_at = ? WHERE peer = (SELECT id FROM peers WHERE peer = ?)", rows)
            self._db.query("DELETE FROM first_seen WHERE round <= ?", (credits.round,))
            past = credits.round - self._rule.hold_rounds
            self._db.query("DELETE FROM verdicts WHERE round < ?", (past,))
            # Receipts are of final rounds: nobody can get one of a record that did not become final.
            self._db.query(
                "DELETE FROM refusals WHERE round = ? AND record NOT IN (SELECT record FROM rounds WHERE round = ?)",
                (past, past),
            )
        return True

    def _check_same(self, credits: RoundCredits, fold: CreditFold) -> None:
        record = fold.record_of(credits.round)
        if record != credits.record:
            raise LedgerConflictError(
                f"round {credits.round} is posted with record {record.short}, but the chain now says "
                f"{credits.record.short}: a final was reverted. Credits stand as they are; keep {self.where} and find "
                "out who signed two finals with the run's key before going on"
            )
        held = self.round_credits(after=credits.round - 1, limit=1)[0]
        if (held.lines, held.voided_tokens) != (credits.lines, credits.voided_tokens):
            raise LedgerConflictError(
                f"the ledger's lines for round {credits.round} are not what record {record.short} earns: the "
                f"model's parameters or the credit rule are not those of this run, or {self.where} was altered"
            )

    def _write(self, credits: RoundCredits, step: FoldStep, finalization: bytes | None) -> None:
        """Write a round, its lines, and what it voids and settles."""
        self._db.query(
            "INSERT INTO rounds (number, round, on_branch, record, parent, base_state, loss, tokens, "
            "voided_tokens, time, seen_at, final) VALUES (?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (step.number, credits.round, bytes(credits.record), bytes(credits.parent), bytes(credits.base_state),
             credits.loss, credits.tokens, credits.voided_tokens, self._time(), self.first_seen_at(credits.record),
             finalization),
        )  # fmt: skip
        peers = self._peer_ids(line.peer for line in credits.lines)
        rows = [
            (step.number, i, peers[line.peer], bytes(line.update), line.windows, line.micro_credits)
            for i, line in enumerate(credits.lines)
        ]
        self._db.many("INSERT INTO lines (number, line, peer, header, windows, micro_credits) "
                      "VALUES (?, ?, ?, ?, ?, ?)", rows)  # fmt: skip
        for number, i in step.voided:
            self._db.query("UPDATE lines SET voided_by = ? WHERE number = ? AND line = ?", (step.number, number, i))
        self._write_audits(credits, step.number)
        if step.settled:
            self._db.query("UPDATE state SET settled = ?", (step.settled[-1] + 1,))
            # Reports on an update concern nobody once its credit has settled without a decision.
            self._db.query(
                "DELETE FROM work_reports WHERE record IN (SELECT record FROM rounds WHERE number >= ? AND number <= ?)"
                " AND NOT EXISTS (SELECT 1 FROM decisions d JOIN rounds r ON r.record = d.record "
                "JOIN lines l ON l.number = r.number AND l.peer = d.peer "
                "WHERE d.record = work_reports.record AND l.header = work_reports.header)",
                (step.settled[0], step.settled[-1]),
            )

    def _write_audits(self, credits: RoundCredits, number: int) -> None:
        """Write the work reports, decisions and pardons of a round."""
        rows = []
        for i, report in enumerate(credits.reports):
            b = report.body
            scores = json.dumps([[s.name, s.value, s.threshold] for s in b.scores])
            rows.append((number, i, bytes(b.record), bytes(b.update), bytes(report.author), b.check, scores))
        self._db.many(
            "INSERT INTO work_reports (number, place, record, header, reporter, kind, scores) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        peers = self._peer_ids(dict.fromkeys(d.author for d in credits.decisions))
        self._db.many(
            "INSERT INTO decisions (number, record, peer, convicted, refuted) VALUES (?, ?, ?, ?, ?)",
            [(number, bytes(d.record), peers[d.author], int(d.convicted), b"".join(d.refuted))
             for d in credits.decisions],
        )  # fmt: skip
        self._db.many(
            "INSERT INTO pardons (number, peer, round) VALUES (?, ?, ?)",
            [(number, bytes(p.peer), p.round) for p in credits.pardons],
        )

    def _time(self) -> int:
        """Return the time of the next round: a clock that was set back repeats the time of the round before.

        So rounds can be searched by time. Only `earned` says when a round's credits count.
        """
        rows = self._db.query("SELECT time FROM rounds ORDER BY number DESC LIMIT 1")
        return max(int(self._now() * 1000), rows[0][0] if rows else 0)

    def _peer_ids(self, peers: Iterable[PeerKey]) -> dict[PeerKey, int]:
        """Return the number of each peer in the tables; a new one is written."""
        peers = list(peers)
        new = [peer for peer in peers if peer not in self._ids]
        self._ids.update(zip(new, range(len(self._ids) + 1, len(self._ids) + 1 + len(new)), strict=True))
        self._db.many("INSERT INTO peers (id, peer) VALUES (?, ?)", [(self._ids[p], bytes(p)) for p in new])
        return {peer: self._ids[peer] for peer in peers}

    def _write_balances(self, peers: Iterable[PeerKey], fold: CreditFold) -> None:
        rows = []
        for peer, number in self._peer_ids(sorted(peers)).items():
            b = fold.balances[peer]
            parts = (b.pending, b.settled, b.voided)
            rows.append((number, *(n for part in parts for n in (part.micro_credits, part.tokens, part.rounds))))
        sets = ", ".join(f"{n} = excluded.{n}" for n in BALANCES)
        self._db.many(
            f"INSERT INTO balances (peer, {', '.join(BALANCES)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            f"ON CONFLICT (peer) DO UPDATE SET {sets}",
            rows,
        )

    def rollback(self, rollback: Rollback) -> bool:
        """Take the branch back to the record of a rollback; return False if that was done already.

        Raises LedgerConflictError if the branch has no such round.
        """
        with self._writing():
            fold = self._current()
            self._fold_changes += 1
            if not fold.roll_back(rollback):
                return False
            self._cut_branch(rollback.round, rollback.epoch)
        return True

    def _cut_branch(self, round_: Round, epoch: int) -> None:
        self._db.query("UPDATE rounds SET on_branch = 0 WHERE on_branch = 1 AND round >= ?", (round_,))
        self._db.query("UPDATE state SET epoch = ?", (epoch,))

    def epoch(self) -> int:
        """Return the number of rollbacks that the index has followed."""
        return self._db.query("SELECT epoch FROM state")[0][0]

    def current_balances(self) -> dict[PeerKey, PeerBalances]:
        """Return the balances in memory, within a transaction in progress."""
        return dict(self._current().balances)

    def check(self, most_lines: int = 2**62) -> list[str]:
        """Return where the index contradicts itself; of one with more lines, only its newest rounds are checked."""
        query = self._db.query
        size, settled = self.size(), self.settled_count()
        (count,) = query("SELECT count(*) FROM lines")[0] if size <= most_lines else (size,)
        if isinstance(self._db, SqliteDatabase) and (damage := self._db.damage(quick=count > most_lines)):
            return [damage]
        first = 0 if count <= most_lines else max(0, size - CHECKED_ROUNDS)
        found = []
        (there,) = query("SELECT count(*) FROM rounds WHERE number >= ?", (first,))[0]
        if there != size - first or not 0 <= settled <= size:
            found.append("rounds are missing")
        (breaks,) = query(
            "SELECT count(*) FROM rounds a LEFT JOIN rounds b ON b.on_branch = 1 AND b.round = a.round - 1 "
            "WHERE a.on_branch = 1 AND a.number >= ? AND a.round > 0 AND (b.record IS NULL OR b.record <> a.parent)",
            (first,),
        )[0]
        if breaks:
            found.append("the rounds of the branch do not follow each other")
        tokens = dict(query("SELECT number, tokens FROM rounds WHERE number >= ?", (first,)))
        lines: dict[int, int] = {}
        for n, windows, micro in query("SELECT number, windows, micro_credits FROM lines WHERE number >= ?", (first,)):
            lines[n] = lines.get(n, 0) + windows * self._rule.window_tokens
            if micro != self._rule.micro_credits(windows):
                found.append(f"a line of round number {n} has another amount than its windows earn")
        if lines != tokens:
            found.append("the lines are not those of the rounds")
        if first == 0:
            sums = query(
                "SELECT peer, CASE WHEN voided_by IS NOT NULL THEN 'voided' WHEN number < ? THEN 'settled' "
                "ELSE 'pending' END, sum(micro_credits), sum(windows), count(*) FROM lines GROUP BY 1, 2",
                (settled,),
            )
            due = {(peer, status): (int(m), int(w) * self._rule.window_tokens, c) for peer, status, m, w, c in sums}
            has = {}
            for row in query(f"SELECT peer, {', '.join(BALANCES)} FROM balances"):
                for i, status in enumerate(("pending", "settled", "voided")):
                    if any(part := tuple(row[1 + 3 * i : 4 + 3 * i])):
                        has[row[0], status] = part
            if has != due:
                found.append(f"the balances of {len({k[0] for k, _ in has.items() ^ due.items()})} peers are not the "
                             "sums of their lines")  # fmt: skip
        return found

    # -- notes of this coordinator ---------------------------------------------------------------------------

    def add_verdicts(self, round_: Round, verdicts: Iterable[Verdict]) -> None:
        """Note verdicts on the record of a round, to be brought into the chain."""
        rows = [(bytes(v.record), bytes(v.peer), round_, v.reason) for v in verdicts]
        with self._writing():
            self._db.many("INSERT INTO verdicts (record, peer, round, reason) VALUES (?, ?, ?, ?) "
                          "ON CONFLICT (record, peer) DO NOTHING", rows)  # fmt: skip

    def add_refusal(self, r: RefusedUpdate) -> bool:
        """Store an announced update that its round left out; return False if it is stored already.

        The oldest ones beyond MAX_REFUSALS_OF_PEER and MAX_REFUSALS are deleted.
        """
        key = (bytes(r.peer), bytes(r.record), bytes(r.update))
        with self._writing():
            if self._db.query("SELECT 1 FROM refusals WHERE peer = ? AND record = ? AND header = ?", key):
                return False
            number = _next(self._db, "refusals")
            self._db.query(
                "INSERT INTO refusals (id, round, parent, peer, record, header, reason, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (number, r.round, bytes(r.parent), *key, r.reason, r.at),
            )
            self._db.query("DELETE FROM refusals WHERE id <= ?", (number - MAX_REFUSALS,))
            rows = self._db.query("SELECT id FROM refusals WHERE peer = ?", key[:1])
            oldest = sorted(rows)[: max(0, len(rows) - MAX_REFUSALS_OF_PEER)]
            self._db.many("DELETE FROM refusals WHERE id = ?", oldest)
        return True

    def add_binding(self, b: BindingRow) -> None:
        """Store a binding, in place of earlier ones by which the account took the same consent of the peer."""
        with self._writing():
            self._db.query(
                "DELETE FROM bindings WHERE peer = ? AND account = ? AND time = ?",
                (bytes(b.peer), bytes(b.account), b.time),
            )
            self._db.query(
                "INSERT INTO bindings (id, peer, account, time, encoded) VALUES (?, ?, ?, ?, ?)",
                (_next(self._db, "bindings"), bytes(b.peer), bytes(b.account), b.time, b.encoded),
            )

    def forget_bindings(self, peers: Sequence[PeerKey]) -> None:
        """Delete the bindings of these peers."""
        with self._writing():
            self._db.many("DELETE FROM bindings WHERE peer = ?", [(bytes(peer),) for peer in peers])

    def note_first_seen(self, record: Digest, round_: Round, seen_at: float) -> None:
        """Note when a record that is not final yet was first seen (unix seconds)."""
        with self._writing():
            self._db.query(
                "INSERT INTO first_seen (record, round, seen_at) VALUES (?, ?, ?) ON CONFLICT (record) DO NOTHING",
                (bytes(record), round_, seen_at),
            )

    def add_admission(self, a: AdmissionRow) -> None:
        """Store the newest admission of a peer; the time of its first one stays."""
        with self._writing():
            self._db.query(
                "INSERT INTO admissions (peer, name, first_at, not_before, not_after, encoded) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (peer) DO UPDATE SET name = excluded.name, "
                "not_before = excluded.not_before, not_after = excluded.not_after, encoded = excluded.encoded",
                (bytes(a.peer), a.name, a.first_at, a.not_before, a.not_after, a.encoded),
            )

    def forget_admissions(self, peers: Sequence[PeerKey]) -> None:
        """Delete the admissions of these peers."""
        if peers:
            with self._writing():
                self._db.many("DELETE FROM admissions WHERE peer = ?", [(bytes(peer),) for peer in peers])


def _next(db: Database, table: str) -> int:
    """Return the next row's number; there is one writer at a time."""
    return db.query(f"SELECT coalesce(max(id), 0) + 1 FROM {table}")[0][0]

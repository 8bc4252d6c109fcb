"""The statements that read the ledger's tables. None of them writes."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.ledger.database import Database, Row
from coordinator.ledger.rows import AdmissionRow, BindingRow, CreditedLine, RefusedUpdate, RoundRow, TreeHeadRow
from protocol.directive_codec import decode_directive
from protocol.envelope import open_envelope
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.accounts import AccountBalance
from protocol.ledger.credits import Balance, CreditRule, RoundCredits
from protocol.ledger.entries import CreditLine, RollbackEntry, SettleEntry, decode_entry, decode_line, genesis_leaf
from protocol.ledger.state import LedgerSnapshot, LedgerState, PendingRound
from protocol.proofs import root_at

_BRANCH = "FROM branch b JOIN rounds r ON r.entry = b.entry "


class LedgerQueries:
    """A ledger in a database, read only. Every method raises LedgerError."""

    def __init__(self, db: Database):
        self._db = db

    def size(self) -> int:
        """Return the number of entries in the log."""
        rows = self._db.query("SELECT sequence FROM entries ORDER BY sequence DESC LIMIT 1")
        return rows[0][0] + 1 if rows else 0

    def entries(self, first: int, limit: int) -> list[bytes]:
        """Return entries as they were written, in order."""
        rows = self._db.query(
            "SELECT encoded FROM entries WHERE sequence >= ? AND sequence < ? ORDER BY sequence", (first, first + limit)
        )
        return [bytes(r[0]) for r in rows]

    def root(self, size: int | None = None) -> Digest:
        """Return the root of the tree over the first `size` entries (all). Raises IndexError."""
        return root_at(self.size() if size is None else size, self.node)

    def lines(self, sequence: int) -> list[bytes]:
        """Return the lines under a round entry, as they were written, in order; none for other entries."""
        rows = self._db.query("SELECT encoded FROM lines WHERE entry = ? ORDER BY line", (sequence,))
        return [bytes(r[0]) for r in rows]

    def node(self, level: int, index: int) -> bytes:
        """Return the hash over the 2^level leaves from index * 2^level on, if all of them exist. Raises IndexError."""
        if level == 0:
            rows = self._db.query("SELECT leaf FROM entries WHERE sequence = ?", (index,))
        else:
            rows = self._db.query("SELECT hash FROM nodes WHERE level = ? AND place = ?", (level, index))
        if not rows:
            raise IndexError((level, index))
        return bytes(rows[0][0])

    def last(self) -> tuple[Round, Digest] | None:
        """Return the newest round of the branch, and its record."""
        rows = self._db.query(f"SELECT r.round, r.record {_BRANCH} ORDER BY b.round DESC LIMIT 1")
        return (Round(rows[0][0]), Digest(rows[0][1])) if rows else None

    def newest_finalization(self) -> bytes | None:
        """Return the finalization (an envelope) of the newest round of the branch that has one."""
        rows = self._db.query(f"SELECT r.final {_BRANCH} WHERE r.final IS NOT NULL ORDER BY b.round DESC LIMIT 1")
        return bytes(rows[0][0]) if rows else None

    def rounds(self, *, after: int = -1, limit: int = 1000) -> list[RoundRow]:
        """Return rounds of the branch in ascending order, from the one after `after`."""
        rows = self._db.query(
            f"SELECT r.round, r.record, r.base_state, r.loss, r.tokens, r.seen_at {_BRANCH} "
            "WHERE b.round > ? ORDER BY b.round LIMIT ?",
            (after, limit),
        )
        return [RoundRow(Round(r[0]), Digest(r[1]), Digest(r[2]), *r[3:]) for r in rows]

    def accounts(self, *, after: int = -1, limit: int = 100) -> list[RoundCredits]:
        """Return rounds of the branch with their lines, in ascending order, from the one after `after`."""
        rows = self._db.query(
            f"SELECT r.round, r.record, r.parent, r.base_state, r.loss, r.entry {_BRANCH} "
            "WHERE b.round > ? ORDER BY b.round LIMIT ?",
            (after, limit),
        )
        shares: dict[int, list[CreditLine]] = {r[5]: [] for r in rows}
        if rows:
            found = self._db.query(
                "SELECT l.entry, l.encoded FROM branch b JOIN lines l ON l.entry = b.entry "
                "WHERE b.round > ? AND b.round <= ? ORDER BY b.round, l.line",
                (after, rows[-1][0]),
            )
            for entry, sent in found:
                shares[entry].append(decode_line(bytes(sent)))
        return [
            RoundCredits(Round(r[0]), Digest(r[1]), Digest(r[2]), Digest(r[3]), r[4], tuple(shares[r[5]])) for r in rows
        ]

    def history_of(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[CreditedLine]:
        """Return a peer's lines with their status, newest first; of entries before `before`."""
        rows = self._db.query(
            "SELECT l.entry, l.line, r.number, r.round, r.record, l.encoded, v.line FROM peers p "
            "JOIN lines l ON l.peer = p.id JOIN rounds r ON r.entry = l.entry "
            "LEFT JOIN transfers v ON v.entry = l.entry AND v.line = l.line AND v.target = 4 * p.id + 3 "
            "WHERE p.peer = ? AND l.entry < ? ORDER BY l.entry DESC LIMIT ?",
            (bytes(peer), 2**62 if before is None else before, limit),
        )
        settled = self.settled_count()
        found = []
        for entry, i, number, round_, record, sent, voided in rows:
            line = decode_line(bytes(sent))
            status = "voided" if voided is not None else "settled" if number < settled else "pending"
            found.append(
                CreditedLine(
                    entry, i, number, Round(round_), Digest(record), peer, line.update, line.windows, line.tokens,
                    line.micro_credits, status,
                )
            )  # fmt: skip
        return found

    def active_since(self, peers: Iterable[PeerKey]) -> dict[PeerKey, float]:
        """Return when the newest posted record with each peer was seen.

        For peers in none it is when they were first admitted. Times are unix seconds, as observed here; peers that were
        only seen by others are left out.
        """
        seen = dict(self._db.query("SELECT p.peer, s.last_at FROM balances s JOIN peers p ON p.id = s.peer"))
        found = {}
        for peer in peers:
            if bytes(peer) in seen:
                at = seen[bytes(peer)]
            else:
                rows = self._db.query("SELECT first_at FROM admissions WHERE peer = ?", (bytes(peer),))
                at = rows[0][0] if rows else None
            if at is not None:
                found[peer] = float(at)
        return found

    def refusals(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[tuple[int, RefusedUpdate]]:
        """Return a peer's refused updates, newest first, each with its number; of those before number `before`."""
        rows = self._db.query(
            "SELECT id, round, parent, record, peer, header, reason, at FROM refusals WHERE peer = ? AND id < ? "
            "ORDER BY id DESC LIMIT ?",
            (bytes(peer), 2**62 if before is None else before, limit),
        )
        return [_refused(r) for r in rows]

    def refused(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[tuple[int, RefusedUpdate]]:
        """Return a peer's refused updates in posted rounds, newest first, with the round's entry.

        Only entries before `before` are searched.
        """
        rows = self._db.query(
            "SELECT r.entry, f.round, f.parent, f.record, f.peer, f.header, f.reason, f.at FROM refusals f "
            "JOIN rounds r ON r.record = f.record WHERE f.peer = ? AND r.entry < ? "
            "ORDER BY r.entry DESC, f.id DESC LIMIT ?",
            (bytes(peer), 2**62 if before is None else before, limit),
        )
        return [_refused(r) for r in rows]

    def posted(self) -> int:
        """Return the number of round entries in the log."""
        rows = self._db.query("SELECT number FROM rounds ORDER BY number DESC LIMIT 1")
        return rows[0][0] + 1 if rows else 0

    def first_since(self, time: int) -> int:
        """Return the first entry of a time (unix milliseconds) or later; the log's size if there is none."""
        low, high = 0, self.size()
        while low < high:
            middle = (low + high) // 2
            if self._db.query("SELECT time FROM entries WHERE sequence = ?", (middle,))[0][0] < time:
                low = middle + 1
            else:
                high = middle
        return low

    def earned(self, first: int, end: int, upto: int) -> list[tuple[PeerKey, float, int]]:
        """Return peers, times (unix seconds, by the hour) and micro-credits of the round entries of a range.

        Amounts that entries before `upto` voided are subtracted.
        """
        rows = self._db.query(
            "SELECT p.peer, e.time / 3600000, "
            "sum(CASE WHEN t.source = 0 THEN t.micro_credits ELSE -t.micro_credits END) "
            "FROM transfers t JOIN entries e ON e.sequence = t.entry JOIN peers p ON p.id = t.target / 4 "
            "WHERE t.entry >= ? AND t.entry < ? AND t.sequence < ? AND (t.source = 0 OR t.target % 4 = 3) "
            "GROUP BY p.peer, e.time / 3600000",
            (first, end, upto),
        )
        return [(PeerKey(bytes(r[0])), (r[1] + 0.5) * 3600, int(r[2])) for r in rows]

    def heads(self, limit: int = 1, before: int | None = None) -> list[TreeHeadRow]:
        """Return signed tree heads, newest first; of those over fewer than `before` entries."""
        rows = self._db.query(
            "SELECT size, root, time, encoded FROM heads WHERE size < ? ORDER BY size DESC, id DESC LIMIT ?",
            (2**62 if before is None else before, limit),
        )
        return [TreeHeadRow(r[0], Digest(r[1]), r[2], bytes(r[3])) for r in rows]

    def bindings(self) -> list[BindingRow]:
        """Return all bindings, oldest first."""
        rows = self._db.query("SELECT peer, account, time, encoded FROM bindings ORDER BY id")
        return [BindingRow(PeerKey(r[0]), PeerKey(r[1]), r[2], bytes(r[3])) for r in rows]

    def admissions(self) -> list[AdmissionRow]:
        """Return the newest admission of every peer."""
        rows = self._db.query("SELECT peer, name, first_at, not_before, not_after, encoded FROM admissions")
        return [AdmissionRow(PeerKey(r[0]), r[1], r[2], r[3], r[4], bytes(r[5])) for r in rows]

    def first_seen(self) -> dict[Digest, float]:
        """Return when records that are not final yet were first seen (unix seconds)."""
        return {Digest(r[0]): r[1] for r in self._db.query("SELECT record, seen_at FROM first_seen")}

    def first_seen_at(self, record: Digest) -> float | None:
        rows = self._db.query("SELECT seen_at FROM first_seen WHERE record = ?", (bytes(record),))
        return rows[0][0] if rows else None

    def entry_of(self, record: Digest) -> int | None:
        """Return the sequence of the round entry of a record."""
        rows = self._db.query("SELECT entry FROM rounds WHERE record = ?", (bytes(record),))
        return rows[0][0] if rows else None

    def balances(self) -> dict[PeerKey, AccountBalance]:
        """Return the balances of every peer, from the derived table."""
        rows = self._db.query(
            "SELECT p.peer, pending_micro, pending_tokens, pending_rounds, settled_micro, settled_tokens, "
            "settled_rounds, voided_micro, voided_tokens, voided_rounds FROM balances s JOIN peers p ON p.id = s.peer"
        )
        return {PeerKey(r[0]): AccountBalance(Balance(*r[1:4]), Balance(*r[4:7]), Balance(*r[7:10])) for r in rows}

    def read_state(self, run: RunId, rule: CreditRule, owner: PeerKey) -> LedgerState:
        """Return the ledger's state at the end of the database."""
        last = self._db.query("SELECT sequence, leaf, time FROM entries ORDER BY sequence DESC LIMIT 1")
        size, leaf, time = (last[0][0] + 1, Digest(last[0][1]), last[0][2]) if last else (0, genesis_leaf(run), 0)
        posted = self._db.query("SELECT count(*) FROM rounds")[0][0]
        settled = self.settled_count()
        branch = self._db.query(
            "SELECT r.record, r.tokens, r.entry FROM branch b JOIN rounds r ON r.entry = b.entry ORDER BY b.round"
        )
        reverted = self._db.query("SELECT record FROM rounds WHERE entry NOT IN (SELECT entry FROM branch)")
        held = self._db.query(
            "SELECT entry, number, round, record FROM rounds WHERE number >= ? ORDER BY number", (settled,)
        )
        state = LedgerSnapshot(
            size, leaf, time, posted, self._epoch(), ((Digest(r[0]), r[1], r[2]) for r in branch),
            (Digest(r[0]) for r in reverted), [self._held(row) for row in held], self.balances(),
        )  # fmt: skip
        return LedgerState.from_snapshot(run, rule, owner, state)

    def settled_count(self) -> int:
        """Return the number of settled round entries: they settle in the order of their numbers."""
        rows = self._db.query("SELECT encoded FROM entries WHERE kind = 'settle' ORDER BY sequence DESC LIMIT 1")
        what = decode_entry(bytes(rows[0][0])).payload if rows else None
        if not isinstance(what, SettleEntry):
            return 0
        return self._db.query("SELECT number FROM rounds WHERE entry = ?", (what.entry,))[0][0] + 1

    def _epoch(self) -> int:
        """Return the epoch of the newest rollback; 0 if there was none."""
        rows = self._db.query("SELECT encoded FROM entries WHERE kind = 'rollback' ORDER BY sequence DESC LIMIT 1")
        what = decode_entry(bytes(rows[0][0])).payload if rows else None
        if not isinstance(what, RollbackEntry):
            return 0
        return decode_directive(open_envelope(what.directive, "directive").payload).epoch

    def _held(self, row: tuple) -> PendingRound:
        entry, number, round_, record = row
        lines = self._db.query("SELECT encoded FROM lines WHERE entry = ? ORDER BY line", (entry,))
        voided = self._db.query("SELECT line FROM transfers WHERE entry = ? AND target % 4 = 3", (entry,))
        return PendingRound(
            entry, number, Round(round_), Digest(record), tuple(decode_line(bytes(r[0])) for r in lines),
            {r[0] for r in voided},
        )  # fmt: skip


def _refused(r: Row) -> tuple[int, RefusedUpdate]:
    return r[0], RefusedUpdate(Round(r[1]), Digest(r[2]), Digest(r[3]), PeerKey(r[4]), Digest(r[5]), r[6], r[7])

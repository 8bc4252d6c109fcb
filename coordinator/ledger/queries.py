"""The statements that read the ledger's tables. None of them writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from coordinator.ledger.database import Database, Row
from coordinator.ledger.rows import (
    AdmissionRow,
    BindingRow,
    CarriedReport,
    CreditedLine,
    RefusedUpdate,
    RoundRow,
    StatedDecision,
    StatedPardon,
)
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.audit import CreditedRound
from protocol.ledger.credits import Balance, CreditLine, CreditRule, PeerBalances, RoundCredits
from protocol.ledger.fold import CreditFold, PendingRound
from protocol.messages import AuditDecision, Pardon, Score, Verdict, WorkReport

BALANCES = tuple(
    f"{kind}_{what}" for kind in ("pending", "settled", "voided") for what in ("micro", "tokens", "rounds")
)
MAX_OPEN = 1000
"""Oldest rounds that are not final whose verdicts are read: nothing settles before they are final."""

MAX_ASKED = 500
"""Peers that one statement asks about."""

_END = 2**62

_EARNED_HOUR = "CASE WHEN r.seen_at * 1000 < r.time THEN CAST(r.seen_at * 1000 AS BIGINT) ELSE r.time END / 3600000"
"""The hour when a round's credits count. Its `time` repeats the one before if the clock was ahead once."""


class LedgerQueries:
    """A ledger in a database, read only. Every method raises LedgerError."""

    def __init__(self, db: Database, rule: CreditRule):
        self._db = db
        self._rule = rule

    def snapshot(self) -> AbstractContextManager[None]:
        """Read everything within as of one moment, whatever is written meanwhile."""
        return self._db.snapshot()

    def size(self) -> int:
        """Return the number of final rounds, on any branch."""
        rows = self._db.query("SELECT number FROM rounds ORDER BY number DESC LIMIT 1")
        return rows[0][0] + 1 if rows else 0

    def settled_count(self) -> int:
        """Return how many of them are settled: they settle in the order of their numbers."""
        return self._db.query("SELECT settled FROM state")[0][0]

    def last(self) -> tuple[Round, Digest] | None:
        """Return the newest round of the branch, and its record."""
        rows = self._db.query("SELECT round, record FROM rounds WHERE on_branch = 1 ORDER BY round DESC LIMIT 1")
        return (Round(rows[0][0]), Digest(rows[0][1])) if rows else None

    def newest_finalization(self) -> bytes | None:
        """Return the finalization (an envelope) of the newest round of the branch that has one."""
        rows = self._db.query(
            "SELECT final FROM rounds WHERE on_branch = 1 AND final IS NOT NULL ORDER BY round DESC LIMIT 1"
        )
        return bytes(rows[0][0]) if rows else None

    def rounds(self, *, after: int = -1, limit: int = 1000) -> list[RoundRow]:
        """Return rounds of the branch in ascending order, from the one after `after`."""
        rows = self._db.query(
            "SELECT round, record, base_state, loss, tokens, voided_tokens, seen_at FROM rounds "
            "WHERE on_branch = 1 AND round > ? ORDER BY round LIMIT ?",
            (after, limit),
        )
        return [RoundRow(Round(r[0]), Digest(r[1]), Digest(r[2]), *r[3:]) for r in rows]

    def round_credits(self, *, after: int = -1, limit: int = 100) -> list[RoundCredits]:
        """Return rounds of the branch with their lines, without verdicts, in ascending order from the one after."""
        rows = self._db.query(
            "SELECT round, record, parent, base_state, loss, number, voided_tokens FROM rounds "
            "WHERE on_branch = 1 AND round > ? ORDER BY round LIMIT ?",
            (after, limit),
        )
        lines = self._lines(r[5] for r in rows)
        return [
            RoundCredits(
                Round(r[0]), Digest(r[1]), Digest(r[2]), Digest(r[3]), r[4], tuple(x for x, _ in lines[r[5]]),
                voided_tokens=r[6],
            )
            for r in rows
        ]  # fmt: skip

    def credited(self, first: int, limit: int) -> list[CreditedRound]:
        """Return final rounds by their numbers from `first` on, on any branch, as an auditor reads them."""
        rows = self._db.query(
            "SELECT number, round, record, parent, time FROM rounds WHERE number >= ? ORDER BY number LIMIT ?",
            (first, limit),
        )
        lines = self._lines(r[0] for r in rows)
        return [
            CreditedRound(
                r[0], Round(r[1]), Digest(r[2]), Digest(r[3]), r[4], tuple(x for x, _ in lines[r[0]]),
                {i: by for i, (_, by) in enumerate(lines[r[0]]) if by is not None},
            )
            for r in rows
        ]  # fmt: skip

    def _lines(self, numbers: Iterable[int]) -> dict[int, list[tuple[CreditLine, int | None]]]:
        """Return the lines of rounds, in order, each with the number of the round that voids it."""
        found: dict[int, list[tuple[CreditLine, int | None]]] = {n: [] for n in numbers}
        if found:
            rows = self._db.query(
                "SELECT l.number, p.peer, l.header, l.windows, l.voided_by FROM lines l JOIN peers p ON p.id = l.peer "
                "WHERE l.number >= ? AND l.number <= ? ORDER BY l.number, l.line",
                (min(found), max(found)),
            )
            for number, peer, header, windows, by in rows:
                if number in found:
                    found[number].append((self._rule.line(PeerKey(peer), Digest(header), windows), by))
        return found

    def history_of(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[CreditedLine]:
        """Return a peer's lines with their status, newest first; of rounds with numbers below `before`."""
        rows = self._db.query(
            "SELECT l.number, r.round, r.record, l.header, l.windows, v.round, "
            "(SELECT min(a.round) FROM decisions d JOIN rounds a ON a.record = d.record "
            "WHERE d.number = l.voided_by AND d.peer = l.peer AND d.convicted = 1) FROM peers p "
            "JOIN lines l ON l.peer = p.id JOIN rounds r ON r.number = l.number "
            "LEFT JOIN rounds v ON v.number = l.voided_by "
            "WHERE p.peer = ? AND l.number < ? ORDER BY l.number DESC LIMIT ?",
            (bytes(peer), _END if before is None else before, limit),
        )
        settled = self.settled_count()
        return [
            CreditedLine(
                r[0], Round(r[1]), Digest(r[2]), self._rule.line(peer, Digest(r[3]), r[4]),
                "voided" if r[5] is not None else "settled" if r[0] < settled else "pending",
                None if r[5] is None else Round(r[5]), None if r[6] is None else Round(r[6]),
            )
            for r in rows
        ]  # fmt: skip

    def decisions(self) -> list[StatedDecision]:
        """Return the decisions that records of the branch state, oldest first."""
        rows = self._db.query(
            "SELECT s.round, s.record, a.round, l.header, d.record, p.peer, d.convicted, d.refuted, "
            "(SELECT coalesce(sum(x.micro_credits), 0) FROM lines x WHERE x.voided_by = d.number AND x.peer = d.peer) "
            "FROM decisions d JOIN rounds s ON s.number = d.number AND s.on_branch = 1 "
            "JOIN rounds a ON a.record = d.record JOIN peers p ON p.id = d.peer "
            "JOIN lines l ON l.number = a.number AND l.peer = d.peer ORDER BY d.number, d.record, p.peer"
        )
        return [
            StatedDecision(
                Round(r[0]), Digest(r[1]), Round(r[2]), Digest(r[3]),
                AuditDecision(Digest(r[4]), PeerKey(r[5]), bool(r[6]), _keys(bytes(r[7]))), int(r[8]) if r[6] else 0,
            )
            for r in rows
        ]  # fmt: skip

    def pardons(self) -> list[StatedPardon]:
        """Return the pardons that records of the branch carry, oldest first."""
        rows = self._db.query(
            "SELECT s.round, p.peer, p.round FROM pardons p JOIN rounds s ON s.number = p.number AND s.on_branch = 1 "
            "ORDER BY p.number, p.peer, p.round"
        )
        return [StatedPardon(Round(stated), Pardon(PeerKey(peer), Round(round_))) for stated, peer, round_ in rows]

    def work_reports(self, run: RunId, since: Round) -> list[CarriedReport]:
        """Return the work reports that records of the branch carry, in their order, about updates from a round on."""
        rows = self._db.query(
            "SELECT c.round, w.reporter, p.peer, a.round, w.record, w.header, w.kind, w.scores FROM work_reports w "
            "JOIN rounds c ON c.number = w.number AND c.on_branch = 1 JOIN rounds a ON a.record = w.record "
            "JOIN lines l ON l.number = a.number AND l.header = w.header JOIN peers p ON p.id = l.peer "
            "WHERE a.round >= ? ORDER BY w.number, w.place",
            (since,),
        )
        found = []
        for carried, reporter, author, round_, record, update, check, text in rows:
            scores = tuple(Score(name, value, least) for name, value, least in json.loads(text))
            body = WorkReport(run, Round(round_), Digest(record), Digest(update), check, scores)
            found.append(CarriedReport(Round(carried), PeerKey(reporter), PeerKey(author), body))
        return found

    def active_since(self, admitted_at: Mapping[PeerKey, Callable[[], float]]) -> dict[PeerKey, float]:
        """Return when the newest final record with each peer was seen.

        For peers in none it is when they were first admitted, or what `admitted_at` returns for one whose admission was
        forgotten. Times are unix seconds, as observed here; peers that were only seen by others are left out.
        """
        seen: dict[bytes, float | None] = {}
        keys = [bytes(peer) for peer in admitted_at]
        for i in range(0, len(keys), MAX_ASKED):
            some = keys[i : i + MAX_ASKED]
            seen |= self._db.query(
                "SELECT p.peer, s.last_at FROM balances s JOIN peers p ON p.id = s.peer "
                f"WHERE p.peer IN ({', '.join('?' * len(some))})",
                some,
            )
        found = {}
        for peer, otherwise in admitted_at.items():
            if bytes(peer) in seen:
                at = seen[bytes(peer)]
            else:
                rows = self._db.query("SELECT first_at FROM admissions WHERE peer = ?", (bytes(peer),))
                at = rows[0][0] if rows else otherwise()
            if at is not None:
                found[peer] = float(at)
        return found

    def verdicts(self, limit: int, open_rounds: Sequence[RoundCredits] = ()) -> tuple[Verdict, ...]:
        """Return the oldest verdicts that may still void something on this branch, and that it does not carry yet.

        `open_rounds` are the rounds of the branch that are not final.
        """
        carried = {(v.record, v.peer) for credits in open_rounds for v in credits.verdicts}
        records = [bytes(credits.record) for credits in open_rounds[:MAX_OPEN]]
        rows = self._db.query(
            "SELECT v.record, v.peer, v.reason FROM verdicts v LEFT JOIN rounds r ON r.record = v.record "
            "LEFT JOIN peers p ON p.peer = v.peer LEFT JOIN lines l ON l.number = r.number AND l.peer = p.id "
            f"WHERE v.record IN ({', '.join('?' * len(records)) or 'NULL'}) OR (r.number >= ? AND l.voided_by IS NULL) "
            "ORDER BY v.round, v.record, v.peer LIMIT ?",
            (*records, self.settled_count(), limit + len(carried)),
        )
        found = (Verdict(Digest(r[0]), PeerKey(r[1]), r[2]) for r in rows)
        return tuple([v for v in found if (v.record, v.peer) not in carried][:limit])

    def refused(self, peer: PeerKey, before: int | None = None, limit: int = 50) -> list[tuple[int, RefusedUpdate]]:
        """Return a peer's refused updates in final rounds, newest first, with the round's number below `before`."""
        rows = self._db.query(
            "SELECT r.number, f.round, f.parent, f.record, f.peer, f.header, f.reason, f.at FROM refusals f "
            "JOIN rounds r ON r.record = f.record WHERE f.peer = ? AND r.number < ? "
            "ORDER BY r.number DESC, f.id DESC LIMIT ?",
            (bytes(peer), _END if before is None else before, limit),
        )
        return [_refused(r) for r in rows]

    def first_since(self, time: int) -> int:
        """Return the number of the first round that was written at a time (unix milliseconds) or later."""
        low, high = 0, self.size()
        while low < high:
            middle = (low + high) // 2
            if self._db.query("SELECT time FROM rounds WHERE number = ?", (middle,))[0][0] < time:
                low = middle + 1
            else:
                high = middle
        return low

    def earned(self, first: int, end: int) -> list[tuple[PeerKey, float, int]]:
        """Return peers, times (unix seconds, by the hour) and micro-credits of the rounds of a range of numbers.

        The credit that rounds of the same range voided is subtracted, wherever it was earned.
        """
        rows = self._db.query(
            "SELECT p.peer, m.hour, sum(m.amount) FROM ("
            f"SELECT l.peer AS peer, {_EARNED_HOUR} AS hour, l.micro_credits AS amount FROM lines l "
            "JOIN rounds r ON r.number = l.number WHERE l.number >= ? AND l.number < ? "
            f"UNION ALL SELECT l.peer, {_EARNED_HOUR}, -l.micro_credits FROM lines l "
            "JOIN rounds r ON r.number = l.number WHERE l.voided_by >= ? AND l.voided_by < ?"
            ") m JOIN peers p ON p.id = m.peer GROUP BY p.peer, m.hour",
            (first, end, first, end),
        )
        return [(PeerKey(bytes(r[0])), (r[1] + 0.5) * 3600, int(r[2])) for r in rows]

    def bindings(self) -> list[BindingRow]:
        rows = self._db.query("SELECT peer, account, time, encoded FROM bindings ORDER BY id")
        return [BindingRow(PeerKey(r[0]), PeerKey(r[1]), r[2], bytes(r[3])) for r in rows]

    def admissions(self) -> list[AdmissionRow]:
        rows = self._db.query("SELECT peer, name, first_at, not_before, not_after, encoded FROM admissions")
        return [AdmissionRow(PeerKey(r[0]), r[1], r[2], r[3], r[4], bytes(r[5])) for r in rows]

    def first_seen(self) -> dict[Digest, float]:
        """Return when records that are not final yet were first seen (unix seconds)."""
        return {Digest(r[0]): r[1] for r in self._db.query("SELECT record, seen_at FROM first_seen")}

    def first_seen_at(self, record: Digest) -> float | None:
        rows = self._db.query("SELECT seen_at FROM first_seen WHERE record = ?", (bytes(record),))
        return rows[0][0] if rows else None

    def balances(self, *, after: PeerKey | None = None, limit: int = _END) -> dict[PeerKey, PeerBalances]:
        """Return the balances of peers with keys above `after`, by ascending key; without arguments those of all."""
        rows = self._db.query(
            f"SELECT p.peer, {', '.join(BALANCES)} FROM peers p JOIN balances s ON s.peer = p.id "
            "WHERE p.peer > ? ORDER BY p.peer LIMIT ?",
            (bytes(after or b""), limit),
        )
        return {PeerKey(r[0]): PeerBalances(Balance(*r[1:4]), Balance(*r[4:7]), Balance(*r[7:10])) for r in rows}

    def read_fold(self, run: RunId) -> CreditFold:
        """Return the fold at the end of the index."""
        epoch, settled = self._db.query("SELECT epoch, settled FROM state")[0]
        held = self._db.query("SELECT number, record FROM rounds WHERE number >= ? ORDER BY number", (settled,))
        lines = self._lines(r[0] for r in held)
        return CreditFold.restored(
            run, self._rule, count=self.size(), epoch=epoch, balances=self.balances(),
            branch=(
                (Digest(r[0]), r[1])
                for r in self._db.query(
                    "SELECT record, tokens - voided_tokens FROM rounds WHERE on_branch = 1 ORDER BY round"
                )
            ),
            reverted=(Digest(r[0]) for r in self._db.query("SELECT record FROM rounds WHERE on_branch = 0")),
            pending=[
                PendingRound(
                    number, Digest(record), tuple(line for line, _ in lines[number]),
                    {i for i, (_, by) in enumerate(lines[number]) if by is not None},
                )
                for number, record in held
            ],
        )  # fmt: skip


def _keys(row: bytes) -> tuple[PeerKey, ...]:
    return tuple(PeerKey(row[i : i + 32]) for i in range(0, len(row), 32))


def _refused(r: Row) -> tuple[int, RefusedUpdate]:
    return r[0], RefusedUpdate(Round(r[1]), Digest(r[2]), Digest(r[3]), PeerKey(r[4]), Digest(r[5]), r[6], r[7])

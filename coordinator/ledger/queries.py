"""The statements behind `store.Ledger`: what it reads, and the rows that are not the books'."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from coordinator.ledger.database import Database
from coordinator.ledger.rows import AdmissionRow, BindingRow, CreditedLine, RefusedUpdate, RoundRow, TreeHeadRow
from coordinator.ledger.writes import node, settled_count
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import RoundAccount
from protocol.ledger.entries import Line, decode_line
from protocol.proofs import root_at


def size(db: Database) -> int:
    rows = db.query("SELECT sequence FROM entries ORDER BY sequence DESC LIMIT 1")
    return rows[0][0] + 1 if rows else 0


def entries(db: Database, first: int, limit: int) -> list[bytes]:
    rows = db.query(
        "SELECT sent FROM entries WHERE sequence >= ? AND sequence < ? ORDER BY sequence", (first, first + limit)
    )
    return [bytes(r[0]) for r in rows]


def root(db: Database, count: int) -> Digest:
    """The root over the first `count` leaves, from the complete subtrees that they are made of. Raises IndexError."""
    return root_at(count, partial(node, db))


def lines(db: Database, sequence: int) -> list[bytes]:
    rows = db.query("SELECT sent FROM lines WHERE entry = ? ORDER BY line", (sequence,))
    return [bytes(r[0]) for r in rows]


# -- rounds --------------------------------------------------------------------------------------------------

_BRANCH = "FROM branch b JOIN rounds r ON r.entry = b.entry "


def last(db: Database) -> tuple[Round, Digest] | None:
    rows = db.query(f"SELECT r.round, r.record {_BRANCH} ORDER BY b.round DESC LIMIT 1")
    return (Round(rows[0][0]), Digest(rows[0][1])) if rows else None


def newest_finalization(db: Database) -> bytes | None:
    rows = db.query(f"SELECT r.final {_BRANCH} WHERE r.final IS NOT NULL ORDER BY b.round DESC LIMIT 1")
    return bytes(rows[0][0]) if rows else None


def rounds(db: Database, after: int, limit: int) -> list[RoundRow]:
    rows = db.query(
        f"SELECT r.round, r.record, r.base_state, r.loss, r.tokens, r.seen_at {_BRANCH} "
        "WHERE b.round > ? ORDER BY b.round LIMIT ?",
        (after, limit),
    )
    return [RoundRow(Round(r[0]), Digest(r[1]), Digest(r[2]), *r[3:]) for r in rows]


def accounts(db: Database, after: int, limit: int) -> list[RoundAccount]:
    rows = db.query(
        f"SELECT r.round, r.record, r.parent, r.base_state, r.loss, r.entry {_BRANCH} "
        "WHERE b.round > ? ORDER BY b.round LIMIT ?",
        (after, limit),
    )
    shares: dict[int, list[Line]] = {r[5]: [] for r in rows}
    if rows:
        found = db.query(
            "SELECT l.entry, l.sent FROM branch b JOIN lines l ON l.entry = b.entry WHERE b.round > ? AND b.round <= ? "
            "ORDER BY b.round, l.line",
            (after, rows[-1][0]),
        )
        for entry, sent in found:
            shares[entry].append(decode_line(bytes(sent)))
    return [
        RoundAccount(Round(r[0]), Digest(r[1]), Digest(r[2]), Digest(r[3]), r[4], tuple(shares[r[5]])) for r in rows
    ]


def history_of(db: Database, peer: PeerKey, before: int | None, limit: int) -> list[CreditedLine]:
    rows = db.query(
        "SELECT l.entry, l.line, r.number, r.round, r.record, l.sent, v.line FROM peers p "
        "JOIN lines l ON l.peer = p.id JOIN rounds r ON r.entry = l.entry "
        "LEFT JOIN transfers v ON v.entry = l.entry AND v.line = l.line AND v.target = 4 * p.id + 3 "
        "WHERE p.peer = ? AND l.entry < ? ORDER BY l.entry DESC LIMIT ?",
        (bytes(peer), 2**62 if before is None else before, limit),
    )
    settled = settled_count(db)
    found = []
    for entry, i, number, round_, record, sent, voided in rows:
        line = decode_line(bytes(sent))
        status = "voided" if voided is not None else "settled" if number < settled else "pending"
        found.append(
            CreditedLine(entry, i, number, Round(round_), Digest(record), peer, line.update, line.windows, line.tokens,
                   line.micro_credits, status)
        )  # fmt: skip
    return found


def active_since(db: Database, peers: Iterable[PeerKey]) -> dict[PeerKey, float]:
    seen = dict(db.query("SELECT p.peer, s.last_at FROM standings s JOIN peers p ON p.id = s.peer"))
    found = {}
    for peer in peers:
        if bytes(peer) in seen:
            at = seen[bytes(peer)]
        else:
            rows = db.query("SELECT first_at FROM admissions WHERE peer = ?", (bytes(peer),))
            at = rows[0][0] if rows else None
        if at is not None:
            found[peer] = float(at)
    return found


# -- refusals, tree heads, bindings --------------------------------------------------------------------------


def _next(db: Database, table: str) -> int:
    """The next row's number; there is one writer at a time."""
    return db.query(f"SELECT coalesce(max(id), 0) + 1 FROM {table}")[0][0]


def refuse(db: Database, r: RefusedUpdate) -> bool:
    key = (bytes(r.peer), bytes(r.record), bytes(r.update))
    if db.query("SELECT 1 FROM refusals WHERE peer = ? AND record = ? AND header = ?", key):
        return False
    db.query(
        "INSERT INTO refusals (id, round, parent, record, peer, header, reason, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (_next(db, "refusals"), r.round, bytes(r.parent), bytes(r.record), bytes(r.peer), bytes(r.update), r.reason,
         r.at),
    )  # fmt: skip
    return True


def refusals(db: Database, peer: PeerKey, before: int | None, limit: int) -> list[tuple[int, RefusedUpdate]]:
    rows = db.query(
        "SELECT id, round, parent, record, peer, header, reason, at FROM refusals WHERE peer = ? AND id < ? "
        "ORDER BY id DESC LIMIT ?",
        (bytes(peer), 2**62 if before is None else before, limit),
    )
    return [
        (r[0], RefusedUpdate(Round(r[1]), Digest(r[2]), Digest(r[3]), PeerKey(r[4]), Digest(r[5]), r[6], r[7]))
        for r in rows
    ]


def refused(db: Database, peer: PeerKey, before: int | None, limit: int) -> list[tuple[int, RefusedUpdate]]:
    rows = db.query(
        "SELECT r.entry, f.round, f.parent, f.record, f.peer, f.header, f.reason, f.at FROM refusals f "
        "JOIN rounds r ON r.record = f.record WHERE f.peer = ? AND r.entry < ? "
        "ORDER BY r.entry DESC, f.id DESC LIMIT ?",
        (bytes(peer), 2**62 if before is None else before, limit),
    )
    return [
        (r[0], RefusedUpdate(Round(r[1]), Digest(r[2]), Digest(r[3]), PeerKey(r[4]), Digest(r[5]), r[6], r[7]))
        for r in rows
    ]


def posted(db: Database) -> int:
    rows = db.query("SELECT number FROM rounds ORDER BY number DESC LIMIT 1")
    return rows[0][0] + 1 if rows else 0


def first_since(db: Database, time: int) -> int:
    """Times never go back, so it is found by halving."""
    low, high = 0, size(db)
    while low < high:
        middle = (low + high) // 2
        if db.query("SELECT time FROM entries WHERE sequence = ?", (middle,))[0][0] < time:
            low = middle + 1
        else:
            high = middle
    return low


def earned(db: Database, first: int, end: int, upto: int) -> list[tuple[PeerKey, float, int]]:
    rows = db.query(
        "SELECT p.peer, e.time / 3600000, sum(CASE WHEN t.source = 0 THEN t.micro_credits ELSE -t.micro_credits END) "
        "FROM transfers t JOIN entries e ON e.sequence = t.entry JOIN peers p ON p.id = t.target / 4 "
        "WHERE t.entry >= ? AND t.entry < ? AND t.sequence < ? AND (t.source = 0 OR t.target % 4 = 3) "
        "GROUP BY p.peer, e.time / 3600000",
        (first, end, upto),
    )
    return [(PeerKey(bytes(r[0])), (r[1] + 0.5) * 3600, int(r[2])) for r in rows]


def add_head(db: Database, h: TreeHeadRow) -> None:
    db.query(
        "INSERT INTO heads (id, size, root, time, sent) VALUES (?, ?, ?, ?, ?)",
        (_next(db, "heads"), h.size, bytes(h.root), h.time, h.sent),
    )


def heads(db: Database, limit: int, before: int | None) -> list[TreeHeadRow]:
    rows = db.query(
        "SELECT size, root, time, sent FROM heads WHERE size < ? ORDER BY size DESC, id DESC LIMIT ?",
        (2**62 if before is None else before, limit),
    )
    return [TreeHeadRow(r[0], Digest(r[1]), r[2], bytes(r[3])) for r in rows]


def bind(db: Database, b: BindingRow) -> None:
    db.query(
        "INSERT INTO bindings (id, peer, account, time, sent) VALUES (?, ?, ?, ?, ?)",
        (_next(db, "bindings"), bytes(b.peer), bytes(b.account), b.time, b.sent),
    )


def bindings(db: Database) -> list[BindingRow]:
    rows = db.query("SELECT peer, account, time, sent FROM bindings ORDER BY id")
    return [BindingRow(PeerKey(r[0]), PeerKey(r[1]), r[2], bytes(r[3])) for r in rows]


# -- admissions ----------------------------------------------------------------------------------------------


def admit(db: Database, a: AdmissionRow) -> None:
    db.query(
        "INSERT INTO admissions (peer, name, first_at, not_before, not_after, sent) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (peer) DO UPDATE SET name = excluded.name, not_before = excluded.not_before, "
        "not_after = excluded.not_after, sent = excluded.sent",
        (bytes(a.peer), a.name, a.first_at, a.not_before, a.not_after, a.sent),
    )


def admissions(db: Database) -> list[AdmissionRow]:
    rows = db.query("SELECT peer, name, first_at, not_before, not_after, sent FROM admissions")
    return [AdmissionRow(PeerKey(r[0]), r[1], r[2], r[3], r[4], bytes(r[5])) for r in rows]


def forget_admissions(db: Database, before: int) -> int:
    where = "not_after < ? AND peer NOT IN (SELECT peer FROM peers)"
    count = db.query(f"SELECT count(*) FROM admissions WHERE {where}", (before,))[0][0]
    db.query(f"DELETE FROM admissions WHERE {where}", (before,))
    return count

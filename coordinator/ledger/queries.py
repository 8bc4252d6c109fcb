"""The statements that read the ledger's tables. None of them writes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from coordinator.ledger.database import Database
from coordinator.ledger.rows import AdmissionRow, BindingRow, CreditedLine, RefusedUpdate, RoundRow, TreeHeadRow
from protocol.directive_codec import decode_directive
from protocol.envelope import open_envelope
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.accounts import AccountBalance
from protocol.ledger.credits import Balance, CreditRule, RoundCredits
from protocol.ledger.entries import CreditLine, RollbackEntry, SettleEntry, decode_entry, decode_line, genesis_leaf
from protocol.ledger.state import LedgerSnapshot, LedgerState, PendingRound
from protocol.proofs import root_at


def size(db: Database) -> int:
    rows = db.query("SELECT sequence FROM entries ORDER BY sequence DESC LIMIT 1")
    return rows[0][0] + 1 if rows else 0


def entries(db: Database, first: int, limit: int) -> list[bytes]:
    rows = db.query(
        "SELECT encoded FROM entries WHERE sequence >= ? AND sequence < ? ORDER BY sequence", (first, first + limit)
    )
    return [bytes(r[0]) for r in rows]


def root(db: Database, count: int) -> Digest:
    """Return the root over the first `count` leaves, from the complete subtrees of which they consist.

    Raises IndexError.
    """
    return root_at(count, partial(node, db))


def lines(db: Database, sequence: int) -> list[bytes]:
    rows = db.query("SELECT encoded FROM lines WHERE entry = ? ORDER BY line", (sequence,))
    return [bytes(r[0]) for r in rows]


def node(db: Database, level: int, index: int) -> bytes:
    """Return the hash of a complete subtree: of the 2^level leaves from index * 2^level on. Raises IndexError."""
    if level == 0:
        rows = db.query("SELECT leaf FROM entries WHERE sequence = ?", (index,))
    else:
        rows = db.query("SELECT hash FROM nodes WHERE level = ? AND place = ?", (level, index))
    if not rows:
        raise IndexError((level, index))
    return bytes(rows[0][0])


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


def accounts(db: Database, after: int, limit: int) -> list[RoundCredits]:
    rows = db.query(
        f"SELECT r.round, r.record, r.parent, r.base_state, r.loss, r.entry {_BRANCH} "
        "WHERE b.round > ? ORDER BY b.round LIMIT ?",
        (after, limit),
    )
    shares: dict[int, list[CreditLine]] = {r[5]: [] for r in rows}
    if rows:
        found = db.query(
            "SELECT l.entry, l.encoded FROM branch b JOIN lines l ON l.entry = b.entry "
            "WHERE b.round > ? AND b.round <= ? ORDER BY b.round, l.line",
            (after, rows[-1][0]),
        )
        for entry, sent in found:
            shares[entry].append(decode_line(bytes(sent)))
    return [
        RoundCredits(Round(r[0]), Digest(r[1]), Digest(r[2]), Digest(r[3]), r[4], tuple(shares[r[5]])) for r in rows
    ]


def history_of(db: Database, peer: PeerKey, before: int | None, limit: int) -> list[CreditedLine]:
    rows = db.query(
        "SELECT l.entry, l.line, r.number, r.round, r.record, l.encoded, v.line FROM peers p "
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
    seen = dict(db.query("SELECT p.peer, s.last_at FROM balances s JOIN peers p ON p.id = s.peer"))
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
    """Return the first entry of a time or later, by bisection: times never decrease."""
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


def heads(db: Database, limit: int, before: int | None) -> list[TreeHeadRow]:
    rows = db.query(
        "SELECT size, root, time, encoded FROM heads WHERE size < ? ORDER BY size DESC, id DESC LIMIT ?",
        (2**62 if before is None else before, limit),
    )
    return [TreeHeadRow(r[0], Digest(r[1]), r[2], bytes(r[3])) for r in rows]


def bindings(db: Database) -> list[BindingRow]:
    rows = db.query("SELECT peer, account, time, encoded FROM bindings ORDER BY id")
    return [BindingRow(PeerKey(r[0]), PeerKey(r[1]), r[2], bytes(r[3])) for r in rows]


# -- admissions ----------------------------------------------------------------------------------------------


def admissions(db: Database) -> list[AdmissionRow]:
    rows = db.query("SELECT peer, name, first_at, not_before, not_after, encoded FROM admissions")
    return [AdmissionRow(PeerKey(r[0]), r[1], r[2], r[3], r[4], bytes(r[5])) for r in rows]


def first_seen(db: Database) -> dict[Digest, float]:
    return {Digest(r[0]): r[1] for r in db.query("SELECT record, seen_at FROM first_seen")}


def first_seen_at(db: Database, record: Digest) -> float | None:
    rows = db.query("SELECT seen_at FROM first_seen WHERE record = ?", (bytes(record),))
    return rows[0][0] if rows else None


def entry_of(db: Database, record: Digest) -> int | None:
    rows = db.query("SELECT entry FROM rounds WHERE record = ?", (bytes(record),))
    return rows[0][0] if rows else None


# -- the state to continue from ---------------------------------------------------------------------------------


def read_balances(db: Database) -> dict[PeerKey, AccountBalance]:
    """Return every peer's balances, from the derived table."""
    rows = db.query(
        "SELECT p.peer, pending_micro, pending_tokens, pending_rounds, settled_micro, settled_tokens, settled_rounds, "
        "voided_micro, voided_tokens, voided_rounds FROM balances s JOIN peers p ON p.id = s.peer"
    )
    return {PeerKey(r[0]): AccountBalance(Balance(*r[1:4]), Balance(*r[4:7]), Balance(*r[7:10])) for r in rows}


def read_state(db: Database, run: RunId, rule: CreditRule, owner: PeerKey) -> LedgerState:
    """Return the ledger's state at the end of the database."""
    last = db.query("SELECT sequence, leaf, time FROM entries ORDER BY sequence DESC LIMIT 1")
    size, leaf, time = (last[0][0] + 1, Digest(last[0][1]), last[0][2]) if last else (0, genesis_leaf(run), 0)
    posted = db.query("SELECT count(*) FROM rounds")[0][0]
    settled = settled_count(db)
    branch = db.query(
        "SELECT r.record, r.tokens, r.entry FROM branch b JOIN rounds r ON r.entry = b.entry ORDER BY b.round"
    )
    reverted = db.query("SELECT record FROM rounds WHERE entry NOT IN (SELECT entry FROM branch)")
    held = db.query("SELECT entry, number, round, record FROM rounds WHERE number >= ? ORDER BY number", (settled,))
    state = LedgerSnapshot(
        size, leaf, time, posted, _epoch(db), ((Digest(r[0]), r[1], r[2]) for r in branch),
        (Digest(r[0]) for r in reverted), [_held(db, row) for row in held], read_balances(db),
    )  # fmt: skip
    return LedgerState.from_snapshot(run, rule, owner, state)


def settled_count(db: Database) -> int:
    """Return the number of settled round entries: they settle in the order of their numbers."""
    rows = db.query("SELECT encoded FROM entries WHERE kind = 'settle' ORDER BY sequence DESC LIMIT 1")
    what = decode_entry(bytes(rows[0][0])).payload if rows else None
    if not isinstance(what, SettleEntry):
        return 0
    return db.query("SELECT number FROM rounds WHERE entry = ?", (what.entry,))[0][0] + 1


def _epoch(db: Database) -> int:
    """Return the epoch of the newest rollback; 0 if there was none."""
    rows = db.query("SELECT encoded FROM entries WHERE kind = 'rollback' ORDER BY sequence DESC LIMIT 1")
    what = decode_entry(bytes(rows[0][0])).payload if rows else None
    if not isinstance(what, RollbackEntry):
        return 0
    return decode_directive(open_envelope(what.directive, "directive").payload).epoch


def _held(db: Database, row: tuple) -> PendingRound:
    entry, number, round_, record = row
    lines = db.query("SELECT encoded FROM lines WHERE entry = ? ORDER BY line", (entry,))
    voided = db.query("SELECT line FROM transfers WHERE entry = ? AND target % 4 = 3", (entry,))
    return PendingRound(
        entry, number, Round(round_), Digest(record), tuple(decode_line(bytes(r[0])) for r in lines),
        {r[0] for r in voided},
    )  # fmt: skip

"""The statements that write the ledger's tables, within a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.ledger.database import Database
from coordinator.ledger.queries import LedgerQueries
from coordinator.ledger.rows import AdmissionRow, BindingRow, RefusedUpdate, TreeHeadRow
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.accounts import LedgerAccount
from protocol.ledger.credits import RoundCredits
from protocol.ledger.entries import encode_line
from protocol.ledger.state import LedgerState, PostedEntry
from protocol.proofs import completed_subtrees

_KINDS = {"issuance": 0, "pending": 1, "settled": 2, "voided": 3}


class PeerNumbers:
    """The number of each peer in the tables; a new one is written on first use."""

    def __init__(self, db: Database):
        self._db = db
        self._numbers = {PeerKey(bytes(key)): n for n, key in db.query("SELECT id, peer FROM peers")}

    def of(self, peer: PeerKey) -> int:
        """Return the peer's number, which is made if there is none."""
        number = self._numbers.get(peer)
        if number is None:
            number = len(self._numbers) + 1
            self._db.query("INSERT INTO peers (id, peer) VALUES (?, ?)", (number, bytes(peer)))
            self._numbers[peer] = number
        return number

    def known(self, account: LedgerAccount) -> int | None:
        """Return the number of an account without writing; None for a peer that the tables do not have."""
        if account.peer is not None and account.peer not in self._numbers:
            return None
        return self.account(account)

    def account(self, account: LedgerAccount) -> int:
        """Return the number of an account: 0, or 4p + 1, 2, 3."""
        kind = _KINDS[account.kind]
        return kind if account.peer is None else 4 * self.of(account.peer) + kind


def write(db: Database, posted: PostedEntry) -> None:
    """Add an entry, and its leaf in the tree."""
    entry = posted.entry
    db.query(
        "INSERT INTO entries (sequence, kind, previous, leaf, time, encoded) VALUES (?, ?, ?, ?, ?, ?)",
        (entry.sequence, entry.kind, bytes(entry.previous), bytes(posted.leaf), entry.time, posted.encoded),
    )
    _grow_tree(db, entry.sequence, posted.leaf)


def write_round(
    db: Database, numbers: PeerNumbers, posted: PostedEntry, account: RoundCredits, seen_at: float | None,
    final: bytes | None,
) -> None:  # fmt: skip
    """Add the metadata of a round, and its lines."""
    sequence = posted.entry.sequence
    db.query(
        "INSERT INTO rounds (entry, number, round, record, parent, base_state, loss, tokens, seen_at, final) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (sequence, posted.round_index, account.round, bytes(account.record), bytes(account.parent),
         bytes(account.base_state), account.loss, account.tokens, seen_at, final),
    )  # fmt: skip
    lines = [(sequence, i, numbers.of(line.peer), encode_line(line)) for i, line in enumerate(posted.lines)]
    db.many("INSERT INTO lines (entry, line, peer, encoded) VALUES (?, ?, ?, ?)", lines)
    db.query("INSERT INTO branch (round, entry) VALUES (?, ?)", (account.round, sequence))


def write_transfers(db: Database, numbers: PeerNumbers, posted: PostedEntry) -> None:
    if posted.transfers:
        db.many(
            "INSERT INTO transfers (entry, line, source, target, sequence, micro_credits) VALUES (?, ?, ?, ?, ?, ?)",
            [
                (t.entry, t.line, numbers.account(t.source), numbers.account(t.target), t.sequence, t.micro_credits)
                for t in posted.transfers
            ],
        )


def write_balances(db: Database, numbers: PeerNumbers, books: LedgerState, peers: Iterable[PeerKey]) -> None:
    """Update the derived balances of some peers."""
    rows = []
    for peer in peers:
        s = books.balances[peer]
        parts = (s.pending, s.settled, s.voided)
        rows.append((numbers.of(peer), *(n for b in parts for n in (b.micro_credits, b.tokens, b.rounds))))
    names = [f"{kind}_{what}" for kind in ("pending", "settled", "voided") for what in ("micro", "tokens", "rounds")]
    sets = ", ".join(f"{n} = excluded.{n}" for n in names)
    db.many(
        f"INSERT INTO balances (peer, {', '.join(names)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (peer) DO UPDATE SET {sets}",
        rows,
    )


def write_last_seen(db: Database, numbers: PeerNumbers, peers: Iterable[PeerKey], seen_at: float | None) -> None:
    """Note when the newest record with these peers was seen."""
    db.many("UPDATE balances SET last_at = ? WHERE peer = ?", [(seen_at, numbers.of(p)) for p in peers])


def _grow_tree(db: Database, index: int, leaf: bytes) -> None:
    """Write the hashes of the subtrees that this leaf completes (RFC 9162 section 2.1)."""
    for done in completed_subtrees(index, leaf, LedgerQueries(db).node)[1:]:  # the first is the leaf itself
        db.query("INSERT INTO nodes (level, place, hash) VALUES (?, ?, ?)", (done.level, done.index, done.hash))


def forget_rounds_after(db: Database, round_: Round) -> None:
    """Cut the branch after a round: a rollback."""
    db.query("DELETE FROM branch WHERE round > ?", (round_,))


def _next(db: Database, table: str) -> int:
    """Return the next row's number; there is one writer at a time."""
    return db.query(f"SELECT coalesce(max(id), 0) + 1 FROM {table}")[0][0]


def add_refusal(db: Database, r: RefusedUpdate) -> bool:
    key = (bytes(r.peer), bytes(r.record), bytes(r.update))
    if db.query("SELECT 1 FROM refusals WHERE peer = ? AND record = ? AND header = ?", key):
        return False
    db.query(
        "INSERT INTO refusals (id, round, parent, record, peer, header, reason, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (_next(db, "refusals"), r.round, bytes(r.parent), bytes(r.record), bytes(r.peer), bytes(r.update), r.reason,
         r.at),
    )  # fmt: skip
    return True


def add_head(db: Database, h: TreeHeadRow) -> None:
    db.query(
        "INSERT INTO heads (id, size, root, time, encoded) VALUES (?, ?, ?, ?, ?)",
        (_next(db, "heads"), h.size, bytes(h.root), h.time, h.encoded),
    )


def add_binding(db: Database, b: BindingRow) -> None:
    db.query(
        "INSERT INTO bindings (id, peer, account, time, encoded) VALUES (?, ?, ?, ?, ?)",
        (_next(db, "bindings"), bytes(b.peer), bytes(b.account), b.time, b.encoded),
    )


def add_admission(db: Database, a: AdmissionRow) -> None:
    db.query(
        "INSERT INTO admissions (peer, name, first_at, not_before, not_after, encoded) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (peer) DO UPDATE SET name = excluded.name, not_before = excluded.not_before, "
        "not_after = excluded.not_after, encoded = excluded.encoded",
        (bytes(a.peer), a.name, a.first_at, a.not_before, a.not_after, a.encoded),
    )


def forget_admissions(db: Database, peers: Iterable[PeerKey]) -> None:
    db.many("DELETE FROM admissions WHERE peer = ?", [(bytes(peer),) for peer in peers])


def note_first_seen(db: Database, record: Digest, round_: Round, seen_at: float) -> None:
    db.query(
        "INSERT INTO first_seen (record, round, seen_at) VALUES (?, ?, ?) ON CONFLICT (record) DO NOTHING",
        (bytes(record), round_, seen_at),
    )


def forget_first_seen(db: Database, round_: Round) -> None:
    """Delete the notes of this round and those before it: they are part of the posted rounds."""
    db.query("DELETE FROM first_seen WHERE round <= ?", (round_,))

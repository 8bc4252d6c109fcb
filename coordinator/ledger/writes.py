"""How what the books make goes into the tables, and how books go on from there. Within a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from coordinator.ledger.database import Database
from protocol.directive_codec import decode_directive
from protocol.envelope import open_envelope
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.accounts import Account, Standing
from protocol.ledger.books import Books, BooksState, Held, Posted
from protocol.ledger.credits import Balance, CreditRule, RoundAccount
from protocol.ledger.entries import (
    RollbackEntry,
    SettleEntry,
    decode_entry,
    decode_line,
    encode_line,
    first_previous,
)
from protocol.proofs import completed

_KINDS = {"issuance": 0, "pending": 1, "settled": 2, "voided": 3}


class PeerNumbers:
    """The number of each peer in the tables; a new one is written when it is first asked for."""

    def __init__(self, db: Database):
        self._db = db
        self._numbers = {PeerKey(bytes(key)): n for n, key in db.query("SELECT id, peer FROM peers")}

    def of(self, peer: PeerKey) -> int:
        """The peer's number, made if need be."""
        number = self._numbers.get(peer)
        if number is None:
            number = len(self._numbers) + 1
            self._db.query("INSERT INTO peers (id, peer) VALUES (?, ?)", (number, bytes(peer)))
            self._numbers[peer] = number
        return number

    def known(self, account: Account) -> int | None:
        """As `account`, without writing: None for a peer that the tables do not have."""
        if account.peer is not None and account.peer not in self._numbers:
            return None
        return self.account(account)

    def account(self, account: Account) -> int:
        """The number of an account: 0, or 4p + 1, 2, 3."""
        kind = _KINDS[account.kind]
        return kind if account.peer is None else 4 * self.of(account.peer) + kind


def write(db: Database, posted: Posted) -> None:
    """The entry, and its leaf in the tree."""
    entry = posted.entry
    db.query(
        "INSERT INTO entries (sequence, kind, previous, leaf, time, sent) VALUES (?, ?, ?, ?, ?, ?)",
        (entry.sequence, entry.kind, bytes(entry.previous), bytes(posted.leaf), entry.time, posted.sent),
    )
    _grow_tree(db, entry.sequence, posted.leaf)


def write_round(
    db: Database, numbers: PeerNumbers, posted: Posted, account: RoundAccount, seen_at: float | None,
    final: bytes | None,
) -> None:  # fmt: skip
    """What is known of a round, and its lines."""
    sequence = posted.entry.sequence
    db.query(
        "INSERT INTO rounds (entry, number, round, record, parent, base_state, loss, tokens, seen_at, final) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (sequence, posted.number, account.round, bytes(account.record), bytes(account.parent),
         bytes(account.base_state), account.loss, account.tokens, seen_at, final),
    )  # fmt: skip
    lines = [(sequence, i, numbers.of(line.peer), encode_line(line)) for i, line in enumerate(posted.lines)]
    db.many("INSERT INTO lines (entry, line, peer, sent) VALUES (?, ?, ?, ?)", lines)
    db.query("INSERT INTO branch (round, entry) VALUES (?, ?)", (account.round, sequence))


def write_transfers(db: Database, numbers: PeerNumbers, posted: Posted) -> None:
    """The transfers of an entry."""
    if posted.transfers:
        db.many(
            "INSERT INTO transfers (entry, line, source, target, sequence, micro_credits) VALUES (?, ?, ?, ?, ?, ?)",
            [
                (t.entry, t.line, numbers.account(t.source), numbers.account(t.target), t.sequence, t.micro_credits)
                for t in posted.transfers
            ],
        )


def write_standings(db: Database, numbers: PeerNumbers, books: Books, peers: Iterable[PeerKey]) -> None:
    """The derived standings of some peers, as the books have them."""
    rows = []
    for peer in peers:
        s = books.standings[peer]
        parts = (s.pending, s.settled, s.voided)
        rows.append((numbers.of(peer), *(n for b in parts for n in (b.micro_credits, b.tokens, b.rounds))))
    names = [f"{kind}_{what}" for kind in ("pending", "settled", "voided") for what in ("micro", "tokens", "rounds")]
    sets = ", ".join(f"{n} = excluded.{n}" for n in names)
    db.many(
        f"INSERT INTO standings (peer, {', '.join(names)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (peer) DO UPDATE SET {sets}",
        rows,
    )


def write_last_seen(db: Database, numbers: PeerNumbers, peers: Iterable[PeerKey], seen_at: float | None) -> None:
    """When the newest record with these peers in it was seen."""
    db.many("UPDATE standings SET last_at = ? WHERE peer = ?", [(seen_at, numbers.of(p)) for p in peers])


def _grow_tree(db: Database, index: int, leaf: bytes) -> None:
    """Write the hashes of the subtrees that this leaf completes (RFC 9162 section 2.1)."""
    for done in completed(index, leaf, partial(node, db))[1:]:  # the first is the leaf itself
        db.query("INSERT INTO nodes (level, place, hash) VALUES (?, ?, ?)", (done.level, done.index, done.hash))


def node(db: Database, level: int, index: int) -> bytes:
    """The hash of a complete subtree: of the 2^level leaves from index * 2^level on. Raises IndexError."""
    if level == 0:
        rows = db.query("SELECT leaf FROM entries WHERE sequence = ?", (index,))
    else:
        rows = db.query("SELECT hash FROM nodes WHERE level = ? AND place = ?", (level, index))
    if not rows:
        raise IndexError((level, index))
    return bytes(rows[0][0])


# -- reading back --------------------------------------------------------------------------------------------


def read_standings(db: Database) -> dict[PeerKey, Standing]:
    """Every peer's standing, from the derived table."""
    rows = db.query(
        "SELECT p.peer, pending_micro, pending_tokens, pending_rounds, settled_micro, settled_tokens, settled_rounds, "
        "voided_micro, voided_tokens, voided_rounds FROM standings s JOIN peers p ON p.id = s.peer"
    )
    return {PeerKey(r[0]): Standing(Balance(*r[1:4]), Balance(*r[4:7]), Balance(*r[7:10])) for r in rows}


def read_books(db: Database, run: RunId, rule: CreditRule, owner: PeerKey) -> Books:
    """Books that go on where the database ends."""
    last = db.query("SELECT sequence, leaf, time FROM entries ORDER BY sequence DESC LIMIT 1")
    size, leaf, time = (last[0][0] + 1, Digest(last[0][1]), last[0][2]) if last else (0, first_previous(run), 0)
    posted = db.query("SELECT count(*) FROM rounds")[0][0]
    settled = settled_count(db)
    branch = db.query(
        "SELECT r.record, r.tokens, r.entry FROM branch b JOIN rounds r ON r.entry = b.entry ORDER BY b.round"
    )
    reverted = db.query("SELECT record FROM rounds WHERE entry NOT IN (SELECT entry FROM branch)")
    held = db.query("SELECT entry, number, round, record FROM rounds WHERE number >= ? ORDER BY number", (settled,))
    state = BooksState(
        size, leaf, time, posted, _epoch(db), ((Digest(r[0]), r[1], r[2]) for r in branch),
        (Digest(r[0]) for r in reverted), [_held(db, row) for row in held], read_standings(db),
    )  # fmt: skip
    return Books.resumed(run, rule, owner, state)


def settled_count(db: Database) -> int:
    """How many round entries are settled: they settle in the order of their numbers."""
    rows = db.query("SELECT sent FROM entries WHERE kind = 'settle' ORDER BY sequence DESC LIMIT 1")
    what = decode_entry(bytes(rows[0][0])).what if rows else None
    if not isinstance(what, SettleEntry):
        return 0
    return db.query("SELECT number FROM rounds WHERE entry = ?", (what.entry,))[0][0] + 1


def _epoch(db: Database) -> int:
    """Of the newest rollback; 0 when there was none."""
    rows = db.query("SELECT sent FROM entries WHERE kind = 'rollback' ORDER BY sequence DESC LIMIT 1")
    what = decode_entry(bytes(rows[0][0])).what if rows else None
    if not isinstance(what, RollbackEntry):
        return 0
    return decode_directive(open_envelope(what.directive, "directive").payload).epoch


def _held(db: Database, row: tuple) -> Held:
    entry, number, round_, record = row
    lines = db.query("SELECT sent FROM lines WHERE entry = ? ORDER BY line", (entry,))
    voided = db.query("SELECT line FROM transfers WHERE entry = ? AND target % 4 = 3", (entry,))
    return Held(
        entry, number, Round(round_), Digest(record), tuple(decode_line(bytes(r[0])) for r in lines),
        {r[0] for r in voided},
    )  # fmt: skip

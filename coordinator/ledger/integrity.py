"""Compares the ledger's database with itself: everything that can be recomputed is.

`check_all` replays the whole log. `check_opened` is for every start: all of a small ledger; of a large one the hash
chain and the newest rounds. So a disk that lost or tore what it had acknowledged is noticed before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.errors import LedgerError
from coordinator.ledger import writes
from coordinator.ledger.database import Database, SqliteDatabase
from coordinator.ledger.queries import LedgerQueries
from protocol.errors import LedgerRuleError, MalformedError
from protocol.ids import Round, RunId
from protocol.ledger.entries import LedgerEntry, RoundEntry, SettleEntry, VoidEntry, decode_entry, genesis_leaf
from protocol.ledger.state import LedgerState, PostedEntry
from protocol.merkle import leaf_hash, tree_hash
from protocol.spec import RunSpec

PAGE = 512
CHECKED_LINES = 20_000
"""Maximum number of lines of a ledger that is checked completely at each start."""

CHECKED_ENTRIES = 200_000
"""Newest entries of a larger ledger over which the hash chain is checked."""

CHECKED_ROUNDS = 32
"""Newest rounds of a larger ledger whose lines are checked."""

REMEDY = (
    "the disk lost or changed what it had promised to keep, or somebody altered it. Restore the file from a copy, or "
    "move it away: credits are computed again from the chain"
)


def check_opened(db: Database, spec: RunSpec) -> None:
    """Raise LedgerError, with the first differences, if the ledger is not whole."""
    try:
        found = _quickly(db, spec)
    except (MalformedError, IndexError, TypeError, ValueError) as e:
        found = [f"it cannot be read: {e!r}"]
    if found:
        raise LedgerError(f"{db.where} is damaged: {'; '.join(found[:3])}: {REMEDY}")


def _quickly(db: Database, spec: RunSpec) -> list[str]:
    size = LedgerQueries(db).size()
    first = max(0, size - CHECKED_ENTRIES)
    count = issued = settled = voided = 0
    leaves = []
    for entry, leaf in _chain(db, spec.run_id, first, size):
        leaves.append(leaf)
        match entry.payload:
            case RoundEntry():
                count, issued = count + entry.payload.count, issued + entry.payload.micro_credits
            case SettleEntry():
                settled += entry.payload.micro_credits
            case VoidEntry():
                voided += entry.payload.micro_credits
    if first == 0 and count <= CHECKED_LINES:
        damage = db.damage() if isinstance(db, SqliteDatabase) else ""
        return [damage] if damage else list(check_all(db, spec))
    found = []
    if first == 0 and leaves and LedgerQueries(db).root(size) != tree_hash(leaves):
        found.append("the Merkle tree is not that of the entries")
    balances = LedgerQueries(db).balances().values()
    sums = [sum(getattr(s, k).micro_credits for s in balances) for k in ("pending", "settled", "voided")]
    if first == 0 and sums != [issued - settled - voided, settled, voided]:
        found.append("the peers' balances are not what the entries give them")
    newest = db.query("SELECT entry FROM rounds ORDER BY entry DESC LIMIT ?", (CHECKED_ROUNDS,))
    for (sequence,) in newest:
        found += _lines_of(db, sequence)
    return found


def _chain(db: Database, run: RunId, first: int, size: int) -> Iterator[tuple[LedgerEntry, bytes]]:
    """Yield the entries from `first` on, each with its leaf hash. Raises MalformedError where the chain is broken."""
    before = LedgerQueries(db).node(0, first - 1) if first else bytes(genesis_leaf(run))
    at = first
    while at < size:
        rows = db.query(
            "SELECT sequence, kind, previous, leaf, time, encoded FROM entries WHERE sequence >= ? "
            "ORDER BY sequence LIMIT ?",
            (at, PAGE),
        )
        if not rows:
            raise MalformedError(f"entry {at} is missing")
        for sequence, kind, previous, leaf, time, sent in rows:
            entry = decode_entry(bytes(sent))
            if sequence != at or entry.sequence != at or entry.run != run or (entry.kind, entry.time) != (kind, time):
                raise MalformedError(f"entry {at} is missing or another's")
            if not bytes(previous) == bytes(entry.previous) == before or leaf_hash(bytes(sent)) != bytes(leaf):
                raise MalformedError(f"the chain of hashes breaks at entry {at}")
            before = bytes(leaf)
            yield entry, before
            at += 1


def _lines_of(db: Database, sequence: int) -> list[str]:
    entry = decode_entry(LedgerQueries(db).entries(sequence, 1)[0])
    root = tree_hash([leaf_hash(line) for line in LedgerQueries(db).lines(sequence)])
    if not isinstance(entry.payload, RoundEntry) or root != entry.payload.lines_root:
        return [f"the lines of entry {sequence} are not those that were posted"]
    return []


def check_all(db: Database, spec: RunSpec) -> Iterator[str]:
    """Replay the log and yield each difference, also between the log and the derived tables. Reads everything."""
    books = LedgerState.of(spec)
    leaves: list[bytes] = []
    size = LedgerQueries(db).size()
    seen: dict[int, PostedEntry] = {}
    for at in range(size):
        rows = db.query("SELECT kind, previous, leaf, time, encoded FROM entries WHERE sequence = ?", (at,))
        if not rows:
            yield f"entry {at} is missing"
            return
        kind, previous, leaf, time, sent = rows[0]
        try:
            posted = books.replay(bytes(sent), LedgerQueries(db).lines(at))
        except (LedgerRuleError, MalformedError) as e:
            yield str(e)
            return
        made = posted.entry
        if (kind, bytes(previous), bytes(leaf), time) != (made.kind, made.previous, posted.leaf, made.time):
            yield f"entry {at} is noted with another kind, hash or time than its bytes have"
        leaves.append(posted.leaf)
        seen[at] = posted
        if at % PAGE == PAGE - 1:
            yield from _compare_transfers(db, seen)
            seen.clear()
    yield from _compare_transfers(db, seen)
    if books.due is not None:
        yield f"entry {books.due} is due and not settled"
    yield from _compare_tables(db, books, leaves)


def _compare_transfers(db: Database, made: dict[int, PostedEntry]) -> Iterator[str]:
    """Yield differences between the transfers and rounds of consecutive entries and their tables."""
    if not made:
        return
    first, last = min(made), max(made)
    numbers = writes.PeerNumbers(db)
    rows = db.query(
        "SELECT sequence, entry, line, source, target, micro_credits FROM transfers WHERE sequence >= ? "
        "AND sequence <= ? ORDER BY sequence, line",
        (first, last),
    )
    peers = dict(db.query("SELECT id, peer FROM peers"))
    found: dict[int, list[tuple]] = {}
    for sequence, *row in rows:
        found.setdefault(sequence, []).append(tuple(row))
    for sequence, posted in made.items():
        due = [
            (t.entry, t.line, numbers.known(t.source), numbers.known(t.target), t.micro_credits)
            for t in posted.transfers
        ]
        if due != found.get(sequence, []):
            yield f"the transfers of entry {sequence} are not what it does to accounts"
        what = posted.entry.payload
        if isinstance(what, RoundEntry):
            tokens = sum(line.tokens for line in posted.lines)
            rows = db.query("SELECT number, round, record, parent, tokens FROM rounds WHERE entry = ?", (sequence,))
            if rows != [(posted.round_index, what.round, what.record, what.parent, tokens)]:
                yield f"the round of entry {sequence} is noted otherwise than it was posted"
            rows = db.query("SELECT peer FROM lines WHERE entry = ? ORDER BY line", (sequence,))
            if [bytes(peers.get(n, b"")) for (n,) in rows] != [bytes(line.peer) for line in posted.lines]:
                yield f"the lines of entry {sequence} are noted as those of other peers"


def _compare_tables(db: Database, books: LedgerState, leaves: list[bytes]) -> Iterator[str]:
    level, at = 0, list(leaves)
    count = db.query("SELECT count(*) FROM nodes")[0][0]
    made = 0
    while len(at) > 1:
        at = [tree_hash([at[i], at[i + 1]]) for i in range(0, len(at) - 1, 2)]
        level, made = level + 1, made + len(at)
        rows = db.query("SELECT place, hash FROM nodes WHERE level = ? ORDER BY place", (level,))
        if [(p, bytes(h)) for p, h in rows] != list(enumerate(bytes(h) for h in at)):
            yield f"level {level} of the Merkle tree is not that of the entries"
    if made != count:
        yield f"the Merkle tree has {count} nodes, and {made} follow from the entries"
    if leaves and LedgerQueries(db).root(len(leaves)) != tree_hash(leaves):
        yield "the root of the Merkle tree is not that of the entries"
    branch = [tuple(r) for r in db.query("SELECT round, entry FROM branch ORDER BY round")]
    if branch != [(r, books.entry_of(Round(r))) for r in range(books.rounds)]:
        yield "the branch of rounds is not the one that the entries lead to"
    balances = LedgerQueries(db).balances()
    if balances != books.balances:
        wrong = [p for p in {**balances, **books.balances} if balances.get(p) != books.balances.get(p)]
        yield f"the balances of {len(wrong)} peers are not what the entries give them: {min(wrong).short} and on"
    total = db.query("SELECT count(*) FROM lines")[0][0]
    if total != sum(s.pending.rounds + s.settled.rounds + s.voided.rounds for s in books.balances.values()):
        yield "there are lines that no entry has"
    moved = db.query("SELECT coalesce(sum(micro_credits), 0) FROM account_sums")[0][0]
    if int(moved) or books.imbalance():
        yield f"all accounts together are {int(moved)}, not zero"

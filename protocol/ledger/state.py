"""The ledger state: a double-entry state machine that makes the ledger's entries, and checks them for auditors.

    issuance -> pending/PEER -> settled/PEER
                             -> voided/PEER

No clock, disk or network. The coordinator makes entries with `post_round`, `void`, `rollback`. An auditor passes the
entries to `replay`, which makes each entry again and compares the bytes, so there is one set of rules. Every amount
goes from one account to another, so all accounts together are zero. Memory: the pending credits, 48 bytes for each
round of the run, and a balance for each peer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol.chain import genesis_digest
from protocol.errors import AdmissionError, LedgerRuleError, MalformedError, SignatureError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.accounts import ISSUANCE, PENDING, SETTLED, VOIDED, AccountBalance, LedgerAccount, Transfer
from protocol.ledger.credits import CreditRule, RoundCredits
from protocol.ledger.entries import (
    CreditLine,
    EntryPayload,
    LedgerEntry,
    RollbackEntry,
    RoundEntry,
    SettleEntry,
    VoidEntry,
    decode_entry,
    decode_line,
    encode_entry,
    genesis_leaf,
    lines_root,
)
from protocol.ledger.void_orders import VoidOrder, open_void_order
from protocol.merkle import leaf_hash
from protocol.message_codec import MessageDecoder
from protocol.messages import Directive, Rollback
from protocol.spec import RunSpec


@dataclass(frozen=True, slots=True)
class PostedEntry:
    """An entry that was made: its bytes, the lines under it (a round's), and what it does to accounts.

    `round_index`: the number of round entries before it, if it is a round's; else -1.
    """

    entry: LedgerEntry
    encoded: bytes
    lines: tuple[CreditLine, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    round_index: int = -1

    @property
    def leaf(self) -> Digest:
        """The entry's leaf hash in the log, and what the next entry names as the one before."""
        return Digest(leaf_hash(self.encoded))


@dataclass(slots=True)
class PendingRound:
    """A round that is posted and not settled yet."""

    sequence: int
    round_index: int
    round: Round
    record: Digest
    lines: tuple[CreditLine, ...]
    voided: set[int] = field(default_factory=set)


@dataclass(slots=True)
class LedgerSnapshot:
    """The contents of the ledger state, to continue from the end of a database.

    These are the log's size, its last leaf and time, its round entries, and the newest rollback's epoch (0: none).
    There are also the branch (record, own tokens and sequence of each round), rolled-back records, pending rounds
    (oldest first), and each peer's balance.
    """

    size: int
    leaf: Digest
    time: int
    rounds_posted: int
    epoch: int
    branch: Iterable[tuple[Digest, int, int]]
    reverted: Iterable[Digest]
    pending: Iterable[PendingRound]
    balances: dict[PeerKey, AccountBalance]


class LedgerState:
    """The accounts of one run as its log leaves them. A method that raises LedgerRuleError has changed nothing."""

    def __init__(self, run: RunId, rule: CreditRule, owner: PeerKey):
        self.run = run
        self.rule = rule
        self.owner = owner
        self.size = 0
        """Entries in the log."""
        self.leaf = genesis_leaf(run)
        """The leaf hash of the last entry."""
        self.time = 0
        self.posted = 0
        """Round entries in the log."""
        self.epoch = 0
        """Number of the newest rollback: each is done once, in the order in which the owner numbered them."""
        self.balances: dict[PeerKey, AccountBalance] = {}
        """The pending, settled and voided credits of each peer."""
        self.totals: Counter[str] = Counter()
        """The sum over all accounts of a kind; issuance is what was issued, below zero."""
        self._pending: dict[int, PendingRound] = {}
        self._reverted: set[Digest] = set()
        self._records = bytearray()
        self._tokens = array("q")
        self._sequences = array("q")

    @classmethod
    def of(cls, spec: RunSpec) -> LedgerState:
        """Return the empty ledger state of a run."""
        return cls(spec.run_id, CreditRule.of(spec), spec.owner_key)

    @classmethod
    def from_snapshot(cls, run: RunId, rule: CreditRule, owner: PeerKey, snapshot: LedgerSnapshot) -> LedgerState:
        """Return a ledger state that continues from a snapshot, which is trusted: an auditor replays instead."""
        state = cls(run, rule, owner)
        state.size, state.leaf, state.time, state.posted = (
            snapshot.size, snapshot.leaf, snapshot.time, snapshot.rounds_posted,
        )  # fmt: skip
        state.epoch = snapshot.epoch
        for record, tokens, sequence in snapshot.branch:
            state._extend_branch(record, tokens, sequence)
        state._reverted = set(snapshot.reverted)
        state._pending = {p.sequence: p for p in snapshot.pending}
        state.balances = dict(snapshot.balances)
        for balance in state.balances.values():
            for kind in (PENDING, SETTLED, VOIDED):
                state.totals[kind] += balance.of(kind).micro_credits
                state.totals[ISSUANCE] -= balance.of(kind).micro_credits
        return state

    # -- what is known ---------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds on the run's branch: the next one has this number."""
        return len(self._sequences)

    @property
    def tip(self) -> Digest:
        """The record that the next round is built on."""
        return self.record_of(Round(self.rounds - 1)) if self.rounds else genesis_digest(self.run)

    def record_of(self, round_: Round) -> Digest:
        """Return the record of a round on the branch. Raises IndexError."""
        if not 0 <= round_ < self.rounds:
            raise IndexError(round_)
        return Digest(bytes(self._records[32 * round_ : 32 * round_ + 32]))

    def entry_of(self, round_: Round) -> int:
        """Return the sequence of the round entry of a round on the branch. Raises IndexError."""
        return self._sequences[round_]

    @property
    def tokens(self) -> int:
        """Tokens accepted on the branch."""
        return self._tokens[-1] if self._tokens else 0

    @property
    def is_complete(self) -> bool:
        """Return whether the branch has the run's tokens."""
        return 0 < self.rule.total_tokens <= self.tokens

    @property
    def pending(self) -> tuple[PendingRound, ...]:
        """Return the posted rounds that are not settled, oldest first."""
        return tuple(self._pending.values())

    @property
    def due(self) -> int | None:
        """The round entry that must be settled before anything else is written."""
        oldest = next(iter(self._pending.values()), None)
        if oldest is None or not (self.is_complete or self.posted - 1 - oldest.round_index >= self.rule.hold_rounds):
            return None
        return oldest.sequence

    def imbalance(self) -> int:
        """Return the sum over all accounts; anything but 0 is a fault of this program."""
        return sum(self.totals.values())

    # -- writing ---------------------------------------------------------------------------------------------

    def post_round(self, credits: RoundCredits, time: int) -> list[PostedEntry]:
        """Return the round's entry, then the settlements that it makes due, oldest first. `time`: unix milliseconds."""
        entries = [self._post(credits, self._monotonic(time))]
        while (entry := self.due) is not None:
            entries.append(self._settle(entry, self.time))
        return entries

    def void(self, void_order: bytes, time: int) -> PostedEntry:
        """Void the line that a void order of the owner names (see `void_orders`), while it is pending."""
        return self._void(void_order, self._monotonic(time))

    def rollback(self, record: Digest, round_: Round, directive: bytes, time: int) -> PostedEntry:
        """Let the next round be the child of a record on the branch, by a signed directive of the owner."""
        return self._rollback(record, round_, directive, self._monotonic(time))

    def has_rollback(self, directive: bytes) -> bool:
        """Return whether the rollback of a directive is in the log already, by this directive or by an earlier one."""
        return self._rollback_in(directive).epoch <= self.epoch

    # -- checking --------------------------------------------------------------------------------------------

    def replay(self, encoded: bytes, lines: Sequence[bytes] = ()) -> PostedEntry:
        """Apply the next entry of a log that somebody else keeps, with the lines of a round.

        Raises LedgerRuleError when it is not the entry that this state would have made, MalformedError when it does not
        parse. The certificate of a round is not looked at: whoever has the chain compares `lines` with it.
        """
        entry = decode_entry(encoded)
        if entry.time < self.time:
            raise LedgerRuleError(
                f"entry {self.size} is of {entry.time} ms, before the entry before it ({self.time} ms)"
            )
        what = entry.payload
        if lines and not isinstance(what, RoundEntry):
            raise LedgerRuleError(f"entry {self.size} is no round, and has lines")
        check = _Expected(encoded, self.size)
        if isinstance(what, RoundEntry):
            shares = tuple(decode_line(line) for line in lines)
            # No rule looks at the base state or the loss, which no entry has: the parent and 0 stand in for them.
            credits = RoundCredits(what.round, what.record, what.parent, what.parent, 0.0, shares)
            return self._post(credits, entry.time, check)
        if isinstance(what, SettleEntry):
            return self._settle(what.entry, entry.time, check)
        if isinstance(what, VoidEntry):
            return self._void(what.void_order, entry.time, check)
        return self._rollback(what.record, what.round, what.directive, entry.time, check)

    # -- the rules -------------------------------------------------------------------------------------------

    def _post(self, credits: RoundCredits, time: int, expected: _Expected | None = None) -> PostedEntry:
        self._check_nothing_due()
        if credits.round != self.rounds or credits.parent != self.tip:
            where = f"ends with round {self.rounds - 1}, record {self.tip.short}" if self.rounds else "is empty"
            raise LedgerRuleError(
                f"round {credits.round} (record {credits.record.short}, parent {credits.parent.short}) does not "
                f"follow the ledger, which {where}"
            )
        if credits.record in self._reverted:
            raise LedgerRuleError(f"record {credits.record.short} was rolled back, and its credit was issued then")
        lines = credits.lines
        if not lines:
            raise LedgerRuleError(f"round {credits.round} has no lines: a record has a contributor at least")
        for i, line in enumerate(lines):
            if i and line.peer <= lines[i - 1].peer:
                raise LedgerRuleError(f"the lines of round {credits.round} are not by ascending peer: line {i}")
            tokens, credit = line.windows * self.rule.window, self.rule.micro_credits(line.windows)
            if (line.tokens, line.micro_credits) != (tokens, credit):
                raise LedgerRuleError(
                    f"line {i} of round {credits.round} says {line.tokens} tokens and {line.micro_credits} "
                    f"micro-credits; {line.windows} windows are {tokens} tokens and earn {credit}"
                )
        what = RoundEntry(
            credits.round, credits.record, credits.parent, lines_root(lines), len(lines), credits.micro_credits
        )
        entry, encoded = self._make_entry(what, time, expected)
        moved = [(i, LedgerAccount(ISSUANCE), LedgerAccount(PENDING, line.peer)) for i, line in enumerate(lines)]
        transfers = self._transfer(entry, entry.sequence, lines, moved)
        number = self.posted
        self._pending[entry.sequence] = PendingRound(entry.sequence, number, credits.round, credits.record, lines)
        self.posted += 1
        self._extend_branch(credits.record, credits.tokens, entry.sequence)
        return self._append(PostedEntry(entry, encoded, lines, transfers, number))

    def _settle(self, sequence: int, time: int, expected: _Expected | None = None) -> PostedEntry:
        if sequence != self.due:
            what = "nothing is due" if self.due is None else f"entry {self.due} is due"
            raise LedgerRuleError(f"entry {self.size} settles entry {sequence}, but {what}")
        held = self._pending[sequence]
        good = [i for i in range(len(held.lines)) if i not in held.voided]
        amount = sum(held.lines[i].micro_credits for i in good)
        entry, encoded = self._make_entry(SettleEntry(sequence, len(good), amount), time, expected)
        moved = [
            (i, LedgerAccount(PENDING, held.lines[i].peer), LedgerAccount(SETTLED, held.lines[i].peer)) for i in good
        ]
        transfers = self._transfer(entry, sequence, held.lines, moved)
        del self._pending[sequence]
        return self._append(PostedEntry(entry, encoded, (), transfers))

    def _void(self, signed_order: bytes, time: int, expected: _Expected | None = None) -> PostedEntry:
        self._check_nothing_due()
        try:
            void_order = open_void_order(signed_order, self.run, self.owner)
        except (MalformedError, SignatureError) as e:
            raise LedgerRuleError(f"a void order that does not count: {e}") from None
        held, i = self._line_of(void_order)
        line = held.lines[i]
        what = VoidEntry(held.sequence, i, line.micro_credits, signed_order)
        entry, encoded = self._make_entry(what, time, expected)
        moved = [(i, LedgerAccount(PENDING, line.peer), LedgerAccount(VOIDED, line.peer))]
        transfers = self._transfer(entry, held.sequence, held.lines, moved)
        held.voided.add(i)
        return self._append(PostedEntry(entry, encoded, (), transfers))

    def _line_of(self, order: VoidOrder) -> tuple[PendingRound, int]:
        """Return the credit line that a void order is about."""
        for held in self._pending.values():
            if (held.record, held.round) == (order.record, order.round):
                for i, line in enumerate(held.lines):
                    if (line.peer, line.update) == (order.peer, order.update):
                        if i in held.voided:
                            raise LedgerRuleError(f"line {i} of entry {held.sequence} is voided already")
                        return held, i
        raise LedgerRuleError(
            f"a void order on update {order.update.short} of {order.peer.short} in round {order.round}: no such line "
            "is pending (what is settled stays)"
        )

    def _rollback(
        self, record: Digest, round_: Round, directive: bytes, time: int, expected: _Expected | None = None
    ) -> PostedEntry:
        self._check_nothing_due()
        if not 0 <= round_ < self.rounds or self.record_of(round_) != record:
            raise LedgerRuleError(
                f"a rollback to round {round_}, record {record.short}: the ledger's branch has no such round"
            )
        rollback = self._rollback_in(directive)
        if (rollback.record, rollback.round) != (record, round_ + 1):
            raise LedgerRuleError(
                f"a rollback to round {round_}, record {record.short}, by a directive that goes back to round "
                f"{rollback.round - 1}, record {rollback.record.short}"
            )
        if rollback.epoch <= self.epoch:
            raise LedgerRuleError(
                f"rollback {rollback.epoch} of the run, after rollback {self.epoch}: each is done once"
            )
        entry, encoded = self._make_entry(RollbackEntry(record, round_, directive), time, expected)
        self.epoch = rollback.epoch
        self._reverted |= {self.record_of(Round(r)) for r in range(round_ + 1, self.rounds)}
        del self._records[32 * (round_ + 1) :]
        del self._tokens[round_ + 1 :]
        del self._sequences[round_ + 1 :]
        return self._append(PostedEntry(entry, encoded))

    def _rollback_in(self, directive: bytes) -> Rollback:
        """Return the rollback that the owner's directive orders."""
        try:
            rollback = MessageDecoder(self.run, self.owner, remember=1).decode(directive, Directive).body.rollback
        except (MalformedError, SignatureError, AdmissionError) as e:
            raise LedgerRuleError(f"a directive that does not count: {e}") from None
        if rollback is None:
            raise LedgerRuleError("a directive that rolls nothing back")
        return rollback

    def _check_nothing_due(self) -> None:
        if (due := self.due) is not None:
            raise LedgerRuleError(f"entry {self.size} must settle entry {due}, which is due")

    def _monotonic(self, time: int) -> int:
        """Return the time of the next entry: a clock that was set back repeats the time of the entry before."""
        return max(int(time), self.time)

    def _make_entry(self, what: EntryPayload, time: int, expected: _Expected | None) -> tuple[LedgerEntry, bytes]:
        entry = LedgerEntry(self.run, self.size, self.leaf, time, what)
        encoded = encode_entry(entry)
        if expected is not None:
            expected.check(entry, encoded)
        return entry, encoded

    def _append(self, posted: PostedEntry) -> PostedEntry:
        self.size += 1
        self.leaf = posted.leaf
        self.time = posted.entry.time
        return posted

    def _transfer(
        self,
        entry: LedgerEntry,
        of: int,
        lines: Sequence[CreditLine],
        moved: Iterable[tuple[int, LedgerAccount, LedgerAccount]],
    ) -> tuple[Transfer, ...]:
        """Return the transfers of the lines `moved` of the round entry `of`, after applying them to the accounts."""
        transfers = []
        for i, source, target in moved:
            line = lines[i]
            transfers.append(Transfer(entry.sequence, of, i, source, target, line.micro_credits))
            self.totals[source.kind] -= line.micro_credits
            self.totals[target.kind] += line.micro_credits
            balance = self.balances.get(line.peer, _NOTHING)
            self.balances[line.peer] = balance.plus(line) if source.kind == ISSUANCE else balance.moved(line, target.kind)
        return tuple(transfers)

    def _extend_branch(self, record: Digest, tokens: int, sequence: int) -> None:
        self._records += record
        self._tokens.append(self.tokens + tokens)
        self._sequences.append(sequence)


_NOTHING = AccountBalance()


class _Expected:
    """The entry that a replay must produce, to the byte."""

    def __init__(self, encoded: bytes, sequence: int):
        self._encoded = encoded
        self._sequence = sequence

    def check(self, made: LedgerEntry, encoded: bytes) -> None:
        if encoded == self._encoded:
            return
        theirs = decode_entry(self._encoded)
        for name in ("run", "sequence", "previous", "time"):
            if getattr(made, name) != getattr(theirs, name):
                raise LedgerRuleError(
                    f"entry {self._sequence}: {name} is {getattr(theirs, name)}, not {getattr(made, name)}"
                )
        raise LedgerRuleError(
            f"entry {self._sequence} says {theirs.payload}, and follows from the ones before as {made.payload}"
        )

"""Credit as a fold over the chain: what each peer has, from the certificates of final records alone.

    fold = CreditFold(spec.run_id, CreditRule.of(spec))
    for certificate in final_certificates:  # in the order in which they became final
        fold.add(credits_of(certificate, rule))
    fold.balances[peer].settled.micro_credits

No clock, disk or network, and integers only: the coordinator, its peers and auditors get the same. A line of credit is
pending at first. A verdict or a conviction in a later record voids it while it is pending; else it settles when
`hold_rounds` more records are final, or the run has its tokens. After a rollback the next record is the child of an
earlier one. Credit that was issued until then remains, and settles by the same count. Memory: the pending lines, a
balance for each peer, and 40 bytes for each round.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from protocol.chain import genesis_digest
from protocol.errors import LedgerRuleError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.ledger.credits import CreditLine, CreditRule, LineStatus, PeerBalances, RoundCredits
from protocol.messages import Rollback
from protocol.spec import is_total_reached


@dataclass(slots=True)
class PendingRound:
    """The lines of a final record that are not settled. `number` counts final records from 0, on any branch."""

    number: int
    record: Digest
    lines: tuple[CreditLine, ...]
    voided: set[int] = field(default_factory=set)
    """Places of the voided lines."""


@dataclass(frozen=True, slots=True)
class FoldStep:
    """The changes that a record makes: its own `number`, the lines that it voids, the rounds that it settles.

    `voided` are pairs of a round's number and a line's place; `settled` are numbers of rounds.
    """

    number: int
    voided: tuple[tuple[int, int], ...]
    settled: tuple[int, ...]
    peers: frozenset[PeerKey]
    """Peers whose balances are others now."""


class CreditFold:
    """The credits of one run after some final records."""

    def __init__(self, run: RunId, rule: CreditRule):
        self.run = run
        self.rule = rule
        self.count = 0
        """Final records so far, on any branch."""
        self.epoch = 0
        """Number of rollbacks so far."""
        self.balances: dict[PeerKey, PeerBalances] = {}
        self._pending: dict[int, PendingRound] = {}
        self._records = bytearray()
        self._tokens = array("q")  # on the branch, up to each of its rounds
        self._reverted: set[Digest] = set()

    @classmethod
    def restored(
        cls, run: RunId, rule: CreditRule, *, count: int, epoch: int, branch: Iterable[tuple[Digest, int]],
        reverted: Iterable[Digest], pending: Iterable[PendingRound], balances: dict[PeerKey, PeerBalances],
    ) -> CreditFold:  # fmt: skip
        """Return the fold that goes on from a stored state; `branch`: records and the progress of each, in order."""
        fold = cls(run, rule)
        fold.count, fold.epoch, fold.balances = count, epoch, balances
        for record, progress in branch:
            fold._extend(record, progress)
        fold._reverted = set(reverted)
        fold._pending = {p.number: p for p in pending}
        return fold

    def copy(self) -> CreditFold:
        """Return a fold in the same state; a change of one does not change the other."""
        other = CreditFold(self.run, self.rule)
        other.count, other.epoch, other.balances = self.count, self.epoch, dict(self.balances)
        other._pending = {n: replace(p, voided=set(p.voided)) for n, p in self._pending.items()}
        other._records, other._tokens = self._records[:], self._tokens[:]
        other._reverted = set(self._reverted)
        return other

    # -- what is known ---------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds on the branch: the next one has this number."""
        return len(self._tokens)

    @property
    def tip(self) -> Digest:
        """The record that the next one is built on."""
        return self.record_of(Round(self.rounds - 1)) if self.rounds else genesis_digest(self.run)

    def record_of(self, round_: Round) -> Digest:
        """Return the record of a round on the branch. Raises IndexError."""
        if not 0 <= round_ < self.rounds:
            raise IndexError(round_)
        return Digest(bytes(self._records[32 * round_ : 32 * round_ + 32]))

    @property
    def tokens(self) -> int:
        """Tokens accepted on the branch, without voided ones."""
        return self._tokens[-1] if self._tokens else 0

    @property
    def is_complete(self) -> bool:
        """Return whether the branch has the run's tokens."""
        return is_total_reached(self.rule.total_tokens, self.tokens)

    @property
    def pending(self) -> Sequence[PendingRound]:
        """Return the final records that are not settled, oldest first."""
        return tuple(self._pending.values())

    @property
    def settled_count(self) -> int:
        """Return how many final records are settled: they settle in the order of their numbers."""
        return self.count - len(self._pending)

    def status(self, number: int, line: int) -> LineStatus:
        """Return the status of a line, unless it was voided and its round is settled: that is not remembered."""
        held = self._pending.get(number)
        return "settled" if held is None else "voided" if line in held.voided else "pending"

    # -- folding ---------------------------------------------------------------------------------------------

    def add(self, credits: RoundCredits) -> FoldStep:
        """Fold in the next final record: its verdicts, then its own lines, then what settles.

        Raises LedgerRuleError, and changes nothing, when it does not follow.
        """
        rollback = credits.rollback
        if rollback is not None and rollback.epoch > self.epoch and rollback.record == credits.parent != self.tip:
            self._check_rollback(rollback)
            self._check_lines(credits, self._tokens[rollback.round - 1] if rollback.round else 0)
            self.roll_back(rollback)
        self._check(credits)
        voided = self._void(credits)
        number = self.count
        self._pending[number] = PendingRound(number, credits.record, credits.lines)
        self.count += 1
        for line in credits.lines:
            self.balances[line.peer] = self.balances.get(line.peer, _NOTHING).plus(line)
        self._extend(credits.record, credits.progress)
        changed = {line.peer for line in credits.lines}
        for n, i in voided:
            changed.add(self._pending[n].lines[i].peer)
        settled = []
        for held in self.pending:
            if not (self.is_complete or self.count - 1 - held.number >= self.rule.hold_rounds):
                break
            settled.append(held.number)
            for i, line in enumerate(held.lines):
                if i not in held.voided:
                    self.balances[line.peer] = self.balances[line.peer].moved(line, "settled")
            changed.update(line.peer for line in held.lines)
            del self._pending[held.number]
        return FoldStep(number, tuple(voided), tuple(settled), frozenset(changed))

    def roll_back(self, rollback: Rollback) -> bool:
        """Let the next record be the child of an earlier one on the branch; return False if that was done already.

        Raises LedgerRuleError if the branch has no such record.
        """
        if rollback.epoch <= self.epoch:
            return False
        self._check_rollback(rollback)
        self.epoch = rollback.epoch
        self._reverted |= {self.record_of(Round(r)) for r in range(rollback.round, self.rounds)}
        del self._records[32 * rollback.round :]
        del self._tokens[rollback.round :]
        return True

    # -- the rules -------------------------------------------------------------------------------------------

    def _check_rollback(self, rollback: Rollback) -> None:
        last = Round(rollback.round - 1)
        on_branch = last < self.rounds and (last < 0 or self.record_of(last) == rollback.record)
        if not on_branch or (last < 0 and rollback.record != genesis_digest(self.run)):
            raise LedgerRuleError(
                f"a rollback to round {rollback.round}, after {rollback.record.short}: no such record is on the branch"
            )

    def _check(self, credits: RoundCredits) -> None:
        if credits.round != self.rounds or credits.parent != self.tip:
            where = f"ends with round {self.rounds - 1}, record {self.tip.short}" if self.rounds else "is empty"
            raise LedgerRuleError(
                f"round {credits.round} (record {credits.record.short}, parent {credits.parent.short}) does not "
                f"follow the credited branch, which {where}"
            )
        if credits.record in self._reverted:
            raise LedgerRuleError(f"record {credits.record.short} was rolled back, and its credit was issued then")
        self._check_lines(credits, self.tokens)

    def _check_lines(self, credits: RoundCredits, tokens: int) -> None:
        """Check amounts; `tokens` are those of the branch that they follow."""
        lines = credits.lines
        if not 0 <= tokens + credits.progress < 2**63:
            raise LedgerRuleError(f"round {credits.round} voids more tokens than its branch has, or adds too many")
        if not lines:
            raise LedgerRuleError(f"round {credits.round} has no lines: a record has a contributor at least")
        for before, line in zip((None, *lines), lines, strict=False):
            if before is not None and line.peer <= before.peer:
                raise LedgerRuleError(f"the lines of round {credits.round} are not by ascending peer")
            if line != self.rule.line(line.peer, line.update, line.windows):
                raise LedgerRuleError(
                    f"the line of {line.peer.short} in round {credits.round} says {line.tokens} tokens and "
                    f"{line.micro_credits} micro-credits, which are not those of {line.windows} windows"
                )

    def _void(self, credits: RoundCredits) -> list[tuple[int, int]]:
        """Void the pending lines that a record's verdicts name, and all of those whom it convicts."""
        named = {(v.record, v.peer) for v in credits.verdicts}
        voided = []
        for held in self._pending.values() if named or credits.convicted else ():
            for i, line in enumerate(held.lines):
                is_named = (held.record, line.peer) in named or line.peer in credits.convicted
                if is_named and i not in held.voided:
                    held.voided.add(i)
                    self.balances[line.peer] = self.balances[line.peer].moved(line, "voided")
                    voided.append((held.number, i))
        return voided

    def _extend(self, record: Digest, progress: int) -> None:
        self._records += record
        self._tokens.append(self.tokens + progress)


_NOTHING = PeerBalances()

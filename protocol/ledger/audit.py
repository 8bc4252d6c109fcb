"""Checks a log of credits against the chain: every entry, every line, every hash, every signed head. Pure.

An auditor receives the entries in the coordinator's order, and finds each difference separately. After a difference
it continues from the chain, so that a single change is a single finding, not a flood. The rules of
the accounts are those of `LedgerState`; what a round earned comes from its certificate, never from the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from protocol.errors import LedgerRuleError, MalformedError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.accounts import AccountBalance
from protocol.ledger.credits import RoundCredits
from protocol.ledger.entries import (
    CreditLine,
    LedgerEntry,
    RollbackEntry,
    RoundEntry,
    SettleEntry,
    VoidEntry,
    decode_entry,
    decode_line,
    encode_line,
    genesis_leaf,
    lines_root,
)
from protocol.ledger.state import LedgerState
from protocol.ledger.statements import TreeHead
from protocol.merkle import leaf_hash, tree_hash
from protocol.proofs import MerkleFrontier
from protocol.spec import RunSpec

MAX_LINES_NAMED = 20
"""Lines of one entry that are named one by one; the rest is counted."""

MAX_DIFFERENCES = 10_000
MAX_GAP = 100_000
REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference between the log and the chain. `entry`: which; None for what is about the log as a whole."""

    entry: int | None
    message: str


@dataclass(frozen=True, slots=True)
class TrustedTreeHead:
    """A verified tree head, and where it is from, for people: "signed" or "seen by this machine"."""

    head: TreeHead
    origin: str = "signed"


@dataclass(slots=True)
class AuditReport:
    """The result of an audit. `unproved`: what could not be checked, and why; amounts in micro-credits."""

    entries: int = 0
    rounds: int = 0
    lines: int = 0
    root: str = ""
    issued: int = 0
    pending: int = 0
    settled: int = 0
    voided: int = 0
    balances: dict[PeerKey, AccountBalance] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unproved: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Everything was checked, and all is as it should be."""
        return not self.findings and not self.unproved


CreditsLookup = Callable[[Digest], RoundCredits | None]
"""A function that returns the credits of a record's certificate (`credits.credits_of`); None without a certificate."""


class Auditor:
    """An audit of one log: `add` each entry in order, then `finish`.

    `find` knows the certificates that were verified; `heads` are those that the log must agree with, newest first.
    `is_abandoned`: whether a record that `find` knows is not of the chain that the swarm follows; the owner must have
    rolled back what was credited for it.
    """

    def __init__(
        self,
        spec: RunSpec,
        find: CreditsLookup,
        heads: Sequence[TrustedTreeHead] = (),
        *,
        is_abandoned: Callable[[Digest], bool] | None = None,
    ):
        self._run = spec.run_id
        self._find = find
        self._is_abandoned = is_abandoned or (lambda record: False)
        self._ledger = LedgerState.of(spec)
        self._log = MerkleFrontier()
        self._number = 0
        """Number of the entry that should come next."""
        self._leaves: OrderedDict[int, bytes] = OrderedDict({-1: bytes(genesis_leaf(spec.run_id))})
        self._time = 0
        self._missing: list[int] = []
        """Numbers of entries that are missing so far."""
        self._early: dict[int, int] = {}
        """Settlements that came before they were due, as when a round is missing: settled entry to settling entry."""
        self._settled_here: set[int] = set()
        """Entries that the auditor settled itself, because the log has no settlement in its place."""
        self._posted: dict[Digest, int] = {}
        self._posted_here: set[Digest] = set()
        """Rounds that the auditor posted itself, because the log has no entry in its place."""
        self._orphans: dict[int, tuple[RoundEntry, bool]] = {}
        """Rounds that are not of the chain, and whether their certificates are known."""
        self._rolled_back = 0
        """The entry of the newest rollback."""
        self._unchecked_heads: dict[int, list[TrustedTreeHead]] = {}
        """Tree heads that the log has not reached, by size."""
        self._heads = list(heads)
        self.report = AuditReport()
        for seen in heads:
            self._unchecked_heads.setdefault(seen.head.size, []).append(seen)
        self._check_order(heads)
        self._check_heads()

    @property
    def tip(self) -> Digest:
        """The record of the newest round that is credited."""
        return self._ledger.tip

    def add(self, encoded: bytes, lines: Sequence[bytes] = ()) -> None:
        """Check the next entry as received, with the credit lines of a round."""
        report, place = self.report, self._log.size
        leaf = leaf_hash(encoded)
        self._log.append(leaf)
        report.entries += 1
        try:
            entry = decode_entry(encoded)
        except MalformedError as e:
            self._add_finding(place, f"entry {place} cannot be read: {e}")
            self._number = max(self._number, place + 1)
            self._remember(place, leaf)
        else:
            again = self._leaves.get(entry.sequence) == leaf
            self._check_place(entry, place)
            if not again:
                self._check_what(entry, list(lines))
            self._remember(entry.sequence, leaf)
        self._check_heads()

    def finish(
        self, finalized: Round | None = None, record: Digest | None = None, *, epoch: int | None = None
    ) -> AuditReport:
        """Return the report.

        `finalized`: the newest round that the owner has finalized, as the swarm holds it; `record` its record.
        `epoch` is that of the newest rollback in the swarm; None if no member was asked.
        """
        report, ledger = self.report, self._ledger
        if epoch is not None and ledger.epoch > epoch:
            n = self._rolled_back
            what = f"entry {n}: no member that was asked has heard of this rollback (number {ledger.epoch} of the run)"
            why = "it is minutes old, or what it takes back was never the swarm's: audit again in a while"
            report.unproved.append(Finding(n, f"{what}: {why}"))
        for of, n in self._early.items():
            self._add_finding(n, f"entry {n} settles entry {of}, which is not due")
        for n, (orphan, proved) in self._orphans.items():
            why = (
                "the swarm follows another" if proved else "this round was invented, or its certificate is kept from us"
            )
            self._add_finding(
                n,
                f"entry {n} credits round {orphan.round} with record {orphan.record.short}, which is not in the chain: "
                f"{why}",
            )
        if (due := ledger.due) is not None:
            self._add_finding(None, f"the settlement of entry {due} is due, and the log ends without it")
        if finalized is not None and finalized >= ledger.rounds:
            missing = (
                f"round {ledger.rounds}" if finalized == ledger.rounds else f"rounds {ledger.rounds} to {finalized}"
            )
            self._add_finding(None, f"the log ends before {missing}: finalized by the owner, and not credited")
        elif finalized is not None and record is not None and ledger.record_of(finalized) != record:
            self._add_finding(
                ledger.entry_of(finalized),
                f"entry {ledger.entry_of(finalized)} credits round {finalized} with record "
                f"{ledger.record_of(finalized).short}; the owner has signed record {record.short} as final",
            )
        for seen in (s for heads in self._unchecked_heads.values() for s in heads):
            self._add_finding(
                None,
                f"a tree head over {seen.head.size} entries was {seen.origin}, but the log has {self._log.size}: "
                "entries were removed",
            )
        report.root = str(self._log.root())
        report.balances = dict(ledger.balances)
        report.issued = -ledger.totals["issuance"]
        report.pending, report.settled = ledger.totals["pending"], ledger.totals["settled"]
        report.voided = ledger.totals["voided"]
        report.findings.sort(key=lambda d: (d.entry is None, d.entry or 0))
        return report

    # -- the log itself --------------------------------------------------------------------------------------

    def _check_place(self, entry: LedgerEntry, place: int) -> None:
        """Check number, hash chain and time."""
        n, expected = entry.sequence, self._number
        if entry.run != self._run:
            self._add_finding(place, f"place {place} holds an entry of another run ({entry.run.short})")
        if n > expected:
            self._missing += range(expected, min(n, expected + MAX_GAP))
            missing = f"entry {expected} is" if n == expected + 1 else f"entries {expected} to {n - 1} are"
            self._add_finding(expected, f"place {place} holds entry {n}: {missing} missing there")
        elif n < expected:
            self._add_finding(n, f"place {place} holds entry {n}: it stands there twice, or the order was changed")
        before = self._leaves.get(n - 1)
        if before is not None and before != entry.previous:
            self._add_finding(
                max(0, n - 1),
                f"entry {n} names another entry before it than entry {n - 1} as it is now: one of the two was changed "
                "after it was written"
                if n
                else "entry 0 does not begin the log of this run",
            )
        if entry.time < self._time and not n < expected:
            self._add_finding(n, f"entry {n} is of {entry.time} ms, before the entry before it ({self._time} ms)")
        self._time = max(self._time, entry.time)
        self._number = max(expected, n + 1)

    def _remember(self, number: int, leaf: bytes) -> None:
        self._leaves[number] = leaf
        while len(self._leaves) > REMEMBERED:
            self._leaves.popitem(last=False)

    def _check_heads(self) -> None:
        """Check the heads over the present number of entries."""
        for seen in self._unchecked_heads.pop(self._log.size, ()):
            if self._log.root() != seen.head.root:
                self._add_finding(
                    None,
                    f"the tree head over {seen.head.size} entries that was {seen.origin} has root "
                    f"{seen.head.root.short}, and these entries hash to {self._log.root().short}: an entry before "
                    f"number {seen.head.size} was changed, added or removed since, or the head is of another log",
                )

    def _check_order(self, heads: Iterable[TrustedTreeHead]) -> None:
        by_size: dict[int, Digest] = {}
        signed = sorted((s.head for s in heads), key=lambda h: (h.time, h.size))
        for a, b in zip(signed, signed[1:], strict=False):
            if b.size < a.size:
                self._add_finding(None, f"a tree head over {b.size} entries was signed after one over {a.size}")
        for head in signed:
            if by_size.setdefault(head.size, head.root) != head.root:
                self._add_finding(None, f"two tree heads over {head.size} entries were signed with different roots")

    # -- what entries say ------------------------------------------------------------------------------------

    def _check_what(self, entry: LedgerEntry, lines: list[bytes]) -> None:
        ledger, what, n = self._ledger, entry.payload, entry.sequence
        # The log's own form was checked above; the ledger state checks its contents.
        ledger.size, ledger.leaf, ledger.time = n, entry.previous, min(ledger.time, entry.time)
        if lines and not isinstance(what, RoundEntry):
            self._add_finding(n, f"entry {n} is no round, and has lines")
        if not (isinstance(what, SettleEntry) and what.entry == ledger.due):
            self._settle_what_is_due(entry)
        try:
            match what:
                case RoundEntry():
                    self._round(entry, what, lines)
                case SettleEntry() if what.entry in self._settled_here:
                    self._settled_here.discard(what.entry)  # it stands in another place, which was said
                case SettleEntry() if what.entry != ledger.due and self._missing:
                    self._early[what.entry] = n
                case SettleEntry():
                    self._compare(entry, ledger._settle(what.entry, entry.time).entry)
                case VoidEntry():
                    self._compare(entry, ledger._void(what.void_order, entry.time).entry)
                case RollbackEntry():
                    self._compare(entry, ledger._rollback(what.record, what.round, what.directive, entry.time).entry)
                    self._rolled_back = n
                    # The branch is given up: its certificates need not be in the chain that peers keep.
                    for m in [m for m, (orphan, _) in self._orphans.items() if orphan.round > what.round]:
                        gone, proved = self._orphans.pop(m)
                        if proved:
                            continue
                        self.report.unproved.append(
                            Finding(m, f"entry {m}: nobody gives the certificate of round {gone.round}, which the "
                                       "owner has rolled back")
                        )  # fmt: skip
        except LedgerRuleError as e:
            self._add_finding(n, f"entry {n} ({entry.kind}): {e}")

    def _settle_what_is_due(self, entry: LedgerEntry) -> None:
        ledger, n = self._ledger, entry.sequence
        while (due := ledger.due) is not None:
            if self._early.pop(due, None) is None:
                self._settled_here.add(due)
                self._add_finding(n, f"the settlement of entry {due} is missing: it was due before entry {n}")
            ledger.size = self._spare(n)
            ledger._settle(due, entry.time)
        ledger.size = n

    def _spare(self, number: int) -> int:
        """Return the number of a missing entry, for its substitute."""
        return self._missing.pop(0) if self._missing else number

    def _compare(self, entry: LedgerEntry, made: LedgerEntry) -> None:
        if entry.payload != made.payload:
            self._add_finding(
                entry.sequence,
                f"entry {entry.sequence} says {_said(entry)}; what follows from the chain is {_said(made)}",
            )

    def _round(self, entry: LedgerEntry, what: RoundEntry, lines: list[bytes]) -> None:
        n, report = entry.sequence, self.report
        report.rounds += 1
        report.lines += len(lines)
        if (first := self._posted.setdefault(what.record, n)) != n:
            self._add_finding(n, f"entry {n} credits round {what.round} again: entry {first} has done so")
            return
        credits = self._find(what.record)
        if credits is None:
            self._orphans[n] = (what, False)
            credits = self._as_logged(entry, what, lines)
            if credits is None:
                return
        else:
            if self._is_abandoned(what.record):
                self._orphans[n] = (what, True)
            self._check_round(n, what, credits, lines)
            if what.record in self._posted_here:
                return
            self._post_what_is_missing(credits, entry)
        self._ledger.size = n
        self._ledger._post(credits, entry.time)

    def _check_round(self, n: int, what: RoundEntry, credits: RoundCredits, lines: list[bytes]) -> None:
        """Check what the entry says, and each line, against the certificate."""
        true = [encode_line(line) for line in credits.lines]
        root = lines_root(credits.lines)
        wrong = [
            f"{name} {said}, not {is_}"
            for name, said, is_ in (
                ("round", what.round, credits.round),
                ("parent", what.parent.short, credits.parent.short),
                ("number of lines", what.count, len(true)),
                ("micro-credits", what.micro_credits, credits.micro_credits),
            )
            if said != is_
        ]
        if wrong:
            self._add_finding(
                n, f"entry {n} says of record {what.record.short}: {'; '.join(wrong)} as its certificate says"
            )
        if lines != true:
            self._name_lines(n, what, credits, lines, true)
            if tree_hash([leaf_hash(line) for line in lines]) != what.lines_root and what.lines_root == root:
                self._add_finding(
                    n, f"the lines of entry {n} do not hash to what the entry commits to: lines were changed"
                )
        if what.lines_root != root:
            self._add_finding(
                n, f"entry {n} commits to other lines than the certificate of round {credits.round} gives"
            )

    def _name_lines(
        self, n: int, what: RoundEntry, credits: RoundCredits, lines: list[bytes], true: list[bytes]
    ) -> None:
        named = 0
        for i in range(max(len(lines), len(true))):
            said, is_ = (lines[i] if i < len(lines) else None), (true[i] if i < len(true) else None)
            if said == is_:
                continue
            named += 1
            if named <= MAX_LINES_NAMED:
                line = credits.lines[i] if is_ is not None else None
                self._add_finding(n, f"line {i} of entry {n} (round {what.round}): {_line_words(said, line)}")
        if named > MAX_LINES_NAMED:
            self._add_finding(n, f"{named - MAX_LINES_NAMED} more lines of entry {n} differ")

    def _as_logged(self, entry: LedgerEntry, what: RoundEntry, lines: list[bytes]) -> RoundCredits | None:
        """Return a round without a certificate as the log has it: no rule looks at its base state and loss."""
        if tree_hash([leaf_hash(line) for line in lines]) != what.lines_root:
            self._add_finding(
                entry.sequence, f"the lines of entry {entry.sequence} do not hash to what the entry commits to"
            )
        try:
            shares = tuple(decode_line(line) for line in lines)
        except MalformedError as e:
            self._add_finding(entry.sequence, f"the lines of entry {entry.sequence} cannot be read: {e}")
            return None
        return RoundCredits(what.round, what.record, what.parent, what.parent, 0.0, shares)

    def _post_what_is_missing(self, credits: RoundCredits, entry: LedgerEntry) -> None:
        """Post the rounds of the chain before this one of which the log has no entry."""
        ledger = self._ledger
        missing: list[RoundCredits] = []
        parent = credits.parent
        while parent != ledger.tip and len(missing) < MAX_GAP:
            known = self._find(parent)
            if known is None or known.round < ledger.rounds:
                return  # the ledger state says what is wrong
            missing.append(known)
            parent = known.parent
        n = entry.sequence
        for round_ in reversed(missing):
            self._add_finding(
                n,
                f"round {round_.round} (record {round_.record.short}) is not credited before entry {n}, which credits "
                "a later one",
            )
            self._posted_here.add(round_.record)
            ledger.size = self._spare(n)
            ledger._post(round_, entry.time)
            while (due := ledger.due) is not None:
                if self._early.pop(due, None) is None:
                    self._settled_here.add(due)
                ledger.size = self._spare(n)
                ledger._settle(due, entry.time)

    def _add_finding(self, entry: int | None, message: str) -> None:
        if len(self.report.findings) < MAX_DIFFERENCES:
            self.report.findings.append(Finding(entry, message))


def _said(entry: LedgerEntry) -> str:
    """Describe an entry in words."""
    what = entry.payload
    match what:
        case RoundEntry():
            return f"round {what.round}, {what.count} lines, {what.micro_credits} micro-credits"
        case SettleEntry():
            return f"{what.count} lines of entry {what.entry} settle, {what.micro_credits} micro-credits"
        case VoidEntry():
            return f"line {what.line} of entry {what.entry} is void, {what.micro_credits} micro-credits"
        case RollbackEntry():
            return f"back to round {what.round}, record {what.record.short}"


def _line_words(said: bytes | None, true: CreditLine | None) -> str:
    """Compare a credit line with the right one."""
    if said is None and true is not None:
        return f"it is missing; peer {true.peer.short} earned {true.micro_credits} micro-credits"
    try:
        line = decode_line(said or b"")
    except MalformedError as e:
        return f"it cannot be read: {e}"
    if true is None:
        return (
            f"it gives peer {line.peer.short} {line.micro_credits} micro-credits, and the certificate has no such line"
        )
    if line.peer != true.peer:
        return (
            f"it gives {line.micro_credits} micro-credits to peer {line.peer.short}; by the certificate they are peer "
            f"{true.peer.short}'s ({true.micro_credits})"
        )
    names = ("update", "windows", "tokens", "micro_credits")
    wrong = [
        f"{name.replace('_', '-')} {getattr(line, name)}, not {getattr(true, name)}"
        for name in names
        if getattr(line, name) != getattr(true, name)
    ]
    return f"peer {line.peer.short}: {'; '.join(wrong)}"

"""A chain on which six keys have stake, with records that carry work reports and what follows from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from protocol.audits import AuditRule, draw_auditors
from protocol.chain import Chain, ChainLimits
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import (
    AuditCheck,
    Certificate,
    Directive,
    Pardon,
    RoundRecord,
    Score,
    Signed,
    UpdateHeader,
    WorkReport,
)
from protocol.stake import StakeRule
from tests.simulation.signer import FakeSigner, certificate
from tests.support.empty_chain import KEYS, OWNER, RUN, STATE

HOLD, WINDOWS = 5, 10
LIAR = KEYS[0]
OTHERS = KEYS[1:]


class Branch:
    """A chain on which six keys have stake, and its records."""

    def __init__(self, rounds: int | None = None, hold: int = HOLD, rule: AuditRule | None = None):
        rule = rule or AuditRule(auditors=3, owner=OWNER.key)
        limits = ChainLimits(100, 8, stake=StakeRule(hold), audit=rule)
        self.chain = Chain(RUN, STATE, limits)
        for _ in range(hold + 3 if rounds is None else rounds):
            self.add()

    @property
    def audited(self) -> Certificate:
        """The newest record whose audits are drawn: the one before the head."""
        return self.chain.certificate(self.chain.parent(self.chain.head))

    def auditors(self, record: Certificate, author: PeerKey = LIAR) -> tuple[PeerKey, ...]:
        """Return the auditors that are drawn for an update of a record."""
        chain = self.chain
        stakes = chain.audit_stakes(record.digest)
        seed = chain.audit_seed(record.digest, update_of(record, author))
        assert seed is not None
        return draw_auditors(seed, author, stakes, chain.limits.audit)

    def record(
        self, *reports: Signed[WorkReport], without: Collection[PeerKey] = (), decisions=None,
        directive: Signed[Directive] | None = None,
    ) -> Certificate:  # fmt: skip
        """Return the next record: of all that may be listed, with these reports and what follows from them."""
        chain = self.chain
        parent, number = chain.head, chain.height(chain.head)
        ordered = tuple(sorted(reports, key=lambda r: (r.body.record, r.body.update, r.author, r.body.check)))
        if decisions is None:
            decisions = chain.reports_after(parent).decisions(ordered)
        left_out = {d.author for d in decisions if d.convicted}.union(without)
        updates = []
        for key in KEYS:
            if key not in left_out and not chain.is_barred(key, parent):
                first, blob = chain.next_window(key, parent), Digest(sha256(b"blob", key, parent))
                body = UpdateHeader(RUN, number, parent, STATE, first, first, first + WINDOWS, 1, blob, 9, 1.0, b"")
                updates.append(FakeSigner(key).sign(body))
        weights = chain.weights(parent, updates)
        body = RoundRecord(
            RUN, number, parent, STATE, 0, tuple(updates), directive, weights, ordered, decisions,
            voided=chain.voided(parent, directive, decisions),
        )  # fmt: skip
        return certificate(FakeSigner(updates[0].author).sign(body), [u.author for u in updates])

    def add(
        self,
        *reports: Signed[WorkReport],
        without: Collection[PeerKey] = (),
        directive: Signed[Directive] | None = None,
    ) -> Certificate:
        made = self.record(*reports, without=without, directive=directive)
        assert self.chain.add(made) and self.chain.head == made.digest
        return made


def pardon(key: PeerKey, convicted_in: int, sequence: int = 1) -> Signed[Directive]:
    """Return a directive of the owner that pardons a conviction."""
    return OWNER.sign(Directive(RUN, sequence, pardons=(Pardon(key, Round(convicted_in)),)))


def update_of(record: Certificate, author: PeerKey = LIAR) -> Signed[UpdateHeader]:
    return next(u for u in record.record.body.updates if u.author == author)


def report(
    record: Certificate, by: PeerKey, *, passed: bool = False, check: AuditCheck = "replay", author: PeerKey = LIAR,
    margin: float = 0.5,
) -> Signed[WorkReport]:  # fmt: skip
    number, update = record.record.body.round, update_of(record, author).digest
    score = Score("warm", 0.5 + (margin if passed else -margin), 0.5)
    return FakeSigner(by).sign(WorkReport(RUN, number, record.digest, update, check, (score,)))


def accused(branch: Branch) -> tuple[Certificate, list[PeerKey], list[PeerKey]]:
    """Return a record whose update by LIAR two auditors accuse in the next one; these two, and the others."""
    record = branch.audited
    drawn = branch.auditors(record)
    made = branch.add(*(report(record, key) for key in drawn[:2]))
    assert made.record.body.decisions == () and len(made.record.body.reports) == 2
    return record, list(drawn[:2]), [key for key in OTHERS if key not in drawn[:2]]


@dataclass(frozen=True)
class NarrowCase:
    """A branch that decides about LIAR's update in `record`, by votes of which too few are clear to refute anybody.

    The jury is OTHERS, with a vote each. `wrong` are those that reported the opposite, and `late` has not voted.
    """

    branch: Branch
    record: Certificate
    voted: tuple[PeerKey, ...]
    wrong: tuple[PeerKey, ...]
    late: PeerKey


def decided_narrowly(*, passed: bool) -> NarrowCase:
    """Return a case in which the jury acquits (`passed`) or convicts."""
    branch = Branch()
    for _ in range(HOLD + 1):
        branch.add(without={LIAR})
    record = branch.add()
    accuser, *others = sorted(OTHERS, key=lambda k: k not in branch.auditors(record))
    branch.add(report(record, accuser), report(record, OWNER.key))
    wrong = (accuser, OWNER.key)
    if not passed:
        wrong = (others.pop(),)
        branch.add(report(record, wrong[0], passed=True))
    *voted, late = others
    branch.add(*(report(record, k, passed=passed, margin=0.5 if n else 0.001) for n, k in enumerate(voted)))
    return NarrowCase(branch, record, tuple(voted), tuple(sorted(wrong)), late)

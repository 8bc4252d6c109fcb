"""The chain of a simulated swarm: the product's chain, stakes, audits and credits, with unsigned records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.adversaries.lineup import Profile
from protocol.audits import AuditRule
from protocol.chain import Chain, ChainLimits
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.fold import CreditFold
from protocol.messages import (
    AuditCheck,
    Certificate,
    RoundRecord,
    Score,
    Signed,
    UpdateHeader,
    Vote,
    WorkReport,
)
from protocol.spec import RunSpec
from protocol.stake import STAKE_ROUNDS, StakeRule

STATE = Digest(sha256(b"state"))
"""The name of every state: the rules that are simulated here do not read it."""


class Branch:
    """One branch that grows by a record each round. Digests are of what a record states, so draws differ by seed."""

    def __init__(self, spec: RunSpec, profile: Profile, rule: AuditRule, founders: Iterable[PeerKey]):
        """Begin a run in which the founders have the stake of a clean record."""
        stake = StakeRule(spec.credit.hold_rounds, tuple(founders), STAKE_ROUNDS * profile.windows)
        limits = ChainLimits(profile.most, profile.peers, stake=stake, audit=rule, replay_batch=profile.batch)
        self.run = spec.run_id
        self.chain = Chain(self.run, STATE, limits)
        self.fold = CreditFold(self.run, CreditRule.of(spec))
        self.voided: set[tuple[int, PeerKey]] = set()
        """Rounds and authors whose credit is void."""
        self.waiting: list[Signed[WorkReport]] = []
        """Accusations for which the newest record had no place."""
        self._authors: list[tuple[PeerKey, ...]] = []

    @property
    def head(self) -> Digest:
        return self.chain.head

    @property
    def round(self) -> int:
        """The round that comes next."""
        return self.chain.height(self.chain.head)

    def header(self, author: PeerKey, windows: int, blob: bytes) -> Signed[UpdateHeader]:
        """Return the announcement of an update in the next round."""
        parent, first = self.head, self.chain.next_window(author, self.head)
        body = UpdateHeader(
            self.run, Round(self.round), parent, STATE, first, first, first + windows, 1,
            Digest(sha256(blob)), len(blob), 1.0, b"",
        )  # fmt: skip
        return _signed(body, author, parent, author, body.blob, first.to_bytes(8, "little"))

    def add(self, updates: Sequence[Signed[UpdateHeader]], reports: Iterable[Signed[WorkReport]]) -> Certificate:
        """Add the next record, of the updates that may be listed and the reports that it may carry."""
        chain, parent = self.chain, self.head
        following = chain.reports_after(parent)
        carried = {(r.body.record, r.body.update, r.author, r.body.check): r
                   for r in reports if following.report_refusal(r) is None}  # fmt: skip
        ordered = tuple(following.within_limit(carried[name] for name in sorted(carried)))
        self.waiting = [report for report in carried.values() if report not in ordered]
        decisions = following.decisions(ordered)
        convicted = {d.author for d in decisions if d.convicted}
        listed = tuple(sorted((u for u in updates if u.author not in convicted), key=lambda u: u.author))
        weights = chain.weights(parent, listed)
        proof = sha256(b"proof", parent, listed[0].author)  # stands for one: another in each run and round
        body = RoundRecord(
            self.run, Round(self.round), parent, STATE, 0, listed, None, weights, ordered, decisions, proof,
            voided=chain.voided(parent, None, decisions),
        )  # fmt: skip
        names = [*(u.digest for u in listed), *(r.digest for r in ordered)]
        record = _signed(body, listed[0].author, parent, *names)
        votes = (_signed(Vote(self.run, body.round, record.digest), u.author, record.digest, u.author) for u in listed)
        certificate = Certificate(record, tuple(votes))
        if not chain.add(certificate):
            raise AssertionError("the chain dropped the only record of its round")
        step = self.fold.add(credits_of(certificate, self.fold.rule))
        self._authors.append(tuple(u.author for u in listed))
        self.voided |= {(number, self._authors[number][line]) for number, line in step.voided}
        return certificate

    def report(
        self, record: Certificate, update: Signed[UpdateHeader], by: PeerKey, check: AuditCheck,
        scores: tuple[Score, ...],
    ) -> Signed[WorkReport]:  # fmt: skip
        """Return an auditor's report on an update of a record."""
        body = WorkReport(self.run, record.record.body.round, record.digest, update.digest, check, scores)
        return _signed(body, by, record.digest, update.digest, by, check.encode())

    def stakes(self, record: Certificate) -> Mapping[PeerKey, int]:
        """Return the stakes that decide about a record's updates."""
        return self.chain.audit_stakes(record.digest)


def _signed(body, author: PeerKey, *names: bytes) -> Signed:
    digest = Digest(sha256(type(body).__name__.encode(), *names))
    return Signed(body, author, digest, bytes(digest))

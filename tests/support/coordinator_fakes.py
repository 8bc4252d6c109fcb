"""A swarm for the coordinator's tests: real keys and signatures, a chain made by hand, heartbeats that say anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.checkpoints.archive import Archive
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.settings import CheckpointSettings
from coordinator.overview import Overview, PeerOverview
from coordinator.swarm import AnnouncedUpdate, ReceivedHeartbeat, RestingState, SwarmView
from protocol.chain import genesis_digest
from protocol.errors import CairnError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.ledger.credits import CreditRule, RoundCredits, credits_of
from protocol.message_codec import KeySigner, encode_certificate, report_place
from protocol.messages import (
    Admission,
    AuditCheck,
    AuditDecision,
    Certificate,
    Directive,
    Finalization,
    Heartbeat,
    Rollback,
    RoundRecord,
    Score,
    Signed,
    UpdateHeader,
    Vote,
    WorkReport,
    quorum,
)
from protocol.rounds.policy import RoundPolicy
from protocol.spec import RunSpec
from protocol.update_weights import AuthorHistory, weigh
from tests.support.specs import OWNER, tiny_spec

PARAMETERS = 28_832
"""Of the tiny run's model: see `tests.support.specs.TINY_LLAMA_TENSORS`."""


def make_spec(**changes) -> RunSpec:
    """Return the tiny run with rounds that are finalized soon and settle at once; `changes` replace top-level
    fields."""
    return tiny_spec(**({"checkpoint": {"final_depth": 3, "every": 5}, "credit": {"hold_rounds": 0}} | changes))


def peer(number: int) -> Identity:
    """Return the peer key of a number."""
    return Identity(sha256(b"peer", number.to_bytes(8, "big")))


def state(round_: int) -> Digest:
    """Return the digest of state[round] in these tests."""
    return Digest(sha256(b"state", round_.to_bytes(8, "big")))


def back_to(
    spec: RunSpec, record: Digest, round_: int, epoch: int = 1, *, sequence: int = 1, by: Identity = OWNER
) -> bytes:
    """Return the owner's directive that rolls the run back to the record of a round, for the `epoch`-th time."""
    back = Rollback(epoch, record, Round(round_ + 1), state(round_ + 1))
    return KeySigner(by).sign(Directive(spec.run_id, sequence, rollback=back)).encoded


class ChainMaker:
    """Makes certificates, each the child of the one before."""

    def __init__(self, spec: RunSpec):
        self.spec = spec
        self.run = spec.run_id
        self.head = genesis_digest(self.run)
        self.certificates: list[Certificate] = []
        self.next_windows: dict[PeerKey, int] = {}
        self.admitted_at: dict[PeerKey, int] = {}
        """Unix seconds at which the admissions in headers begin; 0 for peers that are not here."""
        self.weighs = False
        """True: records weigh their updates as a chain wants. False: as claimed, so that credits are plain."""
        self._histories: dict[PeerKey, AuthorHistory] = {}
        self._most = RoundPolicy.of(spec).chain_limits.max_update_windows
        self.early = 0
        """Windows of each update that were trained before its state came, of authors with one in the record before."""
        self.directive: Signed[Directive] | None = None
        """The owner's directive that a record carries; headers from then on name its rollback."""
        self._carries = -1

    def fork(self, at: int) -> ChainMaker:
        """Another chain with the same first `at` rounds."""
        other = ChainMaker(self.spec)
        other.weighs = self.weighs
        for certificate in self.certificates[:at]:
            other._take(certificate)
        return other

    def carry(self, directive: Signed[Directive]) -> None:
        """Let the next record carry a directive."""
        self.directive, self._carries = directive, len(self.certificates)

    def _take(self, certificate: Certificate) -> None:
        self.certificates.append(certificate)
        self.head = certificate.record.digest
        body = certificate.record.body
        for u, weighed in zip(body.updates, body.weighed, strict=True):
            end = self.next_windows[u.author] = u.body.end_window
            before = self._histories.get(u.author, AuthorHistory())
            self._histories[u.author] = before.after(body.round, end, u.body.windows, weighed, self._most)

    def _weights(self, updates: Sequence[Signed[UpdateHeader]]) -> tuple[int, ...]:
        """Return the `weights` of the next record: those that a chain wants."""
        claims = [u.body.windows for u in updates]
        histories = [self._histories.get(u.author, AuthorHistory()) for u in updates]
        weighed = weigh(list(zip(claims, histories, strict=True)), len(self.certificates), self._most)
        return weighed if self.weighs and weighed != tuple(claims) else ()

    def report(
        self, certificate: Certificate, author: int, by: int, *scores: Score, check: AuditCheck = "replay"
    ) -> Signed[WorkReport]:
        """Return the report of peer `by` on the update of peer `author` in a record."""
        update = next(u for u in certificate.record.body.updates if u.author == peer(author).key)
        body = WorkReport(
            self.run, certificate.record.body.round, certificate.digest, update.digest, check, scores
        )  # fmt: skip
        return KeySigner(peer(by)).sign(body)

    def add(
        self, work: Mapping[int, int], *, loss: float = 5.0, attempt: int = 0,
        reports: Sequence[Signed[WorkReport]] = (), decisions: Sequence[AuditDecision] = (), voided: int = 0,
    ) -> Certificate:  # fmt: skip
        """Add the next round, with windows by the number of the peer; whatever it carries and voids."""
        round_ = Round(len(self.certificates))
        identities = sorted((peer(n) for n in work), key=lambda i: i.key)
        windows = {peer(n).key: w for n, w in work.items()}
        epoch = self.directive.body.epoch if self.directive is not None else 0
        headers = []
        for identity in identities:
            start = self.admitted_at.get(identity.key, 0)
            admission = KeySigner(OWNER).sign(Admission(self.run, identity.key, start, 2**33, ""))
            first = self.next_windows.get(identity.key, 0)
            early = self.early if first else 0
            header = UpdateHeader(
                self.run, round_, self.head, state(round_), first, first + early, first + windows[identity.key], 1,
                Digest(sha256(b"blob", identity.key, bytes(self.head))), 100, loss, admission.encoded, epoch=epoch,
            )  # fmt: skip
            headers.append(KeySigner(identity).sign(header))
        carried = self.directive if round_ == self._carries else None
        body = RoundRecord(
            self.run, round_, self.head, state(round_), attempt, tuple(headers), carried, self._weights(headers),
            tuple(sorted(reports, key=report_place)), tuple(sorted(decisions, key=lambda d: (d.record, d.author))),
            voided=voided,
        )  # fmt: skip
        record = KeySigner(identities[0]).sign(body)
        votes = tuple(KeySigner(i).sign(Vote(self.run, round_, record.digest)) for i in identities)
        assert len(votes) >= quorum(len(identities))
        certificate = Certificate(record, votes)
        self._take(certificate)
        return certificate


def make_archiver(spec: RunSpec, folder: Path, view: SwarmView) -> CheckpointArchiver:
    """Return an archiver over an empty archive, without evaluations and copies."""
    settings = CheckpointSettings.model_validate({"evaluation": {"every": 0}})
    return CheckpointArchiver(Archive(folder / "checkpoints", spec), EvaluationLog(folder), spec, view, settings)


class FakeSwarm:
    """A SwarmView over a ChainMaker."""

    def __init__(self, spec: RunSpec):
        self.spec = spec
        self.chain = ChainMaker(spec)
        self.finals: list[Signed[Finalization]] = []
        self.address_records: list[Signed[Any]] = []
        self.heard: dict[PeerKey, ReceivedHeartbeat] = {}
        self.blobs: set[Digest] = set()
        self.left: list[Certificate] = []
        """Of branches that the chain has left."""
        self.on_disk: list[Certificate] = []
        """Of branches that the chain has left, which nobody gets before `keep_abandoned`."""
        self.headers: list[AnnouncedUpdate] = []
        self.directives: list[Signed[Directive]] = []
        self.offered: list[Digest] = []
        """States that were offered to peers; asked for another than those in `blobs`, it is refused."""
        self.updates_problem = ""
        self.held: int | None = None
        """The newest round whose state is held; None: the newest of all."""
        self.resting: RestingState | None = None
        self.unbacked: set[Digest] = set()
        """Records that most of the stake is not for."""
        self._callbacks: list[Callable[[], None]] = []
        self._listeners: list[Callable[[Signed[Any]], None]] = []

    @property
    def head(self) -> Digest:
        return self.chain.head

    @property
    def final(self) -> Signed[Finalization] | None:
        return self.finals[-1] if self.finals else None

    @property
    def directive(self) -> Signed[Directive] | None:
        return self.directives[-1] if self.directives else None

    async def publish_directive(self, directive: Signed[Directive]) -> None:
        self.directives.append(directive)

    async def offer_state(self, state: Digest, record: Digest) -> None:
        if state not in self.blobs:
            raise CairnError("it is not archived")
        self.offered.append(state)

    async def certificates_after(self, record: Digest, limit: int) -> Sequence[Certificate] | None:
        certificates = self.chain.certificates
        if record == genesis_digest(self.chain.run):
            return certificates[:limit]
        for i, c in enumerate(certificates):
            if c.record.digest == record:
                return certificates[i + 1 : i + 1 + limit]
        return None

    def certificate(self, record: Digest) -> Certificate | None:
        return next((c for c in [*self.chain.certificates, *self.left] if c.digest == record), None)

    async def encoded_certificate(self, record: Digest) -> bytes | None:
        found = self.certificate(record)
        return None if found is None else encode_certificate(found)

    async def keep_abandoned(self, number: Round, tip: Digest, rollback: Rollback) -> None:
        self.left += [c for c in self.on_disk if rollback.round <= c.record.body.round <= number]

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def listen(self, callback: Callable[[Signed[Any]], None]) -> None:
        self._listeners.append(callback)

    def forget_subscribers(self) -> None:
        """Drop all subscriptions: the coordinator that made them has stopped."""
        self._callbacks.clear()
        self._listeners.clear()

    def heartbeats(self) -> Mapping[PeerKey, ReceivedHeartbeat]:
        return self.heard

    def announced(self, parent: Digest) -> Sequence[AnnouncedUpdate]:
        return [a for a in self.headers if a.header.body.parent == parent]

    def addresses(self) -> Sequence[str]:
        return ["/ip4/127.0.0.1/tcp/4001/p2p/observer"]

    async def publish_final(self, final: Signed[Finalization]) -> None:
        self.finals.append(final)

    def own_addresses(self) -> Sequence[str]:
        return self.addresses()[:1]

    @property
    def coordinator_address(self) -> Signed[Any] | None:
        return max(self.address_records, key=lambda w: w.body.sequence, default=None)

    async def publish_coordinator_address(self, address: Signed[Any]) -> None:
        self.address_records.append(address)

    def held_states(self) -> list[int]:
        return [] if self.held is None else [self.held]

    def held_state(self) -> int:
        return len(self.chain.certificates) if self.held is None else self.held

    def count_backed(self, path: Sequence[Digest]) -> int:
        return next((i for i, record in enumerate(path) if record in self.unbacked), len(path))

    def resting_state(self) -> RestingState | None:
        return self.resting

    def has_blob(self, digest: Digest) -> bool:
        return digest in self.blobs

    # -- what happens in it ----------------------------------------------------------------------------------

    def changed(self) -> None:
        for callback in list(self._callbacks):
            callback()

    def round(self, work: Mapping[int, int], **how) -> Certificate:
        certificate = self.chain.add(work, **how)
        self.changed()
        return certificate

    def hear(self, *messages: Signed[Any]) -> None:
        """Let the observer receive these messages."""
        for message in messages:
            for listener in self._listeners:
                listener(message)

    def turn_to(self, chain: ChainMaker) -> None:
        self.chain = chain
        self.changed()

    def beat(self, number: int, *, seconds_since: float = 0.0, **fields) -> None:
        """Add a heartbeat of a peer, received some seconds ago."""
        heartbeat = Heartbeat(
            self.chain.run, 1, Round(len(self.chain.certificates)), self.chain.head, 0, 0, "training", 2000.0, 5.0,
            10_000, 20_000, (), (), b"", "cpu",
        )  # fmt: skip
        self.heard[peer(number).key] = ReceivedHeartbeat(replace(heartbeat, **fields), seconds_since)


def make_credits(rounds: int) -> list[RoundCredits]:
    """Return the credits of the first rounds of a chain with three peers."""
    chain = ChainMaker(make_spec())
    for r in range(rounds):
        chain.add({n: 500 + 10 * n + r for n in range(3)}, loss=5 - r / 100)
    return [credits_of(c, CreditRule.of(chain.spec)) for c in chain.certificates]


def overview(round_: int, peers: dict[int, tuple[str, int]]) -> Overview:
    """Peers by number: phase, and bytes that they say they have sent."""
    run = make_spec().run_id
    views = tuple(
        PeerOverview(
            peer(n).key, str(n), phase,
            Heartbeat(run, 1, Round(round_), Digest(bytes(32)), 0, 0, phase, 1.0, 1.0, up, 2 * up, (), (), b"", ""),
            0.0, 0, 0,
        ) for n, (phase, up) in peers.items()
    )  # fmt: skip
    nothing = Digest(bytes(32))
    return Overview(
        "", "", "healthy", "", round_, nothing, nothing, 0, 0, 0, 0, 0.0, None, len(views), views, (), 0, 0, None, "",
        None,
    )  # fmt: skip

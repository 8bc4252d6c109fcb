"""The codec of the swarm's messages (see `messages`): signs them, and verifies before it decodes.

`MessageDecoder` is the only entry for messages from the network. It remembers verified messages, so that a header
that arrives alone, in a record and in a certificate is verified once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from protocol import vrf
from protocol.checks import ascending, bounded, check_canonical, finite, parsed, rate, text, unsigned_zero
from protocol.directive_codec import MAX_DIRECTIVE_ENVELOPE, MAX_EPOCH, decode_directive, encode_directive
from protocol.envelope import MAX_ENVELOPE, claimed_author, claimed_digest, claimed_kind, open_envelope, seal
from protocol.errors import AdmissionError, MalformedError
from protocol.identity import Identity
from protocol.ids import MAX_ROUND, Digest, PeerKey, Round, RunId, sha256
from protocol.merkle import MAX_BLOB
from protocol.messages import (
    AUDIT_CHECKS,
    CLOCK_TOLERANCE,
    MAX_ADDRESS,
    MAX_ADDRESSES,
    MAX_ATTEMPT,
    MAX_CERTIFICATE,
    MAX_CONTRIBUTORS,
    MAX_KNOWN_HEADERS,
    MAX_MISSING_AUTHORS,
    MAX_NAME,
    MAX_REFUTED,
    MAX_REPORTS,
    MAX_SCORE,
    MAX_SCORE_NAME,
    MAX_SCORES,
    MAX_SHARDS,
    MAX_UNREACHABLE,
    PHASES,
    Admission,
    AuditDecision,
    Body,
    Certificate,
    Directive,
    Finalization,
    Goodbye,
    Heartbeat,
    RoundRecord,
    Score,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Vote,
    WorkReport,
    applied_digest,
    quorum,
    shards_digest,
)
from protocol.wire import swarm_pb2 as wire

T = TypeVar("T", bound=Body)

MAX_CACHED_BYTES = 32 * 1024 * 1024
"""About the most memory, in bytes, that a `MessageDecoder` spends on the verified messages of one kind."""


# -- encoding ------------------------------------------------------------------------------------------------


def _encode_admission(b: Admission) -> Message:
    return wire.Admission(run=b.run, peer=b.peer, not_before=b.not_before, not_after=b.not_after, name=b.name)


def _encode_header(b: UpdateHeader) -> Message:
    m = wire.UpdateHeader(
        run=b.run, round=b.round, parent=b.parent, base_state=b.base_state, first_window=b.first_window,
        end_window=b.end_window, inner_steps=b.inner_steps, blob=b.blob, blob_size=b.blob_size, loss=b.loss,
        admission=b.admission, epoch=b.epoch, rebase_window=b.rebase_window,
    )  # fmt: skip
    m.loss = unsigned_zero(m.loss)  # rounded to 32 bits, a loss just below 0 is -0
    return m


def _encode_record(b: RoundRecord) -> Message:
    return wire.RoundRecord(
        run=b.run, round=b.round, parent=b.parent, base_state=b.base_state, attempt=b.attempt,
        updates=[u.encoded for u in b.updates], directive=b.directive.encoded if b.directive is not None else b"",
        weights=b.weights, reports=[r.encoded for r in b.reports],
        decisions=[
            wire.AuditDecision(record=d.record, author=d.author, convicted=d.convicted, refuted=d.refuted)
            for d in b.decisions
        ],
        proof=b.proof, voided=b.voided,
    )  # fmt: skip


def _encode_vote(b: Vote) -> Message:
    return wire.Vote(run=b.run, round=b.round, record=b.record, shards_digest=b.shards_digest or b"")


def _encode_attestation(b: ShardAttestation) -> Message:
    return wire.ShardAttestation(
        run=b.run, round=b.round, record=b.record, shard=b.shard, blob=b.blob or b"", missing=b.missing
    )  # fmt: skip


def _encode_report(b: WorkReport) -> Message:
    return wire.WorkReport(
        run=b.run, round=b.round, record=b.record, update=b.update, check=b.check,
        scores=[
            wire.Score(name=s.name, value=unsigned_zero(s.value), threshold=unsigned_zero(s.threshold))
            for s in b.scores
        ],
    )  # fmt: skip


def _encode_finalization(b: Finalization) -> Message:
    return wire.Finalization(run=b.run, round=b.round, record=b.record, epoch=b.epoch)


def _encode_heartbeat(b: Heartbeat) -> Message:
    return wire.Heartbeat(
        run=b.run, sequence=b.sequence, round=b.round, head=b.head, weight=b.weight, windows=b.windows, phase=b.phase,
        tokens_per_second=b.tokens_per_second, loss=b.loss, bytes_up=b.bytes_up, bytes_down=b.bytes_down,
        known_headers=b.known_headers, addresses=b.addresses, admission=b.admission, device=b.device,
        state=b.state or b"", unreachable=b.unreachable, directive_sequence=b.directive_sequence,
    )  # fmt: skip


def _encode_goodbye(b: Goodbye) -> Message:
    return wire.Goodbye(run=b.run, sequence=b.sequence)


# -- decoding: every field bounded ---------------------------------------------------------------------------


def _decode_admission(payload: bytes, _: MessageDecoder) -> Admission:
    m = parsed(wire.Admission(), payload)
    return Admission(
        RunId(m.run), PeerKey(m.peer), bounded("not_before", m.not_before), bounded("not_after", m.not_after),
        text("name", m.name, MAX_NAME),
    )  # fmt: skip


def _decode_header(payload: bytes, decoder: MessageDecoder) -> UpdateHeader:
    m = parsed(wire.UpdateHeader(), payload)
    header = UpdateHeader(
        RunId(m.run), Round(bounded("round", m.round, MAX_ROUND)), Digest(m.parent), Digest(m.base_state),
        bounded("first_window", m.first_window), bounded("rebase_window", m.rebase_window),
        bounded("end_window", m.end_window), bounded("inner_steps", m.inner_steps), Digest(m.blob),
        bounded("blob_size", m.blob_size, MAX_BLOB), finite("loss", m.loss), bytes(m.admission),
        bounded("epoch", m.epoch, MAX_EPOCH),
    )  # fmt: skip
    if header.windows < 1 or header.inner_steps < 1:
        raise MalformedError("an update covers at least one window and one inner step")
    return header


def _decode_record(payload: bytes, decoder: MessageDecoder) -> RoundRecord:
    m = parsed(wire.RoundRecord(), payload)
    if not 1 <= len(m.updates) <= MAX_CONTRIBUTORS:
        raise MalformedError(f"a record lists 1 to {MAX_CONTRIBUTORS} updates, not {len(m.updates)}")
    run, parent, base = RunId(m.run), Digest(m.parent), Digest(m.base_state)
    number = Round(bounded("round", m.round, MAX_ROUND))
    # Claimed authors first, or one admitted key could have thousands of headers verified in vain.
    if not ascending([claimed_author(u, limit=MAX_HEADER_ENVELOPE) for u in m.updates]):
        raise MalformedError("a record lists each author once, by ascending key")
    updates = tuple(decoder.decode_header(u) for u in m.updates)
    for u in updates:
        if (u.body.run, u.body.round, u.body.parent, u.body.base_state) != (run, number, parent, base):
            raise MalformedError("a record lists an update of another run, round, parent or base")
        if u.body.epoch != updates[0].body.epoch:
            raise MalformedError("a record lists updates of two epochs")
    directive = decoder.decode(m.directive, Directive) if m.directive else None
    weights = tuple(bounded("weight", w) for w in m.weights)
    if weights and (len(weights) != len(updates) or 0 in weights or weights == tuple(u.body.windows for u in updates)):
        raise MalformedError("a record gives each update a weight of 1 or more, or none if all weigh what they claim")
    attempt = bounded("attempt", m.attempt, MAX_ATTEMPT)
    return RoundRecord(
        run, number, parent, base, attempt, updates, directive, weights, _decode_reports(m, decoder),
        _decode_decisions(m), bytes(m.proof), bounded("voided", m.voided),
    )  # fmt: skip


def _decode_reports(m: wire.RoundRecord, decoder: MessageDecoder) -> tuple[Signed[WorkReport], ...]:
    if len(m.reports) > MAX_REPORTS:
        raise MalformedError(f"a record carries at most {MAX_REPORTS} work reports, not {len(m.reports)}")
    reports = tuple(decoder.decode(r, WorkReport) for r in m.reports)
    if not ascending([report_place(r) for r in reports]):
        raise MalformedError("a record carries work reports by ascending record, update, author and check")
    return reports


def report_place(report: Signed[WorkReport]) -> tuple[bytes, bytes, bytes, str]:
    """Return what orders the work reports of a record; a branch carries no two with the same."""
    return report.body.record, report.body.update, report.author, report.body.check


def _decode_decisions(m: wire.RoundRecord) -> tuple[AuditDecision, ...]:
    if len(m.decisions) > MAX_REPORTS:
        raise MalformedError(f"a record states at most {MAX_REPORTS} decisions, not {len(m.decisions)}")
    decisions = tuple(
        AuditDecision(Digest(d.record), PeerKey(d.author), d.convicted, tuple(PeerKey(key) for key in d.refuted))
        for d in m.decisions
    )
    if not ascending([(d.record, d.author) for d in decisions]):
        raise MalformedError("a record states decisions by ascending record and author")
    if not all(len(d.refuted) <= MAX_REFUTED and ascending(d.refuted) for d in decisions):
        raise MalformedError(f"a decision refutes up to {MAX_REFUTED} keys, each once, by ascending key")
    return decisions


def _decode_vote(payload: bytes, _: MessageDecoder) -> Vote:
    m = parsed(wire.Vote(), payload)
    number = Round(bounded("round", m.round, MAX_ROUND))
    return Vote(RunId(m.run), number, Digest(m.record), Digest(m.shards_digest) if m.shards_digest else None)


def _decode_attestation(payload: bytes, _: MessageDecoder) -> ShardAttestation:
    m = parsed(wire.ShardAttestation(), payload)
    if len(m.missing) > MAX_MISSING_AUTHORS or bool(m.blob) == bool(m.missing):
        raise MalformedError(f"an attestation has a blob, or 1 to {MAX_MISSING_AUTHORS} missing authors")
    missing = tuple(PeerKey(key) for key in m.missing)
    if not ascending(missing):
        raise MalformedError("missing authors are listed once each, by ascending key")
    number, shard = Round(bounded("round", m.round, MAX_ROUND)), bounded("shard", m.shard, MAX_SHARDS - 1)
    return ShardAttestation(RunId(m.run), number, Digest(m.record), shard, Digest(m.blob) if m.blob else None, missing)


def _decode_report(payload: bytes, _: MessageDecoder) -> WorkReport:
    m = parsed(wire.WorkReport(), payload)
    check = m.check
    if check not in AUDIT_CHECKS:
        raise MalformedError(f"{check[:20]!r} is not a check of an update")
    if not 1 <= len(m.scores) <= MAX_SCORES or not ascending([s.name for s in m.scores]):
        raise MalformedError(f"a report has 1 to {MAX_SCORES} scores, each once, by ascending name")
    scores = tuple(
        Score(text("score", s.name, MAX_SCORE_NAME), _score(s.name, s.value), _score(s.name, s.threshold))
        for s in m.scores
    )
    number = Round(bounded("round", m.round, MAX_ROUND))
    return WorkReport(RunId(m.run), number, Digest(m.record), Digest(m.update), check, scores)


def _score(name: str, value: float) -> float:
    if not name or not -MAX_SCORE <= value <= MAX_SCORE:
        raise MalformedError(f"a score has a name, and is a number from -{MAX_SCORE:.0f} to {MAX_SCORE:.0f}")
    return unsigned_zero(value)


def _decode_finalization(payload: bytes, _: MessageDecoder) -> Finalization:
    m = parsed(wire.Finalization(), payload)
    number = Round(bounded("round", m.round, MAX_ROUND))
    return Finalization(RunId(m.run), number, Digest(m.record), bounded("epoch", m.epoch, MAX_EPOCH))


def _decode_heartbeat(payload: bytes, _: MessageDecoder) -> Heartbeat:
    m = parsed(wire.Heartbeat(), payload)
    if (
        len(m.known_headers) > MAX_KNOWN_HEADERS
        or len(m.addresses) > MAX_ADDRESSES
        or len(m.unreachable) > MAX_UNREACHABLE
    ):
        raise MalformedError("a heartbeat lists too many headers, addresses or peers")
    if m.phase not in PHASES:
        raise MalformedError(f"{m.phase[:20]!r} is not a phase")
    return Heartbeat(
        RunId(m.run), bounded("sequence", m.sequence), Round(bounded("round", m.round, MAX_ROUND)), Digest(m.head),
        bounded("weight", m.weight), bounded("windows", m.windows), m.phase,
        rate("tokens_per_second", m.tokens_per_second), finite("loss", m.loss), bounded("bytes_up", m.bytes_up),
        bounded("bytes_down", m.bytes_down), tuple(m.known_headers),
        tuple(text("address", a, MAX_ADDRESS) for a in m.addresses), bytes(m.admission),
        text("device", m.device, 80), Digest(m.state) if m.state else None, tuple(m.unreachable),
        bounded("directive_sequence", m.directive_sequence),
    )  # fmt: skip


def _decode_goodbye(payload: bytes, _: MessageDecoder) -> Goodbye:
    m = parsed(wire.Goodbye(), payload)
    return Goodbye(RunId(m.run), bounded("sequence", m.sequence))


# The limits leave room for one or two more fields. A record must fit MAX_ENVELOPE, and a certificate MAX_CERTIFICATE,
# although each of MAX_CONTRIBUTORS may pad its messages to their limits.
MAX_HEADER_ENVELOPE = 640
MAX_VOTE_ENVELOPE = 256


@dataclass(frozen=True, slots=True)
class MessageKind:
    """A type of message on the wire: its name, the bytes of its largest envelope, its encoder and its decoder."""

    name: str
    limit: int
    encode: Callable[[Any], Message]
    decode: Callable[[bytes, Any], Any]


KINDS: dict[type, MessageKind] = {
    Admission: MessageKind("admission", 320, _encode_admission, _decode_admission),
    UpdateHeader: MessageKind("update-header", MAX_HEADER_ENVELOPE, _encode_header, _decode_header),
    RoundRecord: MessageKind("round-record", MAX_ENVELOPE, _encode_record, _decode_record),
    Vote: MessageKind("vote", MAX_VOTE_ENVELOPE, _encode_vote, _decode_vote),
    ShardAttestation: MessageKind("shard-attestation", 4096, _encode_attestation, _decode_attestation),
    WorkReport: MessageKind("work-report", 1536, _encode_report, _decode_report),
    Finalization: MessageKind("finalization", 1024, _encode_finalization, _decode_finalization),
    Directive: MessageKind("directive", MAX_DIRECTIVE_ENVELOPE, encode_directive, decode_directive),
    Heartbeat: MessageKind("heartbeat", 64 * 1024, _encode_heartbeat, _decode_heartbeat),
    Goodbye: MessageKind("goodbye", 1024, _encode_goodbye, _decode_goodbye),
}
"""The kind of each body."""

EXTENSIBLE = (Heartbeat, Goodbye)
"""Status, on which no agreement depends: fields that a newer version adds are ignored. All else has one form."""

_BODIES = {kind.name: body for body, kind in KINDS.items()}


class Signer(Protocol):
    """The signer of this peer's messages. Deterministic; the simulator has a cheap one."""

    key: PeerKey

    def sign(self, body: T) -> Signed[T]: ...


class KeySigner:
    """Signs with an Ed25519 identity."""

    def __init__(self, identity: Identity):
        self._identity = identity
        self.key = identity.key

    def sign(self, body: T) -> Signed[T]:
        """Return the signed body, rounded as on the wire, and a record with its proof.

        Raises MalformedError for a body that others would refuse.
        """
        kind = KINDS[type(body)]
        if isinstance(body, RoundRecord):
            if not body.updates:
                raise MalformedError("a record lists at least one update")
            body = replace(body, proof=self._identity.prove(body.draw_input))
        e = seal(self._identity, kind.name, kind.encode(body).SerializeToString(deterministic=True))
        if len(e.encoded) > kind.limit:
            raise MalformedError(f"a {kind.name} message of {len(e.encoded)} bytes: at most {kind.limit} are accepted")
        if not isinstance(body, RoundRecord):  # its updates are verified already
            body = kind.decode(e.payload, None)
        return Signed(body, e.author, e.digest, e.encoded)


class _VerifiedCache:
    """An LRU cache of verified envelopes of one kind, by SHA-256; bounded in number and in bytes."""

    def __init__(self, count: int):
        self._count = count
        self._used = 0
        self._seen: OrderedDict[bytes, Signed[Any]] = OrderedDict()

    def get(self, name: bytes) -> Signed[Any] | None:
        if (signed := self._seen.get(name)) is not None:
            self._seen.move_to_end(name)
        return signed

    def put(self, name: bytes, signed: Signed[Any]) -> None:
        self._seen[name] = signed
        self._used += self._cost(signed)
        while len(self._seen) > self._count or self._used > MAX_CACHED_BYTES:
            self._used -= self._cost(self._seen.popitem(last=False)[1])

    @staticmethod
    def _cost(signed: Signed[Any]) -> int:
        # Approximate size of the decoded values: 8 bytes of `known_headers` on the wire are 40 in a tuple of ints.
        return 1024 + 5 * len(signed.encoded)


class MessageDecoder:
    """Decodes messages after it has verified them.

    Keeps the last `remember` verified envelopes of each kind, within MAX_CACHED_BYTES: a flood of one kind, which
    anybody may sign, leaves the others remembered.
    """

    def __init__(self, run: RunId, owner: PeerKey, *, remember: int = 16_384, verifies: bool = True):
        """Prepare. With `verifies=False` signatures and proofs, which take most of the time, are not verified.

        That is for this peer's own files alone, never for the network. Each has a checksum, and its content was
        verified before it was written.
        """
        self.run = run
        self.owner = owner
        self._verifies = verifies
        self._seen = {body: _VerifiedCache(remember) for body in KINDS}

    def decode(self, encoded: bytes, body: type[T]) -> Signed[T]:
        """Return the signed body of the given type. Raises MalformedError, SignatureError, AdmissionError.

        The author of an update header, or of a heartbeat with an admission, was admitted at some time.
        `decode_admission_at` checks an admission for a given time. An observer's heartbeat carries none. Votes and
        records carry none either: the chain and the round machine check that their authors are contributors.
        """
        kind = KINDS[body]
        if len(encoded) > kind.limit:
            raise MalformedError(f"a {kind.name} message of {len(encoded)} bytes: at most {kind.limit} are accepted")
        name = sha256(encoded)
        if (remembered := self._seen[body].get(name)) is not None:
            return remembered
        if body is Directive and claimed_kind(encoded) == kind.name and claimed_author(encoded) != self.owner:
            raise AdmissionError("a directive that is not signed by the run's owner")  # refused before it costs much
        envelope = open_envelope(encoded, kind.name, limit=kind.limit, verifies=self._verifies)
        decoded = kind.decode(envelope.payload, self)
        if body not in EXTENSIBLE:
            check_canonical(kind.name, kind.encode(decoded), envelope.payload)
        if decoded.run != self.run:
            raise MalformedError(f"a {kind.name} message of another run ({decoded.run.short})")
        if body in (Admission, Finalization) and envelope.author != self.owner:
            raise AdmissionError(f"a {kind.name} message that is not signed by the run's owner")
        if body is RoundRecord:
            if envelope.author not in decoded.contributors:  # before its proof costs anything
                raise MalformedError("a record by a peer who has no update in it")
            if self._verifies:
                vrf.verify(envelope.author, decoded.draw_input, decoded.proof)
        if body is UpdateHeader or (body is Heartbeat and decoded.admission):
            self.decode_admission(decoded.admission, envelope.author)
        signed = Signed(decoded, envelope.author, envelope.digest, envelope.encoded)
        self._seen[body].put(name, signed)
        return signed

    def decode_kind(self, encoded: bytes, kind: str) -> Signed[Any]:
        """Return the signed body of an envelope of a kind, given by its name on the wire. Raises as `decode` does."""
        body = _BODIES.get(kind)
        if body is None:
            raise MalformedError(f"a message of unknown kind {kind[:32]!r}")
        return self.decode(encoded, body)

    def decode_header(self, encoded: bytes) -> Signed[UpdateHeader]:
        """Return a signed header whose author the run's owner admitted at some time (see `decode_admission_at`)."""
        return self.decode(encoded, UpdateHeader)

    def decode_admission(self, encoded: bytes, peer: PeerKey) -> Admission:
        """Return the admission of this peer in an envelope. Raises AdmissionError when it is another's."""
        admission = self.decode(encoded, Admission).body
        if admission.peer != peer:
            raise AdmissionError(f"peer {peer.short} presents an admission of {admission.peer.short}")
        return admission

    def decode_admission_at(
        self, encoded: bytes, peer: PeerKey, unix_seconds: float, *, tolerance: float = CLOCK_TOLERANCE
    ) -> Admission:
        """Return the admission of this peer if it is valid at a time, within a tolerance. Raises AdmissionError."""
        a = self.decode_admission(encoded, peer)
        if not a.not_before - tolerance <= unix_seconds <= a.not_after + tolerance:
            raise AdmissionError(
                f"the admission of peer {peer.short} is not valid now: it lasts from {a.not_before} to {a.not_after}, "
                f"and this clock says {unix_seconds:.0f}; a wrong clock, or a renewal that did not happen, is the cause"
            )
        return a

    def decode_certificate(self, encoded: bytes) -> Certificate:
        """Return a certificate: every header and vote verified, votes by more than two thirds of its contributors."""
        if len(encoded) > MAX_CERTIFICATE:
            raise MalformedError(f"a certificate of {len(encoded)} bytes: at most {MAX_CERTIFICATE} are accepted")
        m = parsed(wire.Certificate(), encoded)
        if len(m.votes) > MAX_CONTRIBUTORS or len(m.shards) > MAX_SHARDS:
            raise MalformedError("a certificate with too many votes or shards")
        record = self.decode(m.record, RoundRecord)
        # Claimed authors and the count before any signature is looked at.
        _check_voters(record.body, [claimed_author(v, limit=MAX_VOTE_ENVELOPE) for v in m.votes])
        votes = tuple(self.decode(v, Vote) for v in m.votes)
        return check_certificate(Certificate(record, votes, tuple(Digest(s) for s in m.shards)))


def claimed_certificate(encoded: bytes) -> Digest:
    """Return the digest that a certificate's bytes have, unverified: only to find it. Raises MalformedError."""
    m = parsed(wire.Certificate(), encoded)
    shards = shards_digest(tuple(Digest(s) for s in m.shards))
    return applied_digest(claimed_digest(m.record), shards)


def check_certificate(certificate: Certificate) -> Certificate:
    """Return the same certificate, if it has enough votes. Raises MalformedError."""
    record, votes = certificate.record, certificate.votes
    _check_voters(record.body, [v.author for v in votes])
    voted = (record.body.run, record.body.round, record.digest)
    if any((v.body.run, v.body.round, v.body.record) != voted for v in votes):
        raise MalformedError("a certificate with a vote for another record")
    shards = shards_digest(certificate.shards)
    if any(v.body.shards_digest != shards for v in votes):
        raise MalformedError("a certificate with a vote for other shards of the mean, or for none")
    return certificate


def _check_voters(record: RoundRecord, voters: Sequence[PeerKey]) -> None:
    contributors = record.contributors
    if not ascending(voters):
        raise MalformedError("a certificate lists each vote once, by ascending key")
    if not set(voters) <= set(contributors):
        raise MalformedError("a certificate with a vote by no contributor of its record")
    if len(voters) < quorum(len(contributors)):
        raise MalformedError(f"{len(voters)} votes of {len(contributors)} contributors are not more than two thirds")


def encode_certificate(certificate: Certificate) -> bytes:
    """Return a certificate's bytes for the wire and the disk."""
    return wire.Certificate(
        record=certificate.record.encoded, votes=[v.encoded for v in certificate.votes], shards=certificate.shards
    ).SerializeToString(deterministic=True)

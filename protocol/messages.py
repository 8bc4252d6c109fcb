"""The messages between members of a swarm, as frozen dataclasses. `message_codec` signs and decodes them.

`Signed` pairs a body with its author and the exact bytes that were signed; a `Certificate` is a record with its votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Literal, TypeVar

from protocol.envelope import MAX_ENVELOPE
from protocol.ids import Digest, PeerKey, Round, RunId, sha256

MAX_NAME = 40
CLOCK_TOLERANCE = 600
"""Seconds by which the clock of a peer may be off the coordinator's when it asks for an admission."""
MAX_ATTEMPT = 2**20
MAX_ADDRESSES = 16
MAX_ADDRESS = 200
MAX_CONTRIBUTORS = 4096
MAX_KNOWN_HEADERS = 4096
MAX_UNREACHABLE = 1024
MAX_SHARDS = 1024
MAX_MISSING_AUTHORS = 64
MAX_MESSAGES, MAX_CERTIFICATES = 2048, 256
"""Messages and certificates of one packet. A chain reply has fewer certificates."""
MAX_CERTIFICATE = MAX_ENVELOPE
"""No certificate is larger. The limits of headers and votes (`message_codec`) let one of MAX_CONTRIBUTORS fit."""
PHASES = ("joining", "training", "exchanging", "syncing", "observing", "leaving", "paused", "resting")
TRAINING_PHASES = ("training", "exchanging")
"""Phases of a heartbeat in which a peer works at the open round."""
RUN_STATUSES = ("running", "paused", "ended")
MAX_BANNED = 1024
MAX_REASON = 200
MAX_VERDICTS = 64
MAX_VERDICT_REASON = 80
MAX_PARDONS = 64
MAX_SCORES = 16
MAX_SCORE_NAME = 24
MAX_SCORE = 1e6
MAX_REPORTS = 64
MAX_REFUTED = 96

AuditCheck = Literal["loss", "replay"]
AUDIT_CHECKS: tuple[AuditCheck, ...] = ("loss", "replay")
"""Checks of an update, the weaker evidence first (docs/audits.md)."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The owner's permission for a peer to contribute, from `not_before` to `not_after` (unix seconds)."""

    run: RunId
    peer: PeerKey
    not_before: int
    not_after: int
    name: str


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """The announcement of an update: it commits to the blob before its author may see others' (docs/rounds.md)."""

    run: RunId
    round: Round
    parent: Digest
    base_state: Digest
    first_window: int
    rebase_window: int
    """The first window that was trained from `base_state`. `first_window` unless the run's updates are replayable: then
    those before it were trained before that state came (docs/rounds.md)."""
    end_window: int
    inner_steps: int
    blob: Digest
    blob_size: int
    loss: float
    admission: bytes
    epoch: int = 0
    """Number of rollbacks on the branch that it is for: a header from before one counts in no round after it."""

    @property
    def windows(self) -> int:
        return self.end_window - self.first_window


@dataclass(frozen=True, slots=True)
class RoundChanges:
    """Fields of the spec's round policy (`spec.RoundSpec`) that the owner has changed; None: as in the spec."""

    target_tokens: int | None = None
    max_seconds: float | None = None
    exchange_seconds: float | None = None
    propose_seconds: float | None = None
    patience_seconds: float | None = None
    member_seconds: float | None = None
    max_update_tokens: int | None = None
    max_members: int | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """The run goes on from the `state` after `record`, with which `round` begins."""

    epoch: int
    """Number of the run's rollbacks, this one included."""
    record: Digest
    round: Round
    state: Digest


@dataclass(frozen=True, slots=True)
class Verdict:
    """The credit of `peer` in `record` (certificate digest) is void, for a `reason` in prose.

    It counts while that credit is pending.
    """

    record: Digest
    peer: PeerKey
    reason: str


@dataclass(frozen=True, slots=True)
class Pardon:
    """The conviction of `peer` by a record of `round` is lifted: the peer is barred no more."""

    peer: PeerKey
    round: Round


@dataclass(frozen=True, slots=True)
class Directive:
    """The owner's complete instructions to the run, which replace those of every earlier directive (docs/control.md).

    A ban or change that a new directive does not repeat no longer holds. `run_status` is one of
    RUN_STATUSES, since `since` (unix seconds), for a `reason` in prose. `banned`: ascending keys. The `changes` hold
    in no round before `from_round`. `verdicts`: ascending by record, then peer; `pardons`: by peer, then round. Unlike
    the rest, one of these that a record has carried holds on without being repeated. Records carry the newest directive
    only, so the next directive must repeat what none has carried yet.
    """

    run: RunId
    sequence: int
    run_status: str = "running"
    since: int = 0
    reason: str = ""
    banned: tuple[PeerKey, ...] = ()
    from_round: Round = Round(0)
    changes: RoundChanges = RoundChanges()
    rollback: Rollback | None = None
    verdicts: tuple[Verdict, ...] = ()
    pardons: tuple[Pardon, ...] = ()

    @property
    def epoch(self) -> int:
        """Number of rollbacks up to this directive."""
        return 0 if self.rollback is None else self.rollback.epoch

    @property
    def precedence(self) -> tuple[int, int]:
        """Order of directives: the greatest is in force. The epoch is first, so no older one undoes a rollback."""
        return self.epoch, self.sequence


@dataclass(frozen=True, slots=True)
class Score:
    """A number that a check measured, and the least with which an honest update passes."""

    name: str
    value: float
    threshold: float

    @property
    def passed(self) -> bool:
        return self.value >= self.threshold


@dataclass(frozen=True, slots=True)
class WorkReport:
    """An auditor's statement about one update of a certified record: what a check of it measured.

    `record` is the certificate digest, `update` the digest of the header, `round` that of the record. The scores have
    ascending names. They decide whether the update passed, so anybody can repeat the check and compare.
    """

    run: RunId
    round: Round
    record: Digest
    update: Digest
    check: AuditCheck
    scores: tuple[Score, ...]

    @property
    def passed(self) -> bool:
        return all(score.passed for score in self.scores)


@dataclass(frozen=True, slots=True)
class AuditDecision:
    """The decision of a jury about the update of `author` in a record (certificate digest).

    `refuted`: the keys, ascending, that reported the opposite by the same check. A branch may state a second decision
    about an update, which convicts nobody, if the first one refutes nobody.
    """

    record: Digest
    author: PeerKey
    convicted: bool
    refuted: tuple[PeerKey, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A list of updates for a round to accept: headers in canonical order (ascending author key, each author once)."""

    run: RunId
    round: Round
    parent: Digest
    base_state: Digest
    attempt: int
    updates: tuple[Signed[UpdateHeader], ...]
    directive: Signed[Directive] | None = None
    weights: tuple[int, ...] = ()
    """Weighed windows of each update, in order (protocol/update_weights.py). Empty when each weighs what it claims."""
    reports: tuple[Signed[WorkReport], ...] = ()
    """Work reports, ascending by record, update, author, check; each is in one record of a branch."""
    decisions: tuple[AuditDecision, ...] = ()
    """The decisions that follow from these reports and those before, ascending by record and author."""
    proof: bytes = b""
    """Of its author's verifiable random output for this round (`draw_input`): the signer adds it."""
    voided: int = 0
    """Windows of the records before it, as weighed, that its decisions and the verdicts of its directive void."""

    @property
    def draw_input(self) -> bytes:
        """The input of `proof`. It has nothing that the author chooses, so its author has one output in a round."""
        epoch = self.updates[0].body.epoch
        return b"cairn/v1/draw" + self.run + self.round.to_bytes(8, "little") + epoch.to_bytes(8, "little")

    @property
    def contributors(self) -> tuple[PeerKey, ...]:
        return tuple(u.author for u in self.updates)

    @property
    def weighed(self) -> tuple[int, ...]:
        """Weighed windows of each update, in order: its share of the mean, its author's credit and stake."""
        return self.weights or tuple(u.body.windows for u in self.updates)

    @property
    def windows(self) -> int:
        """Accepted windows, as weighed; times the data's window length they are the accepted tokens."""
        return sum(self.weighed)

    @property
    def progress(self) -> int:
        """Windows by which it brings the run nearer to its end: below 0 if it voids more than it accepts."""
        return self.windows - self.voided

    @property
    def loss(self) -> float:
        """Weighted median of the contributors' own training losses, by weighed windows: for people, no rule needs it.

        It is the least loss that reports of at least half of the windows do not exceed. A mean would be what any one
        contributor says: nobody checks its loss.
        """
        reported = sorted((u.body.loss, windows) for u, windows in zip(self.updates, self.weighed, strict=True))
        counted = accumulate(windows for _, windows in reported)
        return next(loss for (loss, _), n in zip(reported, counted, strict=True) if 2 * n >= self.windows)


@dataclass(frozen=True, slots=True)
class Vote:
    """A contributor's statement that it holds and has checked every update of a record.

    In a reduced round it is about every shard of the mean, and names their digest. `record` is the record digest: the
    certificate is not known yet.
    """

    run: RunId
    round: Round
    record: Digest
    shards_digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class ShardAttestation:
    """A committee member's statement about one shard of a record's mean: a tagged union.

    Either `blob` is the digest of the shard that it computed, and `missing` is empty. Or `blob` is None, and `missing`
    lists the authors (ascending keys, 1 to MAX_MISSING_AUTHORS) whose updates it could not fetch or use. `record` is
    the record digest.
    """

    run: RunId
    round: Round
    record: Digest
    shard: int
    blob: Digest | None
    missing: tuple[PeerKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Finalization:
    """The owner's signature that nothing up to and including this record (certificate digest) is reverted.

    Only a rollback reverts it: it begins a later epoch. `epoch`: number of rollbacks when it was signed.
    """

    run: RunId
    round: Round
    record: Digest
    epoch: int = 0

    @property
    def precedence(self) -> tuple[int, int]:
        """Order of finalizations: the greatest is in force."""
        return self.epoch, self.round


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The status of a member, for scheduling and display."""

    run: RunId
    sequence: int
    """A number that grows with each heartbeat of the author, across restarts."""
    round: Round
    """The round that it trains in: the one after `head`."""
    head: Digest
    """The newest record that its trainer has applied. It may be behind the chain's head, the fork choice's."""
    weight: int
    """Weight of `head`: windows accepted up to it."""
    windows: int
    """Windows that it has trained on for the round and not announced yet."""
    phase: str
    """One of PHASES."""
    tokens_per_second: float
    loss: float
    """Training loss of its last inner steps."""
    bytes_up: int
    """Bytes that its node has sent to the swarm since it started."""
    bytes_down: int
    """Bytes that its node has received from the swarm since it started."""
    known_headers: tuple[int, ...]
    """`short_id`s of the round's update headers that it has."""
    addresses: tuple[str, ...]
    """Multiaddresses at which others can dial it."""
    admission: bytes
    """The envelope of its admission; empty for one that is no peer."""
    device: str
    """Name of its device, for display."""
    state: Digest | None = None
    """Digest of the state after `head`, as it holds it; None for one without a trainer."""
    unreachable: tuple[int, ...] = ()
    """`short_id`s of members whose messages do not reach it directly, so that others relay them."""
    directive_sequence: int = 0
    """Sequence of the newest directive that it knows; 0: none."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The author leaves of its own will."""

    run: RunId
    sequence: int


Body = (
    Admission
    | UpdateHeader
    | RoundRecord
    | Vote
    | ShardAttestation
    | WorkReport
    | Finalization
    | Directive
    | Heartbeat
    | Goodbye
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Signed(Generic[T]):
    """A verified body, its author, its digest, and the envelope to keep and to pass on."""

    body: T
    author: PeerKey
    digest: Digest
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Certificate:
    """A record with votes from more than two thirds of its contributors (ascending author key, each once).

    `shards`: of a round that was reduced, the digests of all shards of the mean, in order: they are applied, and the
    votes name them. Empty when the updates themselves are applied.
    """

    record: Signed[RoundRecord]
    votes: tuple[Signed[Vote], ...]
    shards: tuple[Digest, ...] = ()

    @property
    def digest(self) -> Digest:
        """The digest of the record and of the applied blobs: children name it as their parent, finalizations sign it.

        Of a round that was gathered, the record's digest. Of one that was reduced, SHA-256 over that and the
        `shards_digest`: one record that was certified with two sets of shards is two branches.
        """
        return applied_digest(self.record.digest, shards_digest(self.shards))


def applied_digest(record: Digest, shards: Digest | None) -> Digest:
    """Return the `Certificate.digest` of a record with this `shards_digest`."""
    return record if shards is None else Digest(sha256(b"cairn/v1/applied", record, shards))


def quorum(contributors: int) -> int:
    """Return the least number of votes that is more than two thirds of the contributors that a record lists."""
    return contributors * 2 // 3 + 1


def shards_digest(shards: Sequence[Digest]) -> Digest | None:
    """Return the digest of a reduced mean in votes: SHA-256 over the digests of its shards in order.

    None when there are none.
    """
    return Digest(sha256(b"cairn/v1/shards", *shards)) if shards else None

"""The outputs of the round machine: the driver carries them out in order.

`CancelReduce.record` is a record digest, `KeepState.record` a certificate digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.audits import UpdateCheck
from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Certificate, Directive, Rollback, RoundRecord, Signed, UpdateHeader
from protocol.rounds.policy import RoundPolicy


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a message to every known peer (best effort; the machine repeats what matters)."""

    message: Signed


@dataclass(frozen=True, slots=True)
class Send:
    """Send to one member (best effort)."""

    to: PeerKey
    messages: tuple[Signed, ...] = ()
    certificates: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Trainer: end the inner step and compress the pseudo-gradient. Answered by `UpdateReady` with the same parent."""

    round: Round
    parent: Digest


@dataclass(frozen=True, slots=True)
class FetchBlob:
    """Fetch an update's blob from its author or any holder, and check it.

    Answered by `BlobHeld`, `BlobInvalid` or `BlobUnavailable`; at once when the store has the blob.
    """

    blob: Digest
    author: PeerKey
    holders: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class FetchShard:
    """Fetch the blob of a shard of a record's mean from any of the holders, and check it; answered as `FetchBlob`.

    `holders` have signed the shard's digest, or hold all shards.
    """

    blob: Digest
    record: Signed[RoundRecord]
    shard: int
    holders: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class ReduceShard:
    """Fetch the slices of the record's updates that cover a shard, check them, and make the shard of the mean.

    Slices come from their authors, else from others of the committee. Answered by `ShardReduced`, with the blob in the
    store, or by `ShardUnavailable` within a fraction of `exchange_seconds`; also by `BlobInvalid` for an update whose
    slice breaks the codec's rules.
    """

    record: Signed[RoundRecord]
    shard: int
    committee: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class CancelReduce:
    """Stop all work on this record's shards and slices, and forget the slices.

    Shards that a certificate needs all the same are requested again.
    """

    record: Digest


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Stop fetching this blob of an update or a shard, and forget it: nobody needs it any more."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class RequestChain:
    """Request from a member what follows the newest of `have`. Answered by `ChainReceived` or `ChainUnanswered`."""

    to: PeerKey
    have: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class StoreCertificate:
    """Store a certificate of our tree of records: durably, before the actions that follow."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class StoreFinalization:
    """Store the owner's newest finalization; while its record is `awaited`, beside the one in force."""

    message: Signed
    awaited: bool


@dataclass(frozen=True, slots=True)
class StoreDirective:
    """Store the owner's newest directive."""

    message: Signed


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """Store our newest header in place of the one before: durably, before the actions that follow announce it."""

    message: Signed[UpdateHeader]


@dataclass(frozen=True, slots=True)
class StoreEpoch:
    """Store the epoch (number of rollbacks) of what the trainer saves from now on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DirectivesChanged:
    """The meaning of the owner's directives for this peer: emitted after the start, and whenever it changes."""

    directive: Directive
    """The newest one known; a neutral one of sequence 0 where none is."""

    paused: bool
    """The trainer must make no inner steps: the run is paused or has ended, or this peer is banned or barred."""

    policy: RoundPolicy
    """The policy of the open round."""

    barred_until: Round = Round(0)
    """The first round in which this peer may train again after a conviction; 0 while it may."""


@dataclass(frozen=True, slots=True)
class ApplyRecord:
    """Trainer: move to the state after the one record that follows. Answered by `StateReached` or `SyncFailed`.

    The certificate's shards are applied where it has any, else the record's updates.
    """

    certificate: Certificate
    missed: tuple[Digest, ...]
    """Own blobs that this decided round leaves out: their content returns to the error feedback."""

    next_window: int
    """The end of the own windows that the chain has accepted."""

    weight: int
    """Windows accepted, as weighed, from the genesis up to this record."""

    regained: tuple[Digest, ...] = ()
    """Own blobs that returned to the error feedback earlier, and that the chain has accepted after all: they are taken
    out of the feedback again."""

    is_checkpoint: bool = False
    """The state is one that members keep: write it to the store."""


@dataclass(frozen=True, slots=True)
class SyncState:
    """Trainer: leave the present state and reach the state after the last record of `path`.

    Start from the newest available state among the path's base states (`path[i].record.base_state` is the state before
    `path[i]`) and apply the rest. The driver fetches blobs as needed. Answered by `StateReached` or `SyncFailed`.
    `path` is empty when the goal is the genesis, or the record of `start`.
    """

    path: tuple[Certificate, ...]
    missed: tuple[Digest, ...]
    """As in `ApplyRecord`: own blobs on the branch that was left, or lost with the state."""

    next_window: int
    weight: int
    regained: tuple[Digest, ...] = ()
    start: Rollback | None = None
    """The owner has rolled the run back to this record, and `path` starts there."""

    reset: bool = False
    """The trainer must forget its error feedback and its moments: they are of rounds that were rolled back."""

    starts: tuple[int, ...] = ()
    """Indices into `path` whose base states members keep as checkpoints, best first."""

    is_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class KeepState:
    """Trainer: write the held state, which is that after `record`, to the store as a checkpoint.

    The run is paused or ended, so others may need the state although no record names it. Answered by `StateReached`, or
    by `StateNotKept`.
    """

    record: Digest


@dataclass(frozen=True, slots=True)
class ReleaseTrainer:
    """Trainer and auditor: save, end, and free the devices. Nothing is requested before `AcquireTrainer`."""


@dataclass(frozen=True, slots=True)
class AcquireTrainer:
    """Trainer and auditor: start again. A `SyncState` follows."""


@dataclass(frozen=True, slots=True)
class AuditUpdate:
    """Auditor: make a check of an update (header digest) of this record. Answered by `UpdateAudited`.

    If it cannot be made, and another attempt may succeed, the answer is `AuditNotMade`.
    """

    certificate: Certificate
    update: Digest
    check: UpdateCheck
    seed: bytes
    """The one that drew the update's audit: it also draws the windows of a loss check."""
    is_accused: bool = False
    """An auditor has reported that the update failed a replay."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something for a person or a log: `level` is info, warning or error; `about` a peer, if it concerns one."""

    level: str
    kind: str
    text: str
    about: PeerKey | None = None


@dataclass(frozen=True, slots=True)
class RunCompleted:
    """The run has reached its total or was ended: stop the trainer, and keep driving the machine.

    Other members may still need the last state. `Finished` follows, except for the coordinator's observer. A peer that
    holds no state gets `Finished` alone.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Stop driving the machine: we have left or are banned, or the run is over and nobody needs us any more.

    `again`: then start again, with a chain that is loaded from the store.
    """

    reason: str
    again: bool = False


Action = (
    Broadcast
    | Send
    | RequestUpdate
    | FetchBlob
    | FetchShard
    | ReduceShard
    | CancelReduce
    | CancelFetch
    | RequestChain
    | StoreCertificate
    | StoreFinalization
    | StoreDirective
    | StoreHeader
    | StoreEpoch
    | DirectivesChanged
    | ApplyRecord
    | SyncState
    | KeepState
    | ReleaseTrainer
    | AcquireTrainer
    | AuditUpdate
    | Notice
    | RunCompleted
    | Finished
)

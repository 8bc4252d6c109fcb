"""The inputs of the round machine. Messages in them have been verified (`message_codec.MessageDecoder`).

`record` is a certificate digest; in `ShardReduced` and `ShardUnavailable` it is a record digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.audits import UpdateCheck
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, Directive, Finalization, Score, Signed


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, and a deadline may be due. `machine.next_tick` is the earliest."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message arrived: from its author, or passed on by another member."""

    message: Signed


@dataclass(frozen=True, slots=True)
class CertificateReceived:
    """A whole certificate arrived from `source`."""

    certificate: Certificate
    source: PeerKey


@dataclass(frozen=True, slots=True)
class ChainReceived:
    """The answer to a `RequestChain`: certificates, oldest first, each the child of the one before."""

    certificates: tuple[Certificate, ...]
    finalization: Signed[Finalization] | None
    source: PeerKey
    more: bool
    directive: Signed[Directive] | None = None


@dataclass(frozen=True, slots=True)
class ChainUnanswered:
    """A `RequestChain` was not answered in time, or the answer was malformed."""

    source: PeerKey


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Our trainer's work: windows that no update of ours covers yet, loss and speed."""

    windows: int
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class UpdateReady:
    """Our trainer's answer to `RequestUpdate`: the blob is in the store. `blob is None`: nothing was trained."""

    parent: Digest
    first_window: int
    rebase_window: int
    end_window: int
    inner_steps: int
    blob: Digest | None
    blob_size: int
    loss: float


@dataclass(frozen=True, slots=True)
class BlobHeld:
    """A blob that `FetchBlob` or `FetchShard` named is in the store, and passed every check.

    `author`: the key that an update names, which may not be the one that announced it; None for a shard.
    """

    blob: Digest
    author: PeerKey | None


@dataclass(frozen=True, slots=True)
class BlobInvalid:
    """The blob matches its digest and breaks the codec's rules: its author, or the signer of the shard, is at fault."""

    blob: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class BlobUnavailable:
    """Nobody gave the blob in time. It may be requested again."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class ShardReduced:
    """`ReduceShard` is done: the shard's blob is in the store."""

    record: Digest
    shard: int
    blob: Digest


@dataclass(frozen=True, slots=True)
class ShardUnavailable:
    """`ReduceShard` cannot be done in time: nobody gives the slices of these authors' updates."""

    record: Digest
    shard: int
    authors: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class UpdateAudited:
    """`AuditUpdate` is done: what the check measured."""

    record: Digest
    update: Digest
    check: UpdateCheck
    seed: bytes
    """That of the request."""
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class AuditNotMade:
    """`AuditUpdate` could not be done: there was no file, no memory or no time. It may be requested again."""

    record: Digest
    update: Digest
    check: UpdateCheck
    seed: bytes


@dataclass(frozen=True, slots=True)
class StateReached:
    """The trainer holds the state after `record` (the newest record of an `ApplyRecord` or `SyncState`)."""

    record: Digest
    state: Digest


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """A move was not made (the trainer died, or a blob is gone): the machine requests another in due time."""

    record: Digest
    reason: str
    kept: bool = False
    """The trainer was not given the move: it still holds the state from before."""


@dataclass(frozen=True, slots=True)
class StateNotKept:
    """The state after `record` is not in the store, though a `KeepState` or a move asked for it."""

    record: Digest


@dataclass(frozen=True, slots=True)
class Leave:
    """The user wants to stop: announce what is done, say goodbye."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The user wants the devices for a while: announce what is done, release the trainer, and only follow."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The user does not need the devices any more: train again."""


Event = (
    Tick
    | MessageReceived
    | CertificateReceived
    | ChainReceived
    | ChainUnanswered
    | TrainingProgress
    | UpdateReady
    | BlobHeld
    | BlobInvalid
    | BlobUnavailable
    | ShardReduced
    | ShardUnavailable
    | UpdateAudited
    | AuditNotMade
    | StateReached
    | SyncFailed
    | StateNotKept
    | Leave
    | Rest
    | Resume
)

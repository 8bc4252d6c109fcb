"""What can happen to a member: the round machine's inputs. Messages in them have been verified (`MessageDecoder`)."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest, PeerKey
from protocol.messages import (
    Certificate,
    Directive,
    Finalization,
    Goodbye,
    Heartbeat,
    RoundRecord,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Vote,
)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Needed only for faults and heartbeats; `machine.next_tick` says when the next one is due."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message arrived: from its author, or passed on by another member."""

    message: (
        Signed[Heartbeat]
        | Signed[Goodbye]
        | Signed[UpdateHeader]
        | Signed[RoundRecord]
        | Signed[Vote]
        | Signed[ShardAttestation]
        | Signed[Finalization]
        | Signed[Directive]
    )


@dataclass(frozen=True, slots=True)
class CertificateHeard:
    """A whole certificate arrived from `source`."""

    certificate: Certificate
    source: PeerKey


@dataclass(frozen=True, slots=True)
class ChainHeard:
    """The answer to a `RequestChain`: certificates, oldest first, each the child of the one before."""

    certificates: tuple[Certificate, ...]
    final: Signed[Finalization] | None
    source: PeerKey
    more: bool
    directive: Signed[Directive] | None = None


@dataclass(frozen=True, slots=True)
class ChainSilent:
    """A `RequestChain` was not answered in time, or with rubbish."""

    source: PeerKey


@dataclass(frozen=True, slots=True)
class Progress:
    """The own trainer's work: windows done that no update of ours covers yet, and how it goes."""

    windows: int
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class UpdateReady:
    """The own trainer's answer to `MakeUpdate`: the blob is in the store. `blob is None`: nothing was trained yet."""

    parent: Digest
    first_window: int
    end_window: int
    inner_steps: int
    blob: Digest | None
    blob_size: int
    loss: float


@dataclass(frozen=True, slots=True)
class BlobHeld:
    """A blob that was asked for by `FetchBlob` or `FetchPart` is in the store, and passed every check."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class BlobBad:
    """The blob's bytes are what its digest names, and they break the codec's rules: its author, or who signed the part,
    is at fault."""

    blob: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class BlobMissing:
    """Nobody gave the blob in time. It may be asked for again."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class PartReduced:
    """`Reduce` was done: the part's blob is in the store."""

    record: Digest
    part: int
    blob: Digest


@dataclass(frozen=True, slots=True)
class PartLacking:
    """`Reduce` cannot be done in time: nobody gives the slices of these authors' updates."""

    record: Digest
    part: int
    authors: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class Applied:
    """The trainer holds the state after `record` (the newest record of an `Apply` or `Resync`)."""

    record: Digest
    state: Digest


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    """A move was not made (the trainer died, or a blob is gone): the machine asks for another in due time."""

    record: Digest
    reason: str
    kept: bool = False
    """The trainer was not told of the move: it holds what it held."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The user wants to stop: announce what is done, say goodbye."""


Event = (
    Tick
    | Heard
    | CertificateHeard
    | ChainHeard
    | ChainSilent
    | Progress
    | UpdateReady
    | BlobHeld
    | BlobBad
    | BlobMissing
    | PartReduced
    | PartLacking
    | Applied
    | ApplyFailed
    | Leave
)

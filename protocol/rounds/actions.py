"""What is to be done: the round machine's outputs, carried out in order by whoever drives it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Certificate, Rollback, RoundRecord, Signed


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send to every member known (best effort; the machine repeats what matters)."""

    message: Signed


@dataclass(frozen=True, slots=True)
class Send:
    """Send to one member (best effort)."""

    to: PeerKey
    messages: tuple[Signed, ...] = ()
    certificates: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True)
class MakeUpdate:
    """Trainer: end the inner step, compress the pseudo-gradient; answered by `UpdateReady` with the same parent."""

    round: Round
    parent: Digest


@dataclass(frozen=True, slots=True)
class FetchBlob:
    """Get an update's blob from its author or any holder, check it; answered by BlobHeld, BlobBad or BlobMissing."""

    blob: Digest
    size: int
    author: PeerKey
    holders: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class FetchPart:
    """Get the blob of a part of a record's mean from any of the holders, check it; answered as `FetchBlob`.

    `part` is one of the record's `part_count`; `holders` have signed its digest, or hold all parts.
    """

    blob: Digest
    record: Signed[RoundRecord]
    part: int
    holders: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Get the slices of the record's updates that cover a part (from their authors, else from others of the committee),
    check them, and make the part of the mean: answered by PartReduced, with its blob in the store, or by PartLacking
    within a share of `exchange_seconds`; by BlobBad too for an update whose slice breaks the codec's rules."""

    record: Signed[RoundRecord]
    part: int
    committee: tuple[PeerKey, ...]


@dataclass(frozen=True, slots=True)
class DropReduce:
    """Nothing of this record is worked on any more: stop with its slices and its parts, forget the slices. Parts that
    are needed all the same, because the record was certified, are asked for again."""

    record: Digest


@dataclass(frozen=True, slots=True)
class DropBlob:
    """Nobody needs this blob any more (an update's, or a part's): stop fetching it, forget it."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class RequestChain:
    """Ask a member for what comes after the newest of `have`; answered by ChainHeard or ChainSilent."""

    to: PeerKey
    have: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class KeepCertificate:
    """Store: this certificate is part of our tree of records; write it down before acting on what follows."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class KeepFinal:
    """Store: the owner's newest final."""

    message: Signed


@dataclass(frozen=True, slots=True)
class KeepDirective:
    """Store: the owner's newest word. Whether the trainer is to rest by it, `machine.rests` says."""

    message: Signed


@dataclass(frozen=True, slots=True)
class Apply:
    """Trainer: the one record after the state that it holds. Answered by Applied or ApplyFailed.

    What is applied are the certificate's `parts` where it has any, else the record's updates.
    `missed` are own blobs that this decided round leaves out: they go back into the error feedback. `regained` are own
    blobs that went back into it before, and that the chain has after all: they are taken out of it again.
    `next_window` is the end of the own windows that the chain has accepted; `weight` is the chain's accepted windows
    after this record.
    """

    certificate: Certificate
    missed: tuple[Digest, ...]
    next_window: int
    weight: int
    regained: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class Resync:
    """Trainer: leave what you hold, get the state after the last of `path`: start from the newest state you can have
    among `path`'s base states (path[i].record.base_state is the state before path[i]) and apply the rest.

    `path` runs from a record whose base state some member has as a checkpoint (or the genesis) to the new head; it is
    empty when that is the genesis itself.
    Blobs are fetched by the driver as they are needed. `missed` as in `Apply`: own blobs on the branch that was left,
    or lost with the state; `regained` as in `Apply`. Answered by Applied or ApplyFailed.
    `start`: the owner has rolled the run back to this, and `path` runs from there; it is empty when that is the head.
    `afresh`: what the trainer has learnt and not sent, its feedback and its moments are of rounds that were rolled
    back: all of it goes.
    """

    path: tuple[Certificate, ...]
    missed: tuple[Digest, ...]
    next_window: int
    weight: int
    regained: tuple[Digest, ...] = ()
    start: Rollback | None = None
    afresh: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Something that a person or a log should hear: `level` is info, warning or error; `about` a peer, if one."""

    level: str
    kind: str
    text: str
    about: PeerKey | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The run has reached its total tokens or was ended, or (after Leave) all that could be done is done: the driver
    may stop. `at_once`: nobody wants to hear of us any more. `again`: and then begin anew, with a chain that is loaded
    from the store."""

    reason: str
    at_once: bool = False
    again: bool = False


Action = (
    Broadcast
    | Send
    | MakeUpdate
    | FetchBlob
    | FetchPart
    | Reduce
    | DropReduce
    | DropBlob
    | RequestChain
    | KeepCertificate
    | KeepFinal
    | KeepDirective
    | Apply
    | Resync
    | Report
    | Finished
)

"""The events that the driver of a fetch passes to its scheduler.

An event with the number of a cancelled action has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.swarm.transfer.outcomes import ChunkCheck, Lost, Outcome


@dataclass(frozen=True, slots=True)
class Replied:
    """A `QueryProvider` or `RequestChunk` has this outcome."""

    number: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class SlotReady:
    """The slot can be used for one `RequestChunk`, or returned by `CancelRequest`."""

    number: int


@dataclass(frozen=True, slots=True)
class SlotLost:
    """The stream broke, or could not be opened."""

    number: int
    lost: Lost


@dataclass(frozen=True, slots=True)
class ChunkChecked:
    """A chunk that was given has been written, or is not the blob's."""

    number: int
    check: ChunkCheck


@dataclass(frozen=True, slots=True)
class LeavesLoaded:
    """The leaf hashes that an earlier attempt left; None without any."""

    number: int
    leaves: Sequence[bytes] | None


@dataclass(frozen=True, slots=True)
class LeavesChecked:
    """`valid`: they are the leaf hashes of the blob."""

    number: int
    valid: bool


@dataclass(frozen=True, slots=True)
class BlobOpened:
    """Chunks can be written. `missing` are the indices of the wanted ones that are not here."""

    number: int
    missing: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlobMismatch:
    """The blob cannot have this size."""

    number: int


@dataclass(frozen=True, slots=True)
class EarlyReserved:
    """Chunks may be requested before their hashes are known."""


Event = (
    Replied
    | SlotReady
    | SlotLost
    | ChunkChecked
    | LeavesLoaded
    | LeavesChecked
    | BlobOpened
    | BlobMismatch
    | EarlyReserved
)

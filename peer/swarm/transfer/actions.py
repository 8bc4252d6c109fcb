"""The actions that the scheduler returns and its driver carries out.

Actions with a `number` are answered by events with that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.swarm.transfer.frames import BlobOp
from peer.swarm.transfer.streams import Priority
from protocol.ids import PeerKey


@dataclass(frozen=True, slots=True)
class QueryProvider:
    """Request a size, a page of leaf hashes, or a page of a bitmap: at most `limit` bytes. Answer: `Replied`."""

    number: int
    peer: PeerKey
    priority: Priority
    op: BlobOp
    index: int
    limit: int


@dataclass(frozen=True, slots=True)
class RequestSlot:
    """Wait for a slot on the provider's stream. Answer: `SlotReady`, `SlotLost`."""

    number: int
    peer: PeerKey
    priority: Priority


@dataclass(frozen=True, slots=True)
class RequestChunk:
    """Request a chunk with the slot of that number. Answer: `Replied`, then `ChunkChecked` if it was given.

    The driver keeps the data, and writes them as soon as the blob is open.
    """

    number: int
    slot: int
    peer: PeerKey
    index: int


@dataclass(frozen=True, slots=True)
class OpenChunkStream:
    """Open the stream for chunks in advance. Failure is seen when a slot is requested."""

    peer: PeerKey
    priority: Priority


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel what has this number; return the slot if it is one."""

    number: int


@dataclass(frozen=True, slots=True)
class LoadLeaves:
    """Look for leaf hashes of an earlier attempt. Answer: `LeavesLoaded`."""

    number: int
    size: int


@dataclass(frozen=True, slots=True)
class CheckLeaves:
    """Check leaf hashes against the digest. Answer: `LeavesChecked`."""

    number: int
    size: int
    leaves: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """Reserve room in the store for a blob of these leaf hashes. Answer: `BlobOpened`, `BlobMismatch`."""

    number: int
    size: int
    leaves: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class CloseBlob:
    """Close the blob that is open: its size was wrong."""


@dataclass(frozen=True, slots=True)
class ReserveEarly:
    """Reserve memory for chunks whose hashes are not known yet. Answer: `EarlyReserved`, if there is any."""


@dataclass(frozen=True, slots=True)
class DropProvider:
    """Close the streams to a provider and report it: it broke the rules."""

    peer: PeerKey
    reason: str


@dataclass(frozen=True, slots=True)
class FinishFetch:
    """All that is wanted is here."""


@dataclass(frozen=True, slots=True)
class FailFetch:
    """The blob cannot be had."""

    why: str


Action = (
    QueryProvider
    | RequestSlot
    | RequestChunk
    | OpenChunkStream
    | CancelRequest
    | LoadLeaves
    | CheckLeaves
    | OpenBlob
    | CloseBlob
    | ReserveEarly
    | DropProvider
    | FinishFetch
    | FailFetch
)

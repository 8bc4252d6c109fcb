"""The actions that the scheduler returns, and the event by which its driver answers them.

An action with a `number` is answered by one `Answer`, unless it was cancelled before.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peer.swarm.transfer.frames import BlobOp
from protocol.ids import PeerKey


class Priority(enum.Enum):
    """Requests of one priority share a stream: small ones need not queue behind big ones."""

    SMALL = "chunks of small blobs"
    BULK = "chunks of big blobs"
    QUERY = "sizes, leaf hashes and bitmaps"


class ChunkCheck(enum.Enum):
    """The outcome of writing a chunk to the store."""

    STORED = "stored"
    WRONG = "not the blob's chunk"
    WRONG_SIZE = "the blob's own chunk, of another length than the blob's stated size says"


@dataclass(frozen=True, slots=True)
class QueryProvider:
    """Request a size, a page of leaf hashes, or a page of a bitmap. Answer: `BlobReply` or `Lost`."""

    number: int
    peer: PeerKey
    op: BlobOp
    index: int


@dataclass(frozen=True, slots=True)
class RequestSlot:
    """Wait for a slot on the provider's stream for chunks. Answer: None when there is one, or `Lost`.

    The slot is for one `RequestChunk`, or is returned by `CancelRequest`.
    """

    number: int
    peer: PeerKey


@dataclass(frozen=True, slots=True)
class RequestChunk:
    """Request a chunk with the slot of that number, and write it as soon as the blob is open.

    Answer: `ChunkCheck`, a `BlobReply` that is not OK, or `Lost`.
    """

    number: int
    slot: int
    peer: PeerKey
    index: int


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """Reserve room in the store for a blob of these leaf hashes; None stands for those that an earlier attempt left.

    Answer: the indices of the wanted chunks that are missing; None if there are no such hashes, or not the blob's.
    """

    number: int
    size: int
    leaves: Sequence[bytes] | None


@dataclass(frozen=True, slots=True)
class ReserveEarly:
    """Reserve memory for chunks whose hashes are not known yet. Answer: None, only if there is any."""

    number: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel what has this number; return the slot if it is one."""

    number: int


@dataclass(frozen=True, slots=True)
class CancelAll:
    """Cancel everything, and close the blob if it is open."""


@dataclass(frozen=True, slots=True)
class DropProvider:
    """Close the streams to a provider and report it: it broke the rules."""

    peer: PeerKey
    reason: str


@dataclass(frozen=True, slots=True)
class EndFetch:
    """The fetch is over: all that is wanted is here, or else `failure` says why not."""

    failure: str | None = None


Action = (
    QueryProvider
    | RequestSlot
    | RequestChunk
    | OpenBlob
    | ReserveEarly
    | CancelRequest
    | CancelAll
    | DropProvider
    | EndFetch
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of the action with this number, of the type that the action names. Ignored after a cancellation."""

    number: int
    value: Any

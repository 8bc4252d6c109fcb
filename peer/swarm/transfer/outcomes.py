"""The outcomes of a request to a provider: values, on which the scheduler decides."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from peer.swarm.transfer.frames import BlobReply, ReplyStatus


@dataclass(frozen=True, slots=True)
class Given:
    """The data of an OK reply. Of a chunk they stay with the driver, which keeps them: `data` is empty."""

    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Declined:
    """A reply that is not OK, with its reason."""

    status: ReplyStatus
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream broke, stalled, or could not be opened. `hostile`: the other side broke the framing."""

    reason: str
    hostile: bool = False


Outcome = Given | Declined | Lost


def outcome_of(reply: BlobReply | Lost, *, with_data: bool = True) -> Outcome:
    """Return the outcome that a reply is."""
    if isinstance(reply, Lost):
        return reply
    if reply.status is ReplyStatus.OK:
        return Given(reply.data if with_data else b"")
    return Declined(reply.status, reply.reason)


class ChunkCheck(enum.Enum):
    """The outcome of writing a chunk to the store."""

    STORED = "stored"
    WRONG = "not the blob's chunk"
    WRONG_SIZE = "the blob's own chunk, of another length than the blob's stated size says"

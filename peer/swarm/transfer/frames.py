"""The frames of a blob stream: requests of one fixed size, replies with a length that is checked before it is read.

    request   op u8 | 3 zero bytes | digest 32 | index u64        44 bytes, big endian
    reply     status u8 | length u32 | data                       length at most CHUNK

Requests on a stream are answered in their order, so a client may send several before the first answer.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.merkle import CHUNK, MAX_BLOB, chunk_count
from protocol.plain_text import printable

_REQUEST = struct.Struct(">B3x32sQ")
_REPLY = struct.Struct(">BI")
_SIZE = struct.Struct(">Q")

REQUEST_BYTES = _REQUEST.size
REPLY_PREFIX_BYTES = _REPLY.size
SIZE_BYTES = _SIZE.size
LEAVES_PER_PAGE = CHUNK // 32
BITS_PER_PAGE = CHUNK * 8
SERVER_IDLE_SECONDS = 1800.0
CLIENT_IDLE_SECONDS = SERVER_IDLE_SECONDS - 60
"""Less than the server's: the side that closes a stream knows at once that it is closed."""
MAX_REASON = 200
MAX_INDEX = MAX_BLOB // CHUNK


class BlobOp(enum.IntEnum):
    """The kinds of requests, with the data of an OK reply."""

    SIZE = 1
    """The blob's size, u64."""
    LEAVES = 2
    """Page `index` of the leaf hashes, LEAVES_PER_PAGE a page."""
    CHUNK = 3
    """Chunk `index`."""
    HAVE = 4
    """Page `index` of a bitmap of the chunks that the peer can give, lowest bit first."""


class ReplyStatus(enum.IntEnum):
    """How a request was answered. Unless it is OK, the data is the reason."""

    OK = 0
    MISSING = 1
    """The peer does not hold the blob."""
    ABSENT = 2
    """The blob is arriving; this chunk is not here yet."""
    REFUSED = 3
    """Not for this requester, now. Commit-then-reveal refuses a requester until its own header is here."""
    BUSY = 4
    BAD_REQUEST = 5


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """One request on a blob stream."""

    op: BlobOp
    digest: Digest
    index: int = 0

    def encode(self) -> bytes:
        """Return the REQUEST_BYTES of the frame."""
        return _REQUEST.pack(self.op, bytes(self.digest), self.index)


@dataclass(frozen=True, slots=True)
class BlobReply:
    """One reply on a blob stream."""

    status: ReplyStatus
    data: bytes = b""

    def prefix(self) -> bytes:
        """Return the REPLY_PREFIX_BYTES that precede the data."""
        return _REPLY.pack(self.status, len(self.data))

    @property
    def reason(self) -> str:
        """The text of a reply that is not OK, fit to be shown."""
        said = printable(self.data[:MAX_REASON].decode("utf-8", errors="replace"))
        return said or self.status.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream broke, stalled, or could not be opened. `hostile`: the other side broke the framing."""

    reason: str
    hostile: bool = False


def refusal(status: ReplyStatus, reason: str) -> BlobReply:
    """Return a reply that is not OK, with the reason."""
    return BlobReply(status, reason.encode()[:MAX_REASON])


def parse_request(frame: bytes) -> BlobRequest:
    """Return the request in a frame of REQUEST_BYTES. Raises MalformedError if it is none that can be answered."""
    op, digest, index = _REQUEST.unpack(frame)
    if frame[1:4] != b"\0\0\0" or not 1 <= op <= len(BlobOp) or index > MAX_INDEX:
        raise MalformedError("not a request for a blob")
    return BlobRequest(BlobOp(op), Digest(digest), index)


def parse_reply_prefix(prefix: bytes, limit: int) -> tuple[ReplyStatus, int]:
    """Return the status and the number of bytes that follow: at most `limit` if it is OK, else a short reason.

    Raises MalformedError.
    """
    status, length = _REPLY.unpack(prefix)
    if status > max(ReplyStatus):
        raise MalformedError(f"a reply with the unknown status {status}")
    allowed = limit if status == ReplyStatus.OK else MAX_REASON
    if length > allowed:
        raise MalformedError(f"a reply of {length:,} bytes where at most {allowed:,} were expected")
    return ReplyStatus(status), length


def encode_size(size: int) -> bytes:
    """Return a size as the SIZE_BYTES of a reply."""
    return _SIZE.pack(size)


def leaf_pages(size: int) -> int:
    """Return the number of pages that the leaf hashes of a blob of `size` bytes fill."""
    return -(-chunk_count(size) // LEAVES_PER_PAGE)

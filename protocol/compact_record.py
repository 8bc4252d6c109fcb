"""A record with its headers replaced by header ids, for members that hold them (as compact blocks in BIP 152).

A record of a thousand contributors has 600 KB of headers, which every member has received already, from their
authors. In a compact record each header is replaced by the first HEADER_ID_BYTES of the SHA-256 of its envelope: 18 KB.
All else is the record's own, also its signature, which does not cover the compact record: that is a hint. A peer with
all headers reconstructs the record's envelope to the byte, and decodes it like any other. A wrong compact record
therefore has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.checks import PARSE_ERRORS
from protocol.errors import MalformedError
from protocol.ids import PeerKey, sha256
from protocol.message_codec import MAX_HEADER_ENVELOPE
from protocol.messages import MAX_CONTRIBUTORS, RoundRecord, Signed
from protocol.wire import swarm_pb2 as wire

KIND = "compact-record"
HEADER_ID_BYTES = 16
MAX_COMPACT_RECORD = MAX_CONTRIBUTORS * (HEADER_ID_BYTES + 2 + 8) + 1024
"""No compact record is larger, in bytes: an id, its length, and a weight for each update."""

_MARK = wire.Envelope(kind=KIND).SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True)
class CompactRecord:
    """The unverified contents of a compact record: the claimed author, and the header ids in order."""

    author: PeerKey
    header_ids: tuple[bytes, ...]
    payload: bytes
    signature: bytes

    def reconstruct(self, headers: Sequence[bytes]) -> bytes:
        """Return the record's envelope, from the headers' envelopes in the order of `header_ids`.

        It must be decoded like any other.

        Raises MalformedError when they are not the headers that are named.
        """
        if tuple(header_id(h) for h in headers) != self.header_ids:
            raise MalformedError("a record was put together from other headers than it names")
        record = wire.RoundRecord.FromString(self.payload)
        del record.updates[:]
        record.updates.extend(headers)
        return wire.Envelope(
            kind="round-record", payload=record.SerializeToString(deterministic=True), key=bytes(self.author),
            signature=self.signature,
        ).SerializeToString(deterministic=True)  # fmt: skip


def header_id(header: bytes) -> bytes:
    """Return the id of a header, from its envelope."""
    return sha256(header)[:HEADER_ID_BYTES]


def is_compact_record(encoded: bytes) -> bool:
    """Return whether this claims to be a compact record, to choose how to decode it."""
    return encoded.startswith(_MARK)


def compact(record: Signed[RoundRecord]) -> bytes | None:
    """Return the compact record of a verified record; None if it is too large, or does not restore it to the byte."""
    whole = wire.Envelope.FromString(record.encoded)
    body = wire.RoundRecord.FromString(whole.payload)
    headers = list(body.updates)
    del body.updates[:]
    body.updates.extend(header_id(h) for h in headers)
    encoded = wire.Envelope(
        kind=KIND, payload=body.SerializeToString(deterministic=True), key=whole.key, signature=whole.signature
    ).SerializeToString(deterministic=True)
    return (
        encoded
        if len(encoded) <= MAX_COMPACT_RECORD and parse_compact_record(encoded).reconstruct(headers) == record.encoded
        else None
    )


def parse_compact_record(encoded: bytes) -> CompactRecord:
    """Parse a compact record. Raises MalformedError."""
    if len(encoded) > MAX_COMPACT_RECORD:
        raise MalformedError(f"a compact record of {len(encoded)} bytes: at most {MAX_COMPACT_RECORD} are accepted")
    try:
        envelope = wire.Envelope.FromString(encoded)
        body = wire.RoundRecord.FromString(envelope.payload)
    except PARSE_ERRORS:
        raise MalformedError("the bytes of a compact record do not parse") from None
    header_ids = tuple(bytes(n) for n in body.updates)
    if envelope.kind != KIND or len(envelope.signature) != 64:
        raise MalformedError("a compact record without a signature, or of another kind")
    if not 1 <= len(header_ids) <= MAX_CONTRIBUTORS or any(len(i) != HEADER_ID_BYTES for i in header_ids):
        raise MalformedError(f"a compact record names 1 to {MAX_CONTRIBUTORS} headers by {HEADER_ID_BYTES} bytes each")
    if len(set(header_ids)) != len(header_ids):
        raise MalformedError("a compact record names a header twice")
    return CompactRecord(PeerKey(envelope.key), header_ids, envelope.payload, envelope.signature)


def check_header_ids(header_ids: Sequence[bytes]) -> Sequence[bytes]:
    """Return the header ids that a member requests. Raises MalformedError."""
    if len(header_ids) > MAX_CONTRIBUTORS or any(len(n) != HEADER_ID_BYTES for n in header_ids):
        raise MalformedError(f"at most {MAX_CONTRIBUTORS} headers are asked for, by {HEADER_ID_BYTES} bytes each")
    return header_ids


def check_requested_headers(header_ids: Sequence[bytes], headers: Sequence[bytes]) -> dict[bytes, bytes]:
    """Parse the reply, by header id. Raises MalformedError when it has anything that was not asked for."""
    if len(headers) > len(header_ids) or any(len(h) > MAX_HEADER_ENVELOPE for h in headers):
        raise MalformedError("more, or longer, headers than were asked for")
    found = {header_id(h): h for h in headers}
    if not found.keys() <= set(header_ids):
        raise MalformedError("headers that were not asked for")
    return found

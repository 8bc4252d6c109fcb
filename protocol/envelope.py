"""Signed envelopes (DSSE).

A signature covers DSSE's pre-authentication encoding (https://github.com/secure-systems-lab/dsse, PAE) of the
message's kind and its exact payload bytes. So a signature for one purpose is invalid for another, and nothing is
serialised again for a check. `open_envelope` verifies before anybody decodes the payload.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.checks import PARSE_ERRORS
from protocol.errors import MalformedError, SignatureError
from protocol.identity import Identity, verify
from protocol.ids import Digest, PeerKey, sha256
from protocol.wire import swarm_pb2 as wire

MAX_ENVELOPE = 4 * 1024 * 1024 - 64 * 1024
"""No envelope is larger: it fits one unary message of the transport (4 MiB)."""


def pae(kind: str, payload: bytes) -> bytes:
    """DSSE v1 pre-authentication encoding of a payload of the given kind."""
    name = f"cairn/v1/{kind}".encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A verified message: its kind, author, payload, and the bytes that were sent (to be passed on as they are)."""

    kind: str
    author: PeerKey
    payload: bytes
    encoded: bytes

    @property
    def digest(self) -> Digest:
        """Digest of what was signed and by whom, independent of the envelope's encoding."""
        return content_digest(self.kind, self.author, self.payload)


def content_digest(kind: str, author: PeerKey, payload: bytes) -> Digest:
    """Return SHA-256 of a tag, the author and the PAE: the digest by which records and headers are named."""
    return Digest(sha256(b"cairn/v1/digest", author, pae(kind, payload)))


def seal(identity: Identity, kind: str, payload: bytes) -> Envelope:
    """Sign a payload."""
    signature = identity.sign(pae(kind, payload))
    return Envelope(kind, identity.key, payload, _encode(kind, payload, identity.key, signature))


def _encode(kind: str, payload: bytes, key: bytes, signature: bytes) -> bytes:
    """Return the canonical bytes of an envelope."""
    message = wire.Envelope(kind=kind, payload=payload, key=bytes(key), signature=signature)
    return message.SerializeToString(deterministic=True)


def open_envelope(encoded: bytes, kind: str, *, limit: int = MAX_ENVELOPE, verifies: bool = True) -> Envelope:
    """Verify an envelope of the given kind. The payload is not looked at.

    Not `verifies`: leave the signature out, of bytes from a file that were verified before they were written.

    Raises MalformedError for anything that is not an envelope of at most `limit` bytes, written as `seal` writes it,
    SignatureError for another kind or a signature that does not verify.
    """
    message = _parsed(encoded, kind, limit)
    if message.kind != kind:
        raise SignatureError(f"a message of kind {message.kind[:32]!r} where {kind!r} was expected")
    author = PeerKey(message.key)
    if len(message.signature) != 64:
        raise SignatureError("an Ed25519 signature is 64 bytes")
    # The envelope around the payload is not signed. With several valid encodings a relaying peer could pad a message,
    # and make any number of valid copies of one header.
    if _encode(kind, message.payload, author, message.signature) != encoded:
        raise MalformedError(f"the envelope of a {kind} message is not in canonical form")
    if verifies:
        verify(author, pae(kind, message.payload), message.signature)
    return Envelope(kind, author, message.payload, bytes(encoded))


def claimed_kind(encoded: bytes) -> str:
    """Return the kind that an envelope claims, unverified: only to choose how to decode it. Raises MalformedError."""
    return _parsed(encoded, "signed", MAX_ENVELOPE).kind


def claimed_author(encoded: bytes, *, limit: int = MAX_ENVELOPE) -> PeerKey:
    """Return the author that an envelope claims, unverified: only to refuse it cheaply. Raises MalformedError."""
    return PeerKey(_parsed(encoded, "signed", limit).key)


def claimed_digest(encoded: bytes) -> Digest:
    """Return the digest of what an envelope claims, unverified: only to find it. Raises MalformedError."""
    message = _parsed(encoded, "signed", MAX_ENVELOPE)
    return content_digest(message.kind, PeerKey(message.key), message.payload)


def _parsed(encoded: bytes, kind: str, limit: int) -> wire.Envelope:
    if len(encoded) > limit:
        raise MalformedError(f"a {kind} message of {len(encoded)} bytes: at most {limit} are accepted")
    message = wire.Envelope()
    try:
        message.ParseFromString(encoded)
    except PARSE_ERRORS:
        raise MalformedError(f"the bytes of a {kind} message do not parse") from None
    return message

"""The names of things: digests, peer keys, rounds. A digest is never a bare string, nor a key bare bytes."""

from __future__ import annotations

import base64
import hashlib
from typing import NewType

from protocol.errors import MalformedError

Round = NewType("Round", int)
"""The number of an outer step, from 0. `state[r]` is what round r starts from."""

MAX_ROUND = 2**40
MAX_COUNT = 2**53
"""Bound on every counter on the wire: exact in JSON and in a double."""


_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class _Bytes32(bytes):
    """32 bytes with a kind. Ordered and hashed as bytes; printed as hex."""

    __slots__ = ()
    _words = "32 bytes"

    def __new__(cls, value: bytes):
        if len(value) != 32:
            raise MalformedError(f"a {cls.__name__} is 32 bytes, not {len(value)}")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str):
        """Parse 64 hexadecimal digits. Raises MalformedError."""
        # `fromhex` alone would take white space too: one name would have many spellings.
        if len(text) != 64 or not set(text) <= _HEX_DIGITS:
            raise MalformedError(f"{text[:80]!r} is not {cls._words}: want 64 hexadecimal digits")
        return cls(bytes.fromhex(text))

    @property
    def short(self) -> str:
        """The first 8 hexadecimal digits, for people."""
        return self.hex()[:8]

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.short})"


class Digest(_Bytes32):
    """SHA-256 of something: a record, a state, a blob (see `merkle`)."""

    __slots__ = ()
    _words = "a digest"


class RunId(Digest):
    """The blob digest of a run spec's canonical bytes."""

    __slots__ = ()
    _words = "a run's id"


class PeerKey(_Bytes32):
    """A peer's Ed25519 public key: its name in the protocol."""

    __slots__ = ()
    _words = "a peer's key"

    @property
    def libp2p_id(self) -> bytes:
        """The libp2p peer id (identity multihash of the protobuf-encoded key) that embeds this key."""
        return _LIBP2P_ED25519_PREFIX + bytes(self)

    @classmethod
    def from_libp2p_id(cls, peer_id: bytes) -> PeerKey:
        """Return the key in a libp2p peer id. Raises MalformedError when the id does not embed an Ed25519 key."""
        if len(peer_id) != 38 or not peer_id.startswith(_LIBP2P_ED25519_PREFIX):
            raise MalformedError("this libp2p peer id does not embed an Ed25519 key")
        return cls(peer_id[6:])


# Identity multihash (0x00), 36 bytes (0x24), of PublicKey{Type: Ed25519 (08 01), Data: 32 bytes (12 20)}.
_LIBP2P_ED25519_PREFIX = bytes.fromhex("002408011220")


def sha256(*parts: bytes | memoryview) -> bytes:
    """SHA-256 of the concatenation of the parts."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return h.digest()


def b64url(data: bytes) -> str:
    """Base64url without padding (RFC 4648 section 5)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_b64url(text: str) -> bytes:
    """Invert `b64url`, for exactly the texts that it makes. Raises MalformedError."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        data = None
    # The decoder overlooks padding in odd places, the plain alphabet's + and /, and stray bits at the end.
    if data is None or b64url(data) != text:
        raise MalformedError("not base64url text")
    return data


def short_id(digest: Digest | PeerKey) -> int:
    """Return the first 8 bytes of a digest or key: enough to ask "do you have it", never to trust."""
    return int.from_bytes(digest[:8], "little")

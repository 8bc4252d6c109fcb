"""Ed25519 identities, which sign. Other packages read and write key files; this one turns keys into bytes and back."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol import vrf
from protocol.ed25519_points import WEAK_POINTS
from protocol.errors import IdentityError, SignatureError
from protocol.ids import PeerKey

_PEM_LABEL = "CAIRN PRIVATE KEY"


class Identity:
    """A private Ed25519 key and the peer key that it proves."""

    def __init__(self, seed: bytes):
        if len(seed) != 32:
            raise IdentityError(f"an Ed25519 seed is 32 bytes, not {len(seed)}")
        self._seed = bytes(seed)
        self._private = Ed25519PrivateKey.from_private_bytes(self._seed)
        self.key = PeerKey(self._private.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """64 bytes; deterministic (RFC 8032)."""
        return self._private.sign(message)

    def prove(self, alpha: bytes) -> bytes:
        """Return the proof of the key's verifiable random output for an input (`vrf`); deterministic."""
        return vrf.prove(self._seed, alpha)

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes: what a key file holds."""
        return self._seed

    def libp2p_private_key(self) -> bytes:
        """Return the same key as libp2p's PrivateKey protobuf: type Ed25519, data = seed and public key."""
        return bytes.fromhex("08011240") + self._seed + bytes(self.key)

    def __repr__(self) -> str:
        return f"Identity({self.key.short})"


def verify(key: PeerKey, message: bytes, signature: bytes) -> None:
    """Raise SignatureError unless `signature` is the key's over the message, by the rule of `ed25519_points`."""
    if key in WEAK_POINTS or signature[:32] in WEAK_POINTS:
        raise SignatureError(f"{key.short} is a weak key, or the signature's R a weak point: make another identity")
    try:
        Ed25519PublicKey.from_public_bytes(bytes(key)).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise SignatureError(f"the signature does not verify with key {key.short}") from None


def to_key_file(identity: Identity) -> str:
    """Return the text of a key file."""
    return f"-----BEGIN {_PEM_LABEL}-----\n{identity.seed.hex()}\n-----END {_PEM_LABEL}-----\n"


def parse_key_file(text: str) -> Identity:
    """Return the identity in a key file's text. Raises IdentityError."""
    lines = text.strip().splitlines()
    if len(lines) != 3 or lines[0] != f"-----BEGIN {_PEM_LABEL}-----" or lines[2] != f"-----END {_PEM_LABEL}-----":
        raise IdentityError("this is not a Cairn key file")
    try:
        return Identity(bytes.fromhex(lines[1]))
    except (ValueError, IdentityError):
        raise IdentityError("the key file is damaged") from None

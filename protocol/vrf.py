"""The verifiable random function of an Ed25519 key: ECVRF-EDWARDS25519-SHA512-TAI of RFC 9381.

A signature would not do: an Ed25519 signer can make many of one message, and choose among them. Of a key and an input
there is one `output`, and only the key's owner can compute it before it shows the `proof`.

libsodium makes the curve operations. A multiplication refuses encodings that are not canonical. That key and Gamma are
in the group of prime order is checked here: libsodium before 1.0.21 lets some others pass (CVE-2025-69277). So `output`
may hash Gamma itself; the RFC multiplies it by the cofactor first.
"""

from __future__ import annotations

from hashlib import sha512

from nacl import bindings
from nacl.exceptions import CryptoError

from protocol.errors import SignatureError
from protocol.ids import PeerKey, sha256

PROOF_BYTES = 80
"""Size of a proof: Gamma (32), c (16), s (32)."""

if not (bindings.has_crypto_core_ed25519 and bindings.has_crypto_scalarmult_ed25519):
    raise ImportError("libsodium was built without its Ed25519 point functions: install PyNaCl from its wheel")

_SUITE = b"\x03"
_ORDER = 2**252 + 27742317777372353535851937790883648493
_ORDER_LESS_ONE = (_ORDER - 1).to_bytes(32, "little")
_NEUTRAL = (1).to_bytes(32, "little")


def prove(seed: bytes, alpha: bytes) -> bytes:
    """Return the proof of the key with this secret seed (32 bytes) for an input. Deterministic."""
    hashed = sha512(seed).digest()
    secret = bytearray(hashed[:32])
    secret[0] &= 248
    secret[31] = secret[31] & 127 | 64
    x = _reduced(bytes(secret))
    key = bindings.crypto_scalarmult_ed25519_base_noclamp(x)
    h = _encode_to_curve(key, alpha)
    gamma = bindings.crypto_scalarmult_ed25519_noclamp(x, h)
    k = bindings.crypto_core_ed25519_scalar_reduce(sha512(hashed[32:] + h).digest())
    kb, kh = bindings.crypto_scalarmult_ed25519_base_noclamp(k), bindings.crypto_scalarmult_ed25519_noclamp(k, h)
    c = _challenge(key, h, gamma, kb, kh)
    s = bindings.crypto_core_ed25519_scalar_add(k, bindings.crypto_core_ed25519_scalar_mul(_scalar(c), x))
    return gamma + c + s


def verify(key: PeerKey, alpha: bytes, proof: bytes) -> None:
    """Raise SignatureError unless `proof` is the key's for the input."""
    if not _is_valid(bytes(key), alpha, proof):
        raise SignatureError(f"the proof of the next draws does not verify with key {key.short}")


def output(proof: bytes) -> bytes:
    """Return the 32 bytes that a verified proof shows: one value for each key and input."""
    return sha256(b"cairn/v1/vrf-output", proof[:32])


def _is_valid(key: bytes, alpha: bytes, proof: bytes) -> bool:
    gamma, c, s = proof[:32], proof[32:48], proof[48:]
    if len(proof) != PROOF_BYTES or int.from_bytes(s, "little") >= _ORDER:
        return False
    try:
        if not (_has_prime_order(key) and _has_prime_order(gamma)):
            return False
        h = _encode_to_curve(key, alpha)
        u = bindings.crypto_core_ed25519_sub(
            bindings.crypto_scalarmult_ed25519_base_noclamp(s),
            bindings.crypto_scalarmult_ed25519_noclamp(_scalar(c), key),
        )
        v = bindings.crypto_core_ed25519_sub(
            bindings.crypto_scalarmult_ed25519_noclamp(s, h),
            bindings.crypto_scalarmult_ed25519_noclamp(_scalar(c), gamma),
        )
    except CryptoError:  # not a point of the group, or a scalar of zero
        return False
    return _challenge(key, h, gamma, u, v) == c


def _has_prime_order(point: bytes) -> bool:
    """Return whether a point times the order is neutral. Raises CryptoError for one that libsodium refuses."""
    multiplied = bindings.crypto_scalarmult_ed25519_noclamp(_ORDER_LESS_ONE, point)
    return bindings.crypto_core_ed25519_add(multiplied, point) == _NEUTRAL


def _encode_to_curve(key: bytes, alpha: bytes) -> bytes:
    """Return a point of the prime-order group for an input, by trying and incrementing (RFC 9381, 5.4.1.1)."""
    for counter in range(256):
        tried = sha512(_SUITE + b"\x01" + key + alpha + bytes([counter]) + b"\x00").digest()[:32]
        try:
            point = tried
            for _ in range(3):  # times the cofactor, 8
                point = bindings.crypto_core_ed25519_add(point, point)
        except CryptoError:  # half of all tries are no point
            continue
        return point
    raise SignatureError("no point was found for the input of a proof")  # once in 2^256


def _challenge(*points: bytes) -> bytes:
    return sha512(_SUITE + b"\x02" + b"".join(points) + b"\x00").digest()[:16]


def _scalar(c: bytes) -> bytes:
    return c + bytes(16)


def _reduced(scalar: bytes) -> bytes:
    return bindings.crypto_core_ed25519_scalar_reduce(scalar + bytes(32))

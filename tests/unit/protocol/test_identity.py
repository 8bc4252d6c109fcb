"""Identities: signatures of Ed25519 as others make them, and key files that are whole or refused."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from protocol.ed25519_points import WEAK_POINTS
from protocol.errors import IdentityError, SignatureError
from protocol.identity import Identity, parse_key_file, to_key_file, verify
from protocol.ids import PeerKey
from tests.support import edwards25519 as curve
from tests.support.specs import identity

# RFC 8032 section 7.1, tests 1 to 3: seed, public key, message, signature.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("seed", "key", "message", "signature"), RFC_8032)
def test_signatures_are_those_of_rfc_8032(seed: str, key: str, message: str, signature: str):
    signer = Identity(bytes.fromhex(seed))
    assert signer.key.hex() == key
    assert signer.sign(bytes.fromhex(message)).hex() == signature
    verify(PeerKey.parse(key), bytes.fromhex(message), bytes.fromhex(signature))


@given(st.binary(max_size=100), st.integers(0, 63), st.integers(0, 7))
def test_a_changed_signature_does_not_verify(message: bytes, byte: int, bit: int):
    signer = identity("signer")
    signature = bytearray(signer.sign(message))
    signature[byte] ^= 1 << bit
    with pytest.raises(SignatureError):
        verify(signer.key, message, bytes(signature))


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_signature_is_for_one_message_and_one_key(message: bytes, other: bytes):
    signer, stranger = identity("signer"), identity("stranger")
    signature = signer.sign(message)
    verify(signer.key, message, signature)
    with pytest.raises(SignatureError):
        verify(stranger.key, message, signature)
    if other != message:
        with pytest.raises(SignatureError):
            verify(signer.key, other, signature)


def test_nobody_can_make_a_second_signature_out_of_a_first():
    # S + L is the same scalar: RFC 8032 section 5.1.7 has it refused, or every message would have two envelopes.
    signer = identity("signer")
    signature = signer.sign(b"message")
    order = 2**252 + 27742317777372353535851937790883648493
    scalar = int.from_bytes(signature[32:], "little") + order
    with pytest.raises(SignatureError):
        verify(signer.key, b"message", signature[:32] + scalar.to_bytes(32, "little"))


def test_the_weak_points_are_those_of_small_order_and_those_with_a_second_encoding():
    small = curve.small_order_points()
    assert len(small) == 8 and all(curve.multiply(8, point) == curve.IDENTITY for point in small)
    canonical = {curve.encode(point) for point in small}
    # All encodings whose y is not reduced; and x = 0 with the sign bit: "minus zero".
    other = {(y | sign << 255).to_bytes(32, "little") for y in range(curve.P, 2**255) for sign in (0, 1)}
    other |= {(y | 1 << 255).to_bytes(32, "little") for y in (1, curve.P - 1)}
    assert canonical | other == WEAK_POINTS and len(WEAK_POINTS) == 48
    assert all((point := curve.decode(e)) is None or curve.encode(point) != e for e in other)


def openssl_accepts(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def test_nobody_signs_with_a_weak_key():
    # With a key of small order n, S and R = S*B are a signature of one message in n, whatever S is.
    forged = curve.encode(curve.multiply(5, curve.BASE)) + (5).to_bytes(32, "little")
    messages = [b"message %d" % i for i in range(64)]
    for key in WEAK_POINTS:
        for message in messages:
            with pytest.raises(SignatureError, match="weak key"):
                verify(PeerKey(key), message, forged)
    # The negative control: OpenSSL alone accepts such forgeries.
    accepted = {key for key in WEAK_POINTS if any(openssl_accepts(key, message, forged) for message in messages)}
    assert {curve.encode(point) for point in curve.small_order_points()} <= accepted


def test_a_weak_r_is_refused_also_where_the_equation_holds():
    # The holder of a key has S = k*a for R = the identity: a second signature, which other libraries refuse.
    signer, message = identity("signer"), b"message"
    digest = hashlib.sha512(signer.seed).digest()
    secret = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | 1 << 254
    accepted = set()
    for encoding in WEAK_POINTS:
        challenge = int.from_bytes(hashlib.sha512(encoding + signer.key + message).digest(), "little")
        signature = encoding + (challenge * secret % curve.ORDER).to_bytes(32, "little")
        with pytest.raises(SignatureError, match="weak point"):
            verify(signer.key, message, signature)
        if openssl_accepts(signer.key, message, signature):
            accepted.add(encoding)
    assert accepted == {curve.encode(curve.IDENTITY)}  # the negative control


@given(st.binary(max_size=80).filter(lambda s: len(s) != 64))
def test_a_signature_of_another_size_does_not_verify(signature: bytes):
    with pytest.raises(SignatureError):
        verify(identity("signer").key, b"message", signature)


@given(st.binary(min_size=32, max_size=32))
def test_no_key_that_is_no_point_on_the_curve_does_harm(raw: bytes):
    with pytest.raises(SignatureError):
        verify(PeerKey(raw), b"message", bytes(64))


def test_a_key_file_gives_back_its_identity():
    signer = identity("signer")
    again = parse_key_file(to_key_file(signer))
    assert again.key == signer.key and again.seed == signer.seed
    assert parse_key_file(to_key_file(signer).replace("\n", "\r\n")).key == signer.key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        to_key_file(identity(1)).replace("CAIRN", "EC"),
        to_key_file(identity(1))[:40],
        to_key_file(identity(1)).replace(identity(1).seed.hex(), identity(1).seed.hex()[:-2]),
        to_key_file(identity(1)).replace(identity(1).seed.hex(), "zz" * 32),
        to_key_file(identity(1)).replace(identity(1).seed.hex(), ""),
        to_key_file(identity(1)) * 2,
    ],
)
def test_a_damaged_key_file_is_refused_and_its_secret_is_not_shown(text: str):
    with pytest.raises(IdentityError, match="key file") as caught:
        parse_key_file(text)
    assert identity(1).seed.hex()[:16] not in str(caught.value)


def test_a_seed_has_32_bytes():
    with pytest.raises(IdentityError):
        Identity(b"short")


def test_an_identity_does_not_print_its_seed():
    signer = identity("signer")
    assert signer.seed.hex() not in repr(signer) + str(signer)
    assert repr(signer.seed) not in repr(signer)


def test_the_same_key_is_a_libp2p_key():
    # The Ed25519 vector of libp2p's specification of peer ids: PrivateKey{Type: Ed25519, Data: seed and public key}.
    seed = "7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    public = "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    assert Identity(bytes.fromhex(seed)).libp2p_private_key().hex() == "08011240" + seed + public

"""Names: of one size, one spelling and one kind."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, RunId, b64url, from_b64url, sha256

THIRTY_TWO = st.binary(min_size=32, max_size=32)
NAMES = st.sampled_from([Digest, PeerKey, RunId])


@given(NAMES, THIRTY_TWO)
def test_a_name_survives_being_printed(kind: type, raw: bytes):
    name = kind(raw)
    assert type(kind.parse(str(name))) is kind
    assert kind.parse(str(name)) == name
    assert str(name).startswith(name.short) and len(name.short) == 8
    assert name.short in repr(name) and kind.__name__ in repr(name)


@given(NAMES, st.binary(max_size=80).filter(lambda raw: len(raw) != 32))
def test_a_name_has_32_bytes(kind: type, raw: bytes):
    with pytest.raises(MalformedError):
        kind(raw)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ab",
        "a" * 63,
        "a" * 65,
        "a" * 128,
        "g" * 64,
        "é" * 64,
        "aa " * 21 + "a",
        " " * 64,
        "0x" + "a" * 62,
        "٣" * 64,
    ],
)
def test_only_64_hexadecimal_digits_are_a_name(text: str):
    with pytest.raises(MalformedError, match="64 hexadecimal digits"):
        Digest.parse(text)


@given(st.text(max_size=200))
def test_the_complaint_about_a_name_is_fit_for_a_terminal(text: str):
    try:
        Digest.parse(text)
    except MalformedError as e:
        assert str(e).isprintable() and len(str(e)) < 1000


@given(THIRTY_TWO)
def test_a_peer_key_survives_being_a_libp2p_id(raw: bytes):
    key = PeerKey(raw)
    assert PeerKey.from_libp2p_id(key.libp2p_id) == key


@given(st.binary(max_size=60))
def test_an_id_that_embeds_no_ed25519_key_is_refused(raw: bytes):
    with pytest.raises(MalformedError):
        PeerKey.from_libp2p_id(raw)


def test_a_libp2p_id_of_another_kind_is_refused():
    good = PeerKey(bytes(32)).libp2p_id
    for bad in (good[:-1], good + b"\x00", b"\x12\x20" + bytes(32), good[:3] + b"\x02" + good[4:]):
        with pytest.raises(MalformedError):
            PeerKey.from_libp2p_id(bad)


def base58(text: str) -> bytes:
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    number = 0
    for letter in text:
        number = number * 58 + alphabet.index(letter)
    return bytes(len(text) - len(text.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def test_a_libp2p_id_is_the_one_that_libp2p_gives_the_key():
    # libp2p's specification of peer ids has this Ed25519 key as its test vector; implementations give it this id.
    key = PeerKey.parse("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert key.libp2p_id == base58("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")


@given(st.binary(max_size=100))
def test_base64url_comes_back(data: bytes):
    text = b64url(data)
    assert from_b64url(text) == data
    assert "=" not in text and "+" not in text and "/" not in text


@given(st.text(alphabet="AQgw-_+/= \n\xe9", max_size=12))
def test_bytes_have_one_spelling_in_base64url(text: str):
    try:
        data = from_b64url(text)
    except MalformedError:
        return
    assert b64url(data) == text


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_sha256_is_of_all_parts_in_order(parts: list[bytes]):
    assert sha256(*parts) == hashlib.sha256(b"".join(parts)).digest()

"""Envelopes: nothing gets in that was not signed, for this purpose, by this key, in these bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import MAX_ENVELOPE, claimed_author, claimed_kind, content_digest, open_envelope, pae, seal
from protocol.errors import MalformedError, ProtocolError, SignatureError
from protocol.wire import swarm_pb2 as wire
from tests.support.specs import identity

SIGNER = identity("signer")
KINDS = st.sampled_from(["update-header", "vote", "round-record", "finalization", "run-spec"])
PAYLOADS = st.binary(max_size=200)


@given(KINDS, PAYLOADS)
def test_what_was_sealed_opens_as_it_was(kind: str, payload: bytes):
    sealed = seal(SIGNER, kind, payload)
    opened = open_envelope(sealed.encoded, kind)
    assert opened == sealed
    assert (opened.kind, opened.author, opened.payload) == (kind, SIGNER.key, payload)
    assert opened.digest == sealed.digest == content_digest(kind, SIGNER.key, payload)
    assert claimed_kind(sealed.encoded) == kind and claimed_author(sealed.encoded) == SIGNER.key
    assert open_envelope(memoryview(sealed.encoded), kind) == sealed  # type: ignore[arg-type]


def test_the_signed_bytes_are_dsses():
    # The form of github.com/secure-systems-lab/dsse, protocol.md: lengths in bytes, before each part.
    assert pae("vote", b"hello world") == b"DSSEv1 13 cairn/v1/vote 11 hello world"
    assert pae("v\xe9te", b"") == b"DSSEv1 14 cairn/v1/v\xc3\xa9te 0 "


@given(st.tuples(st.text(max_size=9), PAYLOADS), st.tuples(st.text(max_size=9), PAYLOADS))
def test_no_two_messages_have_the_same_signed_bytes(a: tuple[str, bytes], b: tuple[str, bytes]):
    assert (pae(*a) == pae(*b)) == (a == b)


@given(PAYLOADS)
def test_a_message_of_one_kind_is_none_of_another(payload: bytes):
    sealed = seal(SIGNER, "vote", payload)
    with pytest.raises(SignatureError, match="'vote' where 'finalization' was expected"):
        open_envelope(sealed.encoded, "finalization")
    relabelled = wire.Envelope.FromString(sealed.encoded)
    relabelled.kind = "finalization"
    with pytest.raises(SignatureError, match="does not verify"):
        open_envelope(relabelled.SerializeToString(), "finalization")


@given(PAYLOADS, st.data())
def test_no_bit_can_change(payload: bytes, data: st.DataObject):
    sent = bytearray(seal(SIGNER, "vote", payload).encoded)
    sent[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((MalformedError, SignatureError)):
        open_envelope(bytes(sent), "vote")


def test_every_bit_of_one_envelope_counts():
    sealed = seal(SIGNER, "vote", b"payload")
    for bit in range(8 * len(sealed.encoded)):
        sent = bytearray(sealed.encoded)
        sent[bit // 8] ^= 1 << bit % 8
        with pytest.raises((MalformedError, SignatureError)):
            open_envelope(bytes(sent), "vote")


@given(PAYLOADS, st.data())
def test_a_cut_or_lengthened_envelope_is_refused(payload: bytes, data: st.DataObject):
    sent = seal(SIGNER, "vote", payload).encoded
    cut = data.draw(st.integers(0, len(sent) - 1))
    with pytest.raises((MalformedError, SignatureError)):
        open_envelope(sent[:cut], "vote")
    with pytest.raises((MalformedError, SignatureError)):
        open_envelope(sent + data.draw(st.binary(min_size=1, max_size=20)), "vote")


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


def test_an_envelope_is_written_in_one_way_only():
    # Else whoever passes a header on could make thousands of it that all verify, and fill records with padding.
    m = wire.Envelope.FromString(seal(SIGNER, "vote", b"payload").encoded)
    parts = [_field(1, b"vote"), _field(2, m.payload), _field(3, m.key), _field(4, m.signature)]
    assert b"".join(parts) == seal(SIGNER, "vote", b"payload").encoded
    for other in (
        b"".join(parts[::-1]),
        b"".join(parts) + _field(15, b"padding"),
        _field(15, b"padding") + b"".join(parts),
        b"".join(parts) + parts[0],
        _field(2, b"other") + b"".join(parts),
        b"".join([b"\x8a\x00\x04vote", *parts[1:]]),  # a tag in two bytes where one would do
        b"".join([b"\x0a\x84\x00vote", *parts[1:]]),  # a length, likewise
    ):
        with pytest.raises(MalformedError):
            open_envelope(other, "vote")


@pytest.mark.parametrize(
    ("key", "signature"),
    [(b"", bytes(64)), (bytes(31), bytes(64)), (bytes(33), bytes(64)), (bytes(32), b""), (bytes(32), bytes(63)),
     (bytes(32), bytes(65)), (bytes(32), bytes(64)), (b"\xff" * 32, bytes(64)), (bytes(SIGNER.key), bytes(64))],
)  # fmt: skip
def test_wrong_keys_and_signatures_are_refused(key: bytes, signature: bytes):
    sent = wire.Envelope(kind="vote", payload=b"x", key=key, signature=signature).SerializeToString()
    with pytest.raises((MalformedError, SignatureError)):
        open_envelope(sent, "vote")


def test_somebody_elses_signature_is_refused():
    m = wire.Envelope.FromString(seal(SIGNER, "vote", b"x").encoded)
    m.key = bytes(identity("stranger").key)
    with pytest.raises(SignatureError):
        open_envelope(m.SerializeToString(), "vote")


def test_an_oversized_envelope_is_refused_before_it_is_parsed():
    sent = seal(SIGNER, "vote", b"x" * 1000).encoded
    assert open_envelope(sent, "vote", limit=len(sent)).payload == b"x" * 1000
    for refused in (open_envelope, lambda s, _, limit: claimed_author(s, limit=limit)):
        with pytest.raises(MalformedError, match="at most"):
            refused(sent, "vote", limit=len(sent) - 1)
    for refused in (lambda s: open_envelope(s, "vote"), claimed_kind, claimed_author):
        with pytest.raises(MalformedError, match="at most"):
            refused(b"\x00" * (MAX_ENVELOPE + 1))


def test_text_that_is_not_utf8_is_malformed():
    for open_ in (lambda s: open_envelope(s, "vote"), claimed_kind, claimed_author):
        with pytest.raises(MalformedError):
            open_(_field(1, b"\xff\xfe"))


def test_deeply_nested_unknown_fields_are_malformed():
    with pytest.raises(MalformedError):
        open_envelope(b"\x7b" * 100_000 + b"\x7c" * 100_000, "vote")


@given(st.binary(max_size=400))
def test_rubbish_is_an_error_of_the_protocol(sent: bytes):
    with pytest.raises(ProtocolError):
        open_envelope(sent, "vote")
    for look in (claimed_kind, claimed_author):
        try:
            look(sent)
        except MalformedError:
            pass


def test_a_strange_kind_is_shown_quoted():
    sent = wire.Envelope(kind="\x1b[2J\u202e" + "x" * 1000).SerializeToString()
    with pytest.raises(SignatureError) as caught:
        open_envelope(sent, "vote")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


@given(PAYLOADS, PAYLOADS)
def test_a_digest_names_one_kind_author_and_payload(a: bytes, b: bytes):
    digests = {
        content_digest(kind, key, payload)
        for kind in ("vote", "finalization")
        for key in (SIGNER.key, identity("stranger").key)
        for payload in {a, b}
    }
    assert len(digests) == 4 * len({a, b})

"""The cost of liars: useless checks of signatures, memory, and bytes that are no message at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import message_codec
from protocol.envelope import seal
from protocol.errors import MalformedError, ProtocolError
from protocol.ids import PeerKey, Round
from protocol.message_codec import EXTENSIBLE, KINDS, KeySigner, MessageDecoder, encode_certificate
from protocol.messages import (
    MAX_KNOWN_HEADERS,
    Admission,
    Finalization,
    Goodbye,
    Heartbeat,
    RoundRecord,
    Signed,
    UpdateHeader,
    Vote,
)
from protocol.wire import swarm_pb2 as wire
from tests.support.mutating import mutated
from tests.support.signed import (
    CERTIFICATE,
    ONE_OF_EACH,
    PEERS,
    RECORD,
    RUN,
    SENT,
    STRANGER,
    decoder,
    header,
    heartbeat,
    raw,
    vote,
    wire_record,
)
from tests.support.specs import OWNER, digest, identity


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[PeerKey]:
    """The keys of the signatures that were looked at: what a message costs."""
    keys: list[PeerKey] = []
    real = message_codec.open_envelope

    def counting(sent: bytes, kind: str, *, limit: int, verifies: bool = True):
        envelope = real(sent, kind, limit=limit, verifies=verifies)
        keys.append(envelope.author)
        return envelope

    monkeypatch.setattr(message_codec, "open_envelope", counting)
    return keys


def test_a_header_is_verified_once_alone_in_a_record_and_in_a_certificate(verified: list[PeerKey]):
    o = decoder()
    for sent in SENT:
        o.decode_header(sent)
    assert len(verified) == 2 * len(SENT)  # and each admission
    o.decode(RECORD.encoded, RoundRecord)
    o.decode_certificate(encode_certificate(CERTIFICATE))
    assert len(verified) == 2 * len(SENT) + 1 + len(CERTIFICATE.votes)


def test_one_admitted_key_cannot_have_a_thousand_headers_verified(verified: list[PeerKey]):
    many = [header(PEERS[1], blob_size=i).encoded for i in range(1000)]
    with pytest.raises(MalformedError, match="each author once"):
        decoder().decode(raw(STRANGER, "round-record", wire_record(many)), RoundRecord)
    assert verified == [STRANGER.key]


def test_strangers_cannot_have_a_thousand_headers_verified(verified: list[PeerKey]):
    keys = sorted((identity(f"sybil {i}") for i in range(1000)), key=lambda i: i.key)
    many = [header(i, admission=b"").encoded for i in keys]
    with pytest.raises(ProtocolError):
        decoder().decode(raw(STRANGER, "round-record", wire_record(many)), RoundRecord)
    assert len(verified) <= 2


def test_strangers_cannot_have_a_thousand_votes_verified(verified: list[PeerKey]):
    o = decoder()
    o.decode(RECORD.encoded, RoundRecord)
    verified.clear()
    voters = sorted((identity(f"sybil {i}") for i in range(1000)), key=lambda i: i.key)
    sent = wire.Certificate(record=RECORD.encoded, votes=[vote(v, RECORD).encoded for v in voters]).SerializeToString()
    with pytest.raises(MalformedError, match="no contributor"):
        o.decode_certificate(sent)
    assert verified == []


# -- one form -------------------------------------------------------------------------------------------------


def odd_forms(payload: bytes) -> dict[str, bytes]:
    """Return payloads that a protobuf parser reads as the same message, or with more or less in it."""
    last_wins = payload[:34]  # the field `run` a second time
    return {
        "an unknown field": payload + b"\xf8\x7f\x01",
        "a field of another type": payload + b"\x0d\x00\x00\x00\x00",
        "a field twice": payload + last_wins,
        "a number of too many bytes": payload.replace(b"\x10\x03", b"\x10\x83\x80\x00", 1),
    }


@pytest.mark.parametrize(
    "good", [s for s in ONE_OF_EACH if type(s.body) not in EXTENSIBLE], ids=lambda s: type(s.body).__name__
)
def test_a_payload_has_one_form(good: Signed):
    kind = KINDS[type(good.body)].name
    payload = wire.Envelope.FromString(good.encoded).payload
    signer = next(i for i in (OWNER, *PEERS) if i.key == good.author)
    for what, odd in odd_forms(payload).items():
        if odd != payload:
            with pytest.raises(MalformedError, match="not in canonical form"):
                decoder().decode(seal(signer, kind, odd).encoded, type(good.body))
                pytest.fail(what)


# -- what is remembered ---------------------------------------------------------------------------------------


def remembered_of(sent: list[Signed], o: MessageDecoder, verified: list[PeerKey]) -> int:
    """Decode messages; return how many of them are decoded again, the newest first, without a look at a signature."""
    for message in sent:
        o.decode(message.encoded, type(message.body))
    verified.clear()
    for message in reversed(sent):
        o.decode(message.encoded, type(message.body))
    return len(sent) - len(verified)


def test_a_refused_message_is_not_remembered():
    o = decoder()
    for sent in (
        header(STRANGER, admission=b"").encoded,
        KeySigner(STRANGER).sign(Finalization(RUN, Round(3), digest(1))).encoded,
    ):
        for body in 2 * (UpdateHeader, Finalization):  # one that is remembered is returned
            with pytest.raises(ProtocolError):
                o.decode(sent, body)


def test_what_is_remembered_is_bounded_in_number(verified: list[PeerKey]):
    sent: list[Signed] = [KeySigner(STRANGER).sign(Goodbye(RUN, i)) for i in range(100)]
    assert remembered_of(sent, decoder(remember=10), verified) == 10


def test_what_is_remembered_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, verified: list[PeerKey]):
    monkeypatch.setattr(message_codec, "MAX_CACHED_BYTES", 1024 * 1024)
    o = decoder()
    sent: list[Signed] = [
        heartbeat(STRANGER, admission=b"", sequence=i, known_headers=(2**63,) * 1000) for i in range(100)
    ]
    assert 10 <= remembered_of(sent, o, verified) <= 30
    o.decode(
        heartbeat(STRANGER, admission=b"", known_headers=(1,) * MAX_KNOWN_HEADERS).encoded, Heartbeat
    )  # about a sixth of it


def test_a_message_too_large_to_remember_opens_all_the_same(monkeypatch: pytest.MonkeyPatch, verified: list[PeerKey]):
    monkeypatch.setattr(message_codec, "MAX_CACHED_BYTES", 1000)
    o = decoder()
    assert o.decode_certificate(encode_certificate(CERTIFICATE)) == CERTIFICATE
    once = len(verified)
    assert o.decode_certificate(encode_certificate(CERTIFICATE)) == CERTIFICATE
    assert len(verified) == 2 * once, "nothing of it is remembered"


def test_a_flood_by_strangers_leaves_headers_remembered(verified: list[PeerKey]):
    o = decoder(remember=10)
    o.decode_header(SENT[0])
    for i in range(30):
        o.decode(KeySigner(STRANGER).sign(Goodbye(RUN, i)).encoded, Goodbye)
        o.decode(heartbeat(STRANGER, admission=b"", sequence=i).encoded, Heartbeat)
        o.decode(vote(STRANGER, RECORD, round=Round(i)).encoded, Vote)
        with pytest.raises(ProtocolError):
            o.decode_header(header(STRANGER, admission=b"", blob_size=i).encoded)
    verified.clear()
    o.decode_header(SENT[0])
    assert verified == []


# -- fuzz -----------------------------------------------------------------------------------------------------

_SEEDS = [s.encoded for s in ONE_OF_EACH] + [encode_certificate(CERTIFICATE)]


@given(st.one_of(st.binary(max_size=300), mutated(_SEEDS)))
def test_whatever_arrives_is_opened_or_an_error_of_the_protocol(sent: bytes):
    o = decoder()
    for body in KINDS:
        if sent not in _SEEDS:
            with pytest.raises(ProtocolError):
                o.decode(sent, body)
    if sent not in _SEEDS:
        try:
            o.decode_certificate(sent)  # its own bytes are not signed: a certificate may be written in several ways
        except ProtocolError:
            pass


@given(st.sampled_from(list(KINDS)), st.binary(max_size=200))
def test_whatever_is_signed_is_opened_or_an_error_of_the_protocol(body: type, payload: bytes):
    signer = OWNER if body in (Admission, Finalization) else PEERS[1]
    try:
        decoder().decode(seal(signer, KINDS[body].name, payload).encoded, body)
    except ProtocolError:
        pass


@given(st.data())
def test_whatever_a_member_signs_is_opened_or_an_error_of_the_protocol(data: st.DataObject):
    good = data.draw(st.sampled_from(ONE_OF_EACH))
    kind = KINDS[type(good.body)].name
    payload = bytearray(wire.Envelope.FromString(good.encoded).payload)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    signer = OWNER if type(good.body) in (Admission, Finalization) else PEERS[1]
    try:
        decoder().decode(seal(signer, kind, bytes(payload)).encoded, type(good.body))
    except ProtocolError as e:
        assert str(e).isprintable()

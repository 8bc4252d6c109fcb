"""Messages of the swarm: what one signed, another opens as it was; what nobody honest signed opens for nobody."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.envelope import content_digest, seal
from protocol.errors import AdmissionError, MalformedError, ProtocolError, SignatureError
from protocol.identity import Identity
from protocol.ids import MAX_COUNT, MAX_ROUND, Round, short_id
from protocol.merkle import MAX_BLOB
from protocol.message_codec import KINDS, MAX_HEADER_ENVELOPE, KeySigner, MessageDecoder
from protocol.messages import (
    MAX_ADDRESS,
    MAX_ADDRESSES,
    MAX_KNOWN_HEADERS,
    MAX_NAME,
    PHASES,
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
from tests.support.signed import (
    ADMISSIONS,
    HEADERS,
    ONE_OF_EACH,
    OTHER_RUN,
    PEERS,
    RECORD,
    RUN,
    SPEC,
    STRANGER,
    VOTES,
    decoder,
    header,
    heartbeat,
    raw,
    record,
    wire_header,
)
from tests.support.specs import OWNER, admission, digest

# -- what was signed is what is opened ------------------------------------------------------------------------


@pytest.mark.parametrize("signed", ONE_OF_EACH, ids=lambda s: type(s.body).__name__)
def test_each_kind_opens_as_it_was_signed(signed: Signed[Any]):
    kind = KINDS[type(signed.body)]
    assert decoder().decode(signed.encoded, type(signed.body)) == signed
    assert decoder().decode_kind(signed.encoded, kind.name) == signed
    content = kind.encode(signed.body).SerializeToString(deterministic=True)
    assert content_digest(kind.name, signed.author, content) == signed.digest


def test_there_is_a_sample_of_each_kind():
    assert {type(s.body) for s in ONE_OF_EACH} == KINDS.keys()


def test_the_kind_of_a_message_is_the_name_of_its_class():
    for body, kind in ((b, k.name) for b, k in KINDS.items()):
        assert kind == re.sub(r"(?<=[a-z])(?=[A-Z])", "-", body.__name__).lower()


COUNTS = st.integers(0, MAX_COUNT)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
DIGESTS = st.integers(0, 9).map(digest)


@given(
    st.builds(
        dict, round=st.integers(0, MAX_ROUND), parent=DIGESTS, base_state=DIGESTS, first_window=st.integers(0, 1000),
        rebase_window=COUNTS, end_window=st.integers(1001, MAX_COUNT), inner_steps=st.integers(1, 2**32 - 1),
        blob=DIGESTS, blob_size=st.integers(0, MAX_BLOB), loss=FLOATS,
    )
)  # fmt: skip
def test_every_header_survives_the_wire(fields: dict[str, Any]):
    signed = header(PEERS[1], **fields)
    opened = decoder().decode_header(signed.encoded)
    assert opened == signed
    assert opened.body.windows == fields["end_window"] - fields["first_window"]


@given(
    st.builds(
        dict, sequence=COUNTS, round=st.integers(0, MAX_ROUND), head=DIGESTS, weight=COUNTS, windows=COUNTS,
        phase=st.sampled_from(PHASES), tokens_per_second=st.floats(0, 2.0**50, width=32), loss=FLOATS, bytes_up=COUNTS,
        bytes_down=COUNTS, known_headers=st.lists(st.integers(0, 2**64 - 1), max_size=9).map(tuple),
        addresses=st.lists(st.text("abc/é ", max_size=30), max_size=MAX_ADDRESSES).map(tuple),
        device=st.text("RTX é", max_size=40),
        admission=st.sampled_from([b"", ADMISSIONS[PEERS[1].key]]),
    )
)  # fmt: skip
def test_every_heartbeat_survives_the_wire(fields: dict[str, Any]):
    signed = heartbeat(PEERS[1], **fields)
    assert decoder().decode(signed.encoded, Heartbeat) == signed


@given(st.floats(-1e30, 1e30))
@example(-1e-60)
def test_a_signer_holds_the_loss_that_others_read(loss: float):
    assert decoder().decode_header(header(PEERS[1], loss=loss).encoded) == header(PEERS[1], loss=loss)


def test_a_digest_is_short_only_for_asking():
    assert short_id(digest(1)) == int.from_bytes(digest(1)[:8], "little") < 2**64


@pytest.mark.parametrize(
    "changes",
    [{"loss": math.nan}, {"loss": math.inf}, {"loss": 1e300}, {"end_window": 10}, {"inner_steps": 0},
     {"round": MAX_ROUND + 1}, {"blob_size": MAX_BLOB + 1}, {"end_window": MAX_COUNT + 1},
     {"rebase_window": MAX_COUNT + 1},
     {"admission": bytes(MAX_HEADER_ENVELOPE)}],
)  # fmt: skip
def test_nobody_signs_a_header_that_others_would_refuse(changes: dict[str, Any]):
    with pytest.raises(MalformedError):
        header(PEERS[1], **changes)


# -- hostile bodies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"run": b""}, {"run": bytes(31)}, {"run": bytes(33)}, {"parent": b"x"}, {"base_state": b""}, {"blob": b""},
     {"round": MAX_ROUND + 1}, {"round": 2**64 - 1}, {"first_window": 2**64 - 1}, {"end_window": 2**64 - 1},
     {"rebase_window": 2**64 - 1},
     {"first_window": 20}, {"first_window": 21}, {"inner_steps": 0}, {"blob_size": MAX_BLOB + 1}, {"loss": math.nan},
     {"loss": math.inf}, {"loss": -math.inf}, {"run": bytes(OTHER_RUN)}],
)  # fmt: skip
def test_an_impossible_header_is_malformed(changes: dict[str, Any]):
    decoder().decode_header(raw(PEERS[1], "update-header", wire_header()))  # without the change it is a good one
    with pytest.raises(MalformedError):
        decoder().decode_header(raw(PEERS[1], "update-header", wire_header(**changes)))


@pytest.mark.parametrize(
    "changes",
    [{"phase": "sleeping"}, {"phase": ""}, {"phase": "\x1b[2J"}, {"device": "\x1b[31mcpu"}, {"device": "x" * 81},
     {"device": "\u202ecpu"}, {"device": "a\nb"}, {"device": "a\u2028b"}, {"tokens_per_second": -1.0},
     {"tokens_per_second": math.nan}, {"tokens_per_second": math.inf}, {"tokens_per_second": 3e38}, {"loss": math.nan},
     {"weight": MAX_COUNT + 1}, {"windows": 2**64 - 1}, {"sequence": 2**64 - 1}, {"bytes_up": 2**64 - 1},
     {"round": 2**64 - 1}, {"head": b""}],
)  # fmt: skip
def test_an_impossible_heartbeat_is_malformed(changes: dict[str, Any]):
    m = wire.Heartbeat.FromString(wire.Envelope.FromString(heartbeat(PEERS[1]).encoded).payload)
    decoder().decode(raw(PEERS[1], "heartbeat", m), Heartbeat)
    for field, value in changes.items():
        setattr(m, field, value)
    with pytest.raises(MalformedError):
        decoder().decode(raw(PEERS[1], "heartbeat", m), Heartbeat)


@pytest.mark.parametrize(
    "fields",
    [{"known_headers": [1] * (MAX_KNOWN_HEADERS + 1)}, {"addresses": ["a"] * (MAX_ADDRESSES + 1)},
     {"addresses": ["a" * (MAX_ADDRESS + 1)]}, {"addresses": ["é" * (MAX_ADDRESS // 2 + 1)]},
     {"addresses": ["/ip4/\x00"]},
     {"addresses": ["/ip4/\x9b2J"]}],
)  # fmt: skip
def test_a_heartbeat_that_lists_too_much_is_malformed(fields: dict[str, list]):
    m = wire.Heartbeat.FromString(wire.Envelope.FromString(heartbeat(PEERS[1]).encoded).payload)
    m.ClearField(next(iter(fields)))  # type: ignore[arg-type]
    m.MergeFrom(wire.Heartbeat(**fields))  # type: ignore[arg-type]
    with pytest.raises(MalformedError):
        decoder().decode(raw(PEERS[1], "heartbeat", m), Heartbeat)


@pytest.mark.parametrize(
    "name", ["x" * (MAX_NAME + 1), "é" * (MAX_NAME // 2 + 1), "\x1b[31m", "a\nb", "\u202eabc", "\u200b", "\ufeff"]
)
def test_a_name_that_would_trick_a_reader_is_malformed(name: str):
    m = wire.Admission(run=RUN, peer=PEERS[1].key, not_after=1, name=name)
    with pytest.raises(MalformedError):
        decoder().decode(raw(OWNER, "admission", m), Admission)


def test_invalid_utf8_is_malformed():
    payload = wire.Admission(run=RUN, peer=PEERS[1].key).SerializeToString() + b"\x2a\x02\xff\xfe"
    with pytest.raises(MalformedError):
        decoder().decode(seal(OWNER, "admission", payload).encoded, Admission)


def test_an_unknown_kind_is_malformed():
    with pytest.raises(MalformedError, match="unknown kind"):
        decoder().decode_kind(HEADERS[0].encoded, "\x1b[2Jupdate-header")


def test_a_field_that_a_newer_version_adds_to_a_status_is_passed_over():
    good = heartbeat(PEERS[1])
    payload = wire.Envelope.FromString(good.encoded).payload + b"\xfa\x07\x03new"
    assert decoder().decode(seal(PEERS[1], "heartbeat", payload).encoded, Heartbeat).body == good.body


@pytest.mark.parametrize("body", [Admission, UpdateHeader, Vote, Finalization, Goodbye, Heartbeat])
def test_each_kind_has_its_limit(body: type):
    kind, limit = KINDS[body].name, KINDS[body].limit
    padded = seal(OWNER, kind, b"\x7a" + b"\xff\xff\x03" + bytes(65535)).encoded
    assert len(padded) > limit
    with pytest.raises(MalformedError, match=f"at most {limit} are accepted"):
        decoder().decode(padded, body)


# -- who may say what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", ONE_OF_EACH, ids=lambda s: type(s.body).__name__)
def test_nothing_of_another_run_opens(signed: Signed[Any]):
    with pytest.raises(ProtocolError, match="of another run"):
        MessageDecoder(OTHER_RUN, OWNER.key).decode(signed.encoded, type(signed.body))


@pytest.mark.parametrize("body", KINDS, ids=lambda b: b.__name__)
def test_no_kind_opens_as_another(body: type):
    for signed in ONE_OF_EACH:
        if type(signed.body) is not body and len(signed.encoded) <= KINDS[body].limit:
            with pytest.raises(SignatureError, match="was expected"):
                decoder().decode(signed.encoded, body)


def test_what_is_remembered_as_one_kind_is_not_opened_as_another():
    o = decoder()
    assert o.decode(VOTES[0].encoded, Vote) == VOTES[0]
    with pytest.raises(SignatureError):
        o.decode(VOTES[0].encoded, Finalization)


@pytest.mark.parametrize("signer", [PEERS[1], STRANGER], ids=["a member", "a stranger"])
def test_only_the_owner_admits_and_finalises(signer: Identity):
    forged = KeySigner(signer).sign(Admission(RUN, signer.key, 0, 2**33, "me"))
    with pytest.raises(AdmissionError, match="not signed by the run's owner"):
        decoder().decode(forged.encoded, Admission)
    with pytest.raises(AdmissionError):
        decoder().decode(KeySigner(signer).sign(Finalization(RUN, Round(3), RECORD.digest)).encoded, Finalization)


@pytest.mark.parametrize("how", ["header", "open", "open_any", "in a record"])
def test_a_header_without_its_authors_admission_never_opens(how: str):
    foreign = KeySigner(OWNER).sign(Admission(OTHER_RUN, STRANGER.key, 0, 2**33, "me")).encoded
    forged = KeySigner(STRANGER).sign(Admission(RUN, STRANGER.key, 0, 2**33, "me")).encoded
    for presented in (b"", b"x", ADMISSIONS[PEERS[1].key], foreign, forged):
        signed = header(STRANGER, admission=presented)
        o = decoder()
        with pytest.raises(ProtocolError):
            if how == "header":
                o.decode_header(signed.encoded)
            elif how == "open":
                o.decode(signed.encoded, UpdateHeader)
            elif how == "open_any":
                o.decode_kind(signed.encoded, "update-header")
            else:
                o.decode(record([signed]).encoded, RoundRecord)
        with pytest.raises(ProtocolError):  # nor at the second try
            o.decode(signed.encoded, UpdateHeader)


def test_a_heartbeat_shows_its_authors_admission_or_none():
    assert decoder().decode(heartbeat(STRANGER, admission=b"").encoded, Heartbeat).author == STRANGER.key
    with pytest.raises(AdmissionError, match="presents an admission of"):
        decoder().decode(heartbeat(STRANGER, admission=ADMISSIONS[PEERS[1].key]).encoded, Heartbeat)


@pytest.mark.parametrize(
    ("now", "valid"), [(0, False), (399, False), (400, True), (2000, True), (3600, True), (3601, False)]
)
def test_an_admission_is_for_a_time(now: float, valid: bool):
    sent = admission(SPEC, PEERS[1], not_before=1000, not_after=3000).encoded
    if valid:
        assert decoder().decode_admission_at(sent, PEERS[1].key, now).peer == PEERS[1].key
    else:
        with pytest.raises(AdmissionError, match="wrong clock, or a renewal"):
            decoder().decode_admission_at(sent, PEERS[1].key, now)


def test_an_admission_is_for_one_peer():
    with pytest.raises(AdmissionError, match="presents an admission of"):
        decoder().decode_admission_at(ADMISSIONS[PEERS[1].key], PEERS[2].key, 0)

"""Signed words about the ledger: opened as they were signed, by whom they must be, and nothing else gets in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import seal
from protocol.errors import AdmissionError, MalformedError, ProtocolError, SignatureError
from protocol.ids import MAX_COUNT, Round
from protocol.ledger import statements
from protocol.ledger.statements import (
    BindAccount,
    BindPeer,
    Receipt,
    open_bind_peer,
    open_binding,
    open_receipt,
    sign,
)
from protocol.wire import ledger_pb2 as wire
from protocol.wire import swarm_pb2
from tests.support.bindings import bind
from tests.support.mutating import mutated
from tests.support.signed import OTHER_RUN, RUN
from tests.support.specs import OWNER, digest, identity

PEER, ACCOUNT, STRANGER = identity("a peer"), identity("an account"), identity("stranger")

RECEIPT = Receipt(
    RUN, PEER.key, Round(3), digest("record"), digest("update"), True, "", 10, 160, 12_345, 7, 15
)  # fmt: skip
REFUSED = dataclasses.replace(
    RECEIPT, accepted=False, reason="it came too late", windows=0, tokens=0, micro_credits=0, pending_until=0
)
BINDING = bind(PEER, ACCOUNT, RUN, 1_700_000_000, "ada", "engines")

SENT: dict[str, tuple[bytes, Any]] = {
    "receipt": (sign(OWNER, RECEIPT).encoded, lambda sent: open_receipt(sent, RUN, OWNER.key)),
    "refused": (sign(OWNER, REFUSED).encoded, lambda sent: open_receipt(sent, RUN, OWNER.key)),
    "peer": (sign(PEER, BindPeer(RUN, ACCOUNT.key, 5)).encoded, lambda sent: open_bind_peer(sent, RUN)),
    "binding": (BINDING.encoded, lambda sent: open_binding(sent, RUN)),
}
FORMS: dict[type, tuple[str, Any]] = {
    Receipt: ("receipt", wire.Receipt),
    BindAccount: ("bind-account", wire.BindAccount),
}
"""The kind of a statement, and its message, which has fields of the same names."""

OPENERS = list({id(decoder): decoder for _, decoder in SENT.values()}.values())


def test_what_was_signed_opens_as_it_was():
    for body, decoder in ((RECEIPT, "receipt"), (REFUSED, "receipt")):
        word = sign(OWNER, body)
        assert SENT[decoder][1](word.encoded) == word
        assert (word.body, word.author) == (body, OWNER.key)
        assert sign(OWNER, body).encoded == word.encoded  # the same words, the same bytes


def test_a_binding_is_the_word_of_both():
    b = open_binding(BINDING.encoded, RUN)
    assert (b.peer, b.account, b.name, b.team) == (PEER.key, ACCOUNT.key, "ada", "engines")
    assert b.precedence == (1_700_000_000, 1_700_000_000)
    theirs = sign(PEER, BindPeer(RUN, STRANGER.key, 5)).encoded
    with pytest.raises(AdmissionError, match="not to"):
        open_binding(sign(ACCOUNT, BindAccount(RUN, theirs, 5, "ada", "")).encoded, RUN)
    with pytest.raises(SignatureError):  # another word of the peer's is no binding
        open_binding(sign(ACCOUNT, BindAccount(RUN, seal(PEER, "vote", b"").encoded, 5, "ada", "")).encoded, RUN)


def test_only_the_owner_signs_receipts():
    for body, name in ((RECEIPT, "receipt"), (REFUSED, "refused")):
        with pytest.raises(AdmissionError, match="owner"):
            SENT[name][1](sign(STRANGER, body).encoded)
        relabelled = swarm_pb2.Envelope.FromString(sign(STRANGER, body).encoded)
        relabelled.key = OWNER.key
        with pytest.raises(SignatureError):
            SENT[name][1](relabelled.SerializeToString(deterministic=True))


def test_another_runs_words_are_none():
    for body, name in ((RECEIPT, "receipt"), (REFUSED, "refused")):
        with pytest.raises(MalformedError, match="another run"):
            SENT[name][1](sign(OWNER, dataclasses.replace(body, run=OTHER_RUN)).encoded)
    with pytest.raises(MalformedError, match="another run"):
        open_binding(bind(PEER, ACCOUNT, OTHER_RUN, 1, "ada").encoded, RUN)
    with pytest.raises(MalformedError, match="another run"):  # the inner one
        theirs = sign(PEER, BindPeer(OTHER_RUN, ACCOUNT.key, 5)).encoded
        open_binding(sign(ACCOUNT, BindAccount(RUN, theirs, 5, "ada", "")).encoded, RUN)


@pytest.mark.parametrize(
    "body",
    [
        dataclasses.replace(RECEIPT, reason="and yet"),
        dataclasses.replace(REFUSED, reason=""),
        dataclasses.replace(REFUSED, micro_credits=1),
        dataclasses.replace(REFUSED, reason="x" * 201),
        dataclasses.replace(RECEIPT, tokens=MAX_COUNT + 1),
        dataclasses.replace(RECEIPT, number=MAX_COUNT + 1),
        dataclasses.replace(REFUSED, pending_until=1),
        dataclasses.replace(REFUSED, reason="two\nlines"),
        BindAccount(RUN, b"", 1, "x" * 41, ""),
        BindAccount(RUN, b"", 1, "ada", "team\x1b[31m"),
        BindAccount(RUN, b"", 1, " ada", ""),
        BindAccount(RUN, b"x" * 600, 1, "ada", ""),
    ],
)
def test_what_makes_no_sense_is_neither_signed_nor_opened(body: Any):
    with pytest.raises(MalformedError):
        sign(OWNER, body)
    kind, form = FORMS[type(body)]
    message = form(**{f.name: getattr(body, f.name) for f in dataclasses.fields(body)})
    sent = seal(OWNER, kind, message.SerializeToString(deterministic=True)).encoded
    for decoder in OPENERS:
        with pytest.raises(ProtocolError):
            decoder(sent)


def test_a_statement_is_written_in_one_way_only():
    payload = wire.BindPeer(run=RUN, account=ACCOUNT.key, time=5).SerializeToString(deterministic=True)
    assert open_bind_peer(seal(PEER, "bind-peer", payload).encoded, RUN).body.time == 5
    for other in (payload + b"\x7a\x01x", payload + payload, payload + b"\x18\x05"):
        with pytest.raises(MalformedError, match="canonical"):
            open_bind_peer(seal(PEER, "bind-peer", other).encoded, RUN)


def test_nothing_is_verified_that_is_too_long_or_of_the_wrong_author(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object, **__: object):
        raise AssertionError("a signature was looked at")

    monkeypatch.setattr(statements, "open_envelope", never)
    with pytest.raises(MalformedError, match="at most"):
        open_receipt(seal(OWNER, "receipt", b"x" * 5000).encoded, RUN, OWNER.key)
    with pytest.raises(AdmissionError):
        open_receipt(sign(STRANGER, RECEIPT).encoded, RUN, OWNER.key)


# -- fuzz -----------------------------------------------------------------------------------------------------

_SEEDS = [sent for sent, _ in SENT.values()]


@given(st.one_of(st.binary(max_size=300), mutated(_SEEDS)))
def test_whatever_arrives_is_an_error_of_the_protocol(sent: bytes):
    if sent not in _SEEDS:
        for decoder in OPENERS:
            with pytest.raises(ProtocolError):
                decoder(sent)


@given(st.sampled_from(list(SENT)), st.data())
def test_whatever_its_author_signs_is_opened_or_an_error_of_the_protocol(name: str, data: st.DataObject):
    sent, decoder = SENT[name]
    e = swarm_pb2.Envelope.FromString(sent)
    payload = bytearray(e.payload)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    signer = next(i for i in (OWNER, PEER, ACCOUNT) if i.key == e.key)
    changed = seal(signer, e.kind, bytes(payload)).encoded
    try:
        word = decoder(changed)
        assert word.encoded == changed
    except ProtocolError as error:
        assert str(error).isprintable()

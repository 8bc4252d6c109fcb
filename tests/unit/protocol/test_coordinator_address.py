"""The coordinator address record: only the owner's newest one counts, and its size is limited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocol import coordinator_address as module
from protocol.coordinator_address import (
    KIND,
    MAX_COORDINATOR_ADDRESS_ENVELOPE,
    CoordinatorAddress,
    is_coordinator_address,
    newest_address,
    next_coordinator_address,
    open_coordinator_address,
    open_if_newer,
    sign_coordinator_address,
)
from protocol.envelope import seal
from protocol.errors import AdmissionError, MalformedError, ProtocolError, SignatureError
from protocol.ids import MAX_COUNT
from protocol.invite import HostPort, one_per_peer_first
from protocol.wire import swarm_pb2 as wire
from tests.support.specs import OWNER, digest, identity, tiny_spec

RUN = tiny_spec().run_id
OTHER = tiny_spec(seed=2).run_id
BODY = CoordinatorAddress(
    RUN, 1000, (HostPort("c.example", 7410), HostPort("::1", 7410)), digest("certificate"), ("/ip4/1.2.3.4/tcp/7412",)
)


def word(sequence: int = 1000, **changes: Any):
    return sign_coordinator_address(OWNER, replace(BODY, sequence=sequence, **changes))


def raw(signer=OWNER, kind: str = KIND, **fields: Any) -> bytes:
    """Records that no honest owner would sign."""
    m = wire.CoordinatorAddress(run=RUN, sequence=5, coordinators=["c.example:1"], fingerprint=bytes(32))
    for name, value in fields.items():
        if isinstance(value, list):
            m.ClearField(name)  # pyright: ignore[reportArgumentType]
            getattr(m, name).extend(value)
        else:
            setattr(m, name, value)
    return seal(signer, kind, m.SerializeToString()).encoded


def opened(sent: bytes):
    return open_coordinator_address(sent, RUN, OWNER.key)


def test_what_is_signed_is_what_is_read():
    signed = word()
    assert signed.body == BODY and signed.author == OWNER.key and is_coordinator_address(signed.encoded)
    again = opened(signed.encoded)
    assert (again.body, again.digest, again.encoded) == (signed.body, signed.digest, signed.encoded)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"rubbish",
        word().encoded[:-1],
        raw(run=bytes(OTHER)),
        raw(run=b"short"),
        raw(sequence=MAX_COUNT + 1),
        raw(coordinators=[]),
        raw(coordinators=["c.example:1"] * 5),
        raw(coordinators=["c.example"]),
        raw(coordinators=["c.example:0"]),
        raw(coordinators=["c .example:1"]),
        raw(coordinators=["a" * 300 + ":1"]),
        raw(fingerprint=b"short"),
        raw(addresses=["/ip4/1.2.3.4/tcp/1"] * 9),
        raw(addresses=["not an address"]),
        raw(addresses=["/" + "a" * 200]),
        raw(addresses=["/ip4/1.2.3.4\n"]),
        raw(coordinators=["c.example:1"], addresses=["/" + "a" * 199] * 8) + bytes(MAX_COORDINATOR_ADDRESS_ENVELOPE),
        raw(kind="finalization"),
        raw(coordinators=["c.example:07410"]),
        seal(OWNER, KIND, wire.Envelope.FromString(word().encoded).payload + b"\xf8\x07\x01").encoded,
    ],
)
def test_what_is_not_well_formed_or_of_another_run_is_refused(sent: bytes):
    with pytest.raises(MalformedError):
        opened(sent)


def test_the_largest_that_there_can_be_fits():
    hosts = tuple(HostPort(".".join(["a" * 61] * 4) + ".aaaaa", 10_000 + i) for i in range(4))
    assert (
        len(word(2**53, coordinators=hosts, addresses=("/" + "a" * 199,) * 8).encoded)
        <= MAX_COORDINATOR_ADDRESS_ENVELOPE
    )


def test_only_the_owner_says_where_its_coordinator_is():
    with pytest.raises(AdmissionError, match="not signed by the run's owner"):
        opened(raw(signer=identity("a member")))
    forged = wire.Envelope.FromString(raw(signer=identity("a member")))
    forged.key = bytes(OWNER.key)
    with pytest.raises(SignatureError):
        opened(forged.SerializeToString(deterministic=True))
    sent = word().encoded
    for i in range(0, len(sent), 7):
        with pytest.raises(ProtocolError):
            opened(sent[:i] + bytes([sent[i] ^ 1]) + sent[i + 1 :])


def test_a_word_that_others_would_refuse_is_not_signed():
    with pytest.raises(MalformedError):
        word(coordinators=())


def test_an_old_word_is_no_news_and_costs_no_signature(monkeypatch):
    newest = word(1000)
    assert open_if_newer(newest.encoded, RUN, OWNER.key, None) == newest
    later = word(1001)
    assert open_if_newer(later.encoded, RUN, OWNER.key, newest) == later
    monkeypatch.setattr(module, "open_envelope", lambda *_, **__: pytest.fail("a signature was looked at"))
    assert open_if_newer(newest.encoded, RUN, OWNER.key, newest) is None
    for old in (raw(sequence=1), raw(sequence=1000)):
        assert open_if_newer(old, RUN, OWNER.key, newest) is None
    with pytest.raises(AdmissionError):
        open_if_newer(raw(signer=identity("a member"), sequence=2000), RUN, OWNER.key, newest)


def test_the_newest_counts():
    words = [word(3), word(9), word(5)]
    assert newest_address(words) == words[1] and newest_address([]) is None


def test_the_coordinator_repeats_itself_until_something_changes_and_a_clock_set_back_does_not_silence_it():
    first = next_coordinator_address(OWNER, None, BODY)
    assert first.body == BODY
    assert next_coordinator_address(OWNER, first, replace(BODY, sequence=2000)) is first
    moved = replace(BODY, sequence=2000, coordinators=(HostPort("d.example", 1),))
    assert next_coordinator_address(OWNER, first, moved).body == moved
    late = next_coordinator_address(OWNER, first, replace(moved, sequence=10))
    assert late.body.sequence == 1001 and late.body.coordinators == moved.coordinators


def test_of_many_addresses_one_of_each_peer_comes_first():
    given = ["/a/p2p/X", "/b/p2p/X", "/c/p2p/Y", "/a/p2p/X", "/d/p2p/Z", "/e/p2p/Y"]
    assert one_per_peer_first(given) == ("/a/p2p/X", "/c/p2p/Y", "/d/p2p/Z", "/b/p2p/X", "/e/p2p/Y")

"""Large records go as names of headers: rebuilt to the byte, missing headers requested, bounded against liars."""

from __future__ import annotations

import asyncio

import pytest

from peer.node import compact_records as module
from peer.node.compact_records import IN_PACKET, PER_AUTHOR, CompactRecords, HeaderCache
from peer.swarm import checking_cost
from peer.swarm.errors import PeerUnreachable
from protocol.compact_record import (
    HEADER_ID_BYTES,
    MAX_COMPACT_RECORD,
    check_header_ids,
    check_requested_headers,
    compact,
    header_id,
    is_compact_record,
    parse_compact_record,
)
from protocol.errors import MalformedError, SignatureError
from protocol.ids import PeerKey
from protocol.messages import MAX_CONTRIBUTORS, RoundRecord
from protocol.wire import swarm_pb2 as wire
from tests.support.recorded_tasks import RecordedTasks
from tests.support.signed import HEADERS, PEERS, RECORD, decoder, header, heartbeat, record

A, B = PEERS[1].key, PEERS[2].key
SENT = [h.encoded for h in HEADERS]


WHOLE = len(RECORD.encoded) + checking_cost(RECORD.encoded, has_record=True)
"""Bytes that a whole record counts for."""


def brief_of(of=RECORD) -> bytes:
    sent = compact(of)
    assert sent is not None
    return sent


def changed(**changes) -> bytes:
    """Return a compact record of RECORD with other names, or another signature."""
    envelope = wire.Envelope.FromString(brief_of())
    body = wire.RoundRecord.FromString(envelope.payload)
    if "names" in changes:
        del body.updates[:]
        body.updates.extend(changes.pop("names"))
        envelope.payload = body.SerializeToString(deterministic=True)
    for field, value in changes.items():
        setattr(envelope, field, value)
    return envelope.SerializeToString(deterministic=True)


# -- the form -------------------------------------------------------------------------------------------------


def test_a_record_is_put_together_to_the_byte_and_opened_as_ever():
    sent = brief_of()
    parsed = parse_compact_record(sent)
    assert is_compact_record(sent) and not is_compact_record(RECORD.encoded) and parsed.author == RECORD.author
    assert len(sent) < len(RECORD.encoded) / 8
    assert parsed.reconstruct(SENT) == RECORD.encoded
    assert decoder().decode(parsed.reconstruct(SENT), RoundRecord) == RECORD


@pytest.mark.parametrize(
    "headers", [SENT[:-1], SENT[::-1], [*SENT, SENT[0]], [*SENT[:-1], header(PEERS[0]).encoded[:-1]]]
)
def test_other_headers_than_are_named_are_refused(headers):
    with pytest.raises(MalformedError, match="other headers"):
        parse_compact_record(brief_of()).reconstruct(headers)


def test_a_brief_that_its_author_did_not_sign_comes_to_nothing():
    for sent in (changed(key=bytes(A)), changed(signature=bytes(64)), changed(names=[header_id(SENT[0])])):
        parsed = parse_compact_record(sent)
        with pytest.raises(SignatureError):
            decoder().decode(parsed.reconstruct([h for h in SENT if header_id(h) in parsed.header_ids]), RoundRecord)


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"rubbish", RECORD.encoded, changed(signature=b"x" * 63), changed(key=b"x"), changed(names=[]),
        changed(names=[b"x" * (HEADER_ID_BYTES + 1)]), changed(names=[b"x" * HEADER_ID_BYTES] * 2),
        changed(payload=b"\xff\xff"),
        changed(names=[i.to_bytes(HEADER_ID_BYTES, "big") for i in range(MAX_CONTRIBUTORS + 1)]),
        bytes(MAX_COMPACT_RECORD + 1),
    ],
)  # fmt: skip
def test_what_is_no_brief_is_refused(sent):
    with pytest.raises(MalformedError):
        parse_compact_record(sent)


def test_a_brief_of_the_most_contributors_fits():
    names = [i.to_bytes(HEADER_ID_BYTES, "big") for i in range(MAX_CONTRIBUTORS)]
    assert len(parse_compact_record(changed(names=names)).header_ids) == MAX_CONTRIBUTORS


def test_what_is_asked_for_and_given_is_bounded():
    names = [header_id(h) for h in SENT]
    assert check_requested_headers(names, SENT) == dict(zip(names, SENT, strict=True))
    for headers in ([*SENT, SENT[0]], [b"x" * 700], [b"something else"]):
        with pytest.raises(MalformedError):
            check_requested_headers(names, headers)
    for wanted in ([b"short"], [bytes(HEADER_ID_BYTES)] * (MAX_CONTRIBUTORS + 1)):
        with pytest.raises(MalformedError):
            check_header_ids(wanted)


# -- between nodes --------------------------------------------------------------------------------------------


class Side:
    """One node's compact records, and its network; `other` answers its requests."""

    def __init__(self, other: Side | None = None):
        self.other = other
        self.asked: list[int] = []
        self.taken: list[bytes] = []
        self.charged = 0
        self.tasks = RecordedTasks()
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.members = {A, B}
        self.records = CompactRecords(self, self.tasks)

    async def request_headers(self, sender: PeerKey, names: wire.Packet) -> wire.Packet:
        self.asked.append(len(names.messages))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        assert self.other is not None
        return self.other.records.answer(names)

    async def receive(self, sender: PeerKey, packet: wire.Packet) -> None:
        self.taken += packet.messages

    def is_admitted(self, key: PeerKey) -> bool:
        return key in self.members

    def charge(self, sender: PeerKey, size: int) -> None:
        self.charged += size

    async def get(self, *messages: bytes, sender: PeerKey = A) -> list[bytes]:
        """Return the messages that a packet yields at once; without a gate, wait for the requested headers first."""
        found = list(self.records.reconstruct(sender, wire.Packet(messages=messages)).messages)
        if self.gate is None:
            await self.tasks.finish()
        return found


@pytest.fixture
async def sides(monkeypatch):
    monkeypatch.setattr(module, "COMPACT_FROM", 0)
    sender = Side()
    return sender, Side(sender)


async def test_who_holds_the_headers_has_the_record_at_once(sides):
    sender, receiver = sides
    for h in HEADERS:
        receiver.records.note(h)
    beat = heartbeat(PEERS[3]).encoded
    assert await receiver.get(beat, sender.records.encode(RECORD)) == [beat, RECORD.encoded]
    assert not receiver.asked and receiver.charged == WHOLE


async def test_who_lacks_some_asks_the_sender_for_those_alone(sides):
    sender, receiver = sides
    for h in HEADERS[:-2]:
        receiver.records.note(h)
    sent = sender.records.encode(RECORD)
    assert await receiver.get(sent) == [] and receiver.asked == [2] and receiver.taken == [RECORD.encoded]
    # Headers that came with a record are held like those that came alone.
    receiver.records.note(RECORD)
    assert await receiver.get(sent) == [RECORD.encoded] and receiver.asked == [2]


async def test_small_records_and_all_else_go_as_they_are(monkeypatch):
    side = Side()
    assert [side.records.encode(m) for m in (RECORD, HEADERS[1])] == [RECORD.encoded, HEADERS[1].encoded]
    monkeypatch.setattr(module, "COMPACT_FROM", 0)
    assert is_compact_record(side.records.encode(RECORD)) and side.records.encode(HEADERS[1]) == HEADERS[1].encoded


async def test_headers_are_given_of_records_that_went_out_and_of_no_others(sides):
    sender, _ = sides
    names = wire.Packet(messages=[header_id(h) for h in SENT])
    assert not sender.records.answer(names).messages
    sender.records.encode(RECORD)
    assert list(sender.records.answer(names).messages) == SENT
    with pytest.raises(MalformedError):
        sender.records.answer(wire.Packet(messages=[b"x"]))


async def test_an_author_of_many_headers_pushes_out_its_own_only_and_the_record_still_comes(sides):
    sender, receiver = sides
    for h in HEADERS:
        receiver.records.note(h)
    for i in range(2 * PER_AUTHOR):
        more = header(PEERS[4], inner_steps=100 + i)
        receiver.records.note(more)
        sender.records.note(more)
    assert await receiver.get(sender.records.encode(RECORD)) == []
    assert receiver.asked == [1] and receiver.taken == [RECORD.encoded]


@pytest.mark.parametrize("error", [PeerUnreachable("gone"), MalformedError("rubbish"), asyncio.TimeoutError()])
async def test_a_sender_that_does_not_give_headers_costs_the_record_and_nothing_else(sides, error):
    sender, receiver = sides
    sent = sender.records.encode(RECORD)
    receiver.error = error
    assert await receiver.get(sent) == [] and not receiver.taken
    receiver.error = None
    receiver.tasks.spawned.clear()
    assert await receiver.get(sent) == [] and receiver.taken == [RECORD.encoded]


async def test_a_sender_that_knows_its_headers_no_more_leads_to_nothing(sides):
    sender, receiver = sides
    sent = sender.records.encode(RECORD)
    for attempt in range(module.RECORDS):
        sender.records.encode(record(HEADERS[:1], attempt=attempt))
    assert await receiver.get(sent) == [] and not receiver.taken


async def test_strangers_briefs_are_not_looked_at(sides):
    sender, receiver = sides
    receiver.records.note(RECORD)
    assert await receiver.get(sender.records.encode(RECORD), sender=PEERS[5].key) == []
    assert not receiver.asked and not receiver.charged


async def test_of_one_packet_some_briefs_are_looked_at_and_each_is_charged(sides):
    sender, receiver = sides
    receiver.records.note(RECORD)
    found = await receiver.get(*[sender.records.encode(RECORD)] * (2 * IN_PACKET))
    assert len(found) == IN_PACKET and receiver.charged == IN_PACKET * WHOLE


async def test_one_request_is_under_way_for_a_sender_and_so_many_in_all(sides, monkeypatch):
    monkeypatch.setattr(module, "REQUESTS", 2)
    _, receiver = sides
    receiver.gate = asyncio.Event()
    receiver.members = {p.key for p in PEERS}
    for sender in [A, A, B, *(p.key for p in PEERS[3:])]:
        await receiver.get(changed(names=[bytes([sender[0]]) * HEADER_ID_BYTES]), sender=sender)
    await asyncio.sleep(0)
    assert receiver.asked == [1, 1]
    assert len(receiver.tasks.spawned) == 2
    await receiver.tasks.cancel()
    await receiver.get(changed(names=[b"c" * HEADER_ID_BYTES]), sender=A)
    await asyncio.sleep(0)
    assert receiver.asked == [1, 1, 1]
    await receiver.tasks.cancel()


def test_headers_that_are_held_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "AUTHORS", 3)
    held = HeaderCache()
    for i in range(2 * PER_AUTHOR):
        for p in PEERS:
            held.add(header(p, inner_steps=1 + i))
    assert len(held) <= 3 * PER_AUTHOR and held.authors == 3
    assert held.get(header_id(header(PEERS[-1], inner_steps=2 * PER_AUTHOR).encoded)) is not None
    assert held.get(header_id(header(PEERS[0], inner_steps=1).encoded)) is None


async def test_records_that_others_may_ask_about_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "COMPACT_FROM", 0)
    monkeypatch.setattr(module, "RECORDS", 2)
    sender = Side()
    sent = [header(PEERS[0], inner_steps=1 + i) for i in range(5)]
    for h in sent:
        sender.records.encode(record([h]))
    given = sender.records.answer(wire.Packet(messages=[header_id(h.encoded) for h in sent]))
    assert list(given.messages) == [h.encoded for h in sent[-2:]]


def test_old_headers_that_are_replayed_push_out_nothing():
    held, now = HeaderCache(), header(PEERS[0], round=9)
    held.add(now)
    for i in range(2 * PER_AUTHOR):
        held.add(header(PEERS[0], round=i))
    assert held.get(header_id(now.encoded)) is not None and len(held) == PER_AUTHOR


async def test_a_record_that_is_sent_again_is_still_answered_for(monkeypatch):
    monkeypatch.setattr(module, "COMPACT_FROM", 0)
    monkeypatch.setattr(module, "RECORDS", 2)
    records = Side().records
    for attempt in range(1, 4):
        records.encode(RECORD)
        records.encode(record(HEADERS[:2], attempt=attempt))
    assert len(records.answer(wire.Packet(messages=[header_id(h.encoded) for h in HEADERS])).messages) == len(HEADERS)

"""A node's messages to its peers: every queue bounded, nothing left lying, members introduced and strangers not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import base58
import pytest

from peer.errors import NotInSwarm
from peer.node import introducer as introducer_module
from peer.node import network as network_module
from peer.node import outbox as outbox_module
from peer.node.introducer import Introducer
from peer.node.message_relay import FORWARDED_PER_BEAT
from peer.node.network import SEARCHED_FOR, Network
from peer.node.outbox import MAX_STRANGERS, MAX_WAITING, Outbox
from peer.node.packet_decoder import MAX_REFUSALS, PacketDecoder
from peer.node.peer_table import MAX_NONMEMBERS
from peer.node.round_timings import REMEMBERED, ExchangeTimes, RoundTimes, RoundTimings
from peer.node.tasks import Tasks
from peer.store import StoreError
from peer.swarm import Handlers, PeerUnreachable, SwarmStartError
from peer.swarm.errors import PeerBusy
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, sha256, short_id
from protocol.message_codec import KeySigner, MessageDecoder, encode_certificate
from protocol.messages import Goodbye, Signed
from protocol.rounds.events import CertificateReceived, MessageReceived
from protocol.wire import swarm_pb2 as wire
from tests.support.signed import (
    CERTIFICATE,
    HEADERS,
    PEERS,
    RECORD,
    REDUCED_CERTIFICATE,
    RUN,
    SPEC,
    VOTES,
    decoder,
    heartbeat,
    raw,
    vote,
)
from tests.support.specs import admission, identity
from tests.support.waiting import LIMIT, ended, until

A, B, C = (p.key for p in PEERS[1:4])


class Wire:
    """A transport that notes what went out, and fails or waits on request."""

    def __init__(self):
        self.encoded: list[tuple[PeerKey, wire.Packet]] = []
        self.gate: asyncio.Event | None = None
        self.error: BaseException | None = None

    async def __call__(self, to: PeerKey, packet: wire.Packet, seconds: float) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.encoded.append((to, packet))

    def messages(self, to: PeerKey) -> list[bytes]:
        return [m for t, p in self.encoded if t == to for m in p.messages]


# -- the outbox -----------------------------------------------------------------------------------------------


async def test_what_is_queued_together_goes_together_and_in_order():
    w = Wire()
    box = Outbox(w)
    box.send(A, HEADERS[:2])
    box.send(A, VOTES[:1], [CERTIFICATE])
    await box.flush(LIMIT)
    ((to, packet),) = w.encoded
    assert to == A and list(packet.messages) == [h.encoded for h in [*HEADERS[:2], VOTES[0]]]
    assert list(packet.certificates) == [encode_certificate(CERTIFICATE)]


async def test_strangers_that_never_answer_have_few_queues_and_members_have_theirs():
    w = Wire()
    w.gate = asyncio.Event()
    box = Outbox(w, is_known=lambda key: key == B)
    strangers = [PeerKey(sha256(b"stranger", bytes([n]))) for n in range(MAX_STRANGERS + 9)]
    for key in strangers:
        box.send(key, HEADERS[:1])
    box.send(strangers[0], VOTES[:1])
    box.send(B, HEADERS[:1])
    w.gate.set()
    await box.flush(LIMIT)
    assert {to for to, _ in w.encoded} == {*strangers[:MAX_STRANGERS], B}
    assert w.messages(strangers[0]) == [HEADERS[0].encoded, VOTES[0].encoded]


async def test_a_peer_that_does_not_answer_holds_up_nobody_else_and_its_queue_is_bounded():
    w = Wire()
    w.gate = asyncio.Event()
    box = Outbox(w)
    box.send(A, HEADERS[:1])
    await asyncio.sleep(0)
    for _ in range(2 * MAX_WAITING):
        box.send(A, VOTES[:1])
    gate, w.gate = w.gate, None
    box.send(B, HEADERS[1:2])
    await until(lambda: w.messages(B) == [HEADERS[1].encoded])
    assert not w.messages(A)
    gate.set()
    await box.flush(LIMIT)
    assert len(w.messages(A)) == 1 + MAX_WAITING


async def test_a_newer_heartbeat_takes_the_place_of_one_that_waits():
    w = Wire()
    w.gate = asyncio.Event()
    box = Outbox(w)
    box.send(A, HEADERS[:1])
    await asyncio.sleep(0)
    for sequence in range(1, 6):
        box.send(A, [heartbeat(PEERS[5], sequence=sequence), heartbeat(PEERS[6], sequence=sequence)])
    w.gate.set()
    await box.flush(LIMIT)
    assert w.messages(A) == [HEADERS[0].encoded] + [heartbeat(PEERS[i], sequence=5).encoded for i in (5, 6)]


async def test_what_is_sent_in_the_very_moment_in_which_the_queue_ran_dry_is_not_left_lying():
    w = Wire()
    box = Outbox(w)
    box.send(A, HEADERS[:1])
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    task.add_done_callback(lambda _: box.send(A, HEADERS[1:2]))  # after the drain ended, before anything else
    await until(lambda: w.messages(A) == [h.encoded for h in HEADERS[:2]])
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


@pytest.mark.parametrize("error", [StoreError("x"), asyncio.TimeoutError(), ConnectionResetError(), EOFError()])
async def test_who_cannot_be_reached_is_named_once_and_tried_again(error, caplog):
    caplog.set_level("INFO")
    w = Wire()
    w.error = error
    box = Outbox(w)
    for _ in range(3):
        box.send(A, HEADERS[:1])
        await box.flush(LIMIT)
    assert caplog.text.count("cannot reach") == 1 and list(box.failures) == [A]
    w.error = None
    box.send(A, HEADERS[:1])
    await box.flush(LIMIT)
    assert w.messages(A) == [HEADERS[0].encoded] and not box.failures


async def test_while_the_daemon_does_not_run_no_peer_is_blamed(caplog):
    w = Wire()
    w.error = NotInSwarm("libp2p's daemon is not running (yet)")
    box = Outbox(w)
    with caplog.at_level("INFO"):
        box.send(A, HEADERS[:1])
        await box.flush(LIMIT)
    assert not caplog.records and not box.failures


async def test_failures_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_FAILURES", 3)
    w = Wire()
    w.error = StoreError("x")
    box = Outbox(w)
    for i in range(10):
        box.send(identity(i).key, HEADERS[:1])
    await box.flush(LIMIT)
    assert len(box.failures) == 3


async def test_a_packet_has_a_size(monkeypatch):
    monkeypatch.setattr(outbox_module, "MAX_PACKET", 2 * len(HEADERS[0].encoded) + 50)
    w = Wire()
    box = Outbox(w)
    box.send(A, HEADERS[:5])
    await box.flush(LIMIT)
    assert [len(p.messages) for _, p in w.encoded] == [2, 2, 1]


# -- packets ----------------------------------------------------------------------------------------------------


def test_good_messages_come_through_and_the_bad_ones_between_them_are_refused_by_name(caplog):
    packets = PacketDecoder(decoder())
    forged = HEADERS[2].encoded[:-1] + bytes([HEADERS[2].encoded[-1] ^ 1])
    packet = wire.Packet(messages=[HEADERS[1].encoded, forged, b"rubbish", HEADERS[3].encoded])
    packet.certificates.append(encode_certificate(CERTIFICATE))
    found = list(packets.decode_packet(A, packet, 1e9))
    assert [f.message.author for f in found if isinstance(f, MessageReceived)] == [HEADERS[1].author, HEADERS[3].author]
    assert [f.source for f in found if isinstance(f, CertificateReceived)] == [A]
    assert len(packets.refused) == 2 and A.short in caplog.text


def test_what_does_not_belong_in_the_swarm_is_refused():
    packets = PacketDecoder(decoder())
    with pytest.raises(MalformedError, match="does not belong"):
        packets.decode_message(admission(SPEC, PEERS[1]).encoded, 0.0)
    with pytest.raises(MalformedError):
        packets.decode_message(raw(PEERS[1], "no such kind", wire.Goodbye()), 0.0)


def test_an_admission_that_has_ended_is_refused_and_the_same_refusal_is_not_news_each_second(caplog):
    packets = PacketDecoder(decoder())
    late = 2.0**33 + 601
    for i in range(50):
        packet = wire.Packet(messages=[heartbeat(PEERS[1], sequence=i).encoded])
        assert not any(packets.decode_packet(A, packet, late + i))
    assert sum(packets.refused.values()) == 50 and len(packets.refused) == 1
    assert caplog.text.count("is not valid now") == 2  # the first and the tenth


@pytest.mark.parametrize("seconds, comes_through", [(3599, True), (3601, False)])
def test_a_certificate_that_is_pushed_needs_admissions_that_ended_within_the_hour(seconds, comes_through, caplog):
    packets = PacketDecoder(decoder())
    packet = wire.Packet(certificates=[encode_certificate(CERTIFICATE)])
    assert any(packets.decode_packet(A, packet, 2.0**33 + seconds)) is comes_through
    assert ("is not valid now" in caplog.text) is not comes_through


def test_an_old_certificate_that_is_pushed_again_is_not_verified(monkeypatch):
    verified: list[bytes] = []
    decode = MessageDecoder.decode_certificate
    monkeypatch.setattr(MessageDecoder, "decode_certificate", lambda self, c: verified.append(c) or decode(self, c))
    packet = wire.Packet(certificates=[encode_certificate(CERTIFICATE), b"rubbish"])
    old = PacketDecoder(decoder(), is_old=lambda record: record == CERTIFICATE.digest)
    assert list(old.decode_packet(A, packet, 1e9)) == [None, None] and not verified
    assert len(old.refused) == 1, "the rubbish"
    assert any(PacketDecoder(decoder()).decode_packet(A, packet, 1e9)) and verified == [packet.certificates[0]]


async def test_a_chain_that_is_asked_for_may_be_older_than_its_admissions():
    reply = wire.ChainReply(certificates=[encode_certificate(CERTIFICATE)])
    assert (await PacketDecoder(decoder()).decode_chain_reply(A, reply)).certificates


def test_a_sender_gets_no_more_lines_by_other_words(caplog):
    """The kind of a message, or a name in it, is the sender's choice."""
    packets = PacketDecoder(decoder())
    for i in range(100):
        sent = raw(PEERS[1], "".join(chr(ord("a") + int(d)) for d in f"{i:06}"), wire.Goodbye())
        list(packets.decode_packet(A, wire.Packet(messages=[sent]), 0.0))
    assert caplog.text.count("does not belong in the swarm") == 3  # the first, the tenth, the hundredth
    assert list(packets.refused.values()) == [100]


def test_refusals_remembered_are_bounded():
    packets = PacketDecoder(decoder())
    for i in range(MAX_REFUSALS + 50):
        list(packets.decode_packet(identity(i).key, wire.Packet(messages=[b"rubbish"]), 0.0))
    assert len(packets.refused) == MAX_REFUSALS


async def test_a_chain_reply_is_taken_whole_or_not_at_all():
    packets = PacketDecoder(decoder())
    good = encode_certificate(CERTIFICATE)
    heard = await packets.decode_chain_reply(A, wire.ChainReply(certificates=[good], more=True))
    assert [c.record.digest for c in heard.certificates] == [CERTIFICATE.record.digest] and heard.more
    with pytest.raises(MalformedError):
        await packets.decode_chain_reply(A, wire.ChainReply(certificates=[good, b"rubbish"]))
    with pytest.raises(MalformedError, match="too many"):
        await packets.decode_chain_reply(A, wire.ChainReply(certificates=[good] * 300))


def test_what_was_refused_takes_its_turn_too_and_a_heartbeat_that_came_before_is_no_news():
    packets = PacketDecoder(decoder())
    beat = heartbeat(PEERS[1])
    found = list(
        packets.decode_packet(
            A, wire.Packet(messages=[b"rubbish", beat.encoded, beat.encoded, HEADERS[1].encoded] * 2), 1e9
        )
    )
    assert [f is None for f in found] == [True, False, False, False] * 2
    assert [packets.note(f) for f in found if f is not None] == [True, False, True, False, False, True]


# -- introductions --------------------------------------------------------------------------------------------


OBSERVER = identity("the coordinator's observer")


def coordinator_address() -> Signed[Any]:
    """Return a coordinator address record of the owner, as far as the network looks at it."""
    body = SimpleNamespace(addresses=(way(OBSERVER, 7412),))
    return Signed(cast(Any, body), VOTES[3].author, VOTES[3].digest, VOTES[3].encoded)


class FakeSwarm:
    def __init__(self):
        self.dialled: list[tuple[str, ...]] = []
        self.addresses: list[str] = []
        self.wire = Wire()
        self.bytes_up, self.bytes_down = 5, 7
        self.stopped = False
        self.error: Exception | None = None
        self.found: list[PeerKey] = []
        self.in_dht: list[bytes] = []
        self.fetch_blob: Any = None
        self.chain: wire.ChainReply | Exception = wire.ChainReply()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def connect(self, addresses, soon=False) -> list[PeerKey]:
        if self.error is not None:
            raise self.error
        self.dialled.append(tuple(addresses))
        return self.found

    async def discover(self) -> list[bytes]:
        return self.in_dht

    async def request_chain(self, to, request, timeout) -> wire.ChainReply:
        if isinstance(self.chain, Exception):
            raise self.chain
        return self.chain

    async def send(self, to, packet, seconds) -> None:
        await self.wire(to, packet, seconds)

    async def wait_lost(self) -> str:
        return await self.lost

    async def stop(self) -> None:
        self.stopped = True


class FakeMembership:
    def __init__(self, me: Identity, spec: Any):
        self.spec = spec
        self.identity = me
        self.store = None
        self.addresses: list[str] = []
        self.learnt: list[str] = []
        self.locator = SimpleNamespace(newest=None)
        self.decoder = decoder()

    def learn(self, addresses, own=()) -> None:
        self.learnt = list(addresses)


class World:
    """A started network over a `FakeSwarm`."""

    def __init__(self, me: Identity, banned: Collection[PeerKey], spec: Any):
        self.membership = FakeMembership(me, spec)
        self.swarms: list[FakeSwarm] = []
        self.packets: list[tuple[PeerKey, wire.Packet]] = []
        self.passed = 0.0
        self.restarted = asyncio.Event()
        self.network = Network(
            cast(Any, self.membership), Tasks(), is_banned=lambda key: key in banned, start_swarm=self._start,
            clock=lambda: time.monotonic() + self.passed,
        )  # fmt: skip

    async def _start(self, *_: Any, **__: Any) -> FakeSwarm:
        self.swarms.append(FakeSwarm())
        if len(self.swarms) > 1:
            self.restarted.set()
        return self.swarms[-1]

    async def start(self) -> None:
        async def on_packet(sender: PeerKey, packet: wire.Packet) -> None:
            self.packets.append((sender, packet))

        nothing = cast(Any, None)
        await self.network.start(Handlers(on_packet=on_packet, on_chain_request=nothing, serve_refusal=nothing))


async def world(me=PEERS[0], banned: Collection[PeerKey] = (), spec: Any = SPEC) -> World:
    w = World(me, banned, spec)
    await w.start()
    return w


async def network(me=PEERS[0]) -> tuple[Network, FakeSwarm]:
    w = await world(me)
    return w.network, w.swarms[0]


def hear(net: Network, message: Signed) -> None:
    """First-hand."""
    net.note_message(message, message.author)


async def test_a_newcomer_is_told_of_the_others_and_the_others_of_it_and_it_is_dialled():
    net, swarm = await network()
    theirs = [way(p, 1) for p in PEERS[:3]]
    first, second = heartbeat(PEERS[1], addresses=theirs[:2]), heartbeat(PEERS[2], addresses=theirs)
    hear(net, first)
    hear(net, second)
    await net.flush(LIMIT)
    assert swarm.wire.messages(B) == [first.encoded, second.encoded]
    assert second.encoded in swarm.wire.messages(A)
    assert swarm.dialled == [(theirs[1],), (theirs[2],)], "where each itself is, not whom it names"
    swarm.wire.encoded.clear()
    hear(net, heartbeat(PEERS[2], sequence=2))
    await net.flush(LIMIT)
    assert swarm.wire.encoded == []
    await net.stop(0.1)


async def test_a_newcomer_is_told_where_the_coordinator_is_as_far_as_that_is_known():
    w = await world()
    net, swarm = w.network, w.swarms[0]
    hear(net, heartbeat(PEERS[1]))
    w.membership.locator.newest = word = coordinator_address()
    hear(net, heartbeat(PEERS[2]))
    hear(net, heartbeat(PEERS[2], sequence=2))
    await net.flush(LIMIT)
    assert swarm.wire.messages(B).count(word.encoded) == 1 and word.encoded not in swarm.wire.messages(A)
    await net.stop(0.1)


async def test_there_is_always_room_for_the_coordinators_observer_and_it_is_no_stranger():
    w = await world()
    net = w.network
    for i in range(MAX_NONMEMBERS + 2):
        hear(net, heartbeat(identity(f"stranger {i}"), admission=b""))
    assert len(net.peers.keys()) == MAX_NONMEMBERS
    watcher = heartbeat(OBSERVER, admission=b"")
    hear(net, watcher)
    assert OBSERVER.key not in net.peers.keys() and not net.is_known(OBSERVER.key)
    w.membership.locator.newest = coordinator_address()
    hear(net, watcher)
    assert OBSERVER.key in net.peers.keys() and net.is_known(OBSERVER.key)
    assert not net.is_known(identity("stranger 0").key)
    await net.stop(0.1)


async def test_the_last_member_is_alone_with_the_coordinator_and_with_nobody_else():
    w = await world()
    net, watcher = w.network, heartbeat(OBSERVER, admission=b"")
    w.membership.locator.newest = coordinator_address()
    assert not net.is_alone_with_coordinator()
    hear(net, watcher)
    hear(net, heartbeat(identity("stranger"), admission=b""))
    hear(net, heartbeat(PEERS[2]))  # an auditor's node, or a newcomer's: it holds no updates
    assert net.is_alone_with_coordinator()
    hear(net, heartbeat(PEERS[1], state=RECORD.digest))
    assert not net.is_alone_with_coordinator()
    w.passed = SPEC.round.member_seconds + 1  # it has lost its power
    assert A in net.peers.keys() and net.is_alone_with_coordinator()
    await net.stop(0.1)


async def test_the_coordinator_is_asked_whether_it_follows_a_record():
    w = await world()
    net, swarm = w.network, w.swarms[0]
    assert not await net.coordinator_follows(CERTIFICATE)  # it is not here
    w.membership.locator.newest = coordinator_address()
    hear(net, heartbeat(OBSERVER, admission=b""))
    swarm.chain = PeerUnreachable("it does not answer")
    assert not await net.coordinator_follows(CERTIFICATE)
    swarm.chain = wire.ChainReply()  # its head is the parent, or it holds the record back
    assert not await net.coordinator_follows(CERTIFICATE)
    swarm.chain = wire.ChainReply(certificates=[encode_certificate(REDUCED_CERTIFICATE)])
    assert not await net.coordinator_follows(CERTIFICATE)
    swarm.chain = wire.ChainReply(certificates=[encode_certificate(CERTIFICATE)])
    assert await net.coordinator_follows(CERTIFICATE)
    await net.stop(0.1)


@pytest.mark.parametrize("refusals", [1, 2])
async def test_a_peer_that_was_too_busy_is_sent_the_packet_once_more_and_is_not_unreachable(
    refusals, monkeypatch, caplog
):
    monkeypatch.setattr(network_module, "BUSY_SECONDS", 0.01)
    caplog.set_level("INFO")
    net, swarm = await network()
    tried: list[wire.Packet] = []

    async def send(to, packet, seconds) -> None:
        tried.append(packet)
        if len(tried) <= refusals:
            net.send(A, VOTES[:1])  # queued meanwhile
            raise PeerBusy(f"peer {to.short} refused: too many calls at once: try again")

    swarm.send = send
    net.send(A, HEADERS[:1])
    await net.flush(LIMIT)
    assert [list(p.messages) for p in tried] == [[HEADERS[0].encoded]] * 2 + [[VOTES[0].encoded] * refusals]
    assert "cannot reach" not in caplog.text
    assert ("a packet is dropped" in caplog.text) == (refusals == 2)
    await net.stop(0.1)


async def test_strangers_who_take_calls_and_do_not_answer_hold_up_no_member(monkeypatch):
    monkeypatch.setattr(network_module, "NONMEMBER_SENDS", 2)
    net, swarm = await network()
    under_way: list[PeerKey] = []
    answers = asyncio.Event()

    async def send(to, packet, seconds) -> None:
        under_way.append(to)
        if not net.is_known(to):
            await answers.wait()

    swarm.send = send
    for i in range(8):
        hear(net, heartbeat(identity(f"stranger {i}"), admission=b""))
    hear(net, heartbeat(PEERS[1]))
    await until(lambda: A in under_way and len(under_way) == 3)
    await asyncio.sleep(0.05)
    assert len([k for k in under_way if k != A]) == 2
    answers.set()
    await until(lambda: len(set(under_way)) == 9)
    await net.stop(0.1)


async def test_who_comes_and_goes_all_the_time_is_dialled_once_at_a_time_and_introduced_now_and_then():
    net, swarm = await network()
    hear(net, heartbeat(PEERS[2]))
    dialled: list[str] = []

    async def connect(addresses) -> list[PeerKey]:
        dialled.extend(addresses)
        await asyncio.sleep(3600)
        return []

    swarm.connect = connect
    for i in range(50):
        hear(net, heartbeat(PEERS[1], sequence=2 * i, addresses=[way(PEERS[1], i)]))
        hear(net, KeySigner(PEERS[1]).sign(Goodbye(RUN, 2 * i + 1)))
        await asyncio.sleep(0)
    assert len(dialled) == 1
    await net.flush(LIMIT)
    told = [m for m in swarm.wire.messages(B) if m != heartbeat(PEERS[2]).encoded]
    assert len(told) == 1, "of a newcomer"
    await net.stop(0.1)


async def test_a_stranger_has_nobody_dial_the_addresses_that_it_names_a_member_and_the_coordinator_do():
    w = await world()
    net, swarm, before = w.network, w.swarms[0], len(w.swarms[0].dialled)
    w.membership.locator.newest = coordinator_address()
    stranger, member = identity("a stranger"), identity("a member")
    hear(net, heartbeat(stranger, addresses=[way(stranger, 1)], admission=b""))
    hear(net, heartbeat(OBSERVER, addresses=[way(OBSERVER, 2)], admission=b""))
    hear(net, heartbeat(member, addresses=[way(member, 3)], admission=b"a member"))
    await asyncio.sleep(0)
    assert swarm.dialled[before:] == [(way(OBSERVER, 2),), (way(member, 3),)]
    await net.stop(0.1)


async def test_more_than_fits_a_packet_is_taken_from_the_dht(monkeypatch):
    monkeypatch.setattr(network_module, "MAX_MESSAGES", 3)
    w = await world()
    net, swarm = w.network, w.swarms[0]
    swarm.in_dht = [b"x"] * 7
    await net.read_dht()
    assert [(sender, len(packet.messages)) for sender, packet in w.packets] == [(PEERS[0].key, n) for n in (3, 3, 1)]
    await net.stop(0.1)


async def test_what_a_member_does_not_hear_is_passed_on_to_it_and_to_nobody_else():
    w = await world()
    net, swarm = w.network, w.swarms[0]
    deaf = heartbeat(PEERS[1], unreachable=(short_id(PEERS[2].key),))
    for beat in (deaf, heartbeat(PEERS[2]), heartbeat(PEERS[3])):
        hear(net, beat)
    net.broadcast(heartbeat(PEERS[0]))
    await net.flush(LIMIT)
    swarm.wire.encoded.clear()
    w.passed = SPEC.round.heartbeat_seconds + 1  # a heartbeat's time has passed
    for message in (heartbeat(PEERS[2], sequence=2), HEADERS[2], VOTES[2]):
        hear(net, message)
    for _ in range(3):
        hear(net, HEADERS[2])  # it has been passed on
    hear(net, HEADERS[3])  # its author reaches that member itself
    net.note_message(
        heartbeat(PEERS[2], sequence=3), PEERS[3].key
    )  # not first-hand: who passed it on passes it on to all
    await net.flush(LIMIT)
    assert [to for to, _ in swarm.wire.encoded] == [A] * len(swarm.wire.encoded)
    passed_on = swarm.wire.messages(A)
    assert len(passed_on) == 3
    assert {heartbeat(PEERS[2], sequence=2).encoded, HEADERS[2].encoded, VOTES[2].encoded} <= set(passed_on)
    assert not {heartbeat(PEERS[2], sequence=3).encoded, HEADERS[3].encoded} & set(passed_on)
    await net.stop(0.1)


async def test_who_says_too_much_is_passed_on_no_further_until_the_next_heartbeat():
    w = await world()
    net, swarm = w.network, w.swarms[0]
    for beat in (heartbeat(PEERS[1], unreachable=(short_id(PEERS[2].key),)), heartbeat(PEERS[2]), heartbeat(PEERS[3])):
        hear(net, beat)
    net.broadcast(heartbeat(PEERS[0]))
    await net.flush(LIMIT)
    swarm.wire.encoded.clear()
    w.passed = SPEC.round.heartbeat_seconds + 1
    for i in range(100):
        hear(net, vote(PEERS[2], HEADERS[i % 3], round=Round(i)))
    await net.flush(LIMIT)
    assert len(swarm.wire.messages(A)) == FORWARDED_PER_BEAT
    await net.stop(0.1)


async def test_strangers_are_not_introduced_to_everybody_but_hear_of_everybody():
    net, swarm = await network()
    hear(net, heartbeat(PEERS[1]))
    watcher = heartbeat(PEERS[2], admission=b"")
    hear(net, watcher)
    await net.flush(LIMIT)
    assert watcher.encoded not in swarm.wire.messages(A)
    assert heartbeat(PEERS[1]).encoded in swarm.wire.messages(B)
    await net.stop(0.1)


async def test_in_a_crowd_a_few_introduce_whom_others_tell_of(monkeypatch):
    monkeypatch.setattr(introducer_module, "CROWD", 2)
    monkeypatch.setattr(introducer_module, "INTRODUCERS", 2)
    newcomer = heartbeat(PEERS[6], addresses=[way(PEERS[6], 1)])
    introducers = 0
    for me in PEERS[:6]:
        net, swarm = await network(me)
        for other in PEERS[:6]:
            if other is not me:
                hear(net, heartbeat(other))
        await net.flush(LIMIT)
        swarm.wire.encoded.clear()
        net.note_message(newcomer, next(p.key for p in PEERS if p is not me))
        await asyncio.sleep(0)
        await net.flush(LIMIT)
        told = {to for to, p in swarm.wire.encoded if newcomer.encoded in p.messages} - {newcomer.author}
        assert len(told) in (0, 5) and bool(told) == bool(swarm.wire.messages(newcomer.author))
        assert (way(PEERS[6], 1),) in swarm.dialled
        introducers += bool(told)
        await net.stop(0.1)
    assert introducers == 2


@pytest.mark.parametrize("others", [0, 1, 2])
async def test_in_a_crowd_who_enters_by_us_is_introduced_unless_two_others_do_it(monkeypatch, others):
    monkeypatch.setattr(introducer_module, "CROWD", 2)
    monkeypatch.setattr(introducer_module, "INTRODUCERS", 0)
    soon = SPEC.model_copy(update={"round": SPEC.round.model_copy(update={"heartbeat_seconds": 0.05})})
    w = await world(spec=soon)
    net, swarm = w.network, w.swarms[0]
    for other in PEERS[1:5]:
        hear(net, heartbeat(other))
    newcomer = heartbeat(PEERS[6])
    hear(net, newcomer)
    for other in PEERS[1 : 1 + others]:
        net.note_message(heartbeat(PEERS[6], sequence=2), other.key)
    assert newcomer.encoded not in swarm.wire.messages(A)
    if others < 2:
        await until(lambda: newcomer.encoded in swarm.wire.messages(A), "the newcomer is introduced")
    else:
        await asyncio.sleep(0.1)  # time in which it could be introduced, and must not
        assert newcomer.encoded not in swarm.wire.messages(A)
    await net.stop(0.1)


async def test_whom_others_told_of_is_remembered_within_a_bound(monkeypatch):
    monkeypatch.setattr(introducer_module, "REMEMBERED", 3)
    nothing = cast(Any, None)
    made = Introducer(A, nothing, nothing, nothing, nothing, beat_seconds=1.0, clock=lambda: 0.0)
    for i in range(10):
        for other in PEERS[2:]:
            made.note_introduction(identity(i).key, other.key)
    assert [len(made.introducers_of(identity(i).key)) for i in range(10)] == [0] * 7 + [2] * 3


async def test_who_said_goodbye_is_sent_nothing_more():
    net, swarm = await network()
    hear(net, heartbeat(PEERS[1]))
    hear(net, KeySigner(PEERS[1]).sign(Goodbye(RUN, 9)))
    await net.flush(LIMIT)
    swarm.wire.encoded.clear()
    net.broadcast(HEADERS[3])
    await net.flush(LIMIT)
    assert swarm.wire.encoded == []
    await net.stop(0.1)
    assert swarm.stopped


def way(peer: Identity, port: int) -> str:
    return f"/ip4/192.0.2.1/tcp/{port}/p2p/{base58.b58encode(peer.key.libp2p_id).decode()}"


async def test_who_is_out_of_sight_is_dialled_a_few_at_a_time_and_hears_of_us_and_all_while_we_are_alone():
    w = await world()
    net, swarm = w.network, w.swarms[0]
    mine, there = heartbeat(PEERS[0]), heartbeat(PEERS[1], addresses=(way(PEERS[1], 1),))
    net.broadcast(mine)
    w.membership.addresses = [way(p, 100 + i) for i, p in enumerate(PEERS[:5])]
    await net.search()
    assert sorted(swarm.dialled.pop()) == sorted(w.membership.addresses[1:]), "all but ourselves"
    lost = [identity(50 + i) for i in range(3 * SEARCHED_FOR)]
    now = time.monotonic()
    for i, peer in enumerate(lost):
        net.peers.note_heartbeat(heartbeat(peer, addresses=(way(peer, i),), admission=b"a member"), now - 1000.0)
    net.peers.forget_silent(now)
    hear(net, there)
    await asyncio.sleep(0)
    swarm.dialled.clear()
    seen: set[str] = set()
    for _ in range(100):
        await net.search()
        dialled = swarm.dialled.pop()
        assert len(dialled) == SEARCHED_FOR
        seen.update(dialled)
    assert seen == {way(p, i) for i, p in enumerate(lost)} | set(w.membership.addresses[2:])
    swarm.found = [lost[0].key]
    swarm.wire.encoded.clear()
    assert await net.search() == [lost[0].key]
    await net.flush(LIMIT)
    assert swarm.wire.messages(lost[0].key) == [mine.encoded]
    await net.stop(0.1)


@pytest.mark.parametrize("alone", [True, False])
async def test_who_is_banned_is_not_looked_for_and_who_left_only_while_we_are_alone(alone):
    banned, left, lost = identity("banned"), identity("left"), identity("lost")
    w = await world(banned=[banned.key])
    net, swarm = w.network, w.swarms[0]
    w.membership.addresses = [way(p, 1) for p in (banned, left, lost)]
    silent = time.monotonic() - 1000.0
    for peer in (banned, left, lost):
        net.peers.note_heartbeat(heartbeat(peer, addresses=(way(peer, 2),), admission=b"a member"), silent)
    net.peers.note_goodbye(left.key, 2**40)
    net.peers.forget_silent(time.monotonic())
    if not alone:
        hear(net, heartbeat(PEERS[1]))
        await asyncio.sleep(0)
        swarm.dialled.clear()
    await net.search()
    expected = {way(lost, 1), way(lost, 2)} | ({way(left, 1)} if alone else set())
    assert set(swarm.dialled.pop()) == expected
    await net.stop(0.1)


async def test_nobody_has_us_dial_or_keep_whom_it_likes():
    w = await world()
    net, swarm = w.network, w.swarms[0]
    other, victim = identity("other"), identity("victim")
    said = (way(other, 1), *(way(identity(f"victim {i}"), 443) for i in range(5)), way(victim, 443))
    net.peers.note_heartbeat(heartbeat(other, addresses=said, admission=b"a member"), time.monotonic() - 1000.0)
    hear(net, heartbeat(PEERS[1], addresses=(way(PEERS[1], 2), way(victim, 443))))
    await net.save_addresses()
    assert w.membership.learnt == [way(PEERS[1], 2), way(other, 1)]
    net.peers.forget_silent(time.monotonic())
    await asyncio.sleep(0)
    swarm.dialled.clear()
    await net.search()
    assert swarm.dialled == [(way(other, 1),)]
    await net.stop(0.1)


async def test_a_dial_that_fails_in_any_way_is_a_line_in_the_log(caplog):
    caplog.set_level("DEBUG")
    net, swarm = await network()
    swarm.error = ConnectionResetError("libp2p is gone")
    hear(net, heartbeat(PEERS[1], addresses=[way(PEERS[1], 1)]))
    await until(lambda: "cannot dial: libp2p is gone" in caplog.text)
    await net.stop(0.1)


async def test_who_served_wrong_bytes_of_one_blob_is_asked_last_for_the_next(caplog):
    net, swarm = await network()
    asked: list[list[PeerKey]] = []

    async def fetch(digest, size, holders, *, deadline_seconds, on_bad, chunks) -> None:
        asked.append(list(holders))
        on_bad(A, "sent a chunk 3 that is not the blob's")

    swarm.fetch_blob = fetch
    for _ in range(2):
        await net.fetch_blob(Digest(bytes(32)), 1, [A, B, C], deadline_seconds=1)
    assert asked == [[A, B, C], [B, C, A]]
    line = f"peer {A.short} is dropped from blob {Digest(bytes(32)).short}: sent a chunk 3 that is not the blob's"
    assert [r.message for r in caplog.records] == 2 * [f"{line}; later fetches ask it last"]


CROWD = [identity(f"phantom {i}") for i in range(100)]


def passed_on(net: Network, peers: list[Identity], by: PeerKey, **changes: Any) -> None:
    """Tell of admitted peers that only another one has had a message of."""
    for peer in peers:
        net.note_message(heartbeat(peer, admission=b"admitted", addresses=(), **changes), by)


async def test_a_hundred_keys_without_an_address_do_not_come_before_the_peers_that_are_there():
    """All are admitted, were announced before the members, and say that they hold the state."""
    w = World(PEERS[0], (), SPEC)
    w.membership.addresses = [way(OBSERVER, 7412)]
    w.network = Network(cast(Any, w.membership), Tasks(), start_swarm=w._start)
    await w.start()
    net, state = w.network, Digest(b"s" * 32)
    passed_on(net, CROWD, PEERS[5].key, state=state)
    for peer in PEERS[1:4]:
        hear(net, heartbeat(peer))
    assert {*net.providers(state=state)[:4]} == {A, B, C, OBSERVER.key}
    assert {*net.providers(state=state)[4:]} == {p.key for p in CROWD}
    record_lists = [A, *(p.key for p in CROWD)]  # as does a record that lists them
    assert net.providers(record_lists)[0] == A and {*net.providers(record_lists)[:3]} == {A, B, C}
    await net.stop(0.1)


async def test_no_group_at_first_hand_however_large_keeps_another_from_the_first_places():
    """An attacker with many connections can say that all its keys hold a state."""
    w = World(PEERS[0], (), SPEC)
    w.membership.addresses = [way(OBSERVER, 7412)]
    w.network = Network(cast(Any, w.membership), Tasks(), start_swarm=w._start)
    await w.start()
    net, state = w.network, Digest(b"s" * 32)
    for peer in CROWD:
        hear(net, heartbeat(peer, admission=b"admitted", state=state))
    hear(net, heartbeat(PEERS[1]))
    assert {A, OBSERVER.key} < {*net.providers(state=state)[:6]}
    await net.stop(0.1)


async def test_who_holds_a_state_by_its_own_heartbeat_is_asked_before_others():
    net, _ = await network()
    passed_on(net, CROWD[:20], A)
    passed_on(net, [PEERS[2]], A, state=Digest(b"s" * 32))
    assert net.providers(state=Digest(b"s" * 32))[0] == B
    assert len({tuple(net.providers()) for _ in range(20)}) > 1
    await net.stop(0.1)


async def test_who_could_not_be_reached_is_asked_last_until_it_can_be():
    net, swarm = await network()
    for peer in PEERS[1:4]:
        hear(net, heartbeat(peer))
    await net.flush(LIMIT)
    swarm.wire.error = PeerUnreachable("routing: not found")
    net.send(A, [VOTES[0]])
    await net.flush(LIMIT)
    assert {net.providers([A])[-1] for _ in range(10)} == {A}
    swarm.wire.error = None
    net.send(A, [VOTES[0]])
    await net.flush(LIMIT)
    assert net.providers([A])[0] == A
    await net.stop(0.1)


async def test_a_daemon_that_died_is_replaced_and_its_traffic_still_counts(monkeypatch):
    monkeypatch.setattr(network_module, "LONELY_SECONDS", 0.0)
    w = await world()
    net = w.network
    start, failed = net.start, [SwarmStartError("no memory")]

    async def start_at_the_second_try(handlers: Handlers) -> None:
        if failed:
            raise failed.pop()
        await start(handlers)

    monkeypatch.setattr(net, "start", start_at_the_second_try)
    monkeypatch.setattr(network_module, "DISCOVER_SECONDS", 0.0)
    running = asyncio.create_task(net.keep_running())
    w.swarms[0].lost.set_result("killed")
    await ended(w.restarted.wait())
    assert w.swarms[0].stopped and (net.bytes_up, net.bytes_down) == (10, 14)
    running.cancel()
    await net.stop(0.1)


# -- how long an exchange takes -------------------------------------------------------------------------------


def test_times_are_medians_since_our_own_announcement():
    e, half = RoundTimings(), REMEMBERED // 2 - 1
    assert e.times == ExchangeTimes()
    rounds = [(1, 2, 3), *[(2, 4, 6)] * half, *[(3, 6, 9)] * 2, *[(9, 9, 9)] * half]
    for n, (blobs, certified, applied) in enumerate(rounds):
        parent, start = Digest(bytes([n]) * 32), 100.0 * n
        e.note_announced(parent, n, start)
        e.note_announced(parent, n, start + 50)  # a repeat
        e.note_held(start + blobs)
        e.note_certified(Digest(b"x" * 32), start + 1)  # of a round that we were not in
        e.note_certified(parent, start + certified)
        e.note_held(start + 99)  # late, for the next round
        e.note_applied(Digest(b"x" * 32), start + 1)
        e.note_applied(parent, start + applied)
    assert e.times == ExchangeTimes(3.0, 6.0, 9.0)
    assert e.rounds == [RoundTimes(n, *times) for n, times in enumerate(rounds) if n]

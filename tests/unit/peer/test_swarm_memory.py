"""A swarm works over any transport: packets, the chain, blobs and presence in memory, without daemons."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import async_timeout
import pytest
from google.protobuf.message import Message
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from peer.store import Store
from peer.swarm import (
    BlobFetchError,
    Handlers,
    PacketTooLarge,
    PeerRefused,
    PeerUnreachable,
    Swarm,
    SwarmError,
    SwarmLimits,
    SwarmStartError,
)
from peer.swarm import swarm as swarm_module
from peer.swarm.pace import Paces
from peer.swarm.rate_limiter import CallLimits, RateLimiter
from peer.swarm.swarm import CALLS_OUT, DIALS
from peer.swarm.transfer import requests
from peer.swarm.transfer.blob_server import STRANGER_REQUEST, ServeLimits
from peer.swarm.transfer.frames import BlobOp, BlobRequest, ReplyStatus
from peer.swarm.transfer.streams import StreamLimits
from peer.swarm.transport import Call, StreamHandler, call_name
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.merkle import CHUNK
from protocol.wire import swarm_pb2 as wire
from tests.support.memory_transport import MemoryNetwork, address_of
from tests.support.waiting import LIMIT, NEVER, until

RUN = RunId(b"r" * 32)


class Member:
    """A peer of the network, with a store."""

    def __init__(self, network: MemoryNetwork, n: int, folder: Path):
        self.key = Identity(bytes([n]) * 32).key
        self.store = Store(folder / str(n), 1 << 40)
        self.packets: list[tuple[PeerKey, wire.Packet]] = []
        self.serve_refusal: Callable[[Digest, PeerKey], str | None] = lambda blob, by: None
        self.requested: list[tuple[Digest, PeerKey]] = []
        self.chain: Callable[[wire.ChainRequest], Any] = lambda r: wire.ChainReply(certificates=list(r.locator))
        self.strangers: set[PeerKey] = set()
        self.spec = b""
        self.warnings: list[str] = []
        self.swarm: Swarm
        self.limiter = RateLimiter(CallLimits(calls_per_second=20), lambda key: key not in self.strangers)
        self.transport = network.host(self.key, limiter=self.limiter)

    @property
    def handlers(self) -> Handlers:
        return Handlers(
            on_packet=lambda sender, packet: self.packets.append((sender, packet)),
            on_chain_request=lambda sender, request: self.chain(request),
            serve_refusal=lambda blob, by: self.serve_refusal(blob, by),
            on_blob_requested=lambda blob, by: self.requested.append((blob, by)),
            on_warning=self.warnings.append,
            is_known=lambda key: key not in self.strangers,
            on_coordinator_address_request=lambda _: wire.CoordinatorAddressReply(spec=self.spec),
        )

    async def start(self, *initial: str) -> None:
        self.swarm = await Swarm.over(
            self.transport, self.limiter, self.key, RUN, store=self.store, handlers=self.handlers, initial=initial,
            limits=SwarmLimits(
                streams=StreamLimits(open_seconds=0.02),  # until it is known that somebody cannot be dialled
                serve=ServeLimits(strangers_bytes_per_second=4 * CHUNK, wait_seconds=0.5),
            ),
        )  # fmt: skip

    async def stop(self) -> None:
        await self.swarm.stop()
        self.store.close()


@pytest.fixture
async def three(tmp_path: Path) -> Any:
    network = MemoryNetwork()
    made = [Member(network, n, tmp_path) for n in (1, 2, 3)]
    for member in made:
        await member.start(*(made[0].swarm.addresses if member is not made[0] else ()))
    yield made
    for member in made:
        await member.stop()


async def test_packets_and_requests_go_to_whoever_they_are_for(three: list[Member]):
    a, b, c = three
    packet = wire.Packet(messages=[b"hello"])
    await b.swarm.send(a.key, packet)
    assert a.packets == [(b.key, packet)] and not c.packets
    assert list((await b.swarm.request_chain(c.key, wire.ChainRequest(locator=[b"x"]))).certificates) == [b"x"]
    assert a.swarm.bytes_down == b.swarm.bytes_up - 3
    with pytest.raises(PacketTooLarge):
        await b.swarm.send(a.key, wire.Packet(messages=[bytes(5_000_000)]))


async def test_who_is_gone_is_unreachable_and_who_sends_too_much_is_refused(three: list[Member]):
    a, b, c = three
    with pytest.raises(PeerRefused, match="slow down"):
        for _ in range(100):
            await b.swarm.send(a.key, wire.Packet())
    await c.swarm.stop()
    with pytest.raises(PeerUnreachable):
        await b.swarm.send(c.key, wire.Packet())
    assert await b.swarm.connect(a.swarm.addresses) == [a.key]


async def test_a_non_member_s_packet_of_countless_messages_keeps_no_other_out(three: list[Member]):
    a, b, c = three
    a.strangers = {b.key, c.key}
    with pytest.raises(PeerRefused, match="1,000,000 messages"):
        await b.swarm.send(a.key, wire.Packet(messages=[b""] * 10**6))
    await c.swarm.send(a.key, wire.Packet(messages=[b"hello"]))
    assert [sender for sender, _ in a.packets] == [c.key]


async def test_a_record_counts_for_its_proof_and_for_each_signature_in_it(tmp_path: Path):
    network = MemoryNetwork()
    a, b = Member(network, 1, tmp_path), Member(network, 2, tmp_path)
    await a.start()
    await b.start()
    charged: list[int] = []
    a.limiter.charge = lambda sender, size, *, work=False, now=None: charged.append(size)  # type: ignore[method-assign]
    record = wire.Envelope(kind="round-record", payload=bytes(2560)).SerializeToString()
    header = wire.Envelope(kind="update-header", payload=bytes(2560)).SerializeToString()
    for packet in (wire.Packet(messages=[header]), wire.Packet(messages=[record]), wire.Packet(certificates=[header])):
        await b.swarm.send(a.key, packet)
    assert charged == [4096, 4 * (8 + 10) * 4096, 4 * (8 + 10) * 4096]
    await a.stop()
    await b.stop()


async def test_who_takes_a_chain_request_back_pays_and_shuts_out_nobody_for_long(three: list[Member]):
    a, b, c = three
    a.strangers = {b.key, c.key}

    async def never(request: wire.ChainRequest) -> wire.ChainReply:
        await asyncio.sleep(NEVER)
        raise AssertionError

    a.chain = never
    with pytest.raises(PeerRefused, match="strangers send too much"):
        for _ in range(9):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(b.swarm.request_chain(a.key, wire.ChainRequest()), 0.05)
    shared = a.limiter.strangers
    assert shared is not None and -shared.volume.burst <= shared.volume.tokens < 0, "the debt is one burst at most"
    assert shared.answers.tokens == shared.answers.burst, "nothing was sent"


async def test_answers_to_strangers_keep_to_what_the_user_allows_as_it_changes(tmp_path: Path, monkeypatch):
    network, made, paces = MemoryNetwork(), [], Paces()

    async def start(identity: Identity, *, limiter: RateLimiter, **_: Any) -> Any:
        made.append(limiter)
        return network.host(identity.key, limiter=limiter)

    monkeypatch.setattr("peer.swarm.swarm.Libp2pTransport", SimpleNamespace(start=start))
    m = Member(network, 1, tmp_path)
    m.swarm = await Swarm.start(Identity(bytes([1]) * 32), RUN, store=m.store, handlers=m.handlers, paces=paces)
    for rate, expected in ((400_000, 400_000), (0, inf)):
        paces.up.set_rate(rate)
        assert made[0].uplink() == expected
    await m.stop()


async def test_twenty_newcomers_at_once_stay_far_below_the_limits_of_non_members(tmp_path: Path):
    network = MemoryNetwork()
    a = Member(network, 1, tmp_path)
    a.spec = bytes(64 * 1024)  # real ones have a tenth
    await a.start()
    keys = [Identity(bytes([9, n]) * 16).key for n in range(20)]
    a.strangers = set(keys)

    async def join(key: PeerKey) -> None:
        transport = network.host(key)

        async def call(name: Call, request: Message, answer: type[Message]) -> None:
            await transport.call(a.key, call_name(RUN, name), request, answer)

        await call("coordinator-address", wire.CoordinatorAddressRequest(wants_spec=True), wire.CoordinatorAddressReply)
        for _ in range(10):
            await call("packet", wire.Packet(messages=[bytes(1000)]), wire.Ack)
            await call("chain", wire.ChainRequest(locator=[bytes(1000)]), wire.ChainReply)

    await asyncio.gather(*map(join, keys))
    shared = a.limiter.strangers
    assert shared is not None and len(a.packets) == 200
    assert all(b.tokens > 0.7 * b.burst for b in (shared.calls, shared.volume, shared.answers))
    await a.swarm.stop()
    a.store.close()


async def test_blobs_are_fetched_and_requests_that_were_admitted_are_noted(three: list[Member]):
    a, b, c = three
    data = bytes(range(256)) * (6 * CHUNK // 256)
    blob = a.store.put(data)
    a.serve_refusal = lambda blob, by: None if by == b.key else "not announced"
    with pytest.raises(BlobFetchError, match="not announced"):
        await c.swarm.fetch_blob(blob, len(data), [a.key], deadline_seconds=3.0)
    assert not a.requested
    await b.swarm.fetch_blob(blob, len(data), [a.key], deadline_seconds=LIMIT)
    assert b.store.read(blob) == data and set(a.requested) == {(blob, b.key)}
    await c.swarm.fetch_blob(blob, len(data), [a.key, b.key], deadline_seconds=LIMIT)
    assert c.store.read(blob) == data


async def test_whoever_is_no_member_shares_a_small_part_of_the_uplink_and_members_have_the_rest(three: list[Member]):
    a, b, c = three
    data = bytes(range(256)) * (80 * CHUNK // 256)
    blob = a.store.put(data)
    a.strangers = {c.key}
    loop = asyncio.get_running_loop()
    began = loop.time()
    slow = asyncio.create_task(c.swarm.fetch_blob(blob, len(data), [a.key], deadline_seconds=LIMIT))
    await until(lambda: c.store.in_progress(blob))
    await b.swarm.fetch_blob(blob, len(data), [a.key], deadline_seconds=LIMIT)
    assert not slow.done() and loop.time() - began < 10.0
    await asyncio.sleep(max(0.0, began + 1.5 - loop.time()))
    assert not slow.done(), "twenty seconds for eighty chunks, four a second"
    a.strangers = set()  # it is admitted
    admitted = loop.time()
    await slow
    assert c.store.read(blob) == data and loop.time() - admitted < 10.0


async def test_while_many_that_are_no_members_fetch_the_next_is_sent_away_at_once(three: list[Member]):
    a, _, c = three
    data = bytes(20 * CHUNK)
    blob = a.store.put(data)
    a.strangers = {c.key}
    assert not a.swarm.server.strangers_wait()
    a.swarm.server.strangers_budget.charge(100 * CHUNK)
    with pytest.raises(BlobFetchError, match="too many non-members"):
        await c.swarm.fetch_blob(blob, len(data), [a.key], deadline_seconds=0.5)
    assert not a.requested


async def test_a_request_of_a_non_member_counts_though_it_finds_nothing(three: list[Member]):
    a, _, c = three
    a.strangers = {c.key}
    with pytest.raises(BlobFetchError):
        await c.swarm.fetch_blob(Digest(bytes(32)), CHUNK, [a.key], deadline_seconds=0.3)
    assert a.requested and a.swarm.server.strangers_budget.tokens <= 4 * CHUNK - STRANGER_REQUEST


async def test_peers_that_accept_calls_and_never_answer_do_not_keep_messages_from_others(tmp_path: Path):
    network = MemoryNetwork()
    a, b = (Member(network, n, tmp_path) for n in (1, 2))
    for member in (a, b):
        await member.start()
    await a.swarm.send(b.key, wire.Packet())
    silent, never, called = [Identity(bytes([9, n]) * 16).key for n in range(CALLS_OUT)], asyncio.Event(), []

    async def accept(sender: PeerKey, packet: wire.Packet) -> wire.Ack:
        called.append(sender)
        await never.wait()
        return wire.Ack()

    for key in silent:
        await network.host(key).accept_calls(call_name(RUN, "packet"), wire.Packet, accept)
    sending = [asyncio.ensure_future(a.swarm.send(key, wire.Packet(), LIMIT)) for key in silent]
    await until(lambda: len(called) == CALLS_OUT)
    await a.swarm.send(b.key, wire.Packet(), 2.0)
    assert len(b.packets) == 2
    never.set()
    await asyncio.gather(*sending)
    for member in (a, b):
        await member.swarm.stop()
        member.store.close()


async def test_a_daemon_that_never_answers_is_an_error_and_no_peer_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(swarm_module, "START_SECONDS", 0.05)
    member = Member(MemoryNetwork(), 1, tmp_path)
    monkeypatch.setattr(member.transport, "join_dht", lambda run, warn: asyncio.sleep(LIMIT))
    with pytest.raises(SwarmStartError, match="did not answer"):
        await member.start()
    member.store.close()


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError("refused"), asyncio.IncompleteReadError(b"", 1), P2PDaemonError("no")]
)
async def test_a_daemon_that_ends_while_the_swarm_is_joined_is_an_error_of_the_start(tmp_path, monkeypatch, error):
    member = Member(MemoryNetwork(), 1, tmp_path)

    async def fail(name: str, handler: StreamHandler) -> None:
        raise error

    monkeypatch.setattr(member.transport, "accept_streams", fail)
    with pytest.raises(SwarmStartError, match="try again"):
        await member.start()
    assert not member.transport.reachable
    member.store.close()


async def test_a_peer_is_in_at_the_first_answer_while_other_dials_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network, before = MemoryNetwork(), asyncio.all_tasks()
    a, b, newcomer = (Member(network, n, tmp_path) for n in (1, 2, 3))
    for member in (a, b):
        await member.start()
    hanging = [Identity(bytes([9, n]) * 16).key for n in range(2 * DIALS)]
    monkeypatch.setattr(swarm_module, "DIAL_SECONDS", NEVER)
    async with async_timeout.timeout(LIMIT):
        await newcomer.start(address_of(a.key), *map(address_of, hanging))
        assert await newcomer.swarm.connect([address_of(b.key)]) == [b.key], "they are in nobody's way"
        assert len(asyncio.all_tasks() - before) == len(hanging)
        for member in (a, b, newcomer):
            await member.swarm.stop()
            member.store.close()
    assert asyncio.all_tasks() == before and not newcomer.warnings


async def test_a_dial_that_goes_on_and_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network, entered = MemoryNetwork(), asyncio.Event()
    a, b, newcomer = (Member(network, n, tmp_path) for n in (1, 2, 3))
    await a.start()

    async def dial(peer: PeerKey, addresses: Sequence[str], seconds: float) -> None:
        if peer == b.key:
            await entered.wait()
            raise AssertionError("hivemind is confused")

    monkeypatch.setattr(newcomer.transport, "dial", dial)
    await newcomer.start(address_of(a.key), address_of(b.key))
    entered.set()
    await until(lambda: newcomer.warnings)
    assert "failed: hivemind is confused" in newcomer.warnings[0]
    for member in (a, newcomer):
        await member.swarm.stop()
    for member in (a, b, newcomer):
        member.store.close()


async def test_non_members_that_wait_for_room_do_not_keep_members_out(three: list[Member]):
    a, b, c = three
    server, forever, request = a.swarm.server, asyncio.Event(), BlobRequest(BlobOp.SIZE, Digest(bytes(32)), 0).encode()
    server.limits = replace(server.limits, strangers=2, streams=4)
    a.strangers = {c.key}
    server.serve_refusal = lambda blob, by: waits(forever) if by == c.key else None
    for _ in range(2):
        _, writer = await c.swarm.open_blob_stream(a.key, LIMIT)
        writer.write(request)
    await until(lambda: server.unanswered() == [1, 1])
    more = [(await c.swarm.open_blob_stream(a.key, LIMIT))[0] for _ in range(6)]
    refused = [asyncio.ensure_future(reader.read(1)) for reader in more]
    await until(lambda: sum(r.done() for r in refused) >= 2)
    assert {r.result() for r in refused if r.done()} == {bytes([ReplyStatus.BUSY])}
    reader, writer = await b.swarm.open_blob_stream(a.key, LIMIT)
    writer.write(request)
    async with async_timeout.timeout(LIMIT):
        assert await reader.read(1) == bytes([ReplyStatus.MISSING]), "a member is served at once"
    forever.set()
    for r in refused:
        r.cancel()


async def waits(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_hundred_keys_that_nobody_can_dial_do_not_hide_the_one_provider(
    three: list[Member], monkeypatch: pytest.MonkeyPatch
):
    # Four times as many as are considered at a time, each tried thrice: with the usual pauses it takes two minutes.
    monkeypatch.setattr(requests, "LOST_RETRIES", replace(requests.LOST_RETRIES, most=0.01))
    a, b, _ = three
    data = bytes(6 * CHUNK)
    blob = a.store.put(data)
    crowd = [Identity(bytes([9, n]) * 16).key for n in range(100)]
    await b.swarm.fetch_blob(blob, len(data), [*crowd, a.key], deadline_seconds=LIMIT)
    assert b.store.read(blob) == data


async def test_a_swarm_that_stops_ends_its_fetches_and_begins_no_other(three: list[Member]):
    """A task that fetches again after each failure, as those of a reduced round do, sees ordinary errors only."""
    a, b, _ = three
    data = bytes(6 * CHUNK)
    blob = a.store.put(data)
    a.serve_refusal = lambda blob, by: "not announced"
    errors: list[Exception] = []

    async def fetch_until_stopped() -> None:
        while len(errors) < 3:
            try:
                await b.swarm.fetch_blob(blob, len(data), [a.key], deadline_seconds=LIMIT)
            except SwarmError as e:
                errors.append(e)

    fetching = asyncio.create_task(fetch_until_stopped())
    await asyncio.sleep(0.1)
    assert not errors
    await b.swarm.stop()
    async with async_timeout.timeout(1):
        await fetching
    assert all(isinstance(e, PeerUnreachable) for e in errors)


async def test_heartbeats_are_found_by_all(three: list[Member]):
    a, b, c = three
    assert await a.swarm.publish(b"a", 60) and await b.swarm.publish(b"b", 0)
    assert await c.swarm.discover() == [b"a"]

"""Peers are who their keys say, exchange packets within limits, and no stranger's call ends anybody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import pytest_asyncio
from google.protobuf.message import Message
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings import control
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError, read_pbmsg_safe

from peer.swarm import MAX_PACKET, PacketTooLarge, PeerRefused, PeerUnreachable, SwarmLimits
from peer.swarm.addresses import parse_address
from peer.swarm.errors import short_report
from peer.swarm.libp2p.daemon import p2pd_pb2
from peer.swarm.rate_limiter import CallLimits
from peer.swarm.transport import call_name
from protocol.wire import swarm_pb2 as wire
from tests.support.swarm_world import RUN, Member, Pool, identity, members
from tests.support.waiting import NEVER, ended, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("pool"))
    await made.open()
    yield made
    await made.close()


async def send_once_found(sender: Member, to: Member, packet: wire.Packet) -> None:
    """Send a packet as soon as libp2p's own table, which fills in the moments after a start, has the peer."""

    async def is_sent() -> bool:
        try:
            await sender.swarm.send(to.key, packet)
        except PeerUnreachable:
            return False
        return True

    await until(is_sent, "libp2p finds the peer", every=0.1)


async def test_peers_are_named_by_their_keys_and_packets_say_truly_who_sent_them(tmp_path):
    async with members(3, tmp_path) as (a, b, c):
        for m in (a, b, c):
            (address,) = m.swarm.addresses
            assert parse_address(address)[0] == m.key  # libp2p's name of a peer is its Ed25519 key
        await b.swarm.send(a.key, wire.Packet(messages=[b"from b"]))
        await send_once_found(c, b, wire.Packet(messages=[b"from c"]))  # c knows of a only: found through libp2p
        assert a.packets == [(b.key, wire.Packet(messages=[b"from b"]))]
        assert b.packets == [(c.key, wire.Packet(messages=[b"from c"]))]
        assert 0 < a.swarm.bytes_down == b.swarm.bytes_up


async def test_chain_requests_are_answered(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        a.chain = wire.ChainReply(certificates=[b"c" * 1_000_000] * 3, more=True)
        assert await b.swarm.request_chain(a.key, wire.ChainRequest(run=RUN)) == a.chain


@pytest.mark.parametrize("first", range(3), ids=["chain", "headers", "address"])
async def test_strangers_are_sent_little_of_any_answer_and_members_what_they_ask_for(tmp_path, first):
    limits = SwarmLimits(calls=CallLimits(strangers_answer_bytes_per_second=1))
    async with members(3, tmp_path, limits=limits) as (a, b, c):
        a.strangers = {b.key}
        a.chain, headers = wire.ChainReply(certificates=[b"c" * 1000]), wire.Packet(messages=[b"h" * 1000])
        address = wire.CoordinatorAddressReply(spec=b"s" * 1000)
        a.on_header_request, a.on_coordinator_address_request = lambda names: headers, lambda request: address

        def ask(by: Member) -> list[Callable[[], Awaitable[Message]]]:
            return [
                lambda: by.swarm.request_chain(a.key, wire.ChainRequest(run=RUN)),
                lambda: by.swarm.request_headers(a.key, wire.Packet()),
                lambda: by.swarm.request_coordinator_address(a.key, wire.CoordinatorAddressRequest(run=RUN)),
            ]

        await ask(b)[first]()
        for again in ask(b):
            with pytest.raises(PeerRefused, match="strangers ask for too much"):
                await again()
        assert [await request() for request in ask(c)] == [a.chain, headers, address]


async def test_headers_are_asked_for_by_name_and_given_and_count_against_who_asks(tmp_path):
    async with members(2, tmp_path) as (a, b):
        names, headers = wire.Packet(messages=[b"n" * 16] * 3), wire.Packet(messages=[b"h" * 600] * 3)
        asked = []

        def answer(wanted: wire.Packet) -> wire.Packet:
            asked.append(wanted)
            return headers

        a.on_header_request = answer
        before = a.swarm.bytes_up
        assert await b.swarm.request_headers(a.key, names) == headers and asked == [names]
        assert a.swarm.bytes_up - before == headers.ByteSize()
        a.swarm.charge(b.key, 10**9)
        with pytest.raises(PeerRefused, match="slow down"):
            await b.swarm.request_headers(a.key, names)


async def test_what_does_not_fit_one_message_is_refused_before_it_is_sent(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        fits = wire.Packet(messages=[b"x" * (MAX_PACKET - 8)])
        await b.swarm.send(a.key, fits)
        assert a.packets[0][1] == fits
        with pytest.raises(PacketTooLarge):
            await b.swarm.send(a.key, wire.Packet(messages=[b"x" * MAX_PACKET]))
        a.chain = wire.ChainReply(certificates=[b"x" * MAX_PACKET])
        with pytest.raises(PeerRefused):
            await b.swarm.request_chain(a.key, wire.ChainRequest())


async def test_nobody_there_and_no_answer_are_errors_in_time(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        with pytest.raises(PeerUnreachable):
            await ended(a.swarm.send(identity(99).key, wire.Packet(), timeout=3))
        b.on_packet = lambda sender, packet: asyncio.sleep(NEVER)
        with pytest.raises(PeerUnreachable, match="did not answer"):
            await a.swarm.send(b.key, wire.Packet(), timeout=0.3)
        with pytest.raises(PeerRefused):  # b ends a handler that takes too long by itself
            await ended(a.swarm.send(b.key, wire.Packet(), timeout=NEVER))
        b.on_packet = lambda sender, packet: None
        await a.swarm.send(b.key, wire.Packet())


async def test_an_answer_that_meets_its_timeout_does_not_end_hivemind_s_reader(pool, tmp_path, monkeypatch):
    async with pool.borrow(2, tmp_path) as (a, b):
        timed_out: list[asyncio.Task[None]] = []

        async def read(reader: asyncio.StreamReader, message: Message) -> None:
            """Read a message of the daemon; cancel the second call in the very step in which its answer is read."""
            await read_pbmsg_safe(reader, message)
            is_of_calls = isinstance(message, p2pd_pb2.PersistentConnectionResponse)
            if timed_out and len(b.packets) == 2 and is_of_calls and message.HasField("callUnaryResponse"):
                timed_out.pop().cancel()

        monkeypatch.setattr(control, "read_pbmsg_safe", read)
        await a.swarm.send(b.key, wire.Packet())  # the read that waits for this answer is hivemind's still
        call = asyncio.create_task(a.swarm.send(b.key, wire.Packet()))
        timed_out.append(call)
        with pytest.raises(asyncio.CancelledError):
            await ended(call)
        assert not timed_out, "its answer came"
        await ended(a.swarm.send(b.key, wire.Packet()))
        assert not a.swarm.transport.lost.done() and len(b.packets) == 3


async def test_calls_go_on_after_many_timeouts_and_leave_nothing_pending(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        # hivemind has no public name for what is pending.
        ours, theirs = (m.daemon._client.control for m in (a, b))
        pending = ours._pending_calls
        before = set(pending)  # those that set up a handler, which it keeps
        b.on_packet = lambda sender, packet: asyncio.sleep(0.02)
        ended = await asyncio.gather(
            *(a.swarm.send(b.key, wire.Packet(), timeout=0.015 + 0.0005 * n) for n in range(40)), return_exceptions=True
        )
        assert any(isinstance(e, PeerUnreachable) for e in ended)
        await a.swarm.send(b.key, wire.Packet())
        assert not a.swarm.transport.lost.done()
        await until(lambda: pending.keys() <= before and not theirs._handler_tasks, "nothing is pending")


async def test_a_handler_that_fails_tells_the_caller_nothing_of_us_and_the_next_call_works(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):

        def fails(sender, packet):
            raise RuntimeError("/home/secret")

        b.on_packet = fails
        with pytest.raises(PeerRefused) as e:
            await a.swarm.send(b.key, wire.Packet())
        assert "secret" not in str(e.value) and "internal error" in str(e.value)
        b.on_packet = lambda sender, packet: None
        await a.swarm.send(b.key, wire.Packet())


async def test_who_sends_too_much_is_refused_and_others_are_not(tmp_path):
    async with members(3, tmp_path, limits=SwarmLimits(calls=CallLimits(calls_per_second=20))) as (a, b, c):
        results = await asyncio.gather(
            *(b.swarm.send(a.key, wire.Packet(messages=[b"x"])) for _ in range(200)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, PeerRefused)]
        assert len(a.packets) + len(refused) == 200 and 50 <= len(refused) <= 170
        assert all("slow down" in str(r) for r in refused)
        await c.swarm.send(a.key, wire.Packet(messages=[b"y"]))


async def test_who_holds_too_many_calls_open_is_refused(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        over = asyncio.Event()
        a.on_packet = lambda sender, packet: over.wait()
        name = call_name(RUN, "packet")  # past the limit that an honest peer sets itself
        calls = [asyncio.ensure_future(b.swarm.transport.call(a.key, name, wire.Packet(), wire.Ack)) for _ in range(40)]
        most = CallLimits().concurrent_per_sender
        await until(lambda: sum(c.done() for c in calls) >= 40 - most, "the rest is refused")
        over.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results.count(wire.Ack()) == CallLimits().concurrent_per_sender
        assert sum("at once" in str(r) for r in results) == 40 - CallLimits().concurrent_per_sender
        ours = await asyncio.gather(*(b.swarm.send(a.key, wire.Packet()) for _ in range(20)), return_exceptions=True)
        assert ours == [None] * 20


async def test_a_caller_whose_key_is_not_ed25519_is_refused(pool, tmp_path):
    async with pool.borrow(1, tmp_path) as (a,):
        stranger = await P2P.create(initial_peers=a.swarm.addresses, identity_path=str(tmp_path / "rsa"))
        try:
            name = call_name(RUN, "packet")
            with pytest.raises(Exception, match="Ed25519"):
                await stranger.call_protobuf_handler(a.daemon.peer_id, name, wire.Packet(), wire.Ack)
            assert a.packets == []
        finally:
            await stranger.shutdown()


async def test_bytes_that_are_no_packet_are_refused(pool, tmp_path):
    async with pool.borrow(2, tmp_path) as (a, b):
        with pytest.raises(P2PHandlerError):
            await b.daemon.call_bytes(a.key, call_name(RUN, "packet"), b"\xff")
        assert a.packets == []
        await b.swarm.send(a.key, wire.Packet())


async def test_a_peer_that_restarts_with_its_key_is_reached_again(tmp_path):
    async with members(2, tmp_path) as (a, b):
        await a.swarm.send(b.key, wire.Packet())
        await b.swarm.stop()
        again = await b.start(initial=a.swarm.addresses)
        try:
            await a.swarm.send(b.key, wire.Packet(messages=[b"back"]))
            assert b.packets[-1] == (a.key, wire.Packet(messages=[b"back"]))
        finally:
            await again.stop()


async def test_entering_by_dead_addresses_is_a_warning_and_later_ones_help(pool, tmp_path):
    async with pool.borrow(1, tmp_path) as (a,):
        b = Member(9, tmp_path)
        dead = f"/ip4/127.0.0.1/tcp/9/p2p/{a.swarm.addresses[0].split('/')[-1]}"
        await b.start(initial=[dead, "rubbish"])
        try:
            assert "none of the addresses" in b.warnings[0]
            assert await b.swarm.connect(a.swarm.addresses) == [a.key]
            await b.swarm.send(a.key, wire.Packet())
        finally:
            await b.swarm.stop()
            b.store.close()


async def test_of_dials_that_failed_only_the_reason_is_told():
    said = (
        "peer: failed to dial: failed to dial 12D3KooWFSyM: all dials failed\n  * [/ip4/10.0.0.1/tcp/1] i/o timeout"
        "\n  * [/ip4/127.0.0.1/tcp/55953] dial tcp4 127.0.0.1:55953: connect: connection refused"
    )
    assert short_report(said) == "cannot be dialled: dial tcp4 127.0.0.1:55953: connect: connection refused"
    assert short_report("no\x1b[31m such\n protocol") == "no [31m such protocol"
    assert len(short_report("x" * 10_000)) == 300
    assert short_report(b"got: \xff\xfe") == "got:", "what a listener of a stranger's says may be no text"

"""Peers meet under their own keys, exchange packets within limits, and leave nothing behind however they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from peer.swarm import MAX_PACKET, PacketTooLarge, PeerRefused, PeerUnreachable, SwarmLimits, SwarmStartError
from peer.swarm.addresses import dialable, parse_address
from peer.swarm.daemon import start_daemon
from peer.swarm.limits import Guard, Limits, TooBusy
from protocol.errors import MalformedError
from protocol.ids import PeerKey
from protocol.wire import swarm_pb2 as wire
from tests.swarm_world import RUN, Member, identity, members


async def test_peers_are_named_by_their_keys_and_packets_say_truly_who_sent_them(tmp_path):
    async with members(3, tmp_path) as (a, b, c):
        for m in (a, b, c):
            (address,) = m.swarm.addresses
            assert parse_address(address)[0] == m.key  # what libp2p itself calls us is our Ed25519 key
        await b.swarm.send(a.key, wire.Packet(messages=[b"from b"]))
        await c.swarm.send(b.key, wire.Packet(messages=[b"from c"]))  # c was told of a only: found through libp2p
        assert a.packets == [(b.key, wire.Packet(messages=[b"from b"]))]
        assert b.packets == [(c.key, wire.Packet(messages=[b"from c"]))]
        assert set(await a.swarm.peers()) == {b.key, c.key}
        assert 0 < a.swarm.bytes_down == b.swarm.bytes_up


async def test_chain_requests_are_answered(tmp_path):
    async with members(2, tmp_path) as (a, b):
        a.chain = wire.ChainReply(certificates=[b"c" * 1_000_000] * 3, more=True)
        assert await b.swarm.request_chain(a.key, wire.ChainRequest(run=RUN)) == a.chain


async def test_what_does_not_fit_one_message_is_refused_before_it_is_sent(tmp_path):
    async with members(2, tmp_path) as (a, b):
        fits = wire.Packet(messages=[b"x" * (MAX_PACKET - 8)])
        await b.swarm.send(a.key, fits)
        assert a.packets[0][1] == fits
        with pytest.raises(PacketTooLarge):
            await b.swarm.send(a.key, wire.Packet(messages=[b"x" * MAX_PACKET]))
        a.chain = wire.ChainReply(certificates=[b"x" * MAX_PACKET])
        with pytest.raises(PeerRefused):
            await b.swarm.request_chain(a.key, wire.ChainRequest())


async def test_nobody_there_and_no_answer_are_errors_in_time(tmp_path):
    async with members(2, tmp_path) as (a, b):
        began = time.monotonic()
        with pytest.raises(PeerUnreachable):
            await a.swarm.send(identity(99).key, wire.Packet(), timeout=3)
        assert time.monotonic() - began < 4
        b.on_packet = lambda sender, packet: asyncio.sleep(60)
        with pytest.raises(PeerUnreachable, match="did not answer"):
            await a.swarm.send(b.key, wire.Packet(), timeout=0.3)
        with pytest.raises(PeerRefused):  # b ends a handler that takes too long by itself
            await a.swarm.send(b.key, wire.Packet(), timeout=4)
        b.on_packet = lambda sender, packet: None
        await a.swarm.send(b.key, wire.Packet())


async def test_timeouts_that_meet_their_answers_do_not_end_later_calls(tmp_path):
    async with members(2, tmp_path) as (a, b):
        b.on_packet = lambda sender, packet: asyncio.sleep(0.02)
        ended = await asyncio.gather(
            *(a.swarm.send(b.key, wire.Packet(), timeout=0.015 + 0.0005 * n) for n in range(40)), return_exceptions=True
        )
        assert any(isinstance(e, PeerUnreachable) for e in ended)
        await asyncio.sleep(0.1)
        await a.swarm.send(b.key, wire.Packet())
        assert not a.swarm._daemon.lost.done()


async def test_a_handler_that_fails_tells_the_caller_nothing_of_us_and_the_next_call_works(tmp_path):
    async with members(2, tmp_path) as (a, b):

        def fails(sender, packet):
            raise RuntimeError("/home/secret")

        b.on_packet = fails
        with pytest.raises(PeerRefused) as e:
            await a.swarm.send(b.key, wire.Packet())
        assert "secret" not in str(e.value) and "internal error" in str(e.value)
        b.on_packet = lambda sender, packet: None
        await a.swarm.send(b.key, wire.Packet())


async def test_who_sends_too_much_is_refused_and_others_are_not(tmp_path):
    async with members(3, tmp_path, limits=SwarmLimits(calls=Limits(calls_per_second=20))) as (a, b, c):
        results = await asyncio.gather(
            *(b.swarm.send(a.key, wire.Packet(messages=[b"x"])) for _ in range(200)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, PeerRefused)]
        assert len(a.packets) + len(refused) == 200 and 50 <= len(refused) <= 170
        assert all("slow down" in str(r) for r in refused)
        await c.swarm.send(a.key, wire.Packet(messages=[b"y"]))


async def test_who_holds_too_many_calls_open_is_refused(tmp_path):
    async with members(2, tmp_path) as (a, b):
        a.on_packet = lambda sender, packet: asyncio.sleep(0.5)
        name = a.swarm._names["packet"]  # past the limit that an honest peer sets itself
        results = await asyncio.gather(
            *(b.swarm._daemon.call(a.key, name, wire.Packet(), wire.Ack) for _ in range(40)), return_exceptions=True
        )
        assert results.count(wire.Ack()) == Limits().concurrent_per_sender
        assert sum("at once" in str(r) for r in results) == 40 - Limits().concurrent_per_sender
        ours = await asyncio.gather(*(b.swarm.send(a.key, wire.Packet()) for _ in range(20)), return_exceptions=True)
        assert ours == [None] * 20


async def test_a_caller_whose_key_is_not_ed25519_is_refused(tmp_path):
    async with members(1, tmp_path) as (a,):
        stranger = await P2P.create(initial_peers=a.swarm.addresses, identity_path=str(tmp_path / "rsa"))
        try:
            name = a.swarm._names["packet"]
            with pytest.raises(Exception, match="Ed25519"):
                await stranger.call_protobuf_handler(a.swarm._daemon.peer_id, name, wire.Packet(), wire.Ack)
            assert a.packets == []
        finally:
            await stranger.shutdown()


async def test_bytes_that_are_no_packet_are_refused(tmp_path):
    async with members(2, tmp_path) as (a, b):
        with pytest.raises(P2PHandlerError):
            await b.swarm._daemon._client.call_unary_handler(a.swarm._daemon.peer_id, a.swarm._names["packet"], b"\xff")
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


async def test_entering_by_dead_addresses_is_a_warning_and_later_ones_help(tmp_path):
    async with members(1, tmp_path) as (a,):
        b = Member(2, tmp_path)
        dead = f"/ip4/127.0.0.1/tcp/9/p2p/{a.swarm.addresses[0].split('/')[-1]}"
        await b.start(initial=[dead, "rubbish"])
        try:
            assert "none of the addresses" in b.warnings[0]
            assert await b.swarm.connect(a.swarm.addresses) == [a.key]
            await b.swarm.send(a.key, wire.Packet())
        finally:
            await b.swarm.stop()
            b.store.close()


# -- start and end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1", "tcp/0", "/ip4/127.0.0.1/tcp/70000", "/ip6/127.0.0.1/tcp/0"])
async def test_a_listen_address_that_makes_no_sense_is_an_error_with_an_example(tmp_path, address):
    with pytest.raises(SwarmStartError, match="/ip4/0.0.0.0/tcp/0"):
        await Member(1, tmp_path).start(listen=[address])


async def test_a_port_that_is_taken_is_an_error_with_a_remedy(tmp_path):
    async with members(1, tmp_path) as (a,):
        taken = a.swarm.addresses[0].split("/p2p/")[0]
        with pytest.raises(SwarmStartError, match="choose another port"):
            await Member(2, tmp_path).start(listen=[taken])


async def test_a_daemon_that_does_not_come_up_is_an_error_with_its_own_words(tmp_path):
    sockets = tmp_path / "s"
    sockets.mkdir()
    with pytest.raises(SwarmStartError, match="cannot assign requested address"):
        await start_daemon(
            identity(1), listen=["/ip4/192.0.2.1/tcp/0"], announce=[], folder=sockets, limits=Limits(), start_seconds=20
        )
    assert list(sockets.iterdir()) == []


async def test_stopping_is_quick_and_leaves_neither_processes_nor_files(tmp_path):
    a = Member(1, tmp_path)
    swarm = await a.start()
    folder, watchdog = swarm._daemon.folder, swarm._daemon._child.pid
    children = _children(watchdog)
    assert len(children) == 1
    assert not any("key" in name for name in os.listdir(folder))  # it lies there only while the daemon starts
    began = time.monotonic()
    await swarm.stop()
    await swarm.stop()
    assert time.monotonic() - began < 5
    assert not _there(folder) and not any(map(_alive, [watchdog, *children]))
    with pytest.raises(PeerUnreachable):
        await swarm.send(identity(2).key, wire.Packet())
    a.store.close()


async def test_the_end_of_the_daemon_is_noticed_and_calls_fail_at_once(tmp_path):
    async with members(2, tmp_path) as (a, b):
        (p2pd,) = _children(a.swarm._daemon._child.pid)
        os.kill(p2pd, signal.SIGKILL)
        assert await asyncio.wait_for(a.swarm.wait_lost(), 5)
        began = time.monotonic()
        with pytest.raises(PeerUnreachable):
            await a.swarm.send(b.key, wire.Packet())
        assert time.monotonic() - began < 1


NODE = """
    import asyncio, sys
    from pathlib import Path
    from tests.swarm_world import *

    async def main():
        m = Member(7, Path(sys.argv[1]))
        await m.start()
        print(m.swarm._daemon._child.pid, m.swarm._daemon.folder, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["node", "watchdog"])
def test_the_daemon_dies_with_the_node_on_kill_9_and_its_files_go(tmp_path, victim):
    node = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(NODE), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    try:
        pid, folder = node.stdout.readline().split()
        watchdog = int(pid)
        (p2pd,) = _children(watchdog)
        # Ctrl-C in a terminal goes to the node's process group only: the daemon still carries its goodbye.
        assert os.getpgid(watchdog) != os.getpgid(node.pid) and os.getpgid(p2pd) != os.getpgid(node.pid)
        os.kill(node.pid if victim == "node" else watchdog, signal.SIGKILL)
        until = time.monotonic() + 5
        while time.monotonic() < until and (_alive(p2pd) or _alive(watchdog)):
            time.sleep(0.02)
        assert not _alive(p2pd) and not _alive(watchdog)
        assert victim == "watchdog" or not os.path.exists(folder)
    finally:
        node.kill()
        node.wait()
        node.stdout.close()


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _there(path: str) -> bool:
    return os.path.exists(path)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- pieces --------------------------------------------------------------------------------------------------------

ID = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


def test_addresses_are_parsed_and_all_else_refused():
    key, address = parse_address(f"/ip4/192.0.2.1/tcp/4001/p2p/{ID}")
    assert key == identity(1).key and address == bytes.fromhex("04c0000201060fa1")
    for good in (f"/ip6/2001:db8::1/tcp/1/p2p/{ID}", f"/dns4/peer.example.org/tcp/443/p2p/{ID}"):
        assert parse_address(good)[0] == key
    for bad in (
        "", "x", "/ip4/192.0.2.1/tcp/4001", f"/ip4/1.2.3/tcp/1/p2p/{ID}", f"/ip4/1.2.3.4/tcp/99999/p2p/{ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ID}/p2p-circuit/p2p/{ID}", f"/unix/tmp/x/p2p/{ID}",
        "/ip4/1.2.3.4/tcp/1/p2p/" + "1" * 50, "/ip4/1.2.3.4/udp/1",
        "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", f"/dns/{'a' * 300}/tcp/1/p2p/{ID}",
    ):  # fmt: skip
        with pytest.raises(MalformedError):
            parse_address(bad)


def test_loopback_is_told_to_others_only_where_there_is_nothing_else():
    loop, home, wide = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/198.51.100.7/tcp/1"
    assert dialable([loop]) == [loop]
    assert dialable([loop, home]) == [home]
    assert dialable([loop, home, "/dns4/x.example/tcp/1", "/ip4/8.8.8.8/tcp/1"])[-1] == home
    assert loop not in dialable([loop, wide])


def test_a_senders_share_refills_with_time_and_senders_are_forgotten():
    guard = Guard(Limits(calls_per_second=10, bytes_per_second=100, senders=3, concurrent_per_sender=2))
    key = [PeerKey(bytes([n]) * 32) for n in range(6)]

    def call(n: int, size: int, now: float) -> None:
        with guard.admit(key[n], size, now=now):
            pass

    for _ in range(20):
        call(0, 0, 0.0)
    with pytest.raises(TooBusy, match="calls a second"):
        call(0, 0, 0.0)
    call(0, 0, 0.2)
    call(1, 200, 0.2)
    with pytest.raises(TooBusy, match="bytes a second"):
        call(1, 1, 0.2)
    guard.charge(key[1], 100, now=0.2)
    with pytest.raises(TooBusy):
        call(1, 1, 1.2)
    call(1, 1, 1.3)
    with guard.admit(key[2], 0, now=2.0), guard.admit(key[2], 0, now=2.0):
        with pytest.raises(TooBusy, match="at once"):
            call(2, 0, 2.0)
        for n in (3, 4, 5):
            call(n, 0, 2.0)
        assert len(guard._senders) == 3 and key[2] in guard._senders
    call(2, 0, 2.0)

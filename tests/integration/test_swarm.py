"""A peer's network side starts or says why not, leaves nothing behind however it ends, and parses no junk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from peer.swarm import PeerUnreachable, SwarmStartError
from peer.swarm.addresses import announceable, dial_addresses, parse_address, quic_beside
from peer.swarm.libp2p.daemon import Daemon, start_daemon
from peer.swarm.pace import Pace
from peer.swarm.rate_limiter import CallLimits, RateLimiter, TooBusy
from protocol.errors import MalformedError
from protocol.ids import PeerKey
from protocol.wire import swarm_pb2 as wire
from tests.support.long_cases import long_cases
from tests.support.swarm_world import Member, identity, members
from tests.support.waiting import LIMIT, NEVER, ended, wait_until


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1", "tcp/0", "/ip4/127.0.0.1/tcp/70000", "/ip6/127.0.0.1/tcp/0"])
async def test_a_listen_address_that_makes_no_sense_is_an_error_with_an_example(tmp_path, address):
    with pytest.raises(SwarmStartError, match="/ip4/0.0.0.0/tcp/0"):
        await Member(1, tmp_path).start(listen=[address])


async def test_a_port_that_is_taken_is_an_error_with_a_remedy(tmp_path):
    async with members(1, tmp_path) as (a,):
        taken = a.swarm.addresses[0].split("/p2p/")[0]
        with pytest.raises(SwarmStartError, match=r"choose another port with --listen \(for a coordinator: --swarm"):
            await Member(2, tmp_path).start(listen=[taken])


async def test_a_peer_listens_by_tcp_and_quic_at_one_number_tells_of_one_and_is_met_by_quic(tmp_path):
    async with members(2, tmp_path) as (a, b):
        visible = [str(w).split("/p2p/")[0] for w in await a.daemon.get_visible_maddrs(latest=True)]
        (tcp,) = [w for w in visible if "/tcp/" in w]
        assert set(visible) == {tcp, quic_beside(tcp)} and [w.split("/p2p/")[0] for w in a.swarm.addresses] == [tcp]
        assert await _transports(b) == {"udp"}


async def test_where_udp_does_not_get_through_tcp_does_all_by_itself(tmp_path):
    a, b = Member(1, tmp_path), Member(2, tmp_path)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:  # swallows what comes, as a firewall does
        silent.bind(("127.0.0.1", 0))
        try:
            await a.start(listen=[f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"])
            await b.start(initial=a.swarm.addresses)
            assert not b.warnings
            await b.swarm.send(a.key, wire.Packet(messages=[b"there"]))
            await a.swarm.send(b.key, wire.Packet(messages=[b"and back"]))
            assert await _transports(b) == {"tcp"} and len(a.packets) == len(b.packets) == 1
            assert silent.recv(2048, socket.MSG_DONTWAIT)  # it was tried
        finally:
            for m in (a, b):
                await m.swarm.stop()
                m.store.close()


async def _transports(member: Member) -> set[str]:
    return {str(at).split("/")[3] for peer in await member.daemon.list_peers() for at in peer.addrs}


async def test_a_daemon_that_does_not_come_up_is_an_error_with_its_own_words(tmp_path):
    sockets = tmp_path / "s"
    sockets.mkdir()
    with pytest.raises(SwarmStartError, match="cannot assign requested address"):
        await start_daemon(
            identity(1),
            listen=["/ip4/192.0.2.1/tcp/0"],
            announce=[],
            folder=sockets,
            limiter=RateLimiter(),
            start_seconds=LIMIT,
        )
    assert list(sockets.iterdir()) == []


async def test_a_daemon_that_ends_as_soon_as_it_has_started_is_an_error_too(tmp_path, monkeypatch):
    async def create(*args: Any, **kwargs: Any) -> Any:
        raise asyncio.IncompleteReadError(b"", 1)

    monkeypatch.setattr(Daemon, "create", create)
    with pytest.raises(SwarmStartError, match="did not start, twice"):
        await start_daemon(identity(1), listen=[], announce=[], folder=tmp_path, limiter=RateLimiter())
    assert list(tmp_path.iterdir()) == []


async def test_stopping_leaves_neither_processes_nor_files(tmp_path):
    a = Member(1, tmp_path)
    swarm = await a.start()
    folder, watchdog = a.daemon.folder, a.daemon.pid
    children = _children(watchdog)
    assert len(children) == 1
    assert not any("key" in name for name in os.listdir(folder))  # it lies there only while the daemon starts
    await swarm.stop()
    await swarm.stop()
    assert not _there(folder) and not any(map(_alive, [watchdog, *children]))
    with pytest.raises(PeerUnreachable):
        await swarm.send(identity(2).key, wire.Packet())
    a.store.close()


async def test_the_end_of_the_daemon_is_noticed_and_calls_fail_at_once(tmp_path):
    async with members(2, tmp_path) as (a, b):
        (p2pd,) = _children(a.daemon.pid)
        os.kill(p2pd, signal.SIGKILL)
        assert await ended(a.swarm.wait_lost())
        with pytest.raises(PeerUnreachable):
            await ended(a.swarm.send(b.key, wire.Packet(), timeout=NEVER))


NODE = """
    import asyncio, sys
    from pathlib import Path
    from tests.support.swarm_world import *

    async def main():
        m = Member(7, Path(sys.argv[1]))
        await m.start()
        print(m.daemon.pid, m.daemon.folder, flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["node", *long_cases("watchdog")])
def test_the_daemon_dies_with_the_node_on_kill_9_and_its_files_go(tmp_path, victim):
    node = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(NODE), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    folder = None
    try:
        pid, folder = node.stdout.readline().split()
        watchdog = int(pid)
        (p2pd,) = _children(watchdog)
        # Ctrl-C in a terminal goes to the node's process group only: the daemon still carries its goodbye.
        assert os.getpgid(watchdog) != os.getpgid(node.pid) and os.getpgid(p2pd) != os.getpgid(node.pid)
        os.kill(node.pid if victim == "node" else watchdog, signal.SIGKILL)
        wait_until(lambda: not _alive(p2pd) and not _alive(watchdog), "the daemon and its watchdog end")
        assert victim == "watchdog" or not os.path.exists(folder)
    finally:
        node.kill()
        node.wait()
        node.stdout.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # both who would have cleared it were killed


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
    assert key == identity(1).key and address == "/ip4/192.0.2.1/tcp/4001"
    for good in (f"/ip6/2001:db8::1/tcp/1/p2p/{ID}", f"/dns4/peer.example.org/tcp/443/p2p/{ID}"):
        assert parse_address(good)[0] == key
    for bad in (
        "", "x", "/ip4/192.0.2.1/tcp/4001", f"/ip4/1.2.3/tcp/1/p2p/{ID}", f"/ip4/1.2.3.4/tcp/99999/p2p/{ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ID}/p2p-circuit/p2p/{ID}", f"/unix/tmp/x/p2p/{ID}",
        "/ip4/1.2.3.4/tcp/1/p2p/" + "1" * 50, "/ip4/1.2.3.4/udp/1",
        f"/ip4/1.2.3.4/udp/1/p2p/{ID}", f"/ip4/1.2.3.4/udp/1/quic/p2p/{ID}", f"/ip4/1.2.3.4/tcp/1/quic-v1/p2p/{ID}",
        "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", f"/dns/{'a' * 300}/tcp/1/p2p/{ID}",
        f"/dns4/a..b/tcp/1/p2p/{ID}", f"/dns4/{'a' * 64}.b/tcp/1/p2p/{ID}", f"/dns4/a:b/tcp/1/p2p/{ID}",
    ):  # fmt: skip
        with pytest.raises(MalformedError):
            parse_address(bad)


def test_an_address_of_tcp_stands_for_quic_at_the_same_number_too():
    tcp, quic = f"/ip4/192.0.2.1/tcp/4001/p2p/{ID}", f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{ID}"
    assert quic_beside(tcp) == quic and quic_beside(quic) is None and quic_beside("/ip4/192.0.2.1") is None
    assert dial_addresses(tcp) == (identity(1).key, [parse_address(quic)[1], parse_address(tcp)[1]])
    assert dial_addresses(quic) == (identity(1).key, [parse_address(quic)[1]])
    elsewhere = quic.replace("4001", "5001")
    assert announceable([tcp, quic, elsewhere]) == [tcp, elsewhere] and announceable([quic]) == [quic]


def test_loopback_is_told_to_others_only_where_there_is_nothing_else():
    loop, home, wide = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/198.51.100.7/tcp/1"
    assert announceable([loop]) == [loop]
    assert announceable([loop, home]) == [home]
    assert announceable([loop, home, "/dns4/x.example/tcp/1", "/ip4/8.8.8.8/tcp/1"])[-1] == home
    assert loop not in announceable([loop, wide])


def test_a_senders_share_refills_with_time_and_senders_are_forgotten():
    limiter = RateLimiter(CallLimits(calls_per_second=10, bytes_per_second=100, senders=3, concurrent_per_sender=2))
    key = [PeerKey(bytes([n]) * 32) for n in range(6)]

    def call(n: int, size: int, now: float) -> None:
        with limiter.admit(key[n], size, now=now):
            pass

    for _ in range(20):
        call(0, 0, 0.0)
    with pytest.raises(TooBusy, match="calls a second"):
        call(0, 0, 0.0)
    call(0, 0, 0.2)
    call(1, 200, 0.2)
    with pytest.raises(TooBusy, match="bytes a second"):
        call(1, 1, 0.2)
    limiter.charge(key[1], 100, now=0.2)
    with pytest.raises(TooBusy):
        call(1, 1, 1.2)
    call(1, 1, 1.3)
    with limiter.admit(key[2], 0, now=2.0), limiter.admit(key[2], 0, now=2.0):
        with pytest.raises(TooBusy, match="at once"):
            call(2, 0, 2.0)
        for n in (3, 4, 5):
            for _ in range(20):
                call(n, 0, 2.0)
        for n, why in ((2, "at once"), (4, "calls a second"), (5, "calls a second")):  # three are remembered
            with pytest.raises(TooBusy, match=why):
                call(n, 0, 2.0)
        call(3, 0, 2.0)
    call(2, 0, 2.0)


def test_strangers_have_but_a_part_of_the_calls_whatever_keys_they_make():
    limits = CallLimits(
        bytes_per_second=1000, concurrent=9, concurrent_strangers=2, strangers_bytes_per_second=100,
        strangers_answer_bytes_per_second=100,
    )  # fmt: skip
    member, *strangers = (PeerKey(bytes([n]) * 32) for n in range(6))
    limiter = RateLimiter(limits, is_known=lambda key: key == member)
    with limiter.admit(strangers[0], 10, now=0.0), limiter.admit(strangers[1], 10, now=0.0):
        with pytest.raises(TooBusy, match="at once"), limiter.admit(strangers[2], 0, now=0.0):
            pass
        with limiter.admit(member, 500, now=0.0):
            pass
    limiter.charge_answer(strangers[3], 1000, now=0.0)
    with limiter.admit(strangers[4], 80, now=0.0):
        pass  # answers do not count as what strangers send
    with pytest.raises(TooBusy, match="ask for too much"):
        limiter.check_answers(strangers[4], now=0.0)
    limiter.check_answers(member, now=0.0)
    limiter.charge(strangers[0], 200, work=True, now=0.0)
    with pytest.raises(TooBusy, match="strangers"), limiter.admit(strangers[2], 1, now=1.0):
        pass
    with limiter.admit(strangers[2], 10, now=1.2), limiter.admit(member, 500, now=1.2):
        pass
    limiter.check_answers(strangers[4], now=9.0)
    limiter.charge(strangers[0], 10**9, work=True, now=9.0)
    with pytest.raises(TooBusy, match="strangers"), limiter.admit(strangers[2], 1, now=11.0):
        pass
    with limiter.admit(strangers[2], 1, now=11.1):
        pass  # the debt was one burst


def test_strangers_are_answered_with_a_quarter_of_what_the_user_lets_up_and_it_may_change():
    pace, stranger = Pace(), PeerKey(bytes(32))
    limits = CallLimits(strangers_answer_bytes_per_second=1000)
    limiter = RateLimiter(limits, lambda key: False, lambda: pace.rate)

    def sent(begun: float, seconds: float) -> int:
        """Return the bytes of the answers of 100 bytes that are given in this time."""
        given, now = 0, begun
        while now < begun + seconds:
            with suppress(TooBusy):
                limiter.check_answers(stranger, now=now)
                limiter.charge_answer(stranger, 100, now=now)
                given += 100
            now += 0.05
        return given

    for begun, rate, usual in ((0.0, 0, 1000), (1000.0, 400, 100), (2000.0, 0, 1000), (3000.0, 10**6, 1000)):
        pace.set_rate(rate)
        assert 0.9 < sent(begun, 100.0) / (102 * usual) < 1.1, rate


def test_keys_that_are_used_once_share_a_rate_of_calls():
    member, *strangers = (PeerKey(bytes([n]) * 32) for n in range(8))
    limiter = RateLimiter(CallLimits(strangers_calls_per_second=3), is_known=lambda key: key == member)
    for key in strangers[:6]:
        with limiter.admit(key, 0, now=0.0):
            pass
    with pytest.raises(TooBusy, match="strangers"), limiter.admit(strangers[6], 0, now=0.0):
        pass
    with limiter.admit(member, 0, now=0.0), limiter.admit(strangers[6], 0, now=0.4):
        pass

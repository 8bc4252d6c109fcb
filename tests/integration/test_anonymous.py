"""Anybody may ask a member where the coordinator is, over real connections; who lies or is silent is not in the way."""

from __future__ import annotations

import pytest

from peer.swarm import PeerRefused, PeerUnreachable, anonymous
from peer.swarm.anonymous import ask_for_coordinator, chain_reader
from peer.swarm.errors import TooBusy
from peer.swarm.rate_limiter import RateLimiter
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, RunId
from protocol.wire import swarm_pb2 as wire
from tests.support.swarm_world import LOOPBACK, RUN, members
from tests.support.waiting import ended


async def test_a_stranger_asks_all_it_knows_and_takes_what_is_good(tmp_path, monkeypatch):
    monkeypatch.setattr(anonymous, "SETTLE_SECONDS", 0.5)
    async with members(3, tmp_path) as (a, b, c):
        b.on_coordinator_address_request = lambda request: wire.CoordinatorAddressReply(spec=b"lies")

        def broken(request: wire.CoordinatorAddressRequest) -> wire.CoordinatorAddressReply:
            raise MalformedError("a question about another run's coordinator")

        addresses = [x for m in (a, b, c) for x in m.swarm.addresses]
        gone = addresses[0].replace("tcp/", "tcp/1").replace(addresses[0][-8:], addresses[1][-8:])
        c.on_coordinator_address_request = broken
        heard: dict[PeerKey, bytes] = {}

        def good(peer: PeerKey, reply: wire.CoordinatorAddressReply) -> bool:
            heard[peer] = reply.spec
            return reply.spec == b"spec"

        count = await ask_for_coordinator(RUN, ["rubbish", gone, *addresses], good, listen=LOOPBACK)
        assert count == 1 and heard == {a.key: b"spec", b.key: b"lies"}
        # Members ask each other without the spec, which they have.
        assert await a.swarm.request_coordinator_address(b.key, wire.CoordinatorAddressRequest(run=RUN)) is not None
        assert (await b.swarm.request_coordinator_address(a.key, wire.CoordinatorAddressRequest(run=RUN))).spec == b""
        with pytest.raises(PeerRefused):
            await a.swarm.request_coordinator_address(c.key, wire.CoordinatorAddressRequest(run=RUN))
        # Of another run there is nobody to ask here.
        assert await ended(ask_for_coordinator(RunId(b"o" * 32), addresses, good, listen=LOOPBACK)) == 0


async def test_a_stranger_that_is_sent_away_by_a_busy_member_asks_again(tmp_path, monkeypatch):
    monkeypatch.setattr(anonymous, "BUSY_SECONDS", 0.01)
    async with members(1, tmp_path) as (a,):
        busy = [TooBusy("too many calls at once: try again")]

        def check_answers(limiter: RateLimiter, sender: PeerKey) -> None:
            if busy:
                raise busy.pop()

        a.chain = wire.ChainReply(certificates=[b"one"])
        monkeypatch.setattr(RateLimiter, "check_answers", check_answers)
        assert await ask_for_coordinator(RUN, a.swarm.addresses, lambda *_: True, listen=LOOPBACK) == 1
        assert not busy
        busy.append(TooBusy("strangers ask for too much: slow down"))
        async with chain_reader(RUN, a.swarm.addresses, listen=LOOPBACK) as asker:
            assert list((await asker.ask(a.key, [])).certificates) == [b"one"]
        assert not busy


async def test_what_is_given_out_is_counted_against_whoever_asks(tmp_path, monkeypatch):
    async with members(2, tmp_path) as (a, b):
        a.on_coordinator_address_request = lambda request: wire.CoordinatorAddressReply(spec=b"x" * 1_000_000)
        charged: list[tuple[PeerKey, int]] = []
        monkeypatch.setattr(RateLimiter, "charge_answer", lambda self, sender, size: charged.append((sender, size)))
        reply = await b.swarm.request_coordinator_address(
            a.key, wire.CoordinatorAddressRequest(run=RUN, wants_spec=True)
        )
        assert (b.key, reply.ByteSize()) in charged and a.swarm.bytes_up >= 1_000_000


async def test_a_stranger_reads_the_chain_from_members_and_hears_who_is_silent(tmp_path, monkeypatch):
    async with members(2, tmp_path) as (a, b):
        a.chain = wire.ChainReply(certificates=[b"one", b"two"], more=True)
        addresses = [*a.swarm.addresses, *b.swarm.addresses]
        async with chain_reader(RUN, addresses, listen=LOOPBACK) as asker:
            assert set(asker.members) == {a.key, b.key}
            for _ in range(2):
                assert list((await asker.ask(a.key, [Digest(b"h" * 32)])).certificates) == [b"one", b"two"]
            await b.swarm.stop()
            monkeypatch.setattr(anonymous, "CHAIN_SECONDS", 1.0)
            with pytest.raises(PeerUnreachable):
                await asker.ask(b.key, [])
        async with chain_reader(RUN, addresses, leave_out=[b.key], listen=LOOPBACK) as asker:
            assert asker.members == [a.key]

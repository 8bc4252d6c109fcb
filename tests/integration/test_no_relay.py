"""A peer's daemon relays nobody's traffic: libp2p's protocol for reserving a relay is not offered."""

from __future__ import annotations

import pytest

from peer.swarm.errors import PeerUnreachable
from peer.swarm.libp2p import Libp2pTransport
from peer.swarm.rate_limiter import RateLimiter
from tests.support.swarm_world import identity

HOP, PING = "/libp2p/circuit/relay/0.2.0/hop", "/ipfs/ping/1.0.0"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
SECONDS = 120.0


async def test_a_stranger_can_reserve_no_relay():
    a = await Libp2pTransport.start(identity(1), listen=LISTEN, limiter=RateLimiter())
    b = await Libp2pTransport.start(identity(2), listen=LISTEN, limiter=RateLimiter())
    try:
        addresses = await b.addresses(SECONDS)
        assert addresses
        await a.dial(identity(2).key, [address.partition("/p2p/")[0] for address in addresses], SECONDS)
        _, writer = await a.open_stream(identity(2).key, PING, SECONDS)
        writer.close()
        with pytest.raises(PeerUnreachable, match="protocols"):
            await a.open_stream(identity(2).key, HOP, SECONDS)
    finally:
        await a.stop()
        await b.stop()

"""Where the coordinator is, among members: a newer word is passed on once, and those who miss it ask."""

from __future__ import annotations

import asyncio
import logging
import random

from peer.node.locator import Locator
from peer.node.network import Network
from peer.node.outbox import NETWORK_ERRORS
from protocol.ids import PeerKey
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.seeking")

PASS_ON_SECONDS = 10.0
"""Of words that come faster only the newest is passed on: old ones can be replayed one after the other."""

ASKED = 8


async def pass_on(network: Network, locator: Locator) -> None:
    """For ever: what is newer than all before goes on to everyone who is known."""
    while True:
        await locator.news.wait()
        locator.news.clear()
        if locator.newest is not None:
            network.outbox.broadcast(network.directory.peers(), locator.newest)
        await asyncio.sleep(PASS_ON_SECONDS)


async def ask(network: Network, locator: Locator, run: bytes) -> None:
    """Ask a few members for a newer word, which the locator keeps. Who lies or is silent is a line in the log."""
    everyone = network.everyone()

    async def one(peer: PeerKey) -> None:
        try:
            reply = await network.swarm.request_coordinator_address(peer, wire.CoordinatorAddressRequest(run=run))
            if reply.coordinator_address:
                locator.take(reply.coordinator_address)
        except NETWORK_ERRORS as e:
            log.info("%s does not say where the coordinator is: %s", peer.short, str(e) or type(e).__name__)

    await asyncio.gather(*map(one, random.sample(everyone, min(ASKED, len(everyone)))))

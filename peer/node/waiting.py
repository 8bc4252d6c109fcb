"""A newcomer whose coordinator is away: in the swarm as an observer until it is admitted.

Only the run's key admits, so a member can let nobody contribute. It can say where the coordinator is, give the chain
and the data, and tell when the coordinator is back: so that is what is done meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from peer.errors import PeerError
from peer.node.assets import fetch_assets
from peer.node.membership import ABSENT, Membership
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.node.outbox import NETWORK_ERRORS
from protocol.errors import CairnError
from protocol.messages import Signed

log = logging.getLogger("peer.waiting")

FIRST_SECONDS, RETRY_SECONDS = 3.0, 15.0
SAY_SECONDS = 30.0


async def wait_until_admitted(membership: Membership, options: NodeOptions) -> None:
    """Returns when the membership has a valid admission; may be cancelled. Raises CairnError when the coordinator
    refuses, or the observer cannot go on."""
    there = replace(membership, client=None, admission=b"")
    fresh = asyncio.Event()

    def heard(word: Signed[Any]) -> None:
        membership.locator.take(word.encoded)
        fresh.set()

    there.locator.listeners.append(heard)
    node = Node(there, replace(options, observer=True))
    running = asyncio.ensure_future(node.run())
    fetching = asyncio.ensure_future(_fetch_meanwhile(there, node, running))
    try:
        await _ask_again(membership, there, node, running, fresh)
    finally:
        fetching.cancel()
        node.leave()
        await asyncio.gather(fetching, return_exceptions=True)
        with suppress(CairnError):
            await running
            membership.learn(there.addresses)


async def _ask_again(
    membership: Membership, there: Membership, node: Node, running: asyncio.Future[None], fresh: asyncio.Event
) -> None:
    said, pause = -math.inf, min(RETRY_SECONDS, FIRST_SECONDS)
    while True:
        news = asyncio.ensure_future(fresh.wait())
        await asyncio.wait([running, news], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        if running.done():
            running.result()
            raise PeerError("the peer ended before it was admitted; the same command tries again")
        fresh.clear()
        if time.monotonic() >= said + SAY_SECONDS:
            said, s = time.monotonic(), node.snapshot()
            log.info(
                "waiting for the coordinator: it is away, and nobody else can admit a peer. This one follows the chain "
                "meanwhile (round %d, %d members), and begins when the coordinator is back; Ctrl-C stops",
                s.round,
                s.members,
            )
        try:
            await membership.renew_wherever(there.ask)
            log.info("admitted: the coordinator is back")
            return
        except ABSENT as e:
            log.debug("not admitted yet: %s", e)
        pause = RETRY_SECONDS * random.uniform(0.75, 1.25)  # not all who wait ask at once


async def _fetch_meanwhile(there: Membership, node: Node, running: asyncio.Future[None]) -> None:
    """What training needs, as far as members give it now: what is missing is fetched when it begins."""
    try:
        await node.started(running)
        await fetch_assets(there.spec, there.store, node.network)
    except NETWORK_ERRORS as e:
        log.info("not everything was fetched while waiting: %s", str(e) or type(e).__name__)

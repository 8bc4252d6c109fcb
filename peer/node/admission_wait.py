"""The wait of a newcomer whose coordinator is away: it is in the swarm as an observer until it is admitted.

Only the run's key admits peers, so members cannot. They serve the chain, the data and the coordinator's address, and
they notice when it is back. The observer node collects all of this. It ends before another node begins as a member,
since an observer's machine neither trains nor holds updates.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from contextlib import suppress
from dataclasses import replace

from peer.errors import PeerError
from peer.node.builder import build_node, load_chain
from peer.node.enrollment import COORDINATOR_ABSENT, Enrollment
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.node.outbox import NETWORK_ERRORS
from peer.node.tasks import cancel_and_wait
from peer.node.trainer_files import fetch_assets
from peer.swarm.pace import Paces
from protocol.errors import CairnError

log = logging.getLogger(__name__)

FIRST_REQUEST_SECONDS, REQUEST_SECONDS = 3.0, 15.0
"""Seconds until the first and between the later requests for an admission."""

REPORT_SECONDS = 30.0
"""Minimum seconds between two reports of the wait in the log."""


async def wait_until_admitted(membership: Enrollment, options: NodeOptions, paces: Paces) -> None:
    """Return when the membership has a valid admission; may be cancelled.

    Fetches and answers meanwhile keep to `paces`.

    Raises CairnError when the coordinator refuses the peer, or when the observer cannot go on.
    """
    options = replace(options, observer=True, auditor=False)
    node = build_node(membership, options, await asyncio.to_thread(load_chain, membership, options), paces=paces)
    running = asyncio.ensure_future(node.run())
    fetching = asyncio.ensure_future(_fetch_meanwhile(membership, node, running, options.private_data))
    try:
        await _request_again(membership, node, running)
    finally:
        await cancel_and_wait([fetching])
        node.leave()
        with suppress(CairnError):
            await running


async def _request_again(membership: Enrollment, node: Node, running: asyncio.Future[None]) -> None:
    reported, pause = -math.inf, min(REQUEST_SECONDS, FIRST_REQUEST_SECONDS)
    reason = "it has not admitted this peer yet"
    while True:
        moved = asyncio.ensure_future(membership.locator.newer_than(membership.locator.newest))
        try:
            await asyncio.wait([running, moved], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        if running.done():
            running.result()
            raise PeerError("the peer ended before it was admitted; the same command tries again")
        if time.monotonic() >= reported + REPORT_SECONDS:
            reported, status = time.monotonic(), node.snapshot()
            log.info(
                "waiting for the coordinator: %s. Nobody else can admit a peer. This one follows the chain meanwhile "
                "(round %d, %d members), and asks again; Ctrl-C stops",
                reason,
                status.round,
                status.members,
            )
        try:
            await membership.renew_anywhere(node.ask_for_coordinator)
            log.info("admitted by the coordinator")
            return
        except COORDINATOR_ABSENT as e:
            reason = str(e)  # it may be there, and say what to do instead
        pause = REQUEST_SECONDS * random.uniform(0.75, 1.25)  # spreads the requests of all peers that wait


async def _fetch_meanwhile(
    membership: Enrollment, node: Node, running: asyncio.Future[None], private_data: bool
) -> None:
    """Fetch what training needs as far as members have it now; the rest is fetched when training begins."""
    try:
        await node.started(running)
        await fetch_assets(membership.spec, membership.store, node.network, private_data=private_data)
    except NETWORK_ERRORS as e:
        log.info("not everything was fetched while waiting: %s", str(e) or type(e).__name__)

"""Tells the swarm where its coordinator is, signed by the owner: at the start, and again now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coordinator.swarm import SwarmView
from protocol.coordinator_address import CoordinatorAddress, next_coordinator_address
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.messages import MAX_ADDRESS

log = logging.getLogger(__name__)

MAX_OWN = 4
AGAIN_SECONDS = 30.0
"""The same words again, for those who came since; others, when something has changed."""


class AddressPublisher:
    """One run's. What `invite` gives may change: libp2p finds out only after a while how this machine is reached."""

    def __init__(self, owner: Identity, view: SwarmView, invite: Callable[[], Invite], now: Callable[[], float]):
        self._owner = owner
        self._view = view
        self._invite = invite
        self._now = now

    async def announce(self) -> None:
        """Once. Raises MalformedError for addresses that others would not take."""
        invite = self._invite()
        own = tuple(a for a in self._view.own_addresses() if len(a) <= MAX_ADDRESS)[:MAX_OWN]
        now = CoordinatorAddress(invite.run, int(self._now() * 1000), invite.coordinators, invite.fingerprint, own)
        await self._view.publish_coordinator_address(
            next_coordinator_address(self._owner, self._view.coordinator_address, now)
        )

    async def publish_forever(self) -> None:
        """For ever."""
        while True:
            try:
                await self.announce()
            except MalformedError as e:
                log.error("the swarm is not told where the coordinator is: %s", e)
            await asyncio.sleep(AGAIN_SECONDS)

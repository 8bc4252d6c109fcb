"""Publishes the coordinator's address in the swarm, signed by the owner: at the start and repeatedly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.swarm import SwarmView
from protocol.coordinator_address import CoordinatorAddress, next_coordinator_address
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.messages import MAX_ADDRESS

log = logging.getLogger(__name__)

MAX_OWN = 4
AGAIN_SECONDS = 30.0
"""Seconds between two publications: the same record for new members, a new one when something has changed."""


@dataclass(eq=False)
class AddressPublisher:
    """Publishes one run's record. `invite` may change: libp2p learns only after a while how this machine is reached."""

    owner: Identity
    view: SwarmView
    invite: Callable[[], Invite]
    now: Callable[[], float]

    async def announce(self) -> None:
        """Publish the record once. Raises MalformedError for addresses that others would refuse."""
        invite = self.invite()
        own = tuple(a for a in self.view.own_addresses() if len(a) <= MAX_ADDRESS)[:MAX_OWN]
        now = CoordinatorAddress(invite.run, int(self.now() * 1000), invite.coordinators, invite.fingerprint, own)
        await self.view.publish_coordinator_address(
            next_coordinator_address(self.owner, self.view.coordinator_address, now)
        )

    async def publish_forever(self) -> None:
        """Publish the record every AGAIN_SECONDS."""
        while True:
            try:
                await self.announce()
            except MalformedError as e:
                log.error("the coordinator's address is not published in the swarm: %s", e)
            await asyncio.sleep(AGAIN_SECONDS)

"""Publishes the coordinator's address in the swarm, signed by the owner: at the start and repeatedly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.swarm import SwarmView
from protocol.coordinator_address import CoordinatorAddress, next_coordinator_address
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.messages import MAX_ADDRESS, Signed

log = logging.getLogger(__name__)

MAX_OWN = 4
AGAIN_SECONDS = 30.0
"""Seconds between two publications: the same record for new members, a new one when something has changed."""

CONTRADICTED = 2
"""Newer records in a row after which another coordinator must be there."""


@dataclass(eq=False)
class AddressPublisher:
    """Publishes one run's record. `invite` may change: libp2p learns only after a while how this machine is reached."""

    owner: Identity
    view: SwarmView
    invite: Callable[[], Invite]
    now: Callable[[], float]
    problem: str = field(default="", init=False)
    """Why two coordinators contradict each other, for everybody; empty when there is one."""
    _published: Signed[CoordinatorAddress] | None = field(default=None, init=False)
    _contradicted: int = field(default=0, init=False)

    async def announce(self) -> None:
        """Publish the record once. Raises MalformedError for addresses that others would refuse."""
        invite = self.invite()
        own = tuple(a for a in self.view.own_addresses() if len(a) <= MAX_ADDRESS)[:MAX_OWN]
        now = CoordinatorAddress(invite.run, int(self.now() * 1000), invite.coordinators, invite.fingerprint, own)
        newest = self.view.coordinator_address
        self._note(newest)
        self._published = next_coordinator_address(self.owner, newest, now)
        await self.view.publish_coordinator_address(self._published)

    def _note(self, newest: Signed[CoordinatorAddress] | None) -> None:
        """Report that another coordinator publishes records too.

        One newer record may be late: of a coordinator that has stopped, whose clock was ahead.
        """
        if newest is None or self._published is None or newest.body.sequence <= self._published.body.sequence:
            self._contradicted, self.problem = 0, ""
            return
        self._contradicted += 1
        if self._contradicted >= CONTRADICTED:
            where = " or ".join(map(str, newest.body.coordinators))
            self.problem = f"another coordinator with this run's key is at {where}: the two contradict. Stop one"
        if self._contradicted == CONTRADICTED:
            log.error("%s", self.problem)

    async def publish_forever(self) -> None:
        """Publish the record every AGAIN_SECONDS."""
        while True:
            try:
                await self.announce()
            except MalformedError as e:
                log.error("the coordinator's address is not published in the swarm: %s", e)
            await asyncio.sleep(AGAIN_SECONDS)

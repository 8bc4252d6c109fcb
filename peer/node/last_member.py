"""The last member to leave stays while the coordinator fetches the newest updates from it: nobody else has them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from protocol.messages import Certificate

log = logging.getLogger(__name__)

QUIET_SECONDS, QUIET_BYTES = 2.0, 16_384
"""The last member leaves once it has sent at most QUIET_BYTES within QUIET_SECONDS."""

MAX_STAY_SECONDS = 30.0
"""The longest time that it stays."""

POLL_SECONDS, ASK_SECONDS = 0.1, 1.0
"""Seconds between two looks at what was sent, and between two questions to the coordinator."""


class Serving(Protocol):
    """The part of a `Network` that this needs."""

    @property
    def bytes_up(self) -> int: ...
    def is_alone_with_coordinator(self) -> bool: ...
    async def coordinator_follows(self, newest: Certificate) -> bool: ...


async def serve_coordinator(network: Serving, newest: Certificate) -> None:
    """Wait until the coordinator has fetched what it needs, or another member can provide it.

    It asks for updates once it follows the chain to their record, so its silence means nothing before it has our newest
    one. We ask it for that: its heartbeats reach us no more, since we have said goodbye.
    """
    now = time.monotonic()
    end, sent, quiet_since, follows, said = now + MAX_STAY_SECONDS, network.bytes_up, now, False, False
    while network.is_alone_with_coordinator() and now < min(end, quiet_since + QUIET_SECONDS):
        before, follows = follows, follows or await network.coordinator_follows(newest)
        await asyncio.sleep(POLL_SECONDS if follows else ASK_SECONDS)
        now = time.monotonic()
        if not before or network.bytes_up - sent > QUIET_BYTES:
            sent, quiet_since = network.bytes_up, now
            if not said:
                said = True
                log.info(
                    "the last member here: the coordinator gets the newest updates first (at most %.0f s)",
                    MAX_STAY_SECONDS,
                )

"""Where the coordinator is, as far as a node knows: the owner's newest word, kept on disk, told to whoever asks.

A record is believed for the owner's signature alone, and the newest counts: see `protocol.coordinator_address`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from peer.store import Store, StoreError
from protocol.coordinator_address import open_coordinator_address, open_if_newer
from protocol.errors import MalformedError, ProtocolError
from protocol.messages import MAX_ADDRESSES, Signed
from protocol.spec import RunSpec
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger("peer.locator")

SPEC, WHEREABOUTS = "spec", "coordinator_address"


class Locator:
    """The newest word of one run's owner. All calls are made on one event loop."""

    def __init__(self, store: Store, spec: RunSpec):
        """Raises StoreError. What is on disk is checked like what comes from the network."""
        self._store = store
        self._run, self._owner = spec.run_id, spec.owner_key
        self._spec: bytes | None = None
        self.newest: Signed[Any] | None = None
        self.listeners: list[Callable[[Signed[Any]], None]] = []
        """Called with each newer word."""

        self.news = asyncio.Event()
        """Set with each newer word; whoever waits for it clears it."""

        if (sent := store.read_value(WHEREABOUTS)) is not None:
            try:
                self.newest = open_coordinator_address(sent, self._run, self._owner)
            except ProtocolError as e:
                log.warning("what was stored of the coordinator's address is left out: %s", e)

    def take(self, sent: bytes) -> bool:
        """Whether this is a newer word than any before: it is kept then. Raises ProtocolError."""
        found = open_if_newer(sent, self._run, self._owner, self.newest)
        if found is None:
            return False
        before, self.newest = self.newest, found
        if before is None or before.body.coordinators != found.body.coordinators:
            places = " or ".join(map(str, found.body.coordinators))
            log.info("the coordinator is at %s, as the run's owner has signed", places)
        self.news.set()
        for listener in self.listeners:
            listener(found)
        try:
            self._store.write_value(WHEREABOUTS, found.encoded)
        except StoreError as e:
            log.warning("where the coordinator is was not kept for the next start: %s", e)
        return True

    def answer(self, request: wire.CoordinatorAddressRequest, addresses: Sequence[str]) -> wire.CoordinatorAddressReply:
        """For anybody who asks. Raises MalformedError for a question about another run."""
        if bytes(request.run) != self._run:
            raise MalformedError("a question about another run's coordinator")
        if request.spec and self._spec is None:
            self._spec = self._store.read_value(SPEC)
        return wire.CoordinatorAddressReply(
            spec=(self._spec or b"") if request.spec else b"",
            coordinator_address=self.newest.encoded if self.newest is not None else b"",
            addresses=list(addresses)[:MAX_ADDRESSES],
        )

"""Discovery of a run's coordinator: the owner's newest signed address record, and members as the source of it.

`CoordinatorLocator` keeps the newest record on disk and gives it to anybody who asks. A node in the swarm passes a
newer record on (`pass_on`) and asks members for one when the coordinator does not answer (`ask_members`). A newcomer,
which is in no swarm yet, asks the members at the addresses that it has for the run itself (`discover_run`).

A member's answer counts only by the owner's signature, and the newest record wins: see `protocol.coordinator_address`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peer.coordinator_client import CoordinatorClient, usable_addresses
from peer.node.outbox import NETWORK_ERRORS
from peer.store import Store, StoreError
from protocol.coordinator_address import (
    CoordinatorAddress,
    newest_address,
    open_coordinator_address,
    open_if_newer,
)
from protocol.errors import CairnError, MalformedError, ProtocolError
from protocol.ids import PeerKey, RunId
from protocol.messages import MAX_ADDRESSES, Signed
from protocol.spec import RunSpec, open_spec
from protocol.version import VersionError
from protocol.wire import swarm_pb2 as wire

if TYPE_CHECKING:
    from peer.node.network import Network

log = logging.getLogger(__name__)

SPEC, COORDINATOR_ADDRESS = "spec", "coordinator-address"
"""Names of the values in the store."""

PASS_ON_SECONDS = 10.0
"""Minimum pause between two records that are passed on. Only the newest of those that arrive meanwhile is sent, because
anybody can replay old ones in order."""

MEMBERS_ASKED = 8


class CoordinatorLocator:
    """The newest address record of one run's coordinator. All calls are made on one event loop.

    `client`, if any, is pointed at each newer address.
    """

    def __init__(self, store: Store, spec: RunSpec, client: CoordinatorClient | None = None):
        """Raise StoreError. A record from the disk is checked like one from the network."""
        self._store = store
        self._run, self._owner = spec.run_id, spec.owner_key
        self._client = client
        self._spec: bytes | None = None
        self.newest: Signed[CoordinatorAddress] | None = None
        """The newest verified record; None when there is none yet."""
        self._changed = asyncio.Event()
        if (encoded := store.read_value(COORDINATOR_ADDRESS)) is not None:
            try:
                self._set(open_coordinator_address(encoded, self._run, self._owner))
            except ProtocolError as e:
                log.warning("the stored coordinator address is ignored: %s", e)

    def _set(self, record: Signed[CoordinatorAddress]) -> None:
        self.newest = record
        if self._client is not None:
            self._client.moved(record.body)

    def accept(self, encoded: bytes) -> bool:
        """Keep a record if it is newer than the one held, and return whether it is. Raises ProtocolError."""
        found = open_if_newer(encoded, self._run, self._owner, self.newest)
        if found is None:
            return False
        before = self.newest
        self._set(found)
        if before is None or before.body.coordinators != found.body.coordinators:
            places = " or ".join(map(str, found.body.coordinators))
            log.info("the coordinator is at %s, as the run's owner has signed", places)
        self._changed.set()
        self._changed = asyncio.Event()
        try:
            self._store.write_value(COORDINATOR_ADDRESS, found.encoded)
        except StoreError as e:
            log.warning("the coordinator's address was not kept for the next start: %s", e)
        return True

    async def newer_than(self, record: Signed[CoordinatorAddress] | None) -> Signed[CoordinatorAddress]:
        """Wait until the newest record is another one than `record`, and return it."""
        while self.newest is None or self.newest is record:
            await self._changed.wait()
        return self.newest

    def answer(self, request: wire.CoordinatorAddressRequest, addresses: Sequence[str]) -> wire.CoordinatorAddressReply:
        """Return what this node knows; `addresses` are multiaddresses of members, ours first.

        Raises MalformedError for a question about another run.
        """
        if bytes(request.run) != self._run:
            raise MalformedError("a question about another run's coordinator")
        if request.wants_spec and self._spec is None:
            self._spec = self._store.read_value(SPEC)
        return wire.CoordinatorAddressReply(
            spec=(self._spec or b"") if request.wants_spec else b"",
            coordinator_address=self.newest.encoded if self.newest is not None else b"",
            addresses=list(addresses)[:MAX_ADDRESSES],
        )


# -- in the swarm --------------------------------------------------------------------------------------------


async def pass_on(network: Network, locator: CoordinatorLocator) -> None:
    """Send each newer record to all peers, until cancelled."""
    sent = locator.newest
    while True:
        sent = await locator.newer_than(sent)
        network.send_to_all(sent)
        await asyncio.sleep(PASS_ON_SECONDS)


async def ask_members(network: Network, locator: CoordinatorLocator, run: bytes) -> None:
    """Ask a few members for a newer record, which the locator keeps. Wrong and missing answers are only logged."""

    async def ask(peer: PeerKey) -> None:
        try:
            reply = await network.request_coordinator_address(peer, wire.CoordinatorAddressRequest(run=run))
            if reply.coordinator_address:
                locator.accept(reply.coordinator_address)
        except NETWORK_ERRORS as e:
            log.info("%s does not give the coordinator's address: %s", peer.short, str(e) or type(e).__name__)

    await asyncio.gather(*map(ask, network.providers()[:MEMBERS_ASKED]))


# -- before the swarm ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiscoveredRun:
    """The verified answers of members.

    `encoded` is the signed spec, and `coordinator_address` the owner's newest address record, if members have any.
    `addresses` are multiaddresses to enter the swarm by. `members` is the number of members that answered.
    """

    encoded: bytes
    coordinator_address: Signed[CoordinatorAddress] | None
    addresses: tuple[str, ...]
    members: int


async def discover_run(run: RunId, addresses: Iterable[str]) -> DiscoveredRun | None:
    """Ask the members at these addresses. Return None when none of them gives the run's spec.

    Raises SwarmStartError; VersionError when the run speaks another protocol.
    """
    # Imported here: it loads hivemind and torch, which most newcomers do not need for this.
    from peer.swarm.anonymous import ask_for_coordinator

    encoded, spec = b"", None
    records: list[Signed[CoordinatorAddress]] = []
    usable: list[str] = []

    def accept(member: PeerKey, reply: wire.CoordinatorAddressReply) -> bool:
        """Return whether a member's answer is valid: the spec is the run's, and the rest verifies by it."""
        nonlocal encoded, spec
        try:
            if spec is None or reply.spec != encoded:
                opened = open_spec(reply.spec, run)
                encoded, spec = encoded or reply.spec, spec or opened
            if reply.coordinator_address:
                records.append(open_coordinator_address(reply.coordinator_address, run, spec.owner_key))
        except VersionError:
            raise  # it has the digest that the invite names: every member would give this spec
        except CairnError as e:
            log.warning("the answer of %s about the coordinator is refused: %s", member.short, e)
            return False
        usable.extend(usable_addresses(reply.addresses))
        return True

    members = await ask_for_coordinator(run, addresses, accept)
    if spec is None:
        return None
    return DiscoveredRun(encoded, newest_address(records), tuple(dict.fromkeys(usable)), members)

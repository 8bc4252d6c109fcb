"""Requests to members by a client that is in no swarm: over a connection of its own, under a key that is used once."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import async_timeout
from google.protobuf.message import Message

from peer.swarm.addresses import dial_addresses
from peer.swarm.errors import PeerBusy, PeerUnreachable, SwarmError
from peer.swarm.libp2p import Libp2pTransport
from peer.swarm.rate_limiter import RateLimiter
from peer.swarm.transport import Transport, call_name
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)

ANY = ("/ip4/0.0.0.0/tcp/0",)
MAX_MEMBERS = 16
ADDRESSES_PER_MEMBER = 16
DIAL_SECONDS = 8.0
ADDRESS_SECONDS = 8.0
"""Seconds to wait for a coordinator's address."""

CHAIN_SECONDS = 30.0
"""Seconds to wait for certificates."""

BUSY_SECONDS = 1.0
"""Seconds until a peer that was busy is asked again, more or less."""

SETTLE_SECONDS = 2.0
"""Seconds to wait for other answers after the first acceptable one, which may be outdated."""


def members_at(addresses: Iterable[str]) -> dict[PeerKey, list[str]]:
    """Return the addresses to dial of each member that these name, in their order. Malformed ones are left out."""
    found: dict[PeerKey, list[str]] = {}
    for text in addresses:
        try:
            peer, to_dial = dial_addresses(text)
        except MalformedError:
            continue
        if (len(found) < MAX_MEMBERS or peer in found) and len(found.setdefault(peer, [])) < ADDRESSES_PER_MEMBER:
            found[peer] += to_dial
    return found


@asynccontextmanager
async def _transport(listen: tuple[str, ...]) -> AsyncIterator[Transport]:
    """Start a transport under a new key. Raises SwarmStartError."""
    identity = Identity(secrets.token_bytes(32))
    transport = await Libp2pTransport.start(identity, listen=listen, limiter=RateLimiter())
    try:
        yield transport
    finally:
        await transport.stop()


async def _call(transport: Transport, peer: PeerKey, name: str, request: Message, answer: type[A], seconds: float) -> A:
    """Make a call, and again while the peer is busy. Raises PeerUnreachable, PeerRefused, TimeoutError."""
    async with async_timeout.timeout(seconds):
        while True:
            try:
                return await transport.call(peer, name, request, answer)
            except PeerBusy as e:
                log.info("%s", e)
                await asyncio.sleep(BUSY_SECONDS * random.uniform(0.5, 1.5))  # others were sent away as well


# -- the coordinator's address -----------------------------------------------------------------------------------------


async def ask_for_coordinator(
    run: RunId,
    addresses: Iterable[str],
    accept: Callable[[PeerKey, wire.CoordinatorAddressReply], bool],
    *,
    listen: tuple[str, ...] = ANY,
) -> int:
    """Ask members for the coordinator's address; return the number of answers that `accept` accepted.

    The first MAX_MEMBERS at these addresses are asked at once. `accept` gets each answer, unchecked. The wait ends
    SETTLE_SECONDS after the first accepted answer. Raises SwarmStartError.
    """
    members = members_at(addresses)
    if not members:
        return 0
    async with _transport(listen) as transport:
        asked = {asyncio.create_task(_ask(transport, run, peer, where)): peer for peer, where in members.items()}
        try:
            return await _count_accepted(asked, accept)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def _count_accepted(
    asked: dict[asyncio.Task[wire.CoordinatorAddressReply | None], PeerKey],
    accept: Callable[[PeerKey, wire.CoordinatorAddressReply], bool],
) -> int:
    accepted, waiting, end = 0, set(asked), math.inf
    while waiting and (left := end - time.monotonic()) > 0:
        done, waiting = await asyncio.wait(
            waiting, timeout=None if left == math.inf else left, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            reply = task.result()
            accepted += reply is not None and accept(asked[task], reply)
        if accepted:
            end = min(end, time.monotonic() + SETTLE_SECONDS)
    return accepted


async def _ask(
    transport: Transport, run: RunId, peer: PeerKey, addresses: list[str]
) -> wire.CoordinatorAddressReply | None:
    """Return a member's answer; None, with the reason in the log, when it gives none."""
    request = wire.CoordinatorAddressRequest(run=run, wants_spec=True)
    try:
        await transport.dial(peer, addresses, DIAL_SECONDS)
        name = call_name(run, "coordinator-address")
        return await _call(transport, peer, name, request, wire.CoordinatorAddressReply, ADDRESS_SECONDS)
    except (SwarmError, asyncio.TimeoutError) as e:
        log.info("peer %s does not give the coordinator's address: %s", peer.short, str(e) or type(e).__name__)
    return None


# -- certificates ------------------------------------------------------------------------------------------------------


class ChainReader:
    """Reads certificates of a run from some of its members. Made by `chain_reader`."""

    def __init__(self, run: RunId, transport: Transport, members: dict[PeerKey, list[str]]):
        self._run = run
        self._transport = transport
        self._addresses = members
        self._dialled: set[PeerKey] = set()

    @property
    def members(self) -> Sequence[PeerKey]:
        """The members that can be asked."""
        return list(self._addresses)

    async def ask(self, member: PeerKey, have: Sequence[Digest]) -> wire.ChainReply:
        """Return the certificates after the newest of `have` that the member knows: unchecked, at most 4 MiB.

        Raises PeerUnreachable, and PeerRefused when it has lost the next ones.
        """
        request = wire.ChainRequest(run=self._run, locator=[bytes(d) for d in have])
        if member not in self._dialled:
            await self._transport.dial(member, self._addresses[member], DIAL_SECONDS)
            self._dialled.add(member)
        try:
            name = call_name(self._run, "chain")
            return await _call(self._transport, member, name, request, wire.ChainReply, CHAIN_SECONDS)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"peer {member.short} did not answer in {CHAIN_SECONDS:g} s") from None


@asynccontextmanager
async def chain_reader(
    run: RunId, addresses: Iterable[str], *, leave_out: Iterable[PeerKey] = (), listen: tuple[str, ...] = ANY
) -> AsyncIterator[ChainReader]:
    """Connect to the members at these addresses, except `leave_out`. Raises SwarmStartError."""
    without = set(leave_out)
    members = {peer: where for peer, where in members_at(addresses).items() if peer not in without}
    async with _transport(listen) as transport:
        yield ChainReader(run, transport, members)

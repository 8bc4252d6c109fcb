"""Asks members where a run's coordinator is, for who is in no swarm (yet): by a connection of its own, under a key that
is used this once."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable

import async_timeout
from google.protobuf.message import DecodeError
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from peer.swarm.addresses import ways_to
from peer.swarm.daemon import Daemon, start_daemon
from peer.swarm.errors import PeerUnreachable, libp2p_words
from peer.swarm.limits import Limits
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.ids import PeerKey, RunId
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

ANY = ("/ip4/0.0.0.0/tcp/0",)
MAX_ASKED = 16
WAYS_TO_ONE = 16
DIAL_SECONDS, ANSWER_SECONDS = 8.0, 8.0
SETTLE_SECONDS = 2.0
"""How long others are waited for after the first good answer: it may be an old one."""


def coordinator_address_call(run: RunId) -> str:
    """The name of the unary call."""
    return f"cairn/1/{run.hex()[:8]}/coordinator address"


def members_at(addresses: Iterable[str]) -> dict[PeerKey, list[bytes]]:
    """The binary multiaddresses of each member that these name, in their order; what is no address is left out."""
    found: dict[PeerKey, list[bytes]] = {}
    for text in addresses:
        try:
            peer, ways = ways_to(text)
        except MalformedError:
            continue
        if (len(found) < MAX_ASKED or peer in found) and len(found.setdefault(peer, [])) < WAYS_TO_ONE:
            found[peer] += ways
    return found


async def ask_members(
    run: RunId,
    addresses: Iterable[str],
    good: Callable[[PeerKey, wire.CoordinatorAddressReply], bool],
    *,
    listen: tuple[str, ...] = ANY,
) -> int:
    """Ask the first MAX_ASKED members at these addresses, all at once; `good` is given each answer, unchecked, and says
    whether it will do. Returns how many will, SETTLE_SECONDS after the first of them. Raises SwarmStartError."""
    members = members_at(addresses)
    if not members:
        return 0
    once = Identity(secrets.token_bytes(32))
    daemon = await start_daemon(once, listen=listen, announce=(), folder=None, limits=Limits())
    try:
        asked = {asyncio.create_task(_ask(daemon, run, peer, where)): peer for peer, where in members.items()}
        try:
            return await _first_good(asked, good)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    finally:
        await daemon.stop()


async def _first_good(
    asked: dict[asyncio.Task[wire.CoordinatorAddressReply | None], PeerKey],
    good: Callable[[PeerKey, wire.CoordinatorAddressReply], bool],
) -> int:
    answered, waiting, end = 0, set(asked), math.inf
    while waiting and (left := end - time.monotonic()) > 0:
        done, waiting = await asyncio.wait(
            waiting, timeout=None if left == math.inf else left, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            reply = task.result()
            answered += reply is not None and good(asked[task], reply)
        if answered:
            end = min(end, time.monotonic() + SETTLE_SECONDS)
    return answered


async def _ask(daemon: Daemon, run: RunId, peer: PeerKey, where: list[bytes]) -> wire.CoordinatorAddressReply | None:
    """A member's answer; None, with the reason in the log, when it gives none."""
    request = wire.CoordinatorAddressRequest(run=run, spec=True)
    try:
        await daemon.dial(peer, where, DIAL_SECONDS)
        call = daemon.call(peer, coordinator_address_call(run), request, wire.CoordinatorAddressReply)
        async with async_timeout.timeout(ANSWER_SECONDS):
            return await call
    except (PeerUnreachable, P2PHandlerError, P2PDaemonError, DecodeError, OSError, asyncio.TimeoutError) as e:
        log.info(
            "peer %s does not say where the coordinator is: %s", peer.short, libp2p_words(str(e) or type(e).__name__)
        )
    return None

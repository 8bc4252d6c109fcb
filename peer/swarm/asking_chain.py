"""Asks members for certificates, for who is in no swarm: an auditor, under a key that is used this once."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import async_timeout
from google.protobuf.message import DecodeError
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from peer.swarm.asking import ANY, DIAL_SECONDS, members_at
from peer.swarm.daemon import Daemon, start_daemon
from peer.swarm.errors import PeerRefused, PeerUnreachable, libp2p_words
from peer.swarm.limits import Limits
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.wire import swarm_pb2 as wire

log = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0


class ChainAsker:
    """A connection of its own to some members of a run's swarm."""

    def __init__(self, run: RunId, daemon: Daemon, members: dict[PeerKey, list[bytes]]):
        self._run = run
        self._daemon = daemon
        self._where = members
        self._dialled: set[PeerKey] = set()

    @property
    def members(self) -> Sequence[PeerKey]:
        """Who can be asked."""
        return list(self._where)

    async def ask(self, member: PeerKey, have: Sequence[Digest]) -> wire.ChainReply:
        """The certificates that follow the first of `have` that the member knows; unchecked, at most 4 MiB.

        Raises PeerUnreachable, PeerRefused (it keeps nothing that old).
        """
        request = wire.ChainRequest(run=self._run, have=[bytes(d) for d in have])
        try:
            if member not in self._dialled:
                await self._daemon.dial(member, self._where[member], DIAL_SECONDS)
                self._dialled.add(member)
            call = self._daemon.call(member, f"cairn/1/{self._run.hex()[:8]}/chain", request, wire.ChainReply)
            async with async_timeout.timeout(ANSWER_SECONDS):
                return await call
        except P2PHandlerError as e:
            raise PeerRefused(f"peer {member.short} refused: {libp2p_words(str(e))}") from None
        except DecodeError:
            raise PeerRefused(f"peer {member.short} answered with what is no chain") from None
        except (P2PDaemonError, OSError, asyncio.TimeoutError) as e:
            why = libp2p_words(str(e) or type(e).__name__)
            raise PeerUnreachable(f"peer {member.short} does not answer: {why}") from None


@asynccontextmanager
async def chain_asker(
    run: RunId, addresses: Iterable[str], *, leave_out: Iterable[PeerKey] = (), listen: tuple[str, ...] = ANY
) -> AsyncIterator[ChainAsker]:
    """Asks the members at these addresses but for some. Raises SwarmStartError."""
    without = set(leave_out)
    members = {peer: where for peer, where in members_at(addresses).items() if peer not in without}
    once = Identity(secrets.token_bytes(32))
    daemon = await start_daemon(once, listen=listen, announce=(), folder=None, limits=Limits())
    try:
        yield ChainAsker(run, daemon, members)
    finally:
        await daemon.stop()

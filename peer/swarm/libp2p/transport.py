"""The swarm's transport over libp2p's daemon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import async_timeout
from google.protobuf.message import Message
from hivemind.p2p import P2PContext
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.multiaddr import Multiaddr

from peer.swarm.errors import PeerBusy, PeerRefused, PeerUnreachable, TooBusy, short_report
from peer.swarm.libp2p.daemon import START_SECONDS, Daemon, p2pd_pb2, sender_key, start_daemon
from peer.swarm.libp2p.dht import DhtPresence
from peer.swarm.rate_limiter import RateLimiter
from peer.swarm.transport import CallHandler, StreamHandler
from protocol.checks import PARSE_ERRORS
from protocol.errors import CairnError
from protocol.identity import Identity
from protocol.ids import PeerKey, RunId

log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class Libp2pTransport:
    """Connections to other peers by one daemon of libp2p. Made by `start`; see `Transport` for the methods."""

    def __init__(self, daemon: Daemon):
        self.daemon = daemon

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        folder: Path | None = None,
        limiter: RateLimiter,
        start_seconds: float = START_SECONDS,
    ) -> Libp2pTransport:
        """Listen at these multiaddresses under the identity's key. Raises SwarmStartError.

        `announce` replaces the addresses that the machine sees itself. A private folder for the daemon's sockets is
        made in `folder` (default: the system's temporary folder). Incoming calls are admitted by `limiter`.
        """
        daemon = await start_daemon(
            identity, listen=listen, announce=announce, folder=folder, limiter=limiter, start_seconds=start_seconds
        )
        return cls(daemon)

    @property
    def lost(self) -> asyncio.Future[str]:
        return self.daemon.lost

    async def dial(self, peer: PeerKey, addresses: Sequence[str], seconds: float) -> None:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=peer.libp2p_id, addrs=_binary(addresses)),
        )
        _, writer = await self.daemon.control(peer, request, seconds)
        writer.close()

    async def call(self, peer: PeerKey, name: str, request: Message, answer: type[A]) -> A:
        try:
            return answer.FromString(await self.daemon.call_bytes(peer, name, request.SerializeToString()))
        except P2PHandlerError as e:
            kind = PeerBusy if f"{TooBusy.__name__}(" in str(e) else PeerRefused
            raise kind(f"peer {peer.short} refused: {short_report(str(e))}") from None
        except PARSE_ERRORS:
            raise PeerRefused(f"peer {peer.short} answered with something other than a {answer.__name__}") from None
        except (P2PDaemonError, OSError) as e:
            raise PeerUnreachable(f"peer {peer.short}: {short_report(str(e) or type(e).__name__)}") from None

    async def accept_calls(self, name: str, request: type[Q], handler: CallHandler[Q]) -> None:
        async def accept(message: Q, context: P2PContext) -> Message:
            return await handler(sender_key(context.remote_id), message)

        await self.daemon.add_protobuf_handler(name, accept, request)

    async def open_stream(
        self, peer: PeerKey, name: str, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer.libp2p_id, proto=[name]),
        )
        return await self.daemon.control(peer, request, seconds)

    async def accept_streams(self, name: str, handler: StreamHandler) -> None:
        async def accept(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(sender_key(info.peer_id), reader, writer)
            except (CairnError, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as e:
                log.info("stream %s from %s ended: %s", name, info.peer_id, str(e) or type(e).__name__)
            finally:
                writer.close()

        await self.daemon.add_binary_stream_handler(name, accept)

    async def addresses(self, seconds: float) -> list[str] | None:
        try:
            async with async_timeout.timeout(seconds):
                return [str(a) for a in await self.daemon.get_visible_maddrs(latest=True)]
        except (P2PDaemonError, OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as e:
            log.warning("libp2p's daemon does not say our addresses: %s", e or type(e).__name__)
            return None

    async def join_dht(self, run: RunId, warn: Callable[[str], None]) -> DhtPresence:
        return await DhtPresence.start(self.daemon, run, warn)

    async def stop(self) -> None:
        await self.daemon.stop()


def _binary(addresses: Sequence[str]) -> list[bytes]:
    """Return the binary multiaddresses, without those that libp2p cannot express."""
    found = []
    for address in addresses:
        try:
            found.append(Multiaddr(address).to_bytes())
        except ValueError as e:
            log.debug("an address cannot be dialled: %s", e)
    return found

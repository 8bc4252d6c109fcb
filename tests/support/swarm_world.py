"""Real peers on loopback in one event loop, for the tests of the swarm: each has its own daemon, store and key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from peer.store import Store
from peer.swarm import Handlers, Swarm, SwarmLimits
from peer.swarm.libp2p import Libp2pTransport
from peer.swarm.libp2p.daemon import Daemon
from peer.swarm.rate_limiter import CallLimits, RateLimiter
from peer.swarm.transfer.blob_server import ServeLimits
from peer.swarm.transfer.streams import StreamLimits
from peer.swarm.transport import StreamHandler
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.message_codec import KeySigner
from protocol.messages import Heartbeat
from protocol.wire import swarm_pb2 as wire
from tests.support.waiting import LIMIT

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
RUN = RunId(b"r" * 32)
POOL = 4
"""Peers of a `Pool`."""

IMPATIENT = SwarmLimits(
    calls=CallLimits(handler_seconds=4),
    streams=StreamLimits(open_seconds=30, reply_seconds=4),
    serve=ServeLimits(idle_seconds=5, write_seconds=1.5, linger_seconds=0.3),
)


def identity(n: int) -> Identity:
    return Identity(bytes([n]) * 32)


class Member:
    """A peer of the test: what it received, from whom it refuses blob requests, its warnings."""

    def __init__(self, n: int, folder: Path):
        self.identity = identity(n)
        self.key: PeerKey = self.identity.key
        self.swarm: Swarm
        self.renew(folder / str(n))

    def renew(self, folder: Path) -> None:
        """Begin again with an empty store in that folder."""
        self.store = Store(folder, 1 << 40)
        self.packets: list[tuple[PeerKey, wire.Packet]] = []
        self.chain = wire.ChainReply(more=True)
        self.on_packet: Callable[[PeerKey, wire.Packet], Any] = lambda sender, p: self.packets.append((sender, p))
        self.on_header_request: Callable[[wire.Packet], wire.Packet] = lambda names: wire.Packet()
        self.on_coordinator_address_request: Callable[[wire.CoordinatorAddressRequest], wire.CoordinatorAddressReply]
        self.on_coordinator_address_request = lambda request: wire.CoordinatorAddressReply(
            spec=b"spec" * request.wants_spec
        )
        self.serve_refusal: Callable[[Digest, PeerKey], Any] = lambda blob, requester: None
        self.served: list[Digest] = []
        self.strangers: set[PeerKey] = set()
        self.warnings: list[str] = []
        self.bad: list[tuple[PeerKey, str]] = []

    @property
    def handlers(self) -> Handlers:
        """The handlers, which do as the test says at the time of the call."""

        def serve(blob: Digest, requester: PeerKey) -> Any:
            self.served.append(blob)
            return self.serve_refusal(blob, requester)

        return Handlers(
            on_packet=lambda sender, packet: self.on_packet(sender, packet),
            on_chain_request=lambda sender, request: self.chain,
            serve_refusal=serve,
            on_header_request=lambda names: self.on_header_request(names),
            on_warning=lambda text: self.warnings.append(text),
            is_known=lambda key: key not in self.strangers,
            on_coordinator_address_request=lambda request: self.on_coordinator_address_request(request),
        )

    async def start(self, **kwargs: Any) -> Swarm:
        """Start a swarm over a daemon of its own."""
        kwargs = {"listen": LOOPBACK, "run": RUN, "limits": IMPATIENT} | kwargs
        self.swarm = await Swarm.start(self.identity, store=self.store, handlers=self.handlers, **kwargs)
        return self.swarm

    async def start_over(self, transport: ReusedTransport, limits: SwarmLimits = IMPATIENT) -> None:
        """Start a new swarm over a transport that goes on."""
        limiter = RateLimiter(limits.calls, lambda sender: True)
        transport.daemon.limiter = limiter
        self.swarm = await Swarm.over(
            cast(Any, transport), limiter, self.key, RUN, store=self.store, handlers=self.handlers, limits=limits
        )

    @property
    def daemon(self) -> Daemon:
        """libp2p's daemon."""
        transport: Any = self.swarm.transport
        return transport.daemon

    async def fetch(self, digest: Digest, size: int, holders: list[Member], seconds: float = LIMIT, **kwargs: Any):
        """Fetch a blob from other members."""
        await self.swarm.fetch_blob(
            digest, size, [h.key for h in holders], deadline_seconds=seconds,
            on_bad=lambda peer, reason: self.bad.append((peer, reason)), **kwargs,
        )  # fmt: skip

    def heartbeat(self, sequence: int = 1, **changes: Any) -> bytes:
        """Return a signed heartbeat."""
        fields: dict[str, Any] = dict(
            run=RUN, sequence=sequence, round=Round(0), head=Digest(bytes(32)), weight=0, windows=0, phase="training",
            tokens_per_second=0.0, loss=0.0, bytes_up=0, bytes_down=0, known_headers=(), addresses=(), admission=b"",
            device="cpu",
        )  # fmt: skip
        return KeySigner(self.identity).sign(Heartbeat(**(fields | changes))).encoded


@asynccontextmanager
async def members(count: int, folder: Path, **kwargs: Any) -> AsyncIterator[list[Member]]:
    """Run `count` peers that all entered by the first."""
    async with AsyncExitStack() as stack:
        made: list[Member] = []
        for n in range(1, count + 1):
            member = Member(n, folder)
            stack.callback(member.store.close)
            initial = made[0].swarm.addresses if made else ()
            swarm = await member.start(initial=initial, **kwargs)
            stack.push_async_callback(swarm.stop)
            made.append(member)
        yield made


class ReusedTransport:
    """A transport for several swarms, one after the other: the handlers of the newest one are called."""

    def __init__(self, transport: Libp2pTransport):
        self._transport = transport
        self._calls: dict[str, Any] = {}
        self._streams: dict[str, StreamHandler] = {}
        self._presence: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def accept_calls(self, name: str, request: Any, handler: Any) -> None:
        new = name not in self._calls
        self._calls[name] = handler
        if new:
            await self._transport.accept_calls(name, request, lambda sender, m: self._calls[name](sender, m))

    async def accept_streams(self, name: str, handler: StreamHandler) -> None:
        new = name not in self._streams
        self._streams[name] = handler
        if new:
            await self._transport.accept_streams(name, lambda *stream: self._streams[name](*stream))

    async def join_dht(self, run: RunId, warn: Callable[[str], None]) -> Any:
        if self._presence is None:
            self._presence = await self._transport.join_dht(run, warn)
            self._presence.stop = lambda: None
        return self._presence

    async def stop(self) -> None:
        """Leave the transport as it is: the next swarm uses it."""

    async def end(self) -> None:
        """Stop it."""
        await self._transport.stop()


class Pool:
    """Peers that several tests use one after the other, since a daemon takes a while to start.

    It is for tests that stop or kill no peer; those start their own `members`.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = AsyncExitStack()
        self._members: list[Member] = []
        self._transports: list[ReusedTransport] = []

    async def open(self) -> None:
        """Start the peers, which all know each other."""
        for n in range(1, POOL + 1):
            member = Member(n, self._folder)
            made = await Libp2pTransport.start(member.identity, listen=LOOPBACK, limiter=RateLimiter())
            transport = ReusedTransport(made)
            self._stack.push_async_callback(transport.end)
            await member.start_over(transport)
            if self._members:
                await member.swarm.connect(self._members[0].swarm.addresses)
            self._members.append(member)
            self._transports.append(transport)
        for member in self._members:
            await member.swarm.stop()

    async def close(self) -> None:
        """Stop the peers."""
        await self._stack.aclose()

    @asynccontextmanager
    async def borrow(
        self, count: int, folder: Path, *, streams: StreamLimits = IMPATIENT.streams
    ) -> AsyncIterator[list[Member]]:
        """Lend the first `count` peers, each with a new swarm and an empty store."""
        lent = self._members[:count]
        limits = replace(IMPATIENT, streams=streams)
        for n, (member, transport) in enumerate(zip(lent, self._transports, strict=False)):
            member.store.close()
            member.renew(folder / str(n))
            await member.start_over(transport, limits)
        try:
            yield lent
        finally:
            for member in lent:
                await member.swarm.stop()

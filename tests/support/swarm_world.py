"""Real peers on loopback in one event loop, for the tests of the swarm: each its own daemon, store and key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from peer.store import Store
from peer.swarm import Handlers, Swarm, SwarmLimits
from peer.swarm.limits import Limits
from peer.swarm.links import LinkLimits, Links
from peer.swarm.serve import ServeLimits
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.message_codec import KeySigner
from protocol.messages import Heartbeat
from protocol.wire import swarm_pb2 as wire
from tests.support.waiting import LIMIT

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
RUN = RunId(b"r" * 32)

IMPATIENT = SwarmLimits(
    calls=Limits(handler_seconds=4),
    links=LinkLimits(open_seconds=30, reply_seconds=4),
    serve=ServeLimits(idle_seconds=5, write_seconds=1.5, linger_seconds=0.3),
)


def identity(n: int) -> Identity:
    return Identity(bytes([n]) * 32)


class Member:
    """A peer of the test: what it was sent, whom it refuses blobs, what it was warned of."""

    def __init__(self, n: int, folder: Path):
        self.identity = identity(n)
        self.key: PeerKey = self.identity.key
        self.swarm: Swarm
        self.renew(folder / str(n))

    def renew(self, folder: Path) -> None:
        """As on the first day, with an empty store in that folder."""
        self.store = Store(folder, 1 << 40)
        self.packets: list[tuple[PeerKey, wire.Packet]] = []
        self.chain = wire.ChainReply(more=True)
        self.on_packet: Callable[[PeerKey, wire.Packet], Any] = lambda sender, p: self.packets.append((sender, p))
        self.on_coordinator_address: Callable[[wire.CoordinatorAddressRequest], wire.CoordinatorAddressReply]
        self.on_coordinator_address = lambda request: wire.CoordinatorAddressReply(spec=b"spec" * request.spec)
        self.may_serve: Callable[[Digest, PeerKey], Any] = lambda blob, requester: None
        self.served: list[Digest] = []
        self.warnings: list[str] = []
        self.turned = False  # it answers blob requests as the test says
        self.bad: list[tuple[PeerKey, str]] = []

    async def start(self, **kwargs: Any) -> Swarm:
        def serve(blob: Digest, requester: PeerKey) -> Any:
            self.served.append(blob)
            return self.may_serve(blob, requester)

        handlers = Handlers(
            on_packet=lambda sender, packet: self.on_packet(sender, packet),
            on_chain_request=lambda sender, request: self.chain,
            may_serve=serve,
            on_warning=self.warnings.append,
            on_coordinator_address=lambda request: self.on_coordinator_address(request),
        )
        kwargs = {"listen": LOOPBACK, "run": RUN, "limits": IMPATIENT} | kwargs
        self.swarm = await Swarm.start(self.identity, store=self.store, handlers=handlers, **kwargs)
        return self.swarm

    async def fetch(
        self, digest: Digest, size: int | None, holders: list[Member], seconds: float = LIMIT, **kwargs: Any
    ):
        await self.swarm.fetch_blob(
            digest, size, [h.key for h in holders], deadline_seconds=seconds,
            on_bad=lambda peer, reason: self.bad.append((peer, reason)), **kwargs,
        )  # fmt: skip

    def heartbeat(self, sequence: int = 1, **changes: Any) -> bytes:
        fields: dict[str, Any] = dict(
            run=RUN, sequence=sequence, round=Round(0), head=Digest(bytes(32)), weight=0, windows=0, phase="training",
            tokens_per_second=0.0, loss=0.0, bytes_up=0, bytes_down=0, known_headers=(), addresses=(), admission=b"",
            device="cpu",
        )  # fmt: skip
        return KeySigner(self.identity).sign(Heartbeat(**(fields | changes))).encoded


@asynccontextmanager
async def members(count: int, folder: Path, **kwargs: Any) -> AsyncIterator[list[Member]]:
    """So many peers, all entered by the first."""
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


class Pool:
    """Peers that several tests use one after the other, since a daemon takes a while to start. For tests that stop
    or kill nobody; those start their own `members`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = AsyncExitStack()
        self._members: list[Member] = []

    async def open(self) -> None:
        self._members = await self._stack.enter_async_context(members(4, self._folder))

    async def close(self) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def borrow(
        self, count: int, folder: Path, *, links: LinkLimits = IMPATIENT.links
    ) -> AsyncIterator[list[Member]]:
        lent = self._members[:count]
        # The last test's streams are ending: by themselves once they idle, for daemons do not tell that one is closed.
        end = time.monotonic() + LIMIT
        while any(m.swarm._server._streams for m in self._members) and time.monotonic() < end:
            for stream in [s for m in self._members for s in m.swarm._server._open]:
                if not stream.closing and not stream.unanswered and stream.answers.empty():
                    stream.closing = True
                    stream.answers.put_nowait(None)
            await asyncio.sleep(0.01)
        for n, m in enumerate(lent):
            m.store.close()
            m.renew(folder / str(n))
            swarm = m.swarm
            swarm._store = swarm._server._store = m.store
            swarm._traffic.up = swarm._traffic.down = 0
            swarm._daemon.guard._senders.clear()
            swarm._links = Links(swarm._open_blob_stream, swarm._traffic, links)
        try:
            yield lent
        finally:
            for m in lent:
                m.swarm._links.close()
                if m.turned:
                    name = m.swarm._names["blob"]
                    await m.swarm._daemon.remove_binary_stream_handler(name)
                    await m.swarm._daemon.accept_streams(name, m.swarm._server.handle)

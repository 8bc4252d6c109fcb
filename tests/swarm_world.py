"""Real peers on loopback in one event loop, for the tests of the swarm: each its own daemon, store and key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from peer.store import Store
from peer.swarm import Handlers, Swarm, SwarmLimits
from peer.swarm.limits import Limits
from peer.swarm.links import LinkLimits
from peer.swarm.serve import ServeLimits
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.messages import Heartbeat, KeySigner
from protocol.wire import swarm_pb2 as wire

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
RUN = RunId(b"r" * 32)

IMPATIENT = SwarmLimits(
    calls=Limits(handler_seconds=2),
    links=LinkLimits(open_seconds=3, reply_seconds=1.5),
    serve=ServeLimits(idle_seconds=5, write_seconds=1.5),
)


def identity(n: int) -> Identity:
    return Identity(bytes([n]) * 32)


class Member:
    """A peer of the test: what it was sent, whom it refuses blobs, what it was warned of."""

    def __init__(self, n: int, folder: Path):
        self.identity = identity(n)
        self.key: PeerKey = self.identity.key
        self.store = Store(folder / str(n), 1 << 40)
        self.packets: list[tuple[PeerKey, wire.Packet]] = []
        self.chain = wire.ChainReply(more=True)
        self.on_packet: Callable[[PeerKey, wire.Packet], Any] = lambda sender, p: self.packets.append((sender, p))
        self.may_serve: Callable[[Digest, PeerKey], Any] = lambda blob, requester: None
        self.served: list[Digest] = []
        self.warnings: list[str] = []
        self.bad: list[tuple[PeerKey, str]] = []
        self.swarm: Swarm

    async def start(self, **kwargs: Any) -> Swarm:
        def serve(blob: Digest, requester: PeerKey) -> Any:
            self.served.append(blob)
            return self.may_serve(blob, requester)

        handlers = Handlers(
            on_packet=lambda sender, packet: self.on_packet(sender, packet),
            on_chain_request=lambda sender, request: self.chain,
            may_serve=serve,
            on_warning=self.warnings.append,
        )
        kwargs = {"listen": LOOPBACK, "run": RUN, "limits": IMPATIENT} | kwargs
        self.swarm = await Swarm.start(self.identity, store=self.store, handlers=handlers, **kwargs)
        return self.swarm

    async def fetch(self, digest: Digest, size: int | None, holders: list[Member], seconds: float = 10, **kwargs: Any):
        await self.swarm.fetch_blob(
            digest, size, [h.key for h in holders], deadline_seconds=seconds,
            on_bad=lambda peer, reason: self.bad.append((peer, reason)), **kwargs,
        )  # fmt: skip

    def heartbeat(self, sequence: int = 1, **changes: Any) -> bytes:
        fields: dict[str, Any] = dict(
            run=RUN, sequence=sequence, round=Round(0), head=Digest(bytes(32)), weight=0, windows=0, phase="training",
            tokens_per_second=0.0, loss=0.0, bytes_up=0, bytes_down=0, known=(), addresses=(), admission=b"",
            device="cpu",
        )  # fmt: skip
        return KeySigner(self.identity).sign(Heartbeat(**(fields | changes))).sent


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

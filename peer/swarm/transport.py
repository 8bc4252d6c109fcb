"""The interface between the swarm and the network below it.

`Libp2pTransport` (peer/swarm/libp2p) is the one of the product. Tests and simulations have one in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from google.protobuf.message import Message

from protocol.ids import PeerKey, RunId
from protocol.version import PROTOCOL

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

StreamHandler = Callable[[PeerKey, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CallHandler = Callable[[PeerKey, Q], Awaitable[Message]]

Call = Literal["packet", "chain", "headers", "coordinator-address", "blob"]


def call_name(run: RunId, call: Call) -> str:
    """Return the name under which members of a run accept this call; "blob" is a stream.

    Peers that speak another protocol have other names. The call by which a stranger gets the run's spec is the same in
    all, so that it learns which protocol the run speaks.
    """
    return f"cairn/{1 if call == 'coordinator-address' else PROTOCOL}/{run.hex()[:8]}/{call}"


@dataclass(slots=True)
class ByteCount:
    """Payload bytes of packets, certificates and blobs sent (`up`) and received (`down`), without the transport's."""

    up: int = 0
    down: int = 0


class Transport(Protocol):
    """Authenticated connections to other peers, for one event loop. Peers are named by their keys.

    The transport proves the key of each sender. Incoming calls are admitted by a `RateLimiter`.
    """

    async def dial(self, peer: PeerKey, addresses: Sequence[str], seconds: float) -> None:
        """Connect to a peer at these multiaddresses (without /p2p/). Raises PeerUnreachable."""
        ...

    async def call(self, peer: PeerKey, name: str, request: Message, answer: type[A]) -> A:
        """Make a unary call. The deadline is the caller's.

        Raises PeerUnreachable; PeerRefused when the peer's handler failed, or answered with something else; PeerBusy
        when it raised TooBusy.
        """
        ...

    async def accept_calls(self, name: str, request: type[Q], handler: CallHandler[Q]) -> None:
        """Answer unary calls of this name. A CairnError of the handler is sent to the caller, any other is hidden."""
        ...

    async def open_stream(
        self, peer: PeerKey, name: str, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream of bytes to a peer's handler of this name. Raises PeerUnreachable."""
        ...

    async def accept_streams(self, name: str, handler: StreamHandler) -> None:
        """Accept streams that other peers open under this name. They are closed when the handler returns."""
        ...

    async def addresses(self, seconds: float) -> list[str] | None:
        """Return the multiaddresses with /p2p/ at which this peer is visible; None when that is unknown."""
        ...

    async def join_dht(self, run: RunId, warn: Callable[[str], None]) -> Presence:
        """Take part in the DHT where members of a run publish their heartbeats."""
        ...

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the cause, when the transport ended by itself."""
        ...

    async def stop(self) -> None:
        """Close all connections and release all resources. Idempotent."""
        ...


class Presence(Protocol):
    """Heartbeats of a run's members in a DHT: hints where members may be found."""

    async def publish(self, author: PeerKey, envelope: bytes, seconds: float) -> bool:
        """Keep a heartbeat for a time; return False when there are other members and none accepted it."""
        ...

    async def discover(self) -> list[bytes]:
        """Return heartbeat envelopes of members, signed by their authors, the newest of each."""
        ...

    async def meet(self, peer: PeerKey) -> bool:
        """Introduce ourselves to a peer that was dialled; return whether it answered."""
        ...

    @property
    def clock_offset(self) -> float | None:
        """Seconds by which the members' clocks are ahead of ours; None before anybody answered."""
        ...

    def stop(self) -> None:
        """Leave the DHT."""
        ...

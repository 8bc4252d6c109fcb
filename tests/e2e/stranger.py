"""A peer of the test's own in the swarm: it hears what members broadcast, and sends what the test makes up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from peer.coordinator_client import CoordinatorClient
from peer.store import Store
from peer.swarm import Handlers, Swarm
from protocol.codec import make_codec
from protocol.errors import ProtocolError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.messages import Admission, Body, Header, Heartbeat, KeySigner, Opener, Signed
from protocol.wire import swarm_pb2 as wire
from tests.e2e.world import World

B = TypeVar("B", bound=Body)


class Stranger:
    """On the network side it is a peer like any other; it has no round machine and no trainer."""

    def __init__(self, world: World, name: str):
        self.world = world
        self.identity = Identity(sha256(f"stranger {name}".encode()))
        self.key: PeerKey = self.identity.key
        self.signer = KeySigner(self.identity)
        self.spec = world.spec
        self.opener = Opener(self.spec.run_id, self.spec.owner_key)
        self.blob_size = make_codec(self.spec.codec, self.spec.model.layout).size
        self.store = Store(world.folder / f"stranger-{name}", 10**9)
        self.swarm: Swarm
        self.heard: list[Signed[Any]] = []
        self.on_heard: Callable[[Signed[Any]], None] = lambda message: None
        self._sequence = int(time.time() * 1000)

    async def enter(self, run: RunId | None = None) -> None:
        """Into the swarm of the run (or what claims to be another's), by the coordinator's observer."""
        handlers = Handlers(
            on_packet=self._take,
            on_chain_request=lambda sender, request: wire.ChainReply(),
            may_serve=lambda blob, requester: None,
        )
        self.swarm = await Swarm.start(
            self.identity, run or self.spec.run_id, store=self.store, handlers=handlers,
            listen=("/ip4/127.0.0.1/tcp/0",), initial=self.world.invite.addresses,
        )  # fmt: skip
        # Members tell their addresses in the heartbeats that the DHT has.
        for name in ("ada", "alan", "grace"):
            await self.world.until(f"the way to {name}", lambda n=name: self._reach(n), 40, every=0.5)

    async def _reach(self, name: str) -> bool:
        """A connection to a member, by the addresses that it logs when it starts."""
        found = [line for line in self.world.log(name).splitlines() if "listening at " in line]
        addresses = found[-1].rpartition("listening at ")[2].split(", ") if found else []
        return bool(await self.swarm.connect(addresses))

    def _take(self, sender: PeerKey, packet: wire.Packet) -> None:
        for sent in packet.messages:
            for kind in ("heartbeat", "update", "record", "vote"):
                try:
                    message = self.opener.open_any(sent, kind)
                except ProtocolError:
                    continue
                self.heard.append(message)
                self.on_heard(message)

    async def stop(self) -> None:
        await self.swarm.stop()
        self.store.close()

    # -- what it says ----------------------------------------------------------------------------------------

    async def send(self, name: str, *sent: bytes) -> None:
        """One packet with these bytes to a member."""
        await self.swarm.send(self.world.key(name), wire.Packet(messages=list(sent)))

    async def admit(self) -> bytes:
        """An admission from the coordinator, like everybody's."""
        async with CoordinatorClient(self.world.invite) as client:
            return (await client.admit(self.identity, "stranger")).admission.sent

    def admission(self, *, not_before: int, not_after: int) -> bytes:
        """One that the owner signed in this test."""
        body = Admission(self.spec.run_id, self.key, not_before, not_after, "stranger")
        return KeySigner(self.world.owner).sign(body).sent

    def heartbeat(self, **changes: Any) -> Signed[Heartbeat]:
        self._sequence += 1
        body = Heartbeat(
            run=self.spec.run_id, sequence=self._sequence, round=Round(0), head=Digest(bytes(32)), weight=0, windows=0,
            phase="observing", tokens_per_second=0.0, loss=0.0, bytes_up=0, bytes_down=0, known=(),
            addresses=tuple(self.swarm.addresses), admission=b"", device="",
        )  # fmt: skip
        return self.signer.sign(replace(body, **changes))

    async def listen(self) -> None:
        """Be known to all members, so that they broadcast to this peer too: an observer without an admission."""
        for name in ("ada", "alan", "grace"):
            await self.send(name, self.heartbeat().sent)

    async def open_round(self, seconds: float = 40) -> Header:
        """A member's header of a round that was announced just now: another header must agree with it."""
        heard: asyncio.Future[Header] = asyncio.get_running_loop().create_future()

        def take(message: Signed[Any]) -> None:
            if isinstance(message.body, Header) and message.author != self.key and not heard.done():
                known = max((m.body.round for m in self.heard[:-1] if isinstance(m.body, Header)), default=-1)
                if message.body.round > known:
                    heard.set_result(message.body)

        self.on_heard = take
        try:
            return await asyncio.wait_for(heard, seconds)
        finally:
            self.on_heard = lambda message: None

    def header(self, like: Header, **changes: Any) -> Signed[Header]:
        """An update of this peer's for the same round."""
        return self.signer.sign(replace(like, **changes))


@asynccontextmanager
async def stranger(world: World, name: str) -> AsyncIterator[Stranger]:
    """A stranger in the swarm for as long as the block lasts."""
    made = Stranger(world, name)
    try:
        await made.enter()
    except BaseException:
        made.store.close()
        raise
    try:
        yield made
    finally:
        await made.stop()

"""A peer of the test's own in the swarm: it receives the broadcasts of members, and sends messages of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from peer.coordinator_client import CoordinatorClient
from peer.store import Store
from peer.swarm import Handlers, Swarm
from peer.swarm.transfer.frames import REPLY_PREFIX_BYTES, BlobOp, BlobReply, BlobRequest, parse_reply_prefix
from protocol.codec import make_codec
from protocol.envelope import claimed_kind
from protocol.errors import ProtocolError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, Round, RunId, sha256
from protocol.merkle import CHUNK
from protocol.message_codec import KeySigner, MessageDecoder
from protocol.messages import Admission, Heartbeat, Signed, UpdateHeader
from protocol.wire import swarm_pb2 as wire
from tests.e2e.world import World
from tests.support.waiting import ended

MEMBERS = ("ada", "alan", "grace")
"""The peers of the shared swarm: a stranger knows the way to all of them."""


class Stranger:
    """On the network side it is a peer like any other; it has no round machine and no trainer."""

    def __init__(self, world: World, name: str):
        self.world = world
        self.identity = Identity(sha256(f"stranger {name}".encode()))
        self.key: PeerKey = self.identity.key
        self.signer = KeySigner(self.identity)
        self.spec = world.spec
        self.decoder = MessageDecoder(self.spec.run_id, self.spec.owner_key)
        self.blob_size = make_codec(self.spec.codec, self.spec.model.layout).size
        self.store = Store(world.folder / f"stranger-{name}", 10**9)
        self.swarm: Swarm
        self.heartbeats: dict[PeerKey, Heartbeat] = {}
        """The newest of each member."""

        self.on_heard: Callable[[Signed[Any]], None] = lambda message: None
        self._sequence = int(time.time() * 1000)

    async def enter(self, run: RunId | None = None) -> None:
        """Into the swarm of the run (or what claims to be another's), by the coordinator's observer."""
        handlers = Handlers(
            on_packet=self._take,
            on_chain_request=lambda sender, request: wire.ChainReply(),
            serve_refusal=lambda blob, requester: None,
        )
        self.swarm = await Swarm.start(
            self.identity, run or self.spec.run_id, store=self.store, handlers=handlers,
            listen=("/ip4/127.0.0.1/tcp/0",), initial=self.world.invite.addresses,
        )  # fmt: skip
        for name in MEMBERS:
            await self.world.until(f"the way to {name}", lambda n=name: self._reach(n), every=0.5)

    async def _reach(self, name: str) -> bool:
        """Connect to a member, by the addresses that it logs when it starts."""
        found = [line for line in self.world.log(name).splitlines() if "listening at " in line]
        addresses = found[-1].rpartition("listening at ")[2].split(", ") if found else []
        return bool(await self.swarm.connect(addresses))

    def _take(self, sender: PeerKey, packet: wire.Packet) -> None:
        for sent in packet.messages:
            with suppress(ProtocolError):
                message = self.decoder.decode_kind(sent, claimed_kind(sent))
                if isinstance(message.body, Heartbeat):
                    known = self.heartbeats.get(message.author)
                    if known is None or known.sequence < message.body.sequence:
                        self.heartbeats[message.author] = message.body
                self.on_heard(message)

    async def stop(self) -> None:
        await self.swarm.stop()
        self.store.close()

    # -- what it says ----------------------------------------------------------------------------------------

    async def send(self, name: str, *sent: bytes) -> None:
        """One packet with these bytes to a member."""
        await self.swarm.send(self.world.key(name), wire.Packet(messages=list(sent)))

    async def admit(self) -> bytes:
        """Get an ordinary admission from the coordinator."""
        async with CoordinatorClient(self.world.invite) as client:
            return (await client.admit(self.identity, "stranger")).admission.encoded

    def admission(self, *, not_before: int, not_after: int) -> bytes:
        """One that the owner signed in this test."""
        body = Admission(self.spec.run_id, self.key, not_before, not_after, "stranger")
        return KeySigner(self.world.owner).sign(body).encoded

    def heartbeat(self, **changes: Any) -> Signed[Heartbeat]:
        self._sequence += 1
        body = Heartbeat(
            run=self.spec.run_id, sequence=self._sequence, round=Round(0), head=Digest(bytes(32)), weight=0, windows=0,
            phase="observing", tokens_per_second=0.0, loss=0.0, bytes_up=0, bytes_down=0, known_headers=(),
            addresses=tuple(self.swarm.addresses), admission=b"", device="",
        )  # fmt: skip
        return self.signer.sign(replace(body, **changes))

    async def tell(self, message: Signed[Any]) -> None:
        """One message to all three members."""
        await asyncio.gather(*(self.send(name, message.encoded) for name in MEMBERS))

    async def listen(self) -> None:
        """Be known to all members, so that they broadcast to this peer too: an observer without an admission."""
        await self.tell(self.heartbeat())

    async def pose(self, admission: bytes) -> None:
        """Send the heartbeats of a training member for ever, without training."""
        while True:
            if (beat := self.heartbeats.get(self.world.key("ada"))) is not None and beat.state is not None:
                says = dict(phase="training", round=beat.round, head=beat.head, weight=beat.weight, state=beat.state)
                await self.tell(self.heartbeat(windows=1, tokens_per_second=1000.0, admission=admission, **says))
            await asyncio.sleep(0.2)

    async def new_round(self) -> Heartbeat:
        """Wait for a round that has just begun; return ada's first heartbeat in it."""
        ada = self.world.key("ada")
        old = self.heartbeats[ada].head if ada in self.heartbeats else None

        def look() -> Heartbeat | None:
            beat = self.heartbeats.get(ada)
            return beat if beat is not None and beat.state is not None and beat.head != old else None

        return await self.world.until("a new round", look, every=0.01)

    def header(self, beat: Heartbeat, admission: bytes, blob: Digest, **changes: Any) -> Signed[UpdateHeader]:
        """Return an update header for the round of a heartbeat: well-formed, with any blob."""
        assert beat.state is not None
        body = UpdateHeader(
            run=self.spec.run_id, round=beat.round, parent=beat.head, base_state=beat.state, first_window=0,
            rebase_window=0, end_window=8, inner_steps=1, blob=blob, blob_size=self.blob_size, loss=3.0,
            admission=admission,
        )  # fmt: skip
        return self.signer.sign(replace(body, **changes))

    async def ask_for_chunk(self, name: str, blob: Digest) -> BlobReply:
        """Return the reply of a member's blob server, without the retries of an honest fetch."""
        reader, writer = await self.swarm.open_blob_stream(self.world.key(name), 60)
        try:
            writer.write(BlobRequest(BlobOp.CHUNK, blob).encode())
            status, length = parse_reply_prefix(await ended(reader.readexactly(REPLY_PREFIX_BYTES)), CHUNK)
            return BlobReply(status, await ended(reader.readexactly(length)))
        finally:
            writer.close()


@asynccontextmanager
async def stranger(world: World, name: str) -> AsyncIterator[Stranger]:
    """Keep a stranger in the swarm as long as the block lasts."""
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

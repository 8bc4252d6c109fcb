"""Whole nodes in one event loop: the real round machine, drivers, stores and training; an internet made of memory.

Instead of `peer.swarm` each has a `LoopSwarm`, instead of a trainer's process a `LoopTrainer`: the same `Trainer`
object, whose steps are made in a thread. So a swarm of four costs a second, not a minute, and no process is started.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import async_timeout
import base58

from peer.channel import (
    Apply,
    DataUnavailable,
    Failed,
    FromTrainer,
    Load,
    MakeUpdate,
    Orders,
    Progress,
    Start,
    ToTrainer,
    UpdateMade,
    WriteCheckpoint,
)
from peer.errors import TrainerDied
from peer.node.builder import build_node, load_chain
from peer.node.enrollment import Enrollment
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.node.rest import RestWish
from peer.store import Store
from peer.swarm import BlobFetchError, Handlers, PeerUnreachable
from peer.training.data import DataUnavailableError
from peer.training.trainer import Trainer
from protocol.codec import make_codec
from protocol.errors import CairnError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey
from protocol.merkle import blob_digest
from protocol.messages import Certificate
from protocol.spec import RunSpec
from protocol.wire import swarm_pb2 as wire
from tests.support.specs import OWNER, admission, identity
from tests.support.trainer_world import World
from tests.support.waiting import LIMIT

T = TypeVar("T")

TIMERS = {
    "max_seconds": 20,
    "exchange_seconds": 4,
    "propose_seconds": 1,
    "patience_seconds": 4,
    "heartbeat_seconds": 0.2,
    "member_seconds": 2,
}


def address_of(key: PeerKey) -> str:
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{base58.b58encode(key.libp2p_id).decode()}"


class Internet:
    """The peers that are there. Every message and every byte goes through here."""

    def __init__(self):
        self.there: dict[PeerKey, LoopSwarm] = {}
        self.withheld: Callable[[PeerKey, Digest], bool] = lambda giver, blob: False
        """True for a peer and a blob that it has but gives nobody."""
        self.behind_nats: set[PeerKey] = set()
        """No two of these reach each other."""

        self.fetched: list[tuple[PeerKey, Digest, int]] = []
        """Chunks of blobs that have a digest: who got it, of which blob, its index."""

    def reach(self, a: PeerKey, b: PeerKey) -> bool:
        return not {a, b} <= self.behind_nats


class LoopSwarm:
    """The interface that `peer.swarm.Swarm` offers a node, in memory."""

    internet: Internet

    def __init__(self, key: PeerKey, store: Store, handlers: Handlers):
        self.key = key
        self.store = store
        self.handlers = handlers
        self.addresses = [address_of(key)]
        self.clock_offset = 0.0
        self.bytes_up = self.bytes_down = 0
        self._calls: set[asyncio.Task[Any]] = set()

    @classmethod
    async def start(cls, identity: Identity, run: Any, *, store: Store, handlers: Handlers, **_: Any) -> LoopSwarm:
        swarm = cls(identity.key, store, handlers)
        cls.internet.there[identity.key] = swarm
        return swarm

    @property
    def alive(self) -> bool:
        return self.internet.there.get(self.key) is self

    def _other(self, key: PeerKey) -> LoopSwarm:
        other = self.internet.there.get(key)
        if other is None or not self.alive or not self.internet.reach(self.key, key):
            raise PeerUnreachable(f"peer {key.short} is not there")
        return other

    async def refresh_addresses(self) -> list[str]:
        return self.addresses

    async def connect(self, addresses: Sequence[str], *, soon: bool = False) -> list[PeerKey]:
        there = self.internet.there.items()
        return [k for k, s in there if set(s.addresses) & set(addresses) and self.internet.reach(self.key, k)]

    async def publish(self, heartbeat: bytes, seconds: float = 60) -> bool:
        return True

    async def discover(self) -> list[bytes]:
        return []

    async def send(self, to: PeerKey, packet: wire.Packet, timeout: float = 10) -> None:
        await asyncio.sleep(0.002)
        done = self._other(to).handlers.on_packet(self.key, wire.Packet.FromString(packet.SerializeToString()))
        if done is not None:
            await done

    async def request_chain(self, to: PeerKey, request: wire.ChainRequest, timeout: float = 20) -> wire.ChainReply:
        reply = self._other(to).handlers.on_chain_request(self.key, request)
        return reply if isinstance(reply, wire.ChainReply) else await reply

    async def request_coordinator_address(
        self, peer: PeerKey, request: wire.CoordinatorAddressRequest
    ) -> wire.CoordinatorAddressReply:
        return self._other(peer).handlers.on_coordinator_address_request(request)

    async def fetch_blob(
        self,
        digest: Digest,
        size: int,
        holders: Sequence[PeerKey],
        *,
        deadline_seconds: float,
        chunks: Collection[int] | None = None,
        **_: Any,
    ) -> None:
        async def fetch() -> None:
            while not self.store.has(digest) and not self._fetch_from_all(digest, holders, chunks):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        try:
            async with async_timeout.timeout(deadline_seconds):
                await fetch()
        except asyncio.TimeoutError:
            raise BlobFetchError(digest, f"not in {deadline_seconds:g} s", {}) from None

    def _fetch_from_all(self, digest: Digest, holders: Sequence[PeerKey], chunks: Collection[int] | None) -> bool:
        for key in holders:
            with suppress(PeerUnreachable):
                other = self._other(key)
                if other is not self and self._fetch_from(other, digest, chunks):
                    return True
        return False

    def _fetch_from(self, other: LoopSwarm, digest: Digest, chunks: Collection[int] | None) -> bool:
        """Fetch the chunks that another peer has; return whether all are here now."""
        if self.internet.withheld(other.key, digest):
            return False
        arriving = None if other.store.has(digest) else other.store.in_progress(digest)
        if other.handlers.serve_refusal(digest, self.key) is not None:
            return False
        other.handlers.on_blob_requested(digest, self.key)
        if not (arriving or other.store.has(digest)):
            return False
        size = arriving.size if arriving else other.store.size(digest)
        leaves = arriving.leaves if arriving else other.store.leaves(digest)
        partial = self.store.receive(digest, size, leaves, chunks)
        if partial is None:
            return True
        try:
            for index in partial.missing(chunks):
                if arriving is None or arriving.has(index):
                    data = arriving.read_chunk(index) if arriving else other.store.read_chunk(digest, index)
                    partial.write(index, data)
                    self.internet.fetched.append((self.key, digest, index))
                    other.bytes_up += len(data)
                    self.bytes_down += len(data)
            if not partial.left:
                partial.finish()
            return not partial.is_incomplete(chunks)
        finally:
            partial.close()

    async def wait_lost(self) -> str:
        return await asyncio.Future()

    async def stop(self) -> None:
        if self.alive:
            del self.internet.there[self.key]


_building = threading.Lock()
"""Trainers of this process are built one at a time: see `protocol.adapter.build_adapted`."""


class LoopTrainer:
    """A `TrainerSupervisor` whose trainer works in this process."""

    link = None

    def __init__(
        self,
        start: Start,
        *,
        on_message: Callable[[FromTrainer], None],
        on_lost: Callable[[str], None],
        command: None = None,
        gpu_memory: Callable[[], int] = lambda: 0,
        was_ready: bool = False,
    ):
        self._start = start
        self._say = on_message
        self._asked: asyncio.Queue[ToTrainer] = asyncio.Queue()
        self._over = asyncio.Event()
        self._running = False
        self.ready: Any = None
        self.stopping = False
        self.crashed = False
        self.restarts = 0
        self.notes: list[str] = []
        self.alter: Callable[[UpdateMade], UpdateMade] | None = None
        """Makes the updates that it announces from those that it made."""
        self._loop = asyncio.get_running_loop()
        self._max_windows = 0
        self._thread = ThreadPoolExecutor(1)

    def _born(self) -> Trainer:
        with _building:
            return Trainer(self._start, lambda level, kind, text: self.notes.append(text))

    async def run(self) -> None:
        self._running = True
        trainer = await self._call(self._born)
        self.ready = trainer.ready()
        self._say(self.ready)
        try:
            while not self.stopping:
                if not self._asked.empty():
                    await self._do(trainer, self._asked.get_nowait())
                elif await self._call(lambda: trainer.steps.may_train):
                    try:
                        batch = await self._call(trainer.steps.batches.take, trainer.windows.counter)
                    except DataUnavailableError as e:
                        self._say(DataUnavailable(e.shard))
                        await asyncio.sleep(0.05)
                        continue
                    await self._call(trainer.steps.step, batch)
                    windows, loss = trainer.windows, trainer.steps.throughput.recent_loss
                    done = {"trained": trainer.steps.trained_windows, "next_window": windows.counter}
                    self._say(Progress(windows.uncovered, loss, 1000.0, False, **done))
                else:
                    await asyncio.sleep(0.01)
        finally:
            if not self.crashed:
                with suppress(CairnError):
                    await asyncio.shield(self._call(trainer.checkpointer.save_now))
            trainer.close()
            self._thread.shutdown(wait=False)
            self._over.set()

    async def _do(self, trainer: Trainer, ask: ToTrainer) -> None:
        if isinstance(ask, Orders):
            self._max_windows = ask.max_update_windows
            await self._call(trainer.steps.set_orders, ask)
            return
        what = {MakeUpdate: "update", Apply: "apply", Load: "load", WriteCheckpoint: "write"}[type(ask)]
        move = None
        try:
            if isinstance(ask, MakeUpdate):
                most = self._max_windows or trainer.spec.max_update_windows
                answer: FromTrainer = await self._call(trainer.base.make_update, ask, most)
                if isinstance(answer, UpdateMade) and self.alter is not None:
                    answer = self.alter(answer)
                if trainer.base.is_begin_due:
                    await self._call(trainer.begin_again)
            elif isinstance(ask, Load):
                answer = await self._call(trainer.load, ask)
            elif isinstance(ask, WriteCheckpoint):
                answer = await self._call(trainer.base.write, ask.out)
            elif not isinstance(ask, Apply):
                raise TypeError(f"{type(ask).__name__} is not asked for here")
            else:
                move = await self._call(trainer.base.advance, ask)
                answer = await self._call(trainer.base.applied, move.record, ask.write_checkpoint)
        except (CairnError, OSError) as e:
            answer = Failed(what, str(e), fatal=False)  # type: ignore[arg-type]
        self._say(answer)
        if move is not None:
            await self._call(trainer.swap_base, move)

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the one thread that owns the trainer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    @property
    def is_ready(self) -> bool:
        return self.ready is not None

    async def send(self, message: ToTrainer) -> None:
        if self.stopping:
            raise TrainerDied("it is stopping")
        await self._asked.put(message)

    async def stop(self, seconds: float) -> bool:
        self.stopping = True
        if self._running:
            await self._over.wait()
        return not self.crashed


def spoilt(made: UpdateMade) -> UpdateMade:
    """Return the update with noise as its last records: only those who look at its end see it."""
    data = made.blob_path.read_bytes()
    return replaced(made, data[:-5000] + b"\xff" * 5000)


def replaced(made: UpdateMade, data: bytes) -> UpdateMade:
    """Return the update with another blob."""
    made.blob_path.write_bytes(data)
    return replace(made, digest=blob_digest(data))


class NodeWorld:
    """A run, and nodes of it by name. `close` at the end."""

    def __init__(self, folder: Path, **fields: Any):
        """`fields`: of the spec, over the tiny run's; `model`: of its model's config; `adapter`: train that."""
        LoopSwarm.internet = self.internet = Internet()
        self.trainers: dict[PeerKey, LoopTrainer] = {}
        self.folder = folder
        files = World.make(folder, config=fields.pop("model", {}), adapter=fields.pop("adapter", None))
        self.tokenizer = b"a tokenizer"
        plain = json.loads(files.spec.canonical()) | {"owner": OWNER.key.hex()} | fields
        with Store(folder / "scratch", 1 << 30) as store:
            plain["tokenizer"] = {"digest": store.put(self.tokenizer).hex(), "size": len(self.tokenizer)}
        self.spec = RunSpec.model_validate(plain)
        self.shards = [folder / f"{s.digest}.tokens" for s in self.spec.data.train]
        adapter = self.spec.model.adapter
        self.genesis = files.genesis
        self.base = b"" if adapter is None else (folder / f"{adapter.base.digest}.safetensors").read_bytes()
        self._update_size = make_codec(self.spec.codec, self.spec.model.layout).size
        self.nodes: dict[str, Node] = {}
        self.running: dict[str, asyncio.Task[None]] = {}

    def key(self, name: str) -> PeerKey:
        return identity(name).key

    def start(self, name: str, rest: RestWish | None = None) -> Node:
        """Start a peer, with the disk that it had when it was there before."""
        me, home = identity(name), self.folder / name
        home.mkdir(exist_ok=True)
        store = Store(home / "store", 1 << 40)
        for data in (self.tokenizer, *(s.read_bytes() for s in self.shards)):
            store.put(data)
        if not self.nodes:
            store.put(self.genesis.read_bytes())
            store.put(self.base)
        ways_in = [address_of(self.key(n)) for n in self.nodes if n != name]
        membership = Enrollment(me, self.spec, store, None, name, admission(self.spec, me).encoded, ways_in)
        node = self.nodes[name] = self.build(membership, NodeOptions(home, device="cpu", audit_device="off"), rest=rest)
        self.run(name, node, store)
        return node

    def observe(self) -> Node:
        """Start an observer like that of `cairn coordinator serve`: without admission and without a trainer."""
        home = self.folder / "observer"
        home.mkdir(exist_ok=True)
        store = Store(home / "store", 1 << 40)
        for data in (self.tokenizer, self.genesis.read_bytes()):
            store.put(data)
        ways_in = [address_of(self.key(n)) for n in self.nodes if n != "observer"]
        membership = Enrollment(identity("observer"), self.spec, store, None, "coordinator", b"", ways_in)
        node = self.build(membership, NodeOptions(home, observer=True))
        self.run("observer", node, store)
        return node

    async def leave(self, *names: str) -> None:
        """Have these stop in order, at once, and wait until they are gone: nobody enters by them any more."""
        for name in names:
            self.nodes[name].leave()
        await asyncio.gather(*(self.running.pop(name) for name in names))
        for name in names:
            del self.nodes[name]

    def build(self, membership: Enrollment, options: NodeOptions, **given: Any) -> Node:
        """Build a node in this world's network, with a trainer in this process. `given`: as for `build_node`."""
        chain = load_chain(membership, options)
        return build_node(membership, options, chain, start_swarm=LoopSwarm.start, supervise=self._supervise, **given)

    def _supervise(self, start: Start, **how: Any) -> Any:
        trainer = self.trainers[start.identity_key] = LoopTrainer(start, **how)
        return trainer

    def run(self, name: str, node: Node, store: Store) -> None:
        self.nodes[name] = node
        self.running[name] = asyncio.create_task(self._run(node, store), name=name)

    async def _run(self, node: Node, store: Store) -> None:
        try:
            await node.run()
        finally:
            store.close()

    async def kill(self, name: str) -> None:
        """Stop a node as if it lost its power: it sends nothing more and saves nothing."""
        self.internet.there.pop(self.key(name))
        if (trainer := self.trainers.get(self.key(name))) is not None:
            trainer.crashed = True
        self.running[name].cancel()
        await asyncio.gather(self.running[name], return_exceptions=True)

    async def close(self) -> None:
        for name in self.running:
            self.nodes[name].leave()
        await asyncio.gather(*self.running.values(), return_exceptions=True)

    def path(self, name: str) -> tuple[Certificate, ...]:
        """Return the chain of a node, from the oldest in memory."""
        chain = self.nodes[name].chain
        return chain.path(chain.root, chain.head)

    async def until(self, what: str, true: Callable[[], bool], seconds: float = 2 * LIMIT) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not true():
            for name, task in self.running.items():
                if task.done() and not task.cancelled():
                    task.result()
                    raise AssertionError(f"{name} has ended")
            assert asyncio.get_running_loop().time() < end, f"not within {seconds:.0f} s: {what}"
            await asyncio.sleep(0.02)

    async def rounds(self, names: Sequence[str], count: int, seconds: float = 2 * LIMIT) -> None:
        """Wait until these nodes hold states `count` rounds beyond the present head of the first one's chain."""
        chain = self.nodes[names[0]].chain
        goal = chain.height(chain.head) + count

        def there() -> bool:
            return all(self.nodes[n].snapshot().round >= goal for n in names)

        await self.until(f"{', '.join(names)} in round {goal}", there, seconds)

    def trainer(self, name: str) -> LoopTrainer:
        return self.trainers[self.key(name)]

    def announced(self, name: str) -> set[Digest]:
        """Return the blobs of the round that is open at a node."""
        return {h.body.blob for h in self.nodes[name].machine.summary(time.monotonic()).headers}

    def announced_in(self, name: str, number: int) -> set[Digest]:
        """Return the blobs of a round's updates that a node knows, whether the round is open there or decided."""
        decided = [u for c in self.path(name) for u in c.record.body.updates]
        known = [*decided, *self.nodes[name].machine.summary(time.monotonic()).headers]
        return {h.body.blob for h in known if h.body.round == number}

    def slices(self, name: str) -> set[Digest]:
        """Return the partial blobs of a node's store."""
        return {Digest.parse(f.name) for f in (self.folder / name / "store" / "partial").glob("*") if not f.suffix}

    def is_a_part(self, blob: Digest) -> bool:
        """Return whether a blob is no update, judged by its size."""
        sizes = [s.store.blobs().get(blob) for s in self.internet.there.values()]
        return self._update_size not in sizes

    def contributed(self, name: str, since: int = 0) -> int:
        """Return the number of rounds, from `since` on, to which a peer contributed."""
        one = next(n for n, t in self.running.items() if not t.done())
        return sum(self.key(name) in c.record.body.contributors for c in self.path(one) if c.record.body.round >= since)

"""One member that reduces shards: a real store, and a network made of memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import async_timeout

from peer.errors import PeerError
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.shard_reducer import ShardReducer
from peer.store import Store
from protocol.errors import CodecError
from protocol.ids import Digest, PeerKey
from protocol.merkle import CHUNK, blob_digest, blob_leaves
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer
from tests.support.recorded_tasks import RecordedTasks
from tests.support.waiting import LIMIT, ended

SPEC = make_spec()


SIZE = 8 * CHUNK + 100


PART_SIZE = 300


BAD = b"\xbb"


class Sums:
    """A stand-in for `Reduction`: part p needs the chunks 0, p + 1 and p + 2; its blob is a byte from each update."""

    def size(self, count: int, part: int) -> int:
        return PART_SIZE

    def chunks(self, count: int, part: int) -> tuple[int, ...]:
        return (0, part + 1, part + 2)

    def check_slice(self, blob: memoryview, count: int, part: int) -> None:
        if bytes(blob[(part + 1) * CHUNK : (part + 1) * CHUNK + 1]) == BAD:
            raise CodecError("a value that is not finite")

    def reduce(self, contributions: list[Any], outer: Any, count: int, part: int) -> bytes:
        found = b"".join(bytes(c.blob[i * CHUNK : i * CHUNK + 1]) for c in contributions for i in self.chunks(0, part))
        return found.ljust(PART_SIZE, b"=")

    def check_shard(self, blob: memoryview, count: int, part: int) -> None:
        if not bytes(blob).endswith(b"="):
            raise CodecError("no part")


class Source:
    """A swarm in which each author gives its update unless it is silent, as real chunks in the real store."""

    def __init__(self, store: Store):
        self.store = store
        self.relay = SimpleNamespace(relays_from=lambda author: [])
        self.blobs: dict[Digest, bytes] = {}
        self.silent: set[Digest] = set()
        self.asked: list[tuple[Digest, tuple[PeerKey, ...], tuple[int, ...]]] = []
        self.gate: asyncio.Event | None = None
        self.at_once = self.most_at_once = 0

    def add(self, data: bytes) -> Digest:
        digest = blob_digest(data)
        self.blobs[digest] = data
        return digest

    def providers(self, holders=(), *, state=None) -> list[PeerKey]:
        return list(holders)

    async def fetch_blob(
        self,
        digest: Digest,
        size: int,
        holders,
        *,
        deadline_seconds: float,
        chunks: Collection[int] | None = None,
    ) -> None:
        self.asked.append((digest, tuple(holders), tuple(chunks or ())))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.gate is not None:
                async with async_timeout.timeout(deadline_seconds):
                    await self.gate.wait()
            await asyncio.sleep(0)
            if digest in self.silent or digest not in self.blobs:
                raise PeerError("nobody gives it")
            data = self.blobs[digest]
            assert size == len(data)
            partial = self.store.receive(digest, len(data), blob_leaves(data), chunks)
            assert partial is not None
            for i in partial.missing(chunks):
                partial.write(i, data[i * CHUNK : (i + 1) * CHUNK])
            if not partial.left:
                partial.finish()
            partial.close()
        finally:
            self.at_once -= 1


class World:
    def __init__(self, folder: Path, authors: int, seconds: float = LIMIT):
        self.store = Store(folder, 1 << 40)
        self.source = Source(self.store)
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.tasks = RecordedTasks()
        self.data = {n: peer(n).key + random.Random(n).randbytes(SIZE - 32) for n in range(1, authors + 1)}
        chain = ChainMaker(SPEC)
        chain.add({n: 2 for n in self.data})
        self.record = chain.certificates[0].record
        # The record's blobs are made up: these are what they stand for.
        by_author = {peer(n).key: data for n, data in self.data.items()}
        updates = tuple(with_blob(u, self.source.add(by_author[u.author])) for u in self.record.body.updates)
        self.record = changed(self.record, body=changed(self.record.body, updates=updates))
        self.blobs = {u.author: u.body.blob for u in updates}
        self.updates = RoundBlobFetcher(
            self.store, self.source, cast(Any, _Codec()), deadline_seconds=seconds, post=self.answers.put_nowait,
            tasks=self.tasks,
        )  # fmt: skip
        self.reducing = ShardReducer(
            self.store, self.source, self.updates, cast(Any, Sums()), SIZE, SPEC.outer,
            post=self.answers.put_nowait, tasks=self.tasks,
        )  # fmt: skip

    async def answer(self) -> Any:
        return await ended(self.answers.get())

    def expected(self, part: int) -> bytes:
        ordered = [self.source.blobs[u.body.blob] for u in self.record.body.updates]
        return b"".join(d[i * CHUNK : i * CHUNK + 1] for d in ordered for i in (0, part + 1, part + 2)).ljust(
            PART_SIZE, b"="
        )

    async def close(self) -> None:
        for task in self.tasks.spawned:
            task.cancel()
        failed = await asyncio.gather(*self.tasks.spawned, return_exceptions=True)
        self.store.close()
        for error in failed:
            if isinstance(error, Exception):
                raise error


class _Codec:
    size = SIZE

    def check_shard(self, blob: object) -> None: ...

    def author_of(self, blob: memoryview) -> PeerKey:
        return PeerKey(bytes(blob[:32]))


def changed(value: Any, **fields: Any) -> Any:
    """Return a message or body with other fields, of any type to the type checker."""
    from dataclasses import replace

    return replace(value, **fields)


def with_blob(header: Any, blob: Digest) -> Any:
    """Return an update header that names another blob; its signature is the old one."""
    return changed(header, body=changed(header.body, blob=blob, blob_size=SIZE))

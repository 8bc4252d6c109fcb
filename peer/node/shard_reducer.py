"""A committee member's work in a reduced round: the update slices of its shard, their mean, and the shard's blob.

Of each listed update only the chunks that cover the shard are fetched. They come from the author, from other members of
the committee, or from the author's relays (`slice_relay`). Slices stay partial blobs in the store, and other peers can
fetch them from there. The round machine decides which shards are made.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peer.node.events import Post
from peer.node.network import Network
from peer.node.round_blob_fetcher import RoundBlobFetcher, map_file
from peer.node.tasks import Tasks
from peer.store import BlobMissing, Store, StoreError, StoreFull
from protocol.codec.interface import Blob
from protocol.errors import CairnError, CodecError
from protocol.ids import Digest, PeerKey
from protocol.messages import RoundRecord, Signed, UpdateHeader
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.reduce_plan import shard_count
from protocol.rounds.events import BlobInvalid, ShardReduced, ShardUnavailable
from protocol.spec import OuterSpec

log = logging.getLogger(__name__)

SLICE_TIME_SHARE = 0.5
"""Share of the round's `exchange_seconds` in which the slices must arrive; the rest is left for the next attempt."""

AT_ONCE = 16
"""Maximum number of slices that are fetched at once, for all shards together."""

SLICE_ATTEMPT_SECONDS = 5.0
"""Seconds after which a slice that does not arrive gives its turn to another, here and at a relay, and is tried
again."""

SLICE_RETRY_SECONDS = 0.2
"""Seconds from one attempt to get a slice to the next."""

KEPT_ROUNDS = 8
"""Rounds for which shards made here are kept, even of records that were not certified. Peers on their way to a branch
that we have left may need them."""


@dataclass(frozen=True)
class ReducedShardFormat:
    """The `BlobFormat` of a reduced shard: shard `shard` of `count`."""

    reduction: Reduction
    count: int
    shard: int

    @property
    def size(self) -> int:
        return self.reduction.size(self.count, self.shard)

    def check(self, blob: Blob) -> None:
        self.reduction.check_shard(blob, self.count, self.shard)

    def author_of(self, blob: Blob) -> PeerKey | None:
        """Return None: a committee makes it."""
        return None


@dataclass(eq=False)
class ShardReducer:
    """The reductions under way at this node: one task for each shard.

    An unexpected error in a task, such as a full disk, ends the node.
    `update_size` is in bytes. `post` receives ShardReduced or ShardUnavailable for each shard, and BlobInvalid for an
    update whose slice breaks the codec's rules.
    """

    store: Store
    network: Network
    updates: RoundBlobFetcher
    reduction: Reduction
    update_size: int
    outer: OuterSpec
    post: Post
    tasks: Tasks

    def __post_init__(self) -> None:
        self._tasks: dict[tuple[Digest, int], asyncio.Task[None]] = {}
        self._shards: dict[Digest, tuple[int, set[Digest]]] = {}
        """For each record its round, and the blobs of its shards that were made here or requested.

        Records older than KEPT_ROUNDS are kept by the chain or not at all.
        """
        self._made: dict[Digest, int] = {}
        """The blobs of shards that were made here lately, and their rounds."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._reduce_lock = asyncio.Lock()

    def reduce(self, record: Signed[RoundRecord], shard: int, committee: Sequence[PeerKey]) -> None:
        """Start to make a shard of a record's mean. Do nothing when it is being made already."""
        name = (record.digest, shard)
        if name not in self._tasks:
            self._note(record)
            self._tasks[name] = self.tasks.spawn(self._reduce(record, shard, committee), "shard")

    def fetch(self, blob: Digest, record: Signed[RoundRecord], shard: int, holders: Iterable[PeerKey]) -> None:
        """Fetch a shard that others made; answered like an update."""
        blob_format = self.format_of(len(record.body.updates), shard)
        self._note(record).add(blob)
        self.updates.fetch(blob, holders, blob_format)

    def _note(self, record: Signed[RoundRecord]) -> set[Digest]:
        """Return the blobs of this record's shards, made here or requested; forget those of records long before it."""
        oldest = record.body.round - KEPT_ROUNDS
        self._shards = {d: entry for d, entry in self._shards.items() if entry[0] > oldest}
        return self._shards.setdefault(record.digest, (record.body.round, set()))[1]

    def format_of(self, contributors: int, shard: int) -> ReducedShardFormat:
        """Return the format of a shard, by the number of the record's contributors."""
        return ReducedShardFormat(self.reduction, shard_count(contributors, self.update_size), shard)

    def drop(self, record: Digest) -> None:
        """Stop the work on a record, and forget its shards unless they are kept for another reason."""
        for name in [n for n in self._tasks if n[0] == record]:
            self._tasks.pop(name).cancel()
        for blob in self._shards.pop(record, (0, ()))[1]:
            self.updates.drop(blob)

    def retained_blobs(self) -> list[Digest]:
        """Return the shards to keep whether they are on the chain or not.

        These are the shards of records that were not dropped, and those that were made here lately.
        """
        return [*(blob for _, blobs in self._shards.values() for blob in blobs), *self._made]

    # -- one shard ---------------------------------------------------------------------------------------------

    async def _reduce(self, record: Signed[RoundRecord], shard: int, committee: Sequence[PeerKey]) -> None:
        answer = await self._make(record, shard, committee)
        # Before the answer is posted: it may lead to another request for the same shard.
        if self._tasks.get((record.digest, shard)) is asyncio.current_task():
            del self._tasks[record.digest, shard]
        self.post(answer)

    async def _make(
        self, record: Signed[RoundRecord], shard: int, committee: Sequence[PeerKey]
    ) -> ShardReduced | ShardUnavailable:
        blob_format = self.format_of(len(record.body.updates), shard)
        deadline = asyncio.get_running_loop().time() + SLICE_TIME_SHARE * self.updates.deadline_seconds
        requested: set[PeerKey] = set()
        # In a random order, so that slow authors do not delay the same others at every member.
        headers = random.sample(record.body.updates, len(record.body.updates))
        slice_tasks = {
            asyncio.ensure_future(self._slice(h, blob_format, committee, deadline, requested)): h for h in headers
        }
        slices: dict[PeerKey, memoryview] = {}
        invalid: list[PeerKey] = []
        copies: list[PeerKey] = []
        """Authors whose update names another: all are searched for before any is named."""
        try:
            left = set(slice_tasks)
            while left and not invalid:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    author = slice_tasks[task].author
                    try:
                        found = task.result()
                    except CodecError as e:
                        self.post(BlobInvalid(slice_tasks[task].body.blob, str(e)))
                        invalid.append(author)
                        continue
                    if found is None:
                        continue
                    if shard == 0 and self.updates.codec.author_of(found) != author:
                        copies.append(author)
                        continue
                    slices[author] = found
        finally:
            for task in slice_tasks:
                task.cancel()
            await asyncio.gather(*slice_tasks, return_exceptions=True)
        # Only the author of an invalid update is named: other slices may simply not have arrived yet. Authors whose
        # slices were never requested, because the time ran out, are not named either.
        missing = [h.author for h in record.body.updates if h.author not in slices]
        unavailable = invalid or [author for author in missing if author in requested or author in copies]
        if missing:
            names = ", ".join(a.short for a in unavailable) or "authors that were not asked yet"
            kind = "invalid updates of" if invalid else "others' updates, or none, from"
            log.info("shard %d is not made: %s %s", shard, kind, names)
            return ShardUnavailable(record.digest, shard, tuple(sorted(unavailable)))
        weighed = zip(record.body.contributors, record.body.weighed, strict=True)
        contributions = [Contribution(author, windows, slices[author]) for author, windows in weighed]
        try:
            async with self._reduce_lock:
                blob = await asyncio.to_thread(
                    lambda: self.store.put(
                        self.reduction.reduce(contributions, self.outer, blob_format.count, blob_format.shard)
                    )
                )
        except StoreFull:
            raise
        except StoreError as e:
            log.warning("shard %d is not made, and nobody else is to blame: %s", shard, e)
            return ShardUnavailable(record.digest, shard, ())
        self._note(record).add(blob)
        number = record.body.round
        self._made = {b: n for b, n in self._made.items() if n > number - KEPT_ROUNDS} | {blob: number}
        self.updates.trust(blob, blob_format)
        return ShardReduced(record.digest, shard, blob)

    # -- one slice ---------------------------------------------------------------------------------------------

    async def _slice(
        self,
        header: Signed[UpdateHeader],
        blob_format: ReducedShardFormat,
        committee: Sequence[PeerKey],
        deadline: float,
        requested: set[PeerKey],
    ) -> memoryview | None:
        """Return an update's bytes, of which only the shard's chunks are valid; None when they do not arrive in time.

        The author is added to `requested` once its slice was requested for the duration of a whole attempt.
        Raises CodecError when the slice breaks the codec's rules.
        """
        blob, now = header.body.blob, asyncio.get_running_loop().time
        chunks = self.reduction.chunks(blob_format.count, blob_format.shard)
        while True:
            try:
                await self.updates.verify(blob)
                found = self._find(blob, chunks)
                if found is None and now() < deadline:
                    async with self._turns:
                        seconds = max(0.1, min(SLICE_ATTEMPT_SECONDS, deadline - now()))
                        if seconds >= min(
                            SLICE_ATTEMPT_SECONDS, 0.5 * SLICE_TIME_SHARE * self.updates.deadline_seconds
                        ):
                            requested.add(header.author)
                        relays = self.network.relay.relays_from(header.author)
                        holders = list(dict.fromkeys([header.author, *committee, *relays]))
                        await self.network.fetch_blob(
                            blob, self.update_size, holders, deadline_seconds=seconds, chunks=chunks
                        )  # fmt: skip
                    found = self._find(blob, chunks)
                if found is not None:
                    await asyncio.to_thread(self.reduction.check_slice, found, blob_format.count, blob_format.shard)
                    return found
            except (CodecError, StoreFull):
                raise  # no other attempt helps with a full disk: the user must act
            except (CairnError, asyncio.TimeoutError) as e:
                log.debug("shard %d of update %s did not come: %s", blob_format.shard, blob.short, e)
            if now() >= deadline:
                return None
            await asyncio.sleep(SLICE_RETRY_SECONDS)

    def _find(self, blob: Digest, chunks: Sequence[int]) -> memoryview | None:
        """Return the bytes of an update that is held whole, or of which all these chunks are."""
        try:
            if self.store.has(blob):
                return map_file(self.store.path(blob))
            arriving = self.store.in_progress(blob)
            if arriving is None or arriving.is_incomplete(chunks):
                return None
            return map_file(arriving.path)
        except BlobMissing:
            return None  # it was completed, and moved, at this moment

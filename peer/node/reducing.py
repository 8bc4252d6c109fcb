"""A committee member's work in a reducing round: the slices of its part from every author, their sum, its blob.

Of each listed update only the chunks that cover the part are fetched, from the author, from others of the committee,
or from who hears an author that we do not (`passing`). They stay partial blobs in the store, where the others can have
them too. Nothing here is a decision: which parts of which records are to be reduced, and what follows, the round
machine says.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peer.node.updates import BlobSource, Updates, map_file
from peer.store import BlobMissing as NotInStore
from peer.store import Store, StoreFull
from protocol.codec.interface import Blob
from protocol.errors import CairnError, CodecError
from protocol.ids import Digest, PeerKey
from protocol.messages import RoundRecord, Signed, UpdateHeader
from protocol.outer import Contribution
from protocol.reduce import Reduction, part_count
from protocol.rounds.events import BlobInvalid, ShardReduced, ShardUnavailable
from protocol.spec import OuterSpec

log = logging.getLogger("peer.reducing")

SHARE = 0.5
"""Of the exchange's time, what the slices have to come in: then the rest of the round is left for who is lacking."""

AT_ONCE = 16
"""Slices that are fetched at the same time, of all parts together."""

ATTEMPT_SECONDS = 5.0
"""A slice that does not come lets others have its turn after so long, and is tried again."""

PAUSE_SECONDS = 0.2

KEPT_ROUNDS = 8
"""For so many rounds what was made here is kept, whatever became of its record: others may be on its way to a branch
that we have left, as authors keep their updates for them."""


@dataclass(frozen=True)
class ReducedPart:
    """What a reduced part's blob has to be (a `Kind` of blob)."""

    reduction: Reduction
    count: int
    part: int

    @property
    def size(self) -> int:
        return self.reduction.size(self.count, self.part)

    def check(self, blob: Blob) -> None:
        self.reduction.check(blob, self.count, self.part)


class Reducing:
    """One task a part; `spawn` makes it (an error in one that is not the network's ends the node: a full disk, a bug).

    `answer` gets ShardReduced or ShardUnavailable, and BlobInvalid for an update whose slice breaks the codec's rules.
    """

    def __init__(
        self,
        store: Store,
        source: BlobSource,
        updates: Updates,
        reduction: Reduction,
        update_size: int,
        outer: OuterSpec,
        *,
        exchange_seconds: float,
        answer: Callable[[ShardReduced | ShardUnavailable | BlobInvalid], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        relays: Callable[[PeerKey], Sequence[PeerKey]] = lambda author: (),
    ):
        """`relays`: who else gets us what an author does not give us, for want of a way from it to us (`passing`)."""
        self._store = store
        self._source = source
        self._updates = updates
        self._reduction = reduction
        self._size = update_size
        self._outer = outer
        self.exchange_seconds = exchange_seconds
        """Of the open round."""
        self._answer = answer
        self._spawn = spawn
        self._relays = relays
        self._tasks: dict[tuple[Digest, int], asyncio.Task[None]] = {}
        self._parts: dict[Digest, set[Digest]] = {}
        """The parts' blobs that were made here or asked for, by the record that they are of."""
        self._rounds: dict[Digest, int] = {}
        """The rounds of those records: what is older than KEPT_ROUNDS is kept by the chain, or by nobody."""
        self._made: dict[Digest, int] = {}
        """The parts' blobs that were made here lately, and their rounds."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._one_sum = asyncio.Lock()

    def reduce(self, record: Signed[RoundRecord], part: int, committee: Sequence[PeerKey]) -> None:
        """Make a part of a record; nothing happens when that is under way."""
        name = (record.digest, part)
        if name not in self._tasks:
            self._note(record)
            self._tasks[name] = self._spawn(self._reduce(record, part, committee), "part")

    def fetch(self, blob: Digest, record: Signed[RoundRecord], part: int, holders: Iterable[PeerKey]) -> None:
        """Get a part that others made; answered as an update is."""
        kind = self.kind(len(record.body.updates), part)
        self._note(record).add(blob)
        self._updates.fetch(blob, kind.size, holders, kind)

    def _note(self, record: Signed[RoundRecord]) -> set[Digest]:
        """The parts of this record that are worked on; those of records long before it are forgotten."""
        self._rounds[record.digest] = record.body.round
        oldest = record.body.round - KEPT_ROUNDS
        for old in [d for d, number in self._rounds.items() if number <= oldest]:
            del self._rounds[old]
            self._parts.pop(old, None)
        return self._parts.setdefault(record.digest, set())

    def kind(self, contributors: int, part: int) -> ReducedPart:
        """What a part is, of a record with so many contributors."""
        return ReducedPart(self._reduction, part_count(contributors, self._size), part)

    def drop(self, record: Digest) -> None:
        """Nothing of this record is wanted any more, as far as it is not kept for another reason."""
        for name in [n for n in self._tasks if n[0] == record]:
            self._tasks.pop(name).cancel()
        self._rounds.pop(record, None)
        for blob in self._parts.pop(record, ()):
            self._updates.drop(blob)

    def undecided(self) -> list[Digest]:
        """The parts' blobs to keep, whether they are on the chain or not: of records that were not dropped, and those
        that were made here lately."""
        return [*(blob for blobs in self._parts.values() for blob in blobs), *self._made]

    # -- one part ----------------------------------------------------------------------------------------------

    async def _reduce(self, record: Signed[RoundRecord], part: int, committee: Sequence[PeerKey]) -> None:
        answer = await self._make(record, part, committee)
        # Before the answer: what it leads to may be that the part is asked for again.
        if self._tasks.get((record.digest, part)) is asyncio.current_task():
            del self._tasks[record.digest, part]
        self._answer(answer)

    async def _make(
        self, record: Signed[RoundRecord], part: int, committee: Sequence[PeerKey]
    ) -> ShardReduced | ShardUnavailable:
        kind = self.kind(len(record.body.updates), part)
        until = asyncio.get_running_loop().time() + SHARE * self.exchange_seconds
        asked: set[PeerKey] = set()
        # In each member's own order: those who let us wait shall not be before the same others everywhere.
        headers = random.sample(record.body.updates, len(record.body.updates))
        coming = {asyncio.ensure_future(self._slice(h, kind, committee, until, asked)): h for h in headers}
        slices: dict[PeerKey, memoryview] = {}
        bad: list[PeerKey] = []
        try:
            left = set(coming)
            while left and not bad:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    author = coming[task].author
                    try:
                        found = task.result()
                    except CodecError as e:
                        self._answer(BlobInvalid(coming[task].body.blob, str(e)))
                        bad.append(author)
                        continue
                    if found is not None:
                        slices[author] = found
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
        # Who sent rubbish is at fault; of the others' slices some may still be on their way then. Who was not asked in
        # time is not named.
        missing = [h.author for h in record.body.updates if h.author not in slices]
        lacking = bad or [author for author in missing if author in asked]
        if missing:
            log.info("part %d lacks the updates of %s", part, ", ".join(a.short for a in lacking))
            return ShardUnavailable(record.digest, part, tuple(sorted(lacking)))
        contributions = [Contribution(h.author, h.body.windows, slices[h.author]) for h in record.body.updates]
        async with self._one_sum:
            blob = await asyncio.to_thread(self._sum, contributions, kind)
        self._note(record).add(blob)
        number = record.body.round
        self._made = {b: n for b, n in self._made.items() if n > number - KEPT_ROUNDS} | {blob: number}
        self._updates.trust(blob, kind)
        return ShardReduced(record.digest, part, blob)

    def _sum(self, contributions: Sequence[Contribution], kind: ReducedPart) -> Digest:
        """In a thread: the part's blob, in the store. Raises StoreError."""
        return self._store.put(self._reduction.reduce(contributions, self._outer, kind.count, kind.part))

    # -- one slice ---------------------------------------------------------------------------------------------

    async def _slice(
        self,
        header: Signed[UpdateHeader],
        kind: ReducedPart,
        committee: Sequence[PeerKey],
        until: float,
        asked: set[PeerKey],
    ) -> memoryview | None:
        """An update's bytes, of which only the part's chunks are there; None when they do not come in time.

        Its author is put into `asked` once it has been asked for, for as long as an attempt takes.

        Raises CodecError when they break the codec's rules.
        """
        blob, now = header.body.blob, asyncio.get_running_loop().time
        chunks = self._reduction.chunks(kind.count, kind.part)
        await self._updates.verify(blob)
        while True:
            try:
                found = self._find(blob, chunks)
                if found is None and now() < until:
                    async with self._turns:
                        seconds = max(0.1, min(ATTEMPT_SECONDS, until - now()))
                        if seconds >= min(ATTEMPT_SECONDS, 0.5 * SHARE * self.exchange_seconds):
                            asked.add(header.author)
                        holders = list(dict.fromkeys([header.author, *committee, *self._relays(header.author)]))
                        await self._source.fetch_blob(
                            blob, self._size, holders, deadline_seconds=seconds, chunks=chunks
                        )  # fmt: skip
                    found = self._find(blob, chunks)
                if found is not None:
                    await asyncio.to_thread(self._reduction.check_slice, found, kind.count, kind.part)
                    return found
            except CodecError:
                raise
            except StoreFull:
                raise  # no next try helps: the user must act
            except (CairnError, asyncio.TimeoutError) as e:
                log.debug("part %d of update %s did not come: %s", kind.part, blob.short, e)
            if now() >= until:
                return None
            await asyncio.sleep(PAUSE_SECONDS)

    def _find(self, blob: Digest, chunks: Sequence[int]) -> memoryview | None:
        """The bytes of an update that is here, or of which all these chunks are."""
        try:
            if self._store.has(blob):
                return map_file(self._store.path(blob))
            arriving = self._store.in_progress(blob)
            if arriving is None or arriving.is_incomplete(chunks):
                return None
            return map_file(arriving.path)
        except NotInStore:
            return None  # it was whole, and moved, just now

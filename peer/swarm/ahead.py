"""Getting chunks of a blob that its author is still making, as their leaf hashes become known.

Only what costs nobody anything: a few requests at once, no report of anybody, and whoever gives nothing is left alone.
What did not come is fetched like any other blob once there is a digest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor

from peer.store import Ahead, BlobMissing
from peer.swarm.clock import clock
from peer.swarm.errors import PeerUnreachable
from peer.swarm.fetch import BULK
from peer.swarm.frames import Op, Request, Status
from peer.swarm.links import LinkLost, Links
from protocol.errors import MalformedError
from protocol.ids import PeerKey
from protocol.merkle import CHUNK

log = logging.getLogger(__name__)

AT_ONCE, ALL_AT_ONCE = 4, 16
"""Chunks that are asked of one holder at once, and of all."""

LOOK_SECONDS = 0.05
"""How often to look whether there are more leaf hashes."""

REST_SECONDS, TRIES = 0.1, 6
"""A holder that did not give a chunk is asked again after so long, doubled each time; and after so many not at all."""

ABSENT_SECONDS = 0.2
"""One that has not got it yet, but others perhaps, is asked again after so long, for one."""

GO_ON_SECONDS, DRAIN_SECONDS = 2.0, 5.0
"""In the end so long what was named is still asked for, and so long what is under way is waited for: who asked another
for it would get it later, and twice."""

AUTHORS_SECONDS, FELLOWS_SECONDS = 1.0, 0.5
"""That is over sooner when no chunk came for so long: while the author is asked for some, and when only fellows are."""

Deal = Callable[[], Callable[[int], PeerKey]]
"""Gives, as of now, of whom each chunk is to be asked."""


class FetchAhead:
    """One attempt at one blob. `run` ends when `over` is set."""

    def __init__(
        self, links: Links, executor: Executor, ahead: Ahead, author: PeerKey, deal: Deal, over: asyncio.Event
    ):
        self._links = links
        self._executor = executor
        self._ahead = ahead
        self._author = author
        self._deal = deal
        self._over = over
        self._lane = "bulk" if ahead.size > BULK else "quick"
        self._running: dict[asyncio.Task[None], tuple[PeerKey, int]] = {}
        self._failed: Counter[PeerKey] = Counter()
        self._waits: set[PeerKey] = set()
        """Holders that had not got what was asked for last."""
        self._came_at = 0.0
        self._rests_until: defaultdict[PeerKey, float] = defaultdict(float)

    async def run(self) -> None:
        """Raises MalformedError when the author gave another chunk than it had named, StoreError."""
        try:
            while not self._over.is_set():
                self._ask()
                await self._wait(LOOK_SECONDS)
            self._came_at = clock()
            began = clock()
            while clock() < min(began + DRAIN_SECONDS, self._came_at + self._patience()):
                if clock() < began + GO_ON_SECONDS and self._ahead.missing():
                    self._ask()
                elif not self._running:
                    break
                await self._wait(LOOK_SECONDS)
        except BlobMissing:
            pass  # it is not wanted any more
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _patience(self) -> float:
        """In the end: how long to wait for the next chunk."""
        of_author = any(holder == self._author for holder, _ in self._running.values())
        return AUTHORS_SECONDS if of_author else FELLOWS_SECONDS

    def _ask(self) -> None:
        """For what can be asked for now."""
        now, of_whom = clock(), self._deal()
        asked = {index for _, index in self._running.values()}
        busy = Counter(holder for holder, _ in self._running.values())
        for index in self._ahead.missing():
            if len(self._running) >= ALL_AT_ONCE:
                return
            holder = of_whom(index)
            most = 1 if holder in self._waits else AT_ONCE
            if index in asked or busy[holder] >= most or now < self._rests_until[holder]:
                continue
            busy[holder] += 1
            self._running[asyncio.ensure_future(self._one(holder, index))] = (holder, index)

    async def _wait(self, seconds: float) -> None:
        """For an answer, at most this long. Raises what one led to."""
        if not self._running:
            await asyncio.sleep(seconds)
            return
        done, _ = await asyncio.wait(self._running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._running[task]
            task.result()

    async def _one(self, holder: PeerKey, index: int) -> None:
        try:
            place = await self._links.place(holder, self._lane)
            try:
                async with place.asking(Request(Op.CHUNK, self._ahead.name, index), CHUNK) as reply:
                    if reply.status is Status.ABSENT:
                        self._waits.add(holder)
                        self._rests_until[holder] = max(self._rests_until[holder], clock() + ABSENT_SECONDS)
                        return
                    if reply.status is not Status.OK:
                        self._rest(holder, reply.reason)
                        return
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._executor, self._ahead.write, index, reply.data)
                    self._failed.pop(holder, None)
                    self._waits.discard(holder)
                    self._came_at = clock()
            finally:
                place.free()
        except (LinkLost, PeerUnreachable) as e:
            self._rest(holder, str(e))
        except MalformedError as e:
            if holder == self._author:
                raise
            # Not its fault, perhaps: the author may have named other chunks to it.
            log.debug("%s gives another chunk than the author named: %s", holder.short, e)
            self._rests_until[holder] = float("inf")

    def _rest(self, holder: PeerKey, why: str) -> None:
        """Do not ask this holder for a while. What failed at the same time counts once."""
        if clock() < self._rests_until[holder]:
            return
        self._failed[holder] += 1
        tries = self._failed[holder]
        self._rests_until[holder] = clock() + REST_SECONDS * 2**tries if tries < TRIES else float("inf")
        log.debug("%s gives nothing ahead: %s", holder.short, why)

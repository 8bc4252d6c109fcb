"""Slices of updates that are passed on: an author and a whole committee behind NATs reach each other by who hears both.

A committee member that does not hear an author asks the author's relays too (see `relaying`: everybody computes the
same few) for the update. That is all there is of a request: a relay that is asked looks at its undecided slates, gets
what the asker needs of the update for its parts, from the author, and gives it like any other blob that is arriving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from peer.node.relaying import Relaying
from peer.node.updates import BlobSource
from peer.store import Store
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey
from protocol.messages import RoundRecord, Signed
from protocol.reduce import Reduction, part_count
from protocol.spec import RoundSpec

log = logging.getLogger("peer.passing")

ATTEMPT_SECONDS = 5.0
"""What a slice is waited for: an author that gives nothing must not keep others' from coming. Who still needs it asks
again."""

AT_ONCE = 4
TIMES_OWN_WORK = 4
"""So many times the slices that a member gets for its own parts it passes on in a round: asking costs others nothing.
With committees of three, and 60% of the members behind NATs, the others have 0.6 times their own to pass on; with 75%,
2.5 times."""

FULL = 0.8
"""When more of the store than this is used, its room is for what the node itself needs."""

LOOK_AGAIN, SLATE_UNKNOWN = 1.0, 0.1
"""Seconds until an asker's next question about one update is looked at: one comes with each chunk; also when we do not
know yet what it needs it for."""

MAX_ASKED = 8192

Slices = Callable[[Digest, PeerKey], Sequence[tuple[Signed[RoundRecord], int, tuple[PeerKey, ...]]]]


class Network(BlobSource, Protocol):
    """What is needed of `Network`."""

    @property
    def relaying(self) -> Relaying: ...


class Passing:
    """One task a slice. `slices` is the round machine's `slices_for`."""

    def __init__(
        self,
        me: PeerKey,
        store: Store,
        network: Network,
        reduction: Reduction,
        update_size: int,
        round: RoundSpec,
        slices: Slices,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ):
        self._me = me
        self._store = store
        self._network = network
        self._reduction = reduction
        self._size = update_size
        self._committee = round.committee
        self._slices = slices
        self._spawn = spawn
        self._asked: dict[tuple[Digest, PeerKey], float] = {}
        self._under_way: set[tuple[Digest, tuple[int, ...]]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._number, self._passed = -1, 0
        """Slices passed on in the round."""

    def asked(self, blob: Digest, by: PeerKey) -> None:
        """A peer that may have this blob asks for it: when it is an update that it gets by us only, get its slices."""
        relaying, now = self._network.relaying, asyncio.get_running_loop().time()
        if not relaying.misses_some(by) or now < self._asked.get((blob, by), 0.0):
            return
        if len(self._asked) >= MAX_ASKED:
            self._asked.clear()
        found = () if self._store.has(blob) else self._slices(blob, by)
        self._asked[blob, by] = now + (LOOK_AGAIN if found else SLATE_UNKNOWN)
        for record, part, committee in found:
            for author in (
                u.author for u in record.body.updates if u.body.blob == blob
            ):  # anybody can name it as theirs
                if not relaying.misses(by, author) or self._me not in relaying.relays(author, by):
                    continue
                if not any(relaying.hears_both(k, author, by) for k in committee):
                    self._pass_on(record, author, blob, part, by)

    def _pass_on(self, record: Signed[RoundRecord], author: PeerKey, blob: Digest, part: int, by: PeerKey) -> None:
        contributors = len(record.body.updates)
        chunks = tuple(self._reduction.chunks(part_count(contributors, self._size), part))
        if record.body.round != self._number:
            self._number, self._passed = record.body.round, 0
        arriving = self._store.in_progress(blob)
        here = arriving is not None and not arriving.is_incomplete(chunks)
        most = TIMES_OWN_WORK * self._committee * contributors
        full = self._store.used_bytes > FULL * self._store.limit_bytes
        if here or full or (blob, chunks) in self._under_way or self._passed >= most:
            return
        self._passed += 1
        self._under_way.add((blob, chunks))
        self._spawn(self._get(author, blob, chunks, by), "slice for others")

    async def _get(self, author: PeerKey, blob: Digest, chunks: tuple[int, ...], by: PeerKey) -> None:
        try:
            async with self._turns:
                if not self._slices(blob, by):
                    return  # the slate was decided while others had their turn
                await self._network.fetch_blob(
                    blob, self._size, [author], deadline_seconds=ATTEMPT_SECONDS, chunks=chunks
                )  # fmt: skip
            log.debug("a slice of update %s by %s is passed on", blob.short, author.short)
        except (CairnError, asyncio.TimeoutError) as e:
            log.info("a slice of the update of %s cannot be passed on: %s", author.short, str(e) or type(e).__name__)
        finally:
            self._under_way.discard((blob, chunks))

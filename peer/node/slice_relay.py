"""Relay of update slices between an author and a committee that cannot connect, by members in contact with both.

A committee member without contact to an author also asks the author's relays for the update. Every member computes the
same relays (`message_relay`). The request says no more than the update's digest. The relay finds the undecided
proposals that list it, fetches the slices that the requester needs for its shards from the author, and serves them like
any arriving blob.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from peer.node.network import Network
from peer.node.shard_reducer import SLICE_ATTEMPT_SECONDS
from peer.node.tasks import Tasks
from peer.store import Store
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey
from protocol.messages import RoundRecord, Signed
from protocol.reduce import Reduction
from protocol.reduce_plan import shard_count
from protocol.rounds.machine import RoundMachine
from protocol.spec import RoundSpec

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Maximum number of slices that are fetched for others at once."""

TIMES_OWN_WORK = 4
"""Maximum number of slices relayed in a round, as a multiple of the slices that a member fetches for its own shards:
requests cost others nothing. With committees of three, and 60% of the members behind NATs, the others relay 0.6 times
their own slices; with 75%, 2.5 times."""

FULL = 0.8
"""Share of the store's limit above which its room is kept for the node itself."""

KNOWN_SECONDS, UNKNOWN_SECONDS = 1.0, 0.1
"""Seconds until the next request of one peer for one update is considered: a request comes with each chunk. The second
value holds while no proposal says what the peer needs it for."""

MAX_REQUESTS = 8192


@dataclass(eq=False)
class SliceRelay:
    """The fetching of update slices for members that cannot reach the author: one task for each slice.

    `update_size` is in bytes.
    """

    me: PeerKey
    store: Store
    network: Network
    reduction: Reduction
    update_size: int
    round: RoundSpec
    machine: RoundMachine
    tasks: Tasks

    def __post_init__(self) -> None:
        self._requests: dict[tuple[Digest, PeerKey], float] = {}
        self._under_way: set[tuple[Digest, tuple[int, ...]]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._round, self._relayed = -1, 0
        """The round of the last slice relayed, and the slices relayed in it."""

    def note_request(self, blob: Digest, by: PeerKey) -> None:
        """Note that a peer that may have this blob requests it; fetch the slices that it can only get from us."""
        selector, now = self.network.relay.selector, asyncio.get_running_loop().time()
        if not selector.is_cut_off_from_some(by) or now < self._requests.get((blob, by), 0.0):
            return
        if len(self._requests) >= MAX_REQUESTS:
            self._requests.clear()
        found = () if self.store.has(blob) else self.machine.duties_of(blob, by)
        self._requests[blob, by] = now + (KNOWN_SECONDS if found else UNKNOWN_SECONDS)
        for record, shard, committee in found:
            # Several authors may be listed with one blob: anybody can name it as theirs.
            for author in (u.author for u in record.body.updates if u.body.blob == blob):
                if not selector.is_cut_off(author, by) or self.me not in selector.relays(author, by):
                    continue
                if not any(selector.connects(k, author, by) for k in committee):
                    self._relay(record, author, blob, shard, by)

    def _relay(self, record: Signed[RoundRecord], author: PeerKey, blob: Digest, shard: int, by: PeerKey) -> None:
        contributors = len(record.body.updates)
        chunks = tuple(self.reduction.chunks(shard_count(contributors, self.update_size), shard))
        if record.body.round != self._round:
            self._round, self._relayed = record.body.round, 0
        arriving = self.store.in_progress(blob)
        here = arriving is not None and not arriving.is_incomplete(chunks)
        most = TIMES_OWN_WORK * self.round.committee * contributors
        full = self.store.used_bytes > FULL * self.store.limit_bytes
        if here or full or (blob, chunks) in self._under_way or self._relayed >= most:
            return
        self._relayed += 1
        self._under_way.add((blob, chunks))
        self.tasks.spawn(self._fetch(author, blob, chunks, by), "slice for others")

    async def _fetch(self, author: PeerKey, blob: Digest, chunks: tuple[int, ...], by: PeerKey) -> None:
        try:
            async with self._turns:
                if not self.machine.duties_of(blob, by):
                    return  # the record was decided meanwhile
                await self.network.fetch_blob(
                    blob, self.update_size, [author], deadline_seconds=SLICE_ATTEMPT_SECONDS, chunks=chunks
                )  # fmt: skip
            log.debug("a slice of update %s by %s is relayed", blob.short, author.short)
        except (CairnError, asyncio.TimeoutError) as e:
            log.info("a slice of the update of %s cannot be relayed: %s", author.short, str(e) or type(e).__name__)
        finally:
            self._under_way.discard((blob, chunks))

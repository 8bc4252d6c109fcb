"""The files that a state is made of: a checkpoint and the rounds after it, fetched where they are not held.

The trainer's moves and audits use it: both need everything in the store before they begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from peer.channel import RoundUpdates, UpdateFile
from peer.errors import PeerError
from peer.node.base_model import LEAST_RATE
from peer.node.network import Network
from peer.node.round_blob_fetcher import BlobFormat, RoundBlobFetcher
from peer.node.shard_reducer import ShardReducer
from peer.store import Store, StoreFull
from protocol.errors import CairnError, CodecError
from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Certificate
from protocol.spec import RunSpec
from protocol.state import state_layout

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Blobs that are requested at the same time: a round may have a thousand shards."""

CHECKPOINT_SECONDS = 600.0
"""Maximum seconds to fetch a checkpoint; a large one has as many as LEAST_RATE needs."""


@dataclass(frozen=True, slots=True)
class StateStart:
    """A state to start from: that after `record`, before the round `round`, which is at `index` of the path."""

    index: int
    record: Digest
    round: Round
    state: Digest


@dataclass(eq=False)
class StateFetcher:
    """Fetches checkpoints and rounds into the store. `me`: in reduced rounds our own updates are included."""

    spec: RunSpec
    me: PeerKey
    store: Store
    network: Network
    updates: RoundBlobFetcher
    reducer: ShardReducer

    def __post_init__(self) -> None:
        self.checkpoint_bytes = state_layout(self.spec.model.layout, self.spec.outer).checkpoint_size
        self.checkpoint_seconds = max(CHECKPOINT_SECONDS, self.checkpoint_bytes / LEAST_RATE)
        self._turns = asyncio.Semaphore(AT_ONCE)

    def allow_for(self, bytes_per_second: float) -> None:
        """Raise the deadlines of checkpoints and updates to what a network of this speed needs."""
        self.checkpoint_seconds = max(self.checkpoint_seconds, self.checkpoint_bytes / bytes_per_second)
        self.updates.allow(AT_ONCE * self.updates.codec.size / bytes_per_second)

    def starts(self, path: Sequence[Certificate], kept: Sequence[int]) -> Iterator[StateStart]:
        """Yield the states on a path to start from, best first: the newest in our store, then those that members keep.

        `kept`: the indices of the latter, by `protocol.rounds.retention.kept_starts`.
        """
        newest = range(len(path) - 1, -1, -1)
        held = islice((i for i in newest if self.store.has(path[i].record.body.base_state)), 1)
        for i in dict.fromkeys([*held, *kept]):
            body = path[i].record.body
            yield StateStart(i, body.parent, body.round, body.base_state)

    def missing(self, start: StateStart, path: Sequence[Certificate]) -> dict[Digest, int]:
        """Return the blobs that `collect` would have to fetch for a start, with their sizes in bytes."""
        sizes = {start.state: self._checkpoint_size(start.state)}
        for certificate in path[start.index :]:
            sizes |= self.blob_sizes(certificate)
        return {blob: size for blob, size in sizes.items() if not self.store.has(blob)}

    def blob_sizes(self, certificate: Certificate) -> dict[Digest, int]:
        """Return the blobs that a record's state is made of, with their sizes in bytes."""
        updates = certificate.record.body.updates
        if not certificate.shards:
            return {u.body.blob: self.updates.codec.size for u in updates}
        return {blob: self.reducer.format_of(len(updates), i).size for i, blob in enumerate(certificate.shards)}

    async def collect(
        self,
        starts: Iterable[StateStart],
        path: Sequence[Certificate],
        make_room: Callable[[StateStart], Awaitable[None]] | None = None,
    ) -> tuple[StateStart, Path, tuple[RoundUpdates, ...]]:
        """Return the first start from which all is available, its checkpoint, and the rounds of the path after it.

        `make_room` is called before anything is fetched for a start. A PeerError of its own rules that start out.
        Raises PeerError when there is none, StoreFull, and CodecError for a record that lists an invalid update.
        """
        errors: list[str] = []
        unavailable = -1
        """The last round on the path that nobody gave: it is useless to start before it."""
        for start in starts:
            if start.index <= unavailable:
                continue
            rounds: list[RoundUpdates] = []
            checkpoint = None
            try:
                if make_room is not None:
                    await make_room(start)
                checkpoint = await self.checkpoint(start.state)
                for certificate in path[start.index :]:
                    rounds.append(await self.round_files(certificate))
                return start, checkpoint, tuple(rounds)
            except (StoreFull, CodecError):
                raise  # no other start helps: the user must act, or the record lists an invalid update
            except (CairnError, asyncio.TimeoutError) as e:
                errors.append(f"from the state of round {start.round}: {e}")
                if checkpoint is not None:
                    unavailable = start.index + len(rounds)
        what = "what leads there from a checkpoint" if unavailable >= 0 else "a checkpoint to start from"
        raise PeerError(f"{what} is not available ({'; '.join(errors)})")

    async def checkpoint(self, state: Digest) -> Path:
        """Return the file of a checkpoint, held. Raises CairnError."""
        if not self.store.has(state):
            size = self._checkpoint_size(state)
            providers = self.network.providers(state=state)
            await self.network.fetch_blob(
                state, size, providers, deadline_seconds=self.checkpoint_seconds, what="the checkpoint"
            )
        return self.store.path(state)

    def _checkpoint_size(self, state: Digest) -> int:
        genesis = self.spec.genesis
        return genesis.size if state == genesis.name else self.checkpoint_bytes

    async def round_files(self, certificate: Certificate) -> RoundUpdates:
        """Return the files that a record's state is made of; those that are not held are fetched.

        These are the record's updates, or the reduced shards of a reduced round. Of a reduced round our own update is
        included: the residual that the mean leaves out of it goes back into the error feedback. Raises CairnError.
        """
        record = certificate.record
        listed, holders = record.body.updates, list(record.body.contributors)
        wanted: list[tuple[Digest, list[PeerKey], BlobFormat | None, PeerKey | None]]
        if certificate.shards:
            wanted = [
                (blob, holders, self.reducer.format_of(len(listed), shard), None)
                for shard, blob in enumerate(certificate.shards)
            ]
        else:
            wanted = [(u.body.blob, [u.author, *holders], None, u.author) for u in listed]
        tasks = [asyncio.ensure_future(self._ensure(*one)) for one in wanted]
        try:
            files = tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # when one is unavailable, the others would delay the next attempt
        if not certificate.shards:
            weighed = zip(listed, record.body.weighed, files, strict=True)
            updates = tuple(UpdateFile(u.author, windows, f) for u, windows, f in weighed)
            return RoundUpdates(record.body.round, certificate.digest, updates)
        updates = tuple(
            UpdateFile(u.author, windows, f)
            for u, windows in zip(listed, record.body.weighed, strict=True)
            if u.author == self.me
            for f in self.own_updates([u.body.blob])
        )
        return RoundUpdates(record.body.round, certificate.digest, updates, files)

    def own_updates(self, blobs: Sequence[Digest]) -> tuple[Path, ...]:
        """Return the files of own updates for the error feedback; one that the disk lost is reported as an error."""
        held = [b for b in blobs if self.store.has(b)]
        for lost in set(blobs) - set(held):
            log.error("our update %s is gone from the store: its content is not put back", lost.short)
        return tuple(self.store.path(b) for b in held)

    async def _ensure(
        self, blob: Digest, holders: Sequence[PeerKey], blob_format: BlobFormat | None, author: PeerKey | None
    ) -> Path:
        async with self._turns:
            return await self.updates.ensure(blob, holders, blob_format, author)

"""Moves of the trainer to the state that the round machine asks for: one record on, or a checkpoint and a replay.

Everything that a move needs is fetched before the trainer is asked for it. A move that cannot be prepared ends with
`SyncFailed(kept=True)`: the trainer still has its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from peer.channel import Apply, Load, RoundUpdates, ToTrainer
from peer.errors import TrainerDied
from peer.node.events import Post
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.state_fetcher import StateFetcher, StateStart
from peer.store import BlobMissing, Store, StoreFull
from protocol.chain import Chain, genesis_digest
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.messages import Certificate
from protocol.rounds.actions import ApplyRecord, SyncState
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.events import SyncFailed
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

VERIFY_CHUNKS = 256
"""Chunks that are verified in one piece of work: the end of the node waits for no more than that."""

OWN_RECORDS = 256
"""Records searched for own updates whose untransmitted residual must be restored."""


@dataclass(eq=False)
class StateLoader:
    """Works through ApplyRecord and SyncState actions one by one. The trainer answers a successful move itself.

    `post` receives a SyncFailed for any other.
    """

    spec: RunSpec
    me: PeerKey
    store: Store
    chain: Chain
    updates: RoundBlobFetcher
    files: StateFetcher
    post: Post

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[ApplyRecord | SyncState] = asyncio.Queue(maxsize=64)
        self._current: asyncio.Task[None] | None = None
        self.blobs_in_use: tuple[Digest, ...] = ()
        """Blobs whose files the trainer was last asked to read."""

    def apply(self, action: ApplyRecord | SyncState) -> None:
        """Queue a move behind those that were asked for before."""
        try:
            self._queue.put_nowait(action)
        except asyncio.QueueFull:
            self.post(SyncFailed(_target(action, self.spec.run_id), "too many rounds wait to be applied"))

    def sync(self, action: SyncState) -> None:
        """Replace all moves that were asked for before."""
        self.drop()
        self.apply(action)

    def drop(self) -> None:
        """Cancel all moves: the trainer that they were for is lost, or a SyncState replaces them."""
        while not self._queue.empty():
            self._queue.get_nowait()
        if self._current is not None:
            self._current.cancel()

    async def verify_blobs_in_use(self) -> None:
        """Verify the blobs that the trainer could not use. The store drops damaged ones, and they are fetched again.

        Raises StoreError when the disk cannot be read at all.
        """
        for blob in self.blobs_in_use:
            self.updates.forget([blob])
            await drop_if_damaged(self.store, blob)

    async def run(self, send: Callable[[ToTrainer], Awaitable[None]]) -> None:
        """Make one move after the other, until cancelled. `send` gives a message to the trainer."""
        while True:
            action = await self._queue.get()
            self._current = asyncio.create_task(self._execute(action, send))
            try:
                # A newer SyncState cancels the present move, not this loop.
                await asyncio.wait([self._current])
            except asyncio.CancelledError:
                self._current.cancel()
                raise
            if not self._current.cancelled() and (error := self._current.exception()) is not None:
                raise error
            self._current = None

    async def _execute(self, action: ApplyRecord | SyncState, send: Callable[[ToTrainer], Awaitable[None]]) -> None:
        target = _target(action, self.spec.run_id)
        try:
            await send(await (self._apply(action) if isinstance(action, ApplyRecord) else self._sync(action)))
        except TrainerDied as e:
            # The supervisor reports the loss, once, for all that was under way.
            log.debug("not at the state after %s: %s", target.short, e)
        except StoreFull:
            raise  # no other attempt helps: the user must act
        except (CairnError, asyncio.TimeoutError) as e:
            reason = str(e) or "no answer in time"
            # The machine reports it, with the time of the next attempt. The trainer has not been asked yet.
            log.debug("cannot get to the state after %s: %s", target.short, reason)
            self.post(SyncFailed(target, reason, kept=True))

    async def _apply(self, action: ApplyRecord) -> Apply:
        record = action.certificate.record.body
        update = await self.files.round_files(action.certificate)
        self.blobs_in_use = tuple(applied_blobs(action.certificate))
        return Apply(
            update=update,
            missed=self.files.own_updates(action.missed),
            next_window=action.next_window,
            accepted_windows=action.weight,
            write_checkpoint=self._checkpoint_path(Round(record.round + 1), action.is_checkpoint),
        )

    async def _sync(self, action: SyncState) -> Load:
        path = action.path
        start, checkpoint, replay = await self.files.collect(self._starts(action), action.path)
        reduced = await self._rounds_with_residuals(start.record, action.regained)
        end = Round(path[-1].record.body.round + 1) if path else start.round
        applied = (blob for c in path[start.index :] for blob in applied_blobs(c))
        self.blobs_in_use = (start.state, *applied, *action.regained)
        return Load(
            checkpoint=checkpoint,
            base_state=start.state,
            record=start.record,
            round=start.round,
            replay=replay,
            restore=self.files.own_updates(action.missed),
            next_window=action.next_window,
            accepted_windows=action.weight,
            write_checkpoint=self._checkpoint_path(end, action.is_checkpoint),
            withdraw=self.files.own_updates(action.regained),
            reduced=reduced,
        )

    def _starts(self, action: SyncState) -> Iterator[StateStart]:
        """Yield the states to start from, best first.

        Without a path the only one is the state that the run was rolled back to, or the genesis.
        """
        path, back = action.path, action.start
        if not path and back is not None:
            yield StateStart(0, back.record, back.round, back.state)
        elif not path:
            yield StateStart(0, genesis_digest(self.spec.run_id), Round(0), self.spec.genesis.name)
        yield from self.files.starts(path, action.starts)

    async def _rounds_with_residuals(self, record: Digest, regained: Sequence[Digest]) -> tuple[RoundUpdates, ...]:
        """Return the reduced rounds up to a record, oldest first, for the residuals that they left out of our updates.

        The trainer restores those that its error feedback does not have yet. The rounds are the last one
        that accepted one of our updates, and those that accepted one of `regained`. A round whose blobs are unavailable
        is left out: that costs the residual, not the state.
        """
        found: list[RoundUpdates] = []
        wanted, last = set(regained), True
        for certificate in islice(self._back_from(record), OWN_RECORDS):
            own = next((u.body.blob for u in certificate.record.body.updates if u.author == self.me), None)
            if own is None or not (last or own in wanted):
                continue
            last = False
            if certificate.shards and self.store.has(own):
                try:
                    found.append(await self.files.round_files(certificate))
                except StoreFull:
                    raise
                except (CairnError, asyncio.TimeoutError) as e:
                    number = certificate.record.body.round
                    log.warning("what round %d left out of our update is lost: %s", number, e)
            wanted.discard(own)
            if not wanted:
                break
        return tuple(reversed(found))

    def _back_from(self, record: Digest) -> Iterator[Certificate]:
        """Yield a record's certificate, its parent's, and so on as far as memory goes."""
        if record in self.chain:
            for digest in self.chain.ancestors(record):
                if digest != self.chain.root:
                    yield self.chain.certificate(digest)

    def _checkpoint_path(self, number: Round, is_checkpoint: bool) -> Path | None:
        """Return the file for the trainer to write the state of this round to; None when it is not to be kept."""
        return self.store.scratch / f"state-{number}.safetensors" if is_checkpoint else None


async def drop_if_damaged(store: Store, blob: Digest) -> None:
    """Verify a blob if it is here. The store reports and drops a damaged one. Raises StoreError."""
    with contextlib.suppress(BlobMissing):
        first = 0
        while not await asyncio.to_thread(store.verify, blob, first, VERIFY_CHUNKS):
            first += VERIFY_CHUNKS


def _target(action: ApplyRecord | SyncState, run: RunId) -> Digest:
    """Return the record whose state an action leads to."""
    if isinstance(action, ApplyRecord):
        return action.certificate.digest
    if not action.path and action.start is not None:
        return action.start.record
    return action.path[-1].digest if action.path else genesis_digest(run)

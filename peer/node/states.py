"""Gets the trainer to the state that the machine asks for: one record on, or afresh from a checkpoint and replay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rich.filesize import decimal

from peer.channel import Apply as ApplyMessage
from peer.channel import Load, RoundUpdates, ToTrainer, UpdateFile
from peer.errors import PeerError, TrainerDied
from peer.node.updates import BlobSource, Updates
from peer.store import BlobMissing, Store, StoreFull
from protocol.chain import genesis_digest
from protocol.errors import CairnError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.messages import Certificate
from protocol.rounds.actions import Apply, Resync
from protocol.rounds.events import ApplyFailed
from protocol.spec import RunSpec

log = logging.getLogger("peer.states")

VERIFY_CHUNKS = 256
"""Chunks that are checked at a time: an end waits for no more."""


class States:
    """Works through Apply and Resync actions one by one; the trainer's own Applied is the answer to the machine."""

    def __init__(
        self,
        spec: RunSpec,
        checkpoint_size: int,
        store: Store,
        source: BlobSource,
        updates: Updates,
        send: Callable[[ToTrainer], Awaitable[None]],
        *,
        me: PeerKey,
        everyone: Callable[[], list[PeerKey]],
        failed: Callable[[ApplyFailed], None],
    ):
        self._spec = spec
        self._run = spec.run_id
        self._checkpoint_size = checkpoint_size
        self._store = store
        self._source = source
        self._updates = updates
        self._send = send
        self._me = me
        self._everyone = everyone
        self._failed = failed
        self._queue: asyncio.Queue[Apply | Resync] = asyncio.Queue(maxsize=64)
        self._current: asyncio.Task[None] | None = None
        self._given: tuple[Digest, ...] = ()
        """Blobs whose files the trainer was told to read last."""

    def apply(self, action: Apply) -> None:
        """Next, after what is already asked for."""
        self._put(action)

    def resync(self, action: Resync) -> None:
        """Instead of everything asked for before."""
        self.drop()
        self._put(action)

    def drop(self) -> None:
        """Nothing of what was asked for is wanted any more: the trainer that it was for is lost, or a Resync comes."""
        while not self._queue.empty():
            self._queue.get_nowait()
        if self._current is not None:
            self._current.cancel()

    def _put(self, action: Apply | Resync) -> None:
        try:
            self._queue.put_nowait(action)
        except asyncio.QueueFull:
            self._failed(ApplyFailed(_target(action, self._run), "too many rounds wait to be applied"))

    async def look_for_damage(self) -> None:
        """The trainer could not use what it was given: what is damaged on disk goes, so that the next try fetches it.

        Raises StoreError when the disk cannot be read at all.
        """
        for blob in self._given:
            self._updates.forget([blob])
            with contextlib.suppress(BlobMissing):  # the store has told the user
                first = 0
                while not await asyncio.to_thread(self._store.verify, blob, first, VERIFY_CHUNKS):
                    first += VERIFY_CHUNKS

    async def run(self) -> None:
        """For ever: one action at a time."""
        while True:
            action = await self._queue.get()
            self._current = asyncio.create_task(self._do(action))
            try:
                # A newer Resync cancels the one under way, not this loop.
                await asyncio.wait([self._current])
            except asyncio.CancelledError:
                self._current.cancel()
                raise
            if not self._current.cancelled() and (error := self._current.exception()) is not None:
                raise error
            self._current = None

    async def _do(self, action: Apply | Resync) -> None:
        target = _target(action, self._run)
        try:
            if isinstance(action, Apply):
                await self._apply(action)
            else:
                await self._resync(action)
        except TrainerDied as e:
            # Who watches the trainer tells the machine, once, whatever was under way.
            log.debug("not at the state after %s: %s", target.short, e)
        except StoreFull:
            raise  # no next try helps: the user must act
        except (CairnError, asyncio.TimeoutError) as e:
            reason = str(e) or "no answer in time"
            # The machine tells the user, and when it is tried again.
            log.debug("cannot get to the state after %s: %s", target.short, reason)
            self._failed(ApplyFailed(target, reason))

    async def _apply(self, action: Apply) -> None:
        record = action.certificate.record.body
        update = await self._round(action.certificate)
        self._given = _blobs(action.certificate)
        await self._send(
            ApplyMessage(
                update=update,
                missed=self._own(action.missed),
                mine_accepted=self._me in record.contributors,
                next_window=action.next_window,
                accepted_windows=action.weight,
                write_checkpoint=self._checkpoint_path(Round(record.round + 1), action.weight),
            )
        )

    async def _resync(self, action: Resync) -> None:
        path = action.path
        start, checkpoint = await self._base(path)
        if start < len(path):
            body = path[start].record.body
            record, number, base = body.parent, body.round, body.base_state
        else:
            record, number, base = genesis_digest(self._run), Round(0), self._spec.genesis.name
        replay = tuple([await self._round(c) for c in path[start:]])
        end = Round(path[-1].record.body.round + 1) if path else Round(0)
        self._given = (base, *(blob for c in path[start:] for blob in _blobs(c)), *action.regained)
        await self._send(
            Load(
                checkpoint=checkpoint,
                base_state=base,
                record=record,
                round=number,
                replay=replay,
                restore=self._own(action.missed),
                next_window=action.next_window,
                accepted_windows=action.weight,
                write_checkpoint=self._checkpoint_path(end, action.weight),
                withdraw=self._own(action.regained),
            )
        )

    async def _base(self, path: tuple[Certificate, ...]) -> tuple[int, Path]:
        """Where on the path to begin, and the checkpoint of the state there: the newest that can be had."""
        if not path:
            return 0, await self._checkpoint(self._spec.genesis.name, self._spec.genesis.size, 600)
        # A state certified by a child is vouched for; what is on our disk costs nothing.
        for i in range(len(path) - 1, -1, -1):
            if self._store.has(path[i].record.body.base_state):
                return i, self._store.path(path[i].record.body.base_state)
        errors: list[str] = []
        every = self._spec.checkpoint.every
        marks = [i for i in range(len(path) - 1, -1, -1) if path[i].record.body.round % every == 0]
        # Members keep the last few checkpoints and the genesis: older ones are not worth asking for.
        for i in dict.fromkeys([*marks[: self._spec.checkpoint.keep + 1], 0]):
            base = path[i].record.body.base_state
            genesis = base == self._spec.genesis.name
            size = self._spec.genesis.size if genesis else self._checkpoint_size
            try:
                return i, await self._checkpoint(base, size, 600)
            except StoreFull:
                raise
            except (CairnError, asyncio.TimeoutError) as e:
                errors.append(f"state of round {path[i].record.body.round}: {e}")
        raise PeerError("no member gave a checkpoint to start from (" + "; ".join(errors) + "); it is tried again")

    async def _checkpoint(self, state: Digest, size: int, seconds: float) -> Path:
        if not self._store.has(state):
            log.info("fetching the checkpoint %s (%s)", state.short, decimal(size))
            await self._source.fetch_blob(state, size, self._everyone(), deadline_seconds=seconds)
        return self._store.path(state)

    async def _round(self, certificate: Certificate) -> RoundUpdates:
        """A record's updates as files; those that are not here yet are fetched."""
        record = certificate.record
        holders = list(record.body.contributors)
        seconds = self._spec.round.exchange_seconds
        files = await asyncio.gather(
            *(self._updates.ensure(u.body.blob, [u.author, *holders], seconds) for u in record.body.updates)
        )
        updates = zip(record.body.updates, files, strict=True)
        return RoundUpdates(
            round=record.body.round,
            record=record.digest,
            updates=tuple(UpdateFile(u.author, u.body.windows, f) for u, f in updates),
        )

    def _own(self, blobs: Sequence[Digest]) -> tuple[Path, ...]:
        """Own updates that go back into the error feedback; one that the disk lost is reported, not papered over."""
        held = [b for b in blobs if self._store.has(b)]
        for lost in set(blobs) - set(held):
            log.error("own update %s is gone from the store: what it held is not put back", lost.short)
        return tuple(self._store.path(b) for b in held)

    def _checkpoint_path(self, number: Round, accepted_windows: int) -> Path | None:
        """Where the trainer is to write the state of this round, if it is one to keep: each n-th, and a run's last."""
        total = self._spec.total_tokens
        last = bool(total) and accepted_windows * self._spec.data.window >= total
        if number == 0 or (number % self._spec.checkpoint.every and not last):
            return None
        return self._store.scratch / f"state-{number}.safetensors"


def _blobs(certificate: Certificate) -> tuple[Digest, ...]:
    return tuple(u.body.blob for u in certificate.record.body.updates)


def _target(action: Apply | Resync, run: RunId) -> Digest:
    """The record that an action leads to."""
    if isinstance(action, Apply):
        return action.certificate.record.digest
    return action.path[-1].record.digest if action.path else genesis_digest(run)

"""Gets the trainer to the state that the machine asks for: one record on, or afresh from a checkpoint and replay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from rich.filesize import decimal

from peer.channel import Apply as ApplyMessage
from peer.channel import Load, RoundUpdates, ToTrainer, UpdateFile
from peer.errors import PeerError, TrainerDied
from peer.node.keeping import OWN_BLOBS, applied_blobs
from peer.node.updates import BlobSource, Kind, Updates
from peer.store import BlobMissing, Store, StoreFull
from protocol.chain import genesis_digest
from protocol.errors import CairnError, CodecError
from protocol.ids import Digest, PeerKey, Round, RunId
from protocol.messages import Certificate, Rollback
from protocol.rounds.actions import ApplyRecord, Resync
from protocol.rounds.events import MoveFailed
from protocol.spec import RunSpec

log = logging.getLogger("peer.states")

VERIFY_CHUNKS = 256
"""Chunks that are checked at a time: an end waits for no more."""

AT_ONCE = 32
"""Blobs that are asked for at the same time: a round may have a thousand parts."""


class States:
    """Works through ApplyRecord and Resync actions one by one; the trainer's own Applied is the answer to the machine."""

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
        failed: Callable[[MoveFailed], None],
        part_kind: Callable[[int, int], Kind],
        back_from: Callable[[Digest], Iterator[Certificate]],
    ):
        """`part_kind(contributors, part)`: what a part of a reduced round's mean is. `back_from(record)`: its
        certificate, its parent's, and so on as far as is known."""
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
        self._part_kind = part_kind
        self._back_from = back_from
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._queue: asyncio.Queue[ApplyRecord | Resync] = asyncio.Queue(maxsize=64)
        self._current: asyncio.Task[None] | None = None
        self._given: tuple[Digest, ...] = ()
        """Blobs whose files the trainer was told to read last."""

    def apply(self, action: ApplyRecord) -> None:
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

    def _put(self, action: ApplyRecord | Resync) -> None:
        try:
            self._queue.put_nowait(action)
        except asyncio.QueueFull:
            self._failed(MoveFailed(_target(action, self._run), "too many rounds wait to be applied"))

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

    async def _do(self, action: ApplyRecord | Resync) -> None:
        target = _target(action, self._run)
        try:
            if isinstance(action, ApplyRecord):
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
            # The machine tells the user, and when it is tried again. What is told to the trainer comes last of all.
            log.debug("cannot get to the state after %s: %s", target.short, reason)
            self._failed(MoveFailed(target, reason, kept=True))

    async def _apply(self, action: ApplyRecord) -> None:
        record = action.certificate.record.body
        update = await self._round(action.certificate)
        self._given = applied_blobs(action.certificate)
        await self._send(
            ApplyMessage(
                update=update,
                missed=self._own(action.missed),
                next_window=action.next_window,
                accepted_windows=action.weight,
                write_checkpoint=self._checkpoint_path(Round(record.round + 1), action.weight),
            )
        )

    async def _resync(self, action: Resync) -> None:
        path = action.path
        back = action.start if not path else None
        start, checkpoint, replay = await self._way(path, back)
        if start < len(path):
            body = path[start].record.body
            record, number, base = body.parent, body.round, body.base_state
        elif back is not None:
            record, number, base = back.record, back.round, back.state
        else:
            record, number, base = genesis_digest(self._run), Round(0), self._spec.genesis.name
        reduced = await self._reduced_before(record, action.regained)
        end = Round(path[-1].record.body.round + 1) if path else number
        self._given = (base, *(blob for c in path[start:] for blob in applied_blobs(c)), *action.regained)
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
                reduced=reduced,
            )
        )

    async def _way(
        self, path: tuple[Certificate, ...], back: Rollback | None
    ) -> tuple[int, Path, tuple[RoundUpdates, ...]]:
        """Where on the path to begin, the checkpoint of the state there, and the rounds after it: from what is on disk,
        else from the newest checkpoint from which all can be had. With no path: the state that the run was rolled back
        to, or the genesis."""
        if back is not None:
            return 0, await self._checkpoint(back.state, self._checkpoint_size, 600), ()
        if not path:
            return 0, await self._checkpoint(self._spec.genesis.name, self._spec.genesis.size, 600), ()
        errors: list[str] = []
        lacking = -1
        """The last round on the path that could not be had: it is no use to begin before it."""
        for i in self._starts(path):
            if i <= lacking:
                continue
            base = path[i].record.body.base_state
            size = self._spec.genesis.size if base == self._spec.genesis.name else self._checkpoint_size
            rounds: list[RoundUpdates] = []
            checkpoint = None
            try:
                checkpoint = await self._checkpoint(base, size, 600)
                for certificate in path[i:]:
                    rounds.append(await self._round(certificate))
                return i, checkpoint, tuple(rounds)
            except (StoreFull, CodecError):
                raise  # no other way helps: the user must act; the record that lists it is none of the chain's
            except (CairnError, asyncio.TimeoutError) as e:
                errors.append(f"from the state of round {path[i].record.body.round}: {e}")
                if checkpoint is not None:
                    lacking = i + len(rounds)
        what = "what leads there from a checkpoint" if lacking >= 0 else "a checkpoint to start from"
        raise PeerError(f"no member gave {what} ({'; '.join(errors)}); it is tried again")

    def _starts(self, path: tuple[Certificate, ...]) -> Iterable[int]:
        """Where on a path to begin, the best first. A state certified by a child is vouched for."""
        newest = range(len(path) - 1, -1, -1)
        held = islice((i for i in newest if self._store.has(path[i].record.body.base_state)), 1)
        # Members keep the last few checkpoints and the genesis: older ones are not worth asking for.
        marks = [i for i in newest if path[i].record.body.round % self._spec.checkpoint.every == 0]
        return dict.fromkeys([*held, *marks[: self._spec.checkpoint.keep + 1], 0])

    async def _checkpoint(self, state: Digest, size: int, seconds: float) -> Path:
        if not self._store.has(state):
            log.info("fetching the checkpoint %s (%s)", state.short, decimal(size))
            await self._source.fetch_blob(state, size, self._everyone(), deadline_seconds=seconds)
        return self._store.path(state)

    async def _round(self, certificate: Certificate) -> RoundUpdates:
        """What a record's state is made of, as files; those that are not here yet are fetched.

        These are its updates; or, of a round that was reduced, the parts of their mean, and our own update if there is
        one, since what the mean has dropped of it goes back into the feedback.
        """
        record = certificate.record
        listed, holders = record.body.updates, list(record.body.contributors)
        if certificate.parts:
            kinds = [self._part_kind(len(listed), part) for part in range(len(certificate.parts))]
            wanted = [(blob, holders, kind) for blob, kind in zip(certificate.parts, kinds, strict=True)]
        else:
            wanted = [(u.body.blob, [u.author, *holders], None) for u in listed]
        tasks = [asyncio.ensure_future(self._ensure(*one)) for one in wanted]
        try:
            files = tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # when one cannot be had, the others are in the way of what is tried next
        if not certificate.parts:
            updates = tuple(UpdateFile(u.author, u.body.windows, f) for u, f in zip(listed, files, strict=True))
            return RoundUpdates(record.body.round, certificate.digest, updates)
        own = [(u, f) for u in listed if u.author == self._me for f in self._own([u.body.blob])]
        updates = tuple(UpdateFile(u.author, u.body.windows, f) for u, f in own)
        return RoundUpdates(record.body.round, certificate.digest, updates, files)

    async def _ensure(self, blob: Digest, holders: Sequence[PeerKey], kind: Kind | None) -> Path:
        async with self._turns:
            return await self._updates.ensure(blob, holders, self._updates.deadline_seconds, kind)

    async def _reduced_before(self, record: Digest, regained: Sequence[Digest]) -> tuple[RoundUpdates, ...]:
        """Of the records up to this one, those of which the trainer may still have to put back what was dropped of our
        update: the last that accepted one, and those that accepted one of `regained`. Oldest first.

        What cannot be had any more is left out: it costs what was dropped, not the state.
        """
        found: list[RoundUpdates] = []
        wanted, last = set(regained), True
        for certificate in islice(self._back_from(record), OWN_BLOBS):
            own = next((u.body.blob for u in certificate.record.body.updates if u.author == self._me), None)
            if own is None or not (last or own in wanted):
                continue
            last = False
            if certificate.parts and self._store.has(own):
                try:
                    found.append(await self._round(certificate))
                except StoreFull:
                    raise
                except (CairnError, asyncio.TimeoutError) as e:
                    number = certificate.record.body.round
                    log.warning("what round %d dropped of our update is lost: %s", number, e)
            wanted.discard(own)
            if not wanted:
                break
        return tuple(reversed(found))

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


def _target(action: ApplyRecord | Resync, run: RunId) -> Digest:
    """The record that an action leads to."""
    if isinstance(action, ApplyRecord):
        return action.certificate.digest
    if not action.path and action.start is not None:
        return action.start.record
    return action.path[-1].digest if action.path else genesis_digest(run)

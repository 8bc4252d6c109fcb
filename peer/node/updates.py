"""Fetches the blobs of a round's updates and checks them with the codec before anything else sees them."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from peer.store import BlobMissing as NotInStore
from peer.store import Store
from protocol.codec import Codec
from protocol.errors import CairnError, CodecError
from protocol.ids import Digest, PeerKey
from protocol.rounds.events import BlobBad, BlobHeld, BlobMissing

log = logging.getLogger("peer.updates")


class BlobSource(Protocol):
    """What a swarm offers for blobs (see `peer.swarm`)."""

    async def fetch_blob(
        self,
        digest: Digest,
        size: int | None,
        holders: Sequence[PeerKey],
        *,
        deadline_seconds: float,
    ) -> None: ...


class Updates:
    """One task a blob; `answer` gets BlobHeld, BlobBad or BlobMissing."""

    def __init__(
        self,
        store: Store,
        source: BlobSource,
        codec: Codec,
        *,
        deadline_seconds: float,
        everyone: Callable[[], list[PeerKey]],
        answer: Callable[[BlobHeld | BlobBad | BlobMissing], None],
    ):
        self._store = store
        self._source = source
        self._codec = codec
        self._deadline = deadline_seconds
        self._everyone = everyone
        self._answer = answer
        self._tasks: dict[Digest, asyncio.Task[None]] = {}
        self._checked: set[Digest] = set()

    def fetch(self, blob: Digest, size: int, author: PeerKey, holders: Iterable[PeerKey]) -> None:
        """Start to get a blob; nothing happens when it is on its way already."""
        if blob in self._tasks:
            return
        task = asyncio.create_task(self._fetch(blob, size, [author, *holders]))
        self._tasks[blob] = task
        task.add_done_callback(lambda _: self._tasks.pop(blob, None))

    def drop(self, blob: Digest) -> None:
        """Stop fetching a blob that nobody needs any more."""
        if (task := self._tasks.pop(blob, None)) is not None:
            task.cancel()

    async def _fetch(self, blob: Digest, size: int, holders: list[PeerKey]) -> None:
        if size != self._codec.size:
            self._answer(BlobBad(blob, f"an update of {size} bytes, where the run's codec makes {self._codec.size}"))
            return
        try:
            await self.ensure(blob, holders, self._deadline)
        except CodecError:
            pass  # `ensure` has told the machine
        except (CairnError, asyncio.TimeoutError) as e:
            log.info("update %s did not come: %s", blob.short, e)
            self._answer(BlobMissing(blob))
        else:
            self._answer(BlobHeld(blob))

    async def ensure(self, blob: Digest, holders: Sequence[PeerKey], seconds: float) -> Path:
        """The file of an update's blob, held and checked. Raises CodecError when it is bad, else as `fetch_blob`.

        Of a bad one the machine is told (BlobBad), whoever asked.
        """
        if not self._store.has(blob):
            order = dict.fromkeys([*holders, *self._everyone()])
            await self._source.fetch_blob(blob, self._codec.size, list(order), deadline_seconds=seconds)
        path = self._store.path(blob)
        if blob not in self._checked:
            try:
                await asyncio.to_thread(self._check, path)
            except CodecError as e:
                self._answer(BlobBad(blob, str(e)))
                raise
            self._checked.add(blob)
        return path

    def trust(self, blob: Digest) -> None:
        """An own blob: made by our trainer, nothing to check."""
        self._checked.add(blob)

    def forget(self, gone: Iterable[Digest]) -> None:
        """Blobs that the store has dropped."""
        self._checked.difference_update(gone)

    def _check(self, path: Path) -> None:
        """Structure, bounds and finiteness, in a thread: torch and hashing leave the event loop alone."""
        try:
            with open(path, "rb") as file:
                # Not closed by hand: a CodecError's traceback still holds views of it, and closing would raise instead.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._codec.check(memoryview(data))
        except OSError as e:
            raise NotInStore(f"cannot read {path}: {e.strerror}") from None

    async def close(self) -> None:
        """Stop all fetches."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

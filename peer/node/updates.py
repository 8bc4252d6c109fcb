"""Fetches the blobs of a round's updates and checks them with the codec before anything else sees them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from peer.store import BlobMissing as NotInStore
from peer.store import Store, StoreFull
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
    """One task a blob, made by `spawn` (an error in one that is not the network's ends the node: a full disk, a bug);
    `answer` gets BlobHeld, BlobBad or BlobMissing."""

    def __init__(
        self,
        store: Store,
        source: BlobSource,
        codec: Codec,
        *,
        deadline_seconds: float,
        everyone: Callable[[], list[PeerKey]],
        answer: Callable[[BlobHeld | BlobBad | BlobMissing], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ):
        self._store = store
        self._source = source
        self._codec = codec
        self._deadline = deadline_seconds
        self._everyone = everyone
        self._answer = answer
        self._spawn = spawn
        self._tasks: dict[Digest, asyncio.Task[None]] = {}
        self._checked: set[Digest] = set()

    def fetch(self, blob: Digest, size: int, author: PeerKey, holders: Iterable[PeerKey]) -> None:
        """Start to get a blob; nothing happens when it is on its way already."""
        if blob not in self._tasks:
            self._tasks[blob] = self._spawn(self._fetch(blob, size, [author, *holders]), "blob")

    def drop(self, blob: Digest) -> None:
        """Stop fetching a blob that nobody needs any more."""
        if (task := self._tasks.pop(blob, None)) is not None:
            task.cancel()

    async def _fetch(self, blob: Digest, size: int, holders: list[PeerKey]) -> None:
        answer = await self._get(blob, size, holders)
        # Before the answer: what it leads to may be that the blob is asked for again.
        if self._tasks.get(blob) is asyncio.current_task():
            del self._tasks[blob]
        if answer is not None:
            self._answer(answer)

    async def _get(self, blob: Digest, size: int, holders: list[PeerKey]) -> BlobHeld | BlobBad | BlobMissing | None:
        """What came of it; None when the machine has been told."""
        if size != self._codec.size:
            return BlobBad(blob, f"an update of {size} bytes, where the run's codec makes {self._codec.size}")
        try:
            await self.ensure(blob, holders, self._deadline)
        except CodecError:
            return None  # `ensure` has told the machine
        except StoreFull:
            raise  # no next try helps: the user must act
        except (CairnError, asyncio.TimeoutError) as e:
            log.info("update %s did not come: %s", blob.short, e)
            return BlobMissing(blob)
        return BlobHeld(blob)

    async def ensure(self, blob: Digest, holders: Sequence[PeerKey], seconds: float) -> Path:
        """The file of an update's blob, held and checked. Raises CodecError when it is bad, else as `fetch_blob`.

        Of a bad one the machine is told (BlobBad), whoever asked.
        """
        if blob not in self._checked and self._store.has(blob):
            # From before a restart, perhaps a power cut: its author is not to be blamed for what this disk did.
            with contextlib.suppress(NotInStore):
                await asyncio.to_thread(self._store.verify, blob)
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

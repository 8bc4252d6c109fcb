"""Fetches the blobs of a round, updates and reduced parts, and checks them before anything else sees them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from peer.mapped import mapped_file
from peer.store import BlobMissing as NotInStore
from peer.store import Store, StoreFull
from protocol.codec import Codec
from protocol.codec.interface import Blob
from protocol.errors import CairnError, CodecError
from protocol.ids import Digest, PeerKey
from protocol.rounds.events import BlobHeld, BlobInvalid, BlobUnavailable

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
        chunks: Collection[int] | None = None,
    ) -> None: ...


class Kind(Protocol):
    """What a blob is, and so its size and rules: an update (a `Codec`), or a reduced part. Hashable."""

    @property
    def size(self) -> int: ...

    def check(self, blob: Blob) -> None:
        """Raises CodecError."""
        ...


class Updates:
    """One task a blob, made by `spawn` (an error in one that is not the network's ends the node: a full disk, a bug);
    `answer` gets BlobHeld, BlobInvalid or BlobUnavailable."""

    def __init__(
        self,
        store: Store,
        source: BlobSource,
        codec: Codec,
        *,
        deadline_seconds: float,
        everyone: Callable[[], list[PeerKey]],
        answer: Callable[[BlobHeld | BlobInvalid | BlobUnavailable], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ):
        self._store = store
        self._source = source
        self._codec = codec
        self.deadline_seconds = deadline_seconds
        """Of what the machine asks for: the exchange_seconds of the open round."""
        self._everyone = everyone
        self._answer = answer
        self._spawn = spawn
        self._tasks: dict[Digest, asyncio.Task[None]] = {}
        self._checked: set[tuple[Digest, Kind]] = set()

    def fetch(self, blob: Digest, size: int, holders: Iterable[PeerKey], kind: Kind | None = None) -> None:
        """Start to get a blob, the likeliest holders first; nothing happens when it is on its way already."""
        if blob not in self._tasks:
            self._tasks[blob] = self._spawn(self._fetch(blob, size, list(holders), kind or self._codec), "blob")

    def drop(self, blob: Digest) -> None:
        """Stop fetching a blob that nobody needs any more."""
        if (task := self._tasks.pop(blob, None)) is not None:
            task.cancel()

    async def _fetch(self, blob: Digest, size: int, holders: list[PeerKey], kind: Kind) -> None:
        answer = await self._get(blob, size, holders, kind)
        # Before the answer: what it leads to may be that the blob is asked for again.
        if self._tasks.get(blob) is asyncio.current_task():
            del self._tasks[blob]
        if answer is not None:
            self._answer(answer)

    async def _get(
        self, blob: Digest, size: int, holders: list[PeerKey], kind: Kind
    ) -> BlobHeld | BlobInvalid | BlobUnavailable | None:
        """What came of it; None when the machine has been told."""
        if size != kind.size:
            return BlobInvalid(blob, f"an update of {size} bytes, where the run's codec makes {kind.size}")
        try:
            await self.ensure(blob, holders, self.deadline_seconds, kind)
        except CodecError:
            return None  # `ensure` has told the machine
        except StoreFull:
            raise  # no next try helps: the user must act
        except (CairnError, asyncio.TimeoutError) as e:
            log.info("blob %s did not come: %s", blob.short, e)
            return BlobUnavailable(blob)
        return BlobHeld(blob)

    async def ensure(self, blob: Digest, holders: Sequence[PeerKey], seconds: float, kind: Kind | None = None) -> Path:
        """The file of a blob (an update's, unless another kind is named), held and checked.

        Raises CodecError for a bad one, of which the machine is told (BlobInvalid) whoever asked; else as `fetch_blob`.
        """
        kind = kind or self._codec
        await self.verify(blob, kind)
        if not self._store.has(blob):
            order = dict.fromkeys([*holders, *self._everyone()])
            await self._source.fetch_blob(blob, kind.size, list(order), deadline_seconds=seconds)
        path = self._store.path(blob)
        if (blob, kind) not in self._checked:
            try:
                await asyncio.to_thread(_check, path, kind)
            except CodecError as e:
                self._answer(BlobInvalid(blob, str(e)))
                raise
            self._checked.add((blob, kind))
        return path

    async def verify(self, blob: Digest, kind: Kind | None = None) -> None:
        """Read a blob that is here and was never checked: it is not here any more when the disk has damaged it."""
        if (blob, kind or self._codec) not in self._checked and self._store.has(blob):
            # From before a restart, perhaps a power cut: its author is not to be blamed for what this disk did.
            with contextlib.suppress(NotInStore):
                await asyncio.to_thread(self._store.verify, blob)

    def trust(self, blob: Digest, kind: Kind | None = None) -> None:
        """A blob of our own making: there is nothing to check."""
        self._checked.add((blob, kind or self._codec))

    def forget(self, gone: Collection[Digest]) -> None:
        """Blobs that the store has dropped."""
        if lost := set(gone):
            self._checked = {(blob, kind) for blob, kind in self._checked if blob not in lost}


def _check(path: Path, kind: Kind) -> None:
    """Structure, bounds and finiteness, in a thread: torch and hashing leave the event loop alone."""
    kind.check(map_file(path))


def map_file(path: Path) -> memoryview:
    """A file's bytes. Raises BlobUnavailable: it is gone, or cannot be read."""
    try:
        return mapped_file(path)
    except OSError as e:
        raise NotInStore(f"cannot read {path}: {e.strerror}") from None

"""Fetching of a round's blobs, updates and reduced shards, and their checks before anything else uses them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from peer.memory_map import mapped_file
from peer.node.events import Post
from peer.node.failure_log import FailureLog
from peer.node.network import Network
from peer.node.tasks import Tasks
from peer.store import BlobMissing, Store, StoreFull
from protocol.codec import Codec
from protocol.codec.interface import Blob
from protocol.errors import CairnError, CodecError, os_reason
from protocol.ids import Digest, PeerKey
from protocol.rounds.events import BlobHeld, BlobInvalid, BlobUnavailable
from protocol.rounds.policy import RoundPolicy

log = logging.getLogger(__name__)


class BlobFormat(Protocol):
    """The size in bytes, and the rules, of an update (a `Codec`) or of a reduced shard. Hashable.

    `check` checks structure, bounds and finiteness. It raises CodecError. `author_of` is for a checked blob.
    """

    @property
    def size(self) -> int: ...
    def check(self, blob: Blob) -> None: ...
    def author_of(self, blob: Blob) -> PeerKey | None: ...


@dataclass(eq=False)
class RoundBlobFetcher:
    """The fetches of a round's blobs: one task for each.

    An unexpected error in a task, such as a full disk, ends the node.
    `post` receives BlobHeld, BlobInvalid or BlobUnavailable for each blob that was requested. `deadline_seconds` is the
    time that a blob of the open round may take: the round's `exchange_seconds`.
    """

    store: Store
    network: Network
    codec: Codec
    deadline_seconds: float
    post: Post
    tasks: Tasks

    def __post_init__(self) -> None:
        self._tasks: dict[Digest, asyncio.Task[None]] = {}
        self._checked: set[tuple[Digest, BlobFormat]] = set()
        self._failures = FailureLog()

    def apply_policy(self, policy: RoundPolicy) -> None:
        self.deadline_seconds = policy.exchange_seconds

    def allow(self, seconds: float) -> None:
        """Let a blob of the open round take at least this time, until the next policy."""
        self.deadline_seconds = max(self.deadline_seconds, seconds)

    def fetch(self, blob: Digest, holders: Iterable[PeerKey], blob_format: BlobFormat | None = None) -> None:
        """Start to fetch a blob, from the likeliest holders first. Do nothing when it is being fetched already."""
        if blob not in self._tasks:
            self._tasks[blob] = self.tasks.spawn(self._fetch(blob, list(holders), blob_format or self.codec), "blob")

    def drop(self, blob: Digest) -> None:
        """Stop fetching a blob that nobody needs any more."""
        if (task := self._tasks.pop(blob, None)) is not None:
            task.cancel()

    async def _fetch(self, blob: Digest, holders: list[PeerKey], blob_format: BlobFormat) -> None:
        answer = await self._get(blob, holders, blob_format)
        # Before the answer is posted: it may lead to another request for the same blob.
        if self._tasks.get(blob) is asyncio.current_task():
            del self._tasks[blob]
        if answer is not None:
            self.post(answer)

    async def _get(
        self, blob: Digest, holders: list[PeerKey], blob_format: BlobFormat
    ) -> BlobHeld | BlobUnavailable | None:
        """Return the answer for the machine; None when `ensure` has posted it."""
        try:
            path = await self.ensure(blob, holders, blob_format)
            return BlobHeld(blob, blob_format.author_of(map_file(path)))
        except CodecError:
            return None  # posted by `ensure`
        except StoreFull:
            raise  # no other attempt helps: the user must act
        except (CairnError, asyncio.TimeoutError) as e:
            self._log_failure(blob, str(e) or "no answer in time")
            return BlobUnavailable(blob)

    def _log_failure(self, blob: Digest, reason: str) -> None:
        count = self._failures.failed(time.monotonic())
        if count == 1:
            log.info("the request for blob %s failed: %s", blob.short, reason)
        elif count:
            log.info("%d more requests for blobs failed; the last: blob %s: %s", count, blob.short, reason)

    async def ensure(
        self,
        blob: Digest,
        holders: Sequence[PeerKey],
        blob_format: BlobFormat | None = None,
        author: PeerKey | None = None,
    ) -> Path:
        """Return the file of a blob, held and checked. By default the blob is an update, and of this author if given.

        Raises CodecError for an invalid one, after BlobInvalid was posted, and for one that names another author, after
        BlobHeld was; else the errors of `fetch_blob`.
        """
        blob_format = blob_format or self.codec
        await self.verify(blob, blob_format)
        if not self.store.has(blob):
            providers = self.network.providers(holders)
            await self.network.fetch_blob(blob, blob_format.size, providers, deadline_seconds=self.deadline_seconds)
        path = self.store.path(blob)
        if (blob, blob_format) not in self._checked:
            try:
                # In a thread, because torch and hashing would block the event loop.
                await asyncio.to_thread(lambda: blob_format.check(map_file(path)))
            except CodecError as e:
                self.post(BlobInvalid(blob, str(e)))
                raise
            self._checked.add((blob, blob_format))
        if author is not None and (named := blob_format.author_of(map_file(path))) != author:
            self.post(BlobHeld(blob, named))
            raise CodecError(f"what a record lists as the update of {author.short} is another's")
        return path

    async def verify(self, blob: Digest, blob_format: BlobFormat | None = None) -> None:
        """Compare a held blob that was never checked with its digest; the store drops it when the disk damaged it.

        Such a blob is from before a restart, perhaps a power cut. Its author is not to blame for our disk.
        """
        if (blob, blob_format or self.codec) not in self._checked and self.store.has(blob):
            with contextlib.suppress(BlobMissing):
                await asyncio.to_thread(self.store.verify, blob)

    def trust(self, blob: Digest, blob_format: BlobFormat | None = None) -> None:
        """Note a blob that this node made: it needs no check."""
        self._checked.add((blob, blob_format or self.codec))

    def forget(self, gone: Collection[Digest]) -> None:
        """Forget blobs that the store has dropped."""
        if lost := set(gone):
            self._checked = {(blob, blob_format) for blob, blob_format in self._checked if blob not in lost}


def map_file(path: Path) -> memoryview:
    """Return a file's bytes. Raises BlobMissing when it is gone or cannot be read."""
    try:
        return mapped_file(path)
    except OSError as e:
        raise BlobMissing(f"cannot read {path}: {os_reason(e)}") from None

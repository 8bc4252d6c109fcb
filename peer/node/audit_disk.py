"""The disk space that files of audits may take: bounded by the run's sizes, and by what training needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from peer.errors import AuditError
from peer.node.state_fetcher import StateFetcher
from peer.store import Store
from protocol.chain import Chain
from protocol.ids import Digest
from protocol.spec import RunSpec
from protocol.units import byte_size

ROUNDS_OF_TRAINING = 2
"""Rounds whose updates training always has room for, besides a checkpoint: the one under way and the next."""


@dataclass(eq=False)
class AuditDisk:
    """Counts the blobs that audits fetch. Nobody else may need them, so they stay until the store is pruned.

    `drop` removes those of these blobs that nobody needs now. The blobs of the present check are needed.
    """

    spec: RunSpec
    store: Store
    chain: Chain
    files: StateFetcher
    drop: Callable[[Collection[Digest]], Awaitable[object]]
    trains: bool = True
    """Without a trainer nothing is left free for it."""

    def __post_init__(self) -> None:
        self._fetched: dict[Digest, int] = {}
        """The blobs of earlier checks, with their sizes in bytes."""

    @property
    def most_bytes(self) -> int:
        """The most bytes that all files of audits may take: as many as one check needs in the worst case.

        That is a checkpoint, and the updates of all rounds to the next one and of one more, each by all members that
        the run may have.
        """
        rounds = self.spec.checkpoint.every + 1
        return self.files.checkpoint_bytes + rounds * self.spec.round.max_members * self.files.updates.codec.size

    @property
    def room_bytes(self) -> int:
        """Free bytes of the store, less what training needs: a checkpoint, and the updates of ROUNDS_OF_TRAINING."""
        if not self.trains:
            return self.store.free_bytes
        head, codec = self.chain.head, self.files.updates.codec
        updates = 0 if head == self.chain.root else len(self.chain.certificate(head).record.body.updates)
        return self.store.free_bytes - self.files.checkpoint_bytes - ROUNDS_OF_TRAINING * updates * codec.size

    async def make_room(self, missing: Mapping[Digest, int]) -> None:
        """Make room for the blobs of a check that are missing, by digest with their sizes.

        Raises AuditError, which says what to do, and StoreError.
        """
        size = sum(missing.values())
        if size > self.most_bytes:
            raise AuditError(
                f"it needs {byte_size(size)} of files that are not here, more than a checkpoint and the rounds to the "
                f"next one ({byte_size(self.most_bytes)}): it can be made where a newer checkpoint is"
            )
        self._fetched = {blob: n for blob, n in self._fetched.items() if self._is_on_disk(blob)}
        if size > min(self.room_bytes, self.most_bytes - sum(self._fetched.values())):
            await self.drop(self._fetched.keys())
        if size > (room := max(0, self.room_bytes)):
            left = "are left besides what training needs" if self.trains else "are free"
            raise AuditError(
                f"it needs {byte_size(size)} of files that are not here, and {byte_size(room)} of this peer's disk "
                f"{left}: allow the peer more of it (--disk), or free some"
            )
        self._fetched |= missing

    def _is_on_disk(self, blob: Digest) -> bool:
        return self.store.has(blob) or self.store.in_progress(blob) is not None

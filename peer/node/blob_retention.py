"""Retention of blobs on disk: those that the round machine and the spec name, and what this node has just made.

The rule is the machine's (`RoundMachine.retained_blobs`). It keeps the newest checkpoints, all blobs applied since the
oldest of them, the blobs of the open round, and own updates that may still return to the error feedback.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.store import Store
from protocol.ids import Digest
from protocol.spec import RunSpec

NEW_UPDATES = 2
"""Own updates that are kept before the machine names them."""


@dataclass(eq=False)
class BlobRetention:
    """The choice of the blobs that stay on this node's disk; `prune` removes all others.

    `retained` gives the blobs to keep besides the run's assets, whenever it is called.
    """

    spec: RunSpec
    store: Store
    updates: RoundBlobFetcher
    retained: Callable[[], Iterable[Digest]]

    def __post_init__(self) -> None:
        self._states: deque[Digest] = deque(maxlen=self.spec.checkpoint.keep + 1)
        self._new_updates: deque[Digest] = deque(maxlen=NEW_UPDATES)
        self._protected: frozenset[Digest] = frozenset()
        self._checked: frozenset[Digest] = frozenset()

    def protect_update(self, digest: Digest) -> None:
        """Protect an update that this node has just made: the machine may not have processed it yet."""
        self._new_updates.append(digest)

    def protect_state(self, digest: Digest) -> None:
        """Protect a checkpoint of the store as one of the newest, though no record of the chain may name it yet."""
        if digest not in self._states:
            self._states.append(digest)

    def protect_blobs(self, blobs: frozenset[Digest]) -> None:
        """Protect these blobs, in place of those of the call before: an observer's user keeps them for others."""
        self._protected = blobs

    def protect_check(self, blobs: frozenset[Digest]) -> None:
        """Protect the blobs that the present check reads, in place of those of the check before."""
        self._checked = blobs

    async def prune(self, among: Collection[Digest] | None = None) -> list[Digest]:
        """Remove the blobs that nobody needs, partial ones included, and return them. `among`: of these alone.

        They are selected at once; blobs that arrive later stay. Raises StoreError.
        """
        protected = {*self._states, *self._new_updates, *self._protected, *self._checked}
        kept = {*assets(self.spec), *protected, *self.retained()}
        gone = self.store.unreferenced(kept)
        if among is not None:
            gone = [digest for digest in gone if digest in among]
        await asyncio.to_thread(lambda: [self.store.remove(digest) for digest in gone])
        self.updates.forget(gone)
        return gone


def assets(spec: RunSpec) -> set[Digest]:
    """Return the blobs that the spec itself names."""
    named = [spec.genesis, spec.tokenizer, *spec.data.train, *spec.data.validation]
    if spec.model.adapter is not None:
        named.append(spec.model.adapter.base)
    return {b.name for b in named}

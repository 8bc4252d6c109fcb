"""Retention of blobs on disk: the newest checkpoints, all blobs applied since the oldest of them, and the run's assets.

The round machine names the blobs of undecided rounds, and the own updates that a fork may still leave out
(`RoundMachine.retained_blobs`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from peer.node.update_fetcher import UpdateFetcher
from peer.store import Store
from protocol.chain import Chain
from protocol.ids import Digest
from protocol.messages import Certificate
from protocol.spec import RunSpec

NEW_UPDATES = 2
"""Own updates that are kept before the machine names them."""


class BlobRetention:
    """Removal of all blobs that nobody needs.

    `undecided` gives the blobs to keep beside those of the chain, whenever it is called.
    """

    def __init__(
        self,
        spec: RunSpec,
        store: Store,
        chain: Chain,
        updates: UpdateFetcher,
        undecided: Callable[[], Iterable[Digest]],
    ):
        self._spec = spec
        self._store = store
        self._chain = chain
        self._updates = updates
        self._undecided = undecided
        self._states: deque[Digest] = deque(maxlen=spec.checkpoint.keep + 1)
        self._new_updates: deque[Digest] = deque(maxlen=NEW_UPDATES)

    def keep_update(self, digest: Digest) -> None:
        """Keep an update that this node has just made: the machine may not have processed it yet."""
        self._new_updates.append(digest)

    def keep_state(self, digest: Digest) -> None:
        """Keep a checkpoint of the store as one of the newest, though no record of the chain may name it yet."""
        if digest not in self._states:
            self._states.append(digest)

    async def prune(self) -> list[Digest]:
        """Remove the blobs that nobody needs, partial ones included, and return them.

        They are selected at once; blobs that arrive later stay. Raise StoreError.
        """
        spec, chain = self._spec, self._chain
        start = _ancestor(chain, chain.height(chain.head) - spec.checkpoint.every * (spec.checkpoint.keep + 2))
        keep = blobs_to_keep(
            spec, chain.path(start, chain.head), [*self._states, *self._new_updates, *self._undecided()]
        )
        gone = self._store.dispensable(keep)
        await asyncio.to_thread(self._remove, gone)
        self._updates.forget(gone)
        return gone

    def _remove(self, gone: Sequence[Digest]) -> None:
        for digest in gone:
            self._store.remove(digest)


def assets(spec: RunSpec) -> set[Digest]:
    """Return the blobs that the spec itself names."""
    named = [spec.genesis, spec.tokenizer, *spec.data.train, *spec.data.validation]
    return {b.name for b in named}


def blobs_to_keep(spec: RunSpec, path: Sequence[Certificate], others: Iterable[Digest]) -> set[Digest]:
    """Return the blobs to keep of all in the store.

    `path`: the chain's newest certificates in memory, oldest first. `others`: checkpoints that no certificate names
    yet, and blobs of undecided rounds.
    """
    keep = assets(spec) | set(others)
    every, wanted = spec.checkpoint.every, spec.checkpoint.keep
    marks = [i for i, c in enumerate(path) if c.record.body.round % every == 0]
    # One checkpoint more than `keep`: a member that is fetching the oldest must not see it vanish.
    recent = marks[-(wanted + 1) :]
    keep |= {path[i].record.body.base_state for i in recent}
    since = recent[0] if len(marks) > wanted else 0
    for certificate in path[since:]:
        keep.update(applied_blobs(certificate))
    return keep


def applied_blobs(certificate: Certificate) -> tuple[Digest, ...]:
    """Return the blobs that a round's state is made of: the reduced shards where there are any, else the updates."""
    return certificate.parts or tuple(u.body.blob for u in certificate.record.body.updates)


def _ancestor(chain: Chain, height: int) -> Digest:
    """Return the head's ancestor at that height, or the oldest record in memory."""
    return chain.ancestor_at(chain.head, max(chain.height(chain.root), height)) or chain.root

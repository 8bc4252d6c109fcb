"""Decides what stays on disk: the last checkpoints, every blob that was applied since the oldest of them, and what the
spec names."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from peer.store import Store
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate
from protocol.spec import RunSpec

OWN_BLOBS = 256
"""Own updates that stay in the store until they are final: a fork may leave them out, and they go back then."""


class Keeping:
    """What a node keeps beside what its chain names, and the removal of all else."""

    def __init__(self, spec: RunSpec, store: Store, chain: Chain, me: PeerKey):
        self._spec = spec
        self._store = store
        self._chain = chain
        self._states: deque[Digest] = deque(maxlen=spec.checkpoint.keep + 1)
        self._own: deque[tuple[int, Digest]] = deque(maxlen=OWN_BLOBS)
        height = chain.height(chain.head)
        for certificate in chain.path(_back(chain, height - OWN_BLOBS), chain.head):
            for u in certificate.record.body.updates:
                if u.author == me and store.has(u.body.blob):
                    self.own(u.body.round, u.body.blob)

    def state(self, digest: Digest) -> None:
        """A checkpoint that is in the store, though no record of the chain may name it (yet): one of the newest."""
        if digest not in self._states:
            self._states.append(digest)

    def own(self, round: int, blob: Digest) -> None:
        """An update of ours for a round."""
        self._own.append((round, blob))

    async def prune(self, undecided: Iterable[Digest]) -> list[Digest]:
        """Drop what nobody needs any more, half-fetched blobs too; says what. `undecided`: blobs of the open round.

        What to drop is decided at once; blobs that arrive later stay. Raises StoreError.
        """
        spec, chain = self._spec, self._chain
        start = _back(chain, chain.height(chain.head) - spec.checkpoint.every * (spec.checkpoint.keep + 2))
        final = chain.final.body.round if chain.final is not None else -1
        own = [blob for number, blob in self._own if number > final]
        gone = self._store.unreferenced(to_keep(spec, chain.path(start, chain.head), self._states, [*own, *undecided]))
        await asyncio.to_thread(self._remove, gone)
        return gone

    def _remove(self, gone: Sequence[Digest]) -> None:
        for digest in gone:
            self._store.remove(digest)


def assets(spec: RunSpec) -> set[Digest]:
    """The blobs that the spec itself names."""
    named = [spec.genesis, spec.tokenizer, *spec.data.train, *spec.data.validation]
    return {b.name for b in named}


def to_keep(
    spec: RunSpec, path: Sequence[Certificate], held_states: Iterable[Digest], own: Iterable[Digest]
) -> set[Digest]:
    """The digests to keep, of all in the store.

    `path`: the chain's newest certificates, oldest first, as far back as is kept in memory. `held_states`: checkpoints
    in the store that no certificate vouches for yet (the newest). `own`: updates of ours that are undecided.
    """
    keep = assets(spec) | set(held_states) | set(own)
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
    """The blobs that a round's state is made of: the parts of the mean where it was reduced, else the updates."""
    return certificate.parts or tuple(u.body.blob for u in certificate.record.body.updates)


def _back(chain: Chain, height: int) -> Digest:
    """The record at that height on the way to the head, or the oldest in memory."""
    return chain.ancestor_at(chain.head, max(chain.height(chain.root), height)) or chain.root

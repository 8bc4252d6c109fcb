"""A peer's work for committees: slices of updates are fetched, then a part of the mean is made, all without bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import RoundRecord
from protocol.rounds import actions as do
from protocol.rounds import events as ev

if TYPE_CHECKING:
    from tests.simulation.node import Node

RETRY = 0.1
LACKING_AFTER = 0.5
"""Fraction of `exchange_seconds` after which the authors of missing slices are reported."""


def part_of(record: RoundRecord, parts: int, part: int) -> Digest:
    """Return the digest that every honest committee member makes of a part.

    It depends on the updates, not on the record around them.
    """
    updates = (u.author + u.body.blob + u.body.windows.to_bytes(8, "big") for u in record.updates)
    return Digest(sha256(b"part", bytes([parts, part]), *updates))


def bad_slice(blob: Digest, parts: int) -> int:
    """Return the number of the slice in which a bad update is bad."""
    return blob[0] % parts


class CommitteeWork:
    """The work of one incarnation of a node for proposals; `slices` survives in its store."""

    def __init__(self, node: Node):
        self.node = node
        self.under_way: set[tuple[Digest, int]] = set()

    def gives(self, blob: Digest, parts: int, part: int, to: PeerKey) -> bool:
        """Return whether the node serves a slice of an update to a peer now."""
        n = self.node
        held = blob in n.blobs or (blob, parts, part) in n.slices
        return n.alive and held and n.machine.serve_refusal(blob, to) is None

    def begin(self, action: do.ReduceShard) -> None:
        key = (action.record.digest, action.shard)
        if key in self.under_way:
            raise AssertionError(f"peer {self.node.index} is told twice to reduce a part")
        self.under_way.add(key)
        w = self.node.world
        self._fetch(self.node.incarnation, action, w.clock.now + LACKING_AFTER * w.policy.exchange_seconds)

    def drop(self, record: Digest) -> None:
        self.under_way = {key for key in self.under_way if key[0] != record}

    def _fetch(self, incarnation: int, action: do.ReduceShard, deadline: float) -> None:
        n, w, record, part = self.node, self.node.world, action.record, action.shard
        if not n.alive or incarnation != n.incarnation or (record.digest, part) not in self.under_way:
            return
        parts = w.policy.exchange.shard_count(len(record.body.updates))
        missing = []
        for u in record.body.updates:
            blob = u.body.blob
            if blob in n.blobs or (blob, parts, part) in n.slices:
                continue
            sources = [w.by_key[k] for k in (u.author, *action.committee) if k != n.key]
            if any(w.network.connected(n.index, s.index) and s.gives_slice(blob, parts, part, n.key) for s in sources):
                n.slices.add((blob, parts, part))
            else:
                missing.append(u.author)
        if not missing:
            w.clock.after(2 * w.network.delay(), self._done, incarnation, action, parts)
        elif w.clock.now >= deadline:
            self.under_way.discard((record.digest, part))
            n.step(ev.ShardUnavailable(record.digest, part, tuple(missing)))
        else:
            w.clock.after(RETRY, self._fetch, incarnation, action, deadline)

    def _done(self, incarnation: int, action: do.ReduceShard, parts: int) -> None:
        n, record, part = self.node, action.record, action.shard
        if not n.alive or incarnation != n.incarnation or (record.digest, part) not in self.under_way:
            return
        self.under_way.discard((record.digest, part))
        for u in record.body.updates:
            blob = u.body.blob
            if blob in n.world.bad_blobs and u.author != n.key and bad_slice(blob, parts) == part:
                n.step(ev.BlobInvalid(blob, "chunk 3: a scale that is not finite"))
                return
        copies = [u.author for u in record.body.updates if n.world.made_by[u.body.blob] != u.author]
        if copies and part == 0:
            n.step(ev.ShardUnavailable(record.digest, part, tuple(copies)))
            return
        made = part_of(record.body, parts, part)
        n.blobs.add(made)
        n.step(ev.ShardReduced(record.digest, part, made))

"""Peers without a machine of their own: each does what one of the watched peers does, with its own key, a little later.

With a machine for each of a thousand peers, each would receive a thousand messages of a kind: a million steps a kind
and round. Peers with equal links behave nearly the same, so a few are simulated fully, and receive the messages of
all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.scale.shape import CORES
from benchmarks.scale.sizes import CheapSigner, key_of
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Heartbeat, RoundRecord, ShardAttestation, Signed, UpdateHeader, Vote

if TYPE_CHECKING:
    from benchmarks.scale.peer import Peer
    from benchmarks.scale.world import World


LATER = 0.01
"""Seconds at most after its model that a peer does the same."""


class Shadows:
    """All peers from the number of machines on."""

    def __init__(self, world: World):
        self._world = world
        shape = world.shape
        numbers = range(shape.machines, shape.peers)
        self._signers = {i: CheapSigner(key_of(i)) for i in numbers}
        self._number: dict[PeerKey, int] = {s.key: i for i, s in self._signers.items()}
        self._later = {i: world.rng.uniform(0, LATER) for i in numbers}
        """Seconds after its model."""
        self._said: dict[tuple[int, Digest], Signed] = {}
        self._proposed: set[Digest] = set()
        self._proposals: set[Digest] = set()

    def model(self, index: int) -> int:
        """Return the peer that a peer copies."""
        return index % self._world.shape.machines

    def follow(self, model: Peer, message: Signed) -> None:
        """Send a watched peer's message from its shadows too: each for itself, and the repeated messages of others."""
        shape, clock, body = self._world.shape, self._world.clock, message.body
        if message.author == model.key and not isinstance(body, UpdateHeader | Heartbeat | Vote):
            return
        for index in range(shape.machines + model.index, shape.peers, shape.machines):
            said = self._own(index, message) if message.author == model.key else message
            clock.at(clock.now + self._later[index], self._world.links.broadcast, index, said)

    def _own(self, index: int, message: Signed) -> Signed:
        """Return a model's message as this peer's own; a repeated message stays the same."""
        signer, body = self._signers[index], message.body
        if isinstance(body, Heartbeat):
            return signer.sign(body)
        said = self._said.get((index, message.digest))
        if said is None:
            if isinstance(body, UpdateHeader):
                body = replace(body, blob=Digest(sha256(b"blob", signer.key, body.parent)))
                self._world.made_by[body.blob] = signer.key
            said = self._said[index, message.digest] = signer.sign(body)
        return said

    def propose(self, model: Peer) -> None:
        """One of them may be the first in rank; it knows what its model knows."""
        b = model.machine.open_round
        if b is None or b.ready_at is None or b.parent in self._proposed or b.state is None or not b.proposer_order:
            return
        index = self._number.get(b.proposer_order[0])
        if index is None or self.model(index) != model.index:
            return
        self._proposed.add(b.parent)
        holds = model.machine._context.blobs.holds_update
        listed = [h for h in b.candidates() if b.chain.is_reduced_after(b.parent) or holds(h)]
        updates = tuple(sorted(listed, key=lambda h: h.author))
        weights = b.chain.weights(b.parent, updates)
        body = RoundRecord(self._world.run, b.number, b.parent, b.state, 0, updates, weights=weights)
        record = self._signers[index].sign(body)
        self.slate(record, b.chain.seed(b.parent))
        self._world.links.broadcast(index, record)

    def slate(self, record: Signed[RoundRecord], seed: bytes) -> None:
        """Let the committee members of a proposed record fetch their slices, make their shards and attest them.

        `seed`: of its parent.
        """
        world = self._world
        shape, clock = world.shape, world.clock
        if shape.exchange == "gather" or record.digest in self._proposals:
            return
        self._proposals.add(record.digest)
        duties: dict[int, list[int]] = {}
        for part, committee in enumerate(shape.policy.exchange.committees(seed, record.body)):
            for key in committee:
                if key in self._number:
                    duties.setdefault(self._number[key], []).append(part)
        for index, parts in duties.items():
            size = sum((shape.peers - 1) * shape.slice_bytes(p) for p in parts)
            heard = clock.now + 2.5 * shape.rtt + size / (shape.down / 8 * shape.efficiency)
            for i, part in enumerate(parts):
                body = ShardAttestation(world.run, record.body.round, record.digest, part, part_of(record.digest, part))
                said = self._signers[index].sign(body)
                clock.at(heard + shape.reduce * (1 + i // CORES), world.links.broadcast, index, said)


def part_of(record: Digest, part: int) -> Digest:
    """Return the digest of a shard of a record's mean."""
    return Digest(sha256(record, part.to_bytes(4, "big")))

"""The attestations of the committees of one proposal: data and pure rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from protocol.ids import Digest, PeerKey
from protocol.messages import ShardAttestation, Signed


class ShardTally:
    """The attestations of one record's shards. The first one of each committee member for each shard counts.

    A shard is agreed when more than half of its committee name one digest. Bounded by the committees' seats.
    """

    __slots__ = ("committees", "attestations", "agreed", "open", "deadlocked")

    def __init__(self, committees: tuple[tuple[PeerKey, ...], ...]):
        self.committees = committees
        self.attestations: tuple[dict[PeerKey, Signed[ShardAttestation]], ...] = tuple({} for _ in committees)
        self.agreed: list[Digest | None] = [None] * len(committees)
        """The digest of each agreed shard."""

        self.open = len(committees)
        """Number of shards that are not agreed."""

        self.deadlocked: int | None = None
        """A shard on which its committee cannot agree any more."""

    def has_seat(self, author: PeerKey, shard: int) -> bool:
        return shard < len(self.committees) and author in self.committees[shard]

    def duties(self, author: PeerKey) -> list[int]:
        """Return the shards for which the author has a seat and has attested nothing."""
        return [
            i for i, seated in enumerate(self.committees) if author in seated and author not in self.attestations[i]
        ]

    def add(self, attestation: Signed[ShardAttestation]) -> bool:
        """Add a member's first attestation of a shard. Return True when the shard is agreed by it."""
        shard = attestation.body.shard
        seated, received = self.committees[shard], self.attestations[shard]
        received[attestation.author] = attestation
        if self.agreed[shard] is not None:
            return False
        counts = Counter(a.body.blob for a in received.values() if a.body.blob is not None)
        blob, most = counts.most_common(1)[0] if counts else (None, 0)
        if 2 * most > len(seated):
            self.agreed[shard] = blob
            self.open -= 1
            return True
        if 2 * (most + len(seated) - len(received)) <= len(seated):
            self.deadlocked = shard
        return False

    @property
    def digests(self) -> tuple[Digest, ...] | None:
        """The digests of all shards; None while one is not agreed."""
        found = tuple(digest for digest in self.agreed if digest is not None)
        return None if self.open else found

    def unavailable(self, shard: int) -> set[PeerKey]:
        """Return the authors whose updates more than half of a shard's committee cannot get, or use."""
        counts = Counter(author for a in self.attestations[shard].values() for author in a.body.missing)
        return {author for author, count in counts.items() if 2 * count > len(self.committees[shard])}

    def unavailable_to(self, member: PeerKey) -> set[PeerKey]:
        """Return the authors whose updates one member attested that it cannot get."""
        own = [received[member] for received in self.attestations if member in received]
        return {author for attestation in own for author in attestation.body.missing}

    def silent(self) -> set[PeerKey]:
        """Return the members that attested nothing of a shard that is not agreed."""
        found: set[PeerKey] = set()
        for seated, received, digest in zip(self.committees, self.attestations, self.agreed, strict=True):
            if digest is None:
                found |= {author for author in seated if author not in received}
        return found

    def signers(self, shard: int, blob: Digest) -> tuple[PeerKey, ...]:
        """Return the peers that signed this digest of a shard, by ascending key."""
        received = self.attestations[shard]
        return tuple(a for a in self.committees[shard] if a in received and received[a].body.blob == blob)

    def all(self) -> Iterator[Signed[ShardAttestation]]:
        for received in self.attestations:
            yield from received.values()

"""How a round's updates reach everybody: gathered, or reduced in shards by committees. Pure rules that all agree on.

*Gather*: everyone fetches every update, so a peer's bytes grow with the number of contributors. *Reduce*: the mean is
divided into shards. A small committee, drawn by hash, makes each shard, and fetches only the slices that it needs.
Everyone fetches the shards on which more than half of each committee agree, so a peer's bytes do not grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.blob_sizes import blob_size, mean_size
from protocol.ids import PeerKey, sha256
from protocol.merkle import chunk_count
from protocol.messages import MAX_SHARDS, Certificate, RoundRecord
from protocol.spec import RunSpec


def shard_count(contributors: int, update_size: int) -> int:
    """Return the number of shards of the mean of a number of updates of `update_size` bytes each.

    A shard covers at least one chunk of every update, and there are no more shards than contributors.
    """
    return max(1, min(contributors, chunk_count(update_size), MAX_SHARDS))


def committees(
    seed: bytes, attempt: int, contributors: Iterable[PeerKey], shards: int, committee: int
) -> tuple[tuple[PeerKey, ...], ...]:
    """Return the committee of each shard, by ascending key: `committee` contributors, or all if there are fewer.

    Contributors sit in the order of SHA-256 of seed (the parent's), attempt and key; shards are dealt round the table.
    So nobody has more than its share of the work: `committee` shards if there are as many shards as contributors. Each
    attempt draws new committees, so that one that cannot agree does not stop the round for ever.
    """
    place = b"cairn/v1/committee" + seed + attempt.to_bytes(4, "big")
    seated = sorted(contributors, key=lambda key: sha256(place, key))
    committee = min(committee, len(seated))
    return tuple(
        tuple(sorted(seated[seat % len(seated)] for seat in range(shard * committee, (shard + 1) * committee)))
        for shard in range(shards)
    )


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """The run's choice, with the sizes in bytes that `auto` decides by: of an update, and of the whole mean."""

    kind: str = "gather"
    committee: int = 3
    update_size: int = 0
    mean_size: int = 0

    @classmethod
    def of(cls, spec: RunSpec) -> ReducePlan:
        """Return the plan of a run spec."""
        layout, r = spec.model.layout, spec.round
        return cls(r.exchange, r.committee, blob_size(spec.codec, layout), mean_size(spec.codec, layout))

    def is_reduced(self, contributors: int) -> bool:
        """Return whether the round after a record with a number of contributors (0: the genesis) is reduced."""
        if self.kind != "auto":
            return self.kind == "reduce"
        # A member gets (and gives) about `committee` times an update for its own shards, and then the whole mean.
        return (contributors - 1) * self.update_size > 2 * (self.committee * self.update_size + self.mean_size)

    def shard_count(self, contributors: int) -> int:
        """Return the number of shards of the mean of a record with a number of contributors."""
        return shard_count(contributors, self.update_size)

    def record_refusal(self, certificate: Certificate, before: int) -> str | None:
        """Why a certificate does not fit after a record with `before` contributors; None when it does."""
        found, wanted = len(certificate.shards), 0
        if self.is_reduced(before):
            wanted = self.shard_count(len(certificate.record.body.updates))
        if found == wanted:
            return None
        return f"it is certified with {found} shards of the mean, and should be with {wanted}"

    def committees(self, seed: bytes, record: RoundRecord) -> tuple[tuple[PeerKey, ...], ...]:
        """Return the committee of each shard of a record's mean. `seed`: of its parent (`Chain.seed`)."""
        keys = record.contributors
        return committees(seed, record.attempt, keys, self.shard_count(len(keys)), self.committee)


GATHER = ReducePlan()
"""Every round is gathered."""

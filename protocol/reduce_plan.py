"""How a round's updates reach everybody: gathered, or reduced in parts by committees. Pure rules that all agree on.

*Gather*: everyone fetches every update, so a peer's bytes grow with the number of contributors. *Reduce*: the mean is
cut into parts; each is made by a small committee drawn by hash, which alone fetches the slices of the updates that it
needs; everyone fetches the parts that more than half of each committee agree on, and their bytes do not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, sha256
from protocol.layout import CODEC_CHUNK, Layout
from protocol.merkle import chunk_count
from protocol.messages import MAX_SHARDS, Certificate, RoundRecord
from protocol.spec import MEAN_KEEP_FACTOR, CodecSpec, RunSpec

HEADER = 40
"""Bytes before the records of every blob of a codec."""


def shard_count(contributors: int, update_size: int) -> int:
    """Into how many parts the mean of so many updates, of `update_size` bytes each, is cut: a part is a blob's chunk of
    every update, or more, and there are no more parts than contributors."""
    return max(1, min(contributors, chunk_count(update_size), MAX_SHARDS))


def committees(
    parent: Digest, attempt: int, contributors: Iterable[PeerKey], shards: int, committee: int
) -> tuple[tuple[PeerKey, ...], ...]:
    """For each part the contributors that make it, by ascending key: `size` of them, or all when there are fewer.

    Contributors sit in the order of SHA-256 of parent, attempt and key, and parts are dealt round the table. So nobody
    has more than its share of the work (`size` parts when there are as many parts as contributors); and another
    attempt seats them anew, so that a committee that cannot agree does not stop the round for ever.
    """
    place = b"cairn/v1/committee" + parent + attempt.to_bytes(4, "big")
    seated = sorted(contributors, key=lambda key: sha256(place, key))
    committee = min(committee, len(seated))
    return tuple(
        tuple(sorted(seated[seat % len(seated)] for seat in range(part * committee, (part + 1) * committee)))
        for part in range(shards)
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
        """From a run spec."""
        layout, r = spec.model.layout, spec.round
        return cls(r.exchange, r.committee, blob_size(spec.codec, layout), mean_size(spec.codec, layout))

    def is_reduced(self, contributors: int) -> bool:
        """Whether the round after a record with so many contributors (0: the genesis) is reduced."""
        if self.kind != "auto":
            return self.kind == "reduce"
        # A member gets (and gives) about `committee` times an update for its own parts, and then the whole mean.
        return (contributors - 1) * self.update_size > 2 * (self.committee * self.update_size + self.mean_size)

    def shard_count(self, contributors: int) -> int:
        """The parts of the mean of a record with so many contributors."""
        return shard_count(contributors, self.update_size)

    def validation_error(self, certificate: Certificate, before: int) -> str | None:
        """Why a certificate does not fit after a record with `before` contributors; None when it does."""
        found, wanted = len(certificate.shards), 0
        if self.is_reduced(before):
            wanted = self.shard_count(len(certificate.record.body.updates))
        if found == wanted:
            return None
        return f"it is certified with {found} parts of the mean, and should be with {wanted}"

    def committees(self, record: RoundRecord) -> tuple[tuple[PeerKey, ...], ...]:
        """The committee of each part of a record's mean."""
        keys = record.contributors
        return committees(record.parent, record.attempt, keys, self.shard_count(len(keys)), self.committee)


GATHER = ReducePlan()
"""Every round is gathered."""


def mean_size(codec: CodecSpec, layout: Layout) -> int:
    """Bytes of the whole mean as its parts have it, but for their headers: what `Reduction.total_size(1)` says."""
    match codec.kind:
        case "sparse":
            k = min(CODEC_CHUNK, MEAN_KEEP_FACTOR * codec.k)
            return _size(layout, lambda width: 2 + _kept(width, k) + _positions_size(width, _kept(width, k)))
        case "none":
            return blob_size(codec, layout)
        case _:
            return blob_size(codec.model_copy(update={"kind": "int8"}), layout)


def blob_size(codec: CodecSpec, layout: Layout) -> int:
    """Bytes of every update under a codec: what `Codec.size` says, known without building the codec (docs/codec.md)."""
    match codec.kind:
        case "none":
            return _size(layout, lambda width: 4 * width)
        case "int8":
            return _size(layout, lambda width: 2 + width)
        case "sign":
            return _size(layout, lambda width: 2 + -(-width // 8))
        case _:
            k = codec.k
            return _size(
                layout,
                lambda width: 4 + _positions_size(width, _kept(width, k)) + -(-2 * _kept(width, k) // 8),
            )


def _size(layout: Layout, record_size: Callable[[int], int]) -> int:
    size = HEADER
    for tensor in layout.tensors:
        whole, rest = divmod(tensor.numel, CODEC_CHUNK)
        size += whole * record_size(CODEC_CHUNK) + (record_size(rest) if rest else 0)
    return size


def _kept(width: int, k: int) -> int:
    """Coordinates that are kept of a chunk, when k are of a full one."""
    return -(-width * k // CODEC_CHUNK)


def _positions_size(m: int, k: int) -> int:
    """Bytes of k positions below m: none, Elias-Fano's or a bitmap's."""
    if k == m:
        return 0
    low = (m // k).bit_length() - 1
    elias_fano = -(-k * low // 8) + -(-(k + ((m - 1) >> low)) // 8)
    return min(elias_fano, -(-m // 8))

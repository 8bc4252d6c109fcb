"""The sharded reduce: a round's mean in shards, each computed by a committee and passed on as one blob.

A shard is consecutive blocks in layout order, so its encoded blocks lie together in every update's blob. A member of
its committee fetches these slices of all listed updates and averages them as `outer.apply` would. It encodes the mean
with the shard codec (`make_shard_codec`) over the shard's own layout, with one tensor for each slice. Everything is
exact or correctly rounded in canonical order: members who reduce the same updates make the same bytes, on any machine.
The state then takes its step by the decoded shards. `untransmitted` handles the values that the mean leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from protocol.codec import Batch, Codec, make_shard_codec
from protocol.codec.interface import HEADER, Blob
from protocol.codec.scales import MAX_INPUT
from protocol.errors import CodecError
from protocol.layout import BLOCK, Layout, TensorShape, TensorSlice
from protocol.merkle import CHUNK
from protocol.messages import MAX_SHARDS
from protocol.outer import Clipping, Contribution, OuterOptimizer, RobustMean, canonical_order
from protocol.spec import OuterSpec

__all__ = ["Reduction", "apply_reduced"]


class Reduction:
    """How the rounds of one run are reduced. Methods with `count` and `shard`: of shard `shard` of `count`.

    They raise ValueError when there is no such shard.
    """

    def __init__(self, codec: Codec):
        self.codec = codec
        """The codec of updates."""
        self.slices = lru_cache(maxsize=8)(self._slices)
        self.shard_codec = lru_cache(maxsize=2 * MAX_SHARDS)(self._shard_codec)

    # -- where shards lie ------------------------------------------------------------------------------------

    def _slices(self, count: int) -> tuple[tuple[TensorSlice, ...], ...]:
        """Return the tensor slices of each shard, in layout order, at most one of a tensor."""
        layout = self.codec.layout
        if not 1 <= count <= layout.blocks:
            raise ValueError(f"{layout.blocks} blocks in {count} shards")
        ends = [layout.blocks * (p + 1) // count for p in range(count)]
        found: list[list[TensorSlice]] = [[] for _ in ends]
        at = p = 0
        for index, tensor in enumerate(layout.tensors):
            first = 0
            while first < tensor.blocks:
                p += at == ends[p]
                some = min(tensor.blocks - first, ends[p] - at)
                stop = min(tensor.numel, (first + some) * BLOCK)
                found[p].append(TensorSlice(index, first * BLOCK, stop))
                first, at = first + some, at + some
        return tuple(map(tuple, found))

    def _shard_codec(self, count: int, shard: int) -> Codec:
        """Return the codec of a reduced shard: its layout has the shard's slices as tensors, in order."""
        slices = self._slices_of(count, shard)
        # The shard's number is in the names, so no shard passes for another.
        shapes = [TensorShape(f"{shard:04d}/{i:05d}", (whole.numel,)) for i, whole in enumerate(slices)]
        return make_shard_codec(self.codec, Layout(tuple(shapes)))

    def _slices_of(self, count: int, shard: int) -> tuple[TensorSlice, ...]:
        if not 0 <= shard < count:
            raise ValueError(f"shard {shard} of {count}")
        return self.slices(count)[shard]

    def update_slice(self, count: int, shard: int) -> tuple[int, int]:
        """Return the range of a shard's bytes in an update's blob: from, to (excluded). Shard 0 has the header."""
        slices = self._slices_of(count, shard)
        start, (last, size) = self.codec.encoded_range(slices[0])[0], self.codec.encoded_range(slices[-1])
        return (start if shard else 0), last + size

    def chunks(self, count: int, shard: int) -> tuple[int, ...]:
        """Return the Merkle chunks of an update's blob that cover its slice."""
        start, stop = self.update_slice(count, shard)
        return tuple(range(start // CHUNK, -(-stop // CHUNK)))

    def size(self, count: int, shard: int) -> int:
        """Bytes of the reduced shard's blob."""
        return self.shard_codec(count, shard).size

    # -- what committees do ----------------------------------------------------------------------------------

    def check_slice(self, blob: Blob, count: int, shard: int) -> None:
        """Raise CodecError unless the shard's blocks in an update's blob are valid; for shard 0 its header, too.

        The blob has its full size; what is not in `chunks` is not looked at, and may be anything.
        """
        self.codec.check_size(blob)
        if shard == 0:
            self.codec.check_header(blob)
        self.codec.check_blocks(blob, self._slices_of(count, shard))

    def reduce(
        self,
        contributions: Sequence[Contribution],
        outer: OuterSpec,
        count: int,
        shard: int,
        device: torch.device | str = "cpu",
    ) -> bytes:
        """Return the reduced shard's blob: the robust mean of the updates over the shard, by the codec of sums.

        As in `apply`, but norms are of the shard's slices of tensors, the limit is their lower median without a
        reference, and values are kept within what codecs accept (MAX_INPUT). Of the blobs no more is read than by
        `check_slice`. Raises CodecError for updates that do not pass that, for none, and for two by one author.
        """
        ordered, device = canonical_order(contributions), torch.device(device)
        if not ordered:
            raise CodecError("a round without updates has nothing to reduce")
        for c in ordered:
            self.codec.check_size(c.blob)
            if shard == 0:
                self.codec.check_header(c.blob)
        slices = self._slices_of(count, shard)
        clipping = Clipping.of(ordered, self.codec, outer, device, None, slices) if outer.clip == "median" else None
        mean = RobustMean(ordered, self.codec, outer, device, slices, clipping)
        shard_codec = self.shard_codec(count, shard)
        blob = bytearray(shard_codec.size)
        blob[:HEADER] = shard_codec.header
        for batch, of_shard in zip(mean.batches, shard_codec.batches(device=device), strict=True):
            shard_codec.encode_batch(of_shard, [mean.batch_mean(batch).clamp_(-MAX_INPUT, MAX_INPUT)], blob)
        return bytes(blob)

    # -- what everybody does with a reduced shard ------------------------------------------------------------

    def check_shard(self, blob: Blob, count: int, shard: int) -> None:
        """Raise CodecError unless this can be the reduced shard's blob. It names no author."""
        codec = self.shard_codec(count, shard)
        codec.check(blob)
        if any(codec.author_of(blob)):
            raise CodecError("a reduced shard that names an author: the place of the key must be zero")

    def check_shard_headers(self, shards: Sequence[Blob]) -> None:
        """Raise CodecError unless these are as many blobs as a round can have shards, of the right sizes, in order."""
        if not 1 <= len(shards) <= self.codec.layout.blocks:
            raise CodecError(f"{len(shards)} reduced shards of a model of {self.codec.layout.blocks} blocks")
        for shard, blob in enumerate(shards):
            self.shard_codec(len(shards), shard).check_header(blob)

    def batches(
        self,
        shards: Sequence[Blob],
        device: torch.device,
        slices: Sequence[TensorSlice] | None = None,
        batch_blocks: int | None = None,
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the values of a round's reduced shards, in batches of the model's layout. Their headers were checked.

        Values: fp32 [batch.numel], fresh, 0 where nothing was sent. `slices`: only values in these, at most one of a
        tensor. Raises CodecError.
        """
        mine = {p.index: p for p in (self.codec.layout.full_slices if slices is None else slices)}
        for shard, blob in enumerate(shards):
            codec = self.shard_codec(len(shards), shard)
            here: list[TensorSlice] = []
            there: list[TensorSlice] = []
            for i, whole in enumerate(self._slices_of(len(shards), shard)):
                if (own := mine.get(whole.index)) is None:
                    continue
                start, stop = max(whole.start, own.start), min(whole.stop, own.stop)
                if start < stop:
                    here.append(TensorSlice(whole.index, start, stop))
                    there.append(TensorSlice(i, start - whole.start, stop - whole.start))
            # The same coordinates in the same order are cut into batches of one form.
            of_model = self.codec.batches(batch_blocks, slices=here, device=device)
            of_shard = codec.batches(batch_blocks, slices=there, device=device)
            for batch, shard_batch in zip(of_model, of_shard, strict=True):
                decoded = codec.decode_batch(blob, shard_batch, device)
                if decoded.positions is None:
                    yield batch, decoded.values
                else:
                    values = torch.zeros(batch.numel, dtype=torch.float32, device=device)
                    values[decoded.positions] = decoded.values
                    yield batch, values


def apply_reduced(
    state: Mapping[str, Tensor],
    shards: Sequence[Blob],
    reduction: Reduction,
    outer: OuterSpec,
    batch_blocks: int | None = None,
    slices: Sequence[TensorSlice] | None = None,
    device: torch.device | None = None,
) -> None:
    """state[r] to state[r+1] in place, from all of a round's reduced shards in order: `apply`, with them as the mean.

    The reference norms stay as they are: nobody has read the norms of whole updates.
    `state`, `batch_blocks`, `slices` and `device` as for `apply`, and as exact. Raises CodecError for shards of another
    run before anything is changed; one that never passed `check_shard` can raise it half way: the state is then lost.
    """
    reduction.check_shard_headers(shards)
    target = OuterOptimizer(state, reduction.codec.layout, outer, slices)
    for batch, mean in reduction.batches(shards, device or target.device, slices, batch_blocks):
        target.step(batch, mean)

"""A file of tensors that several ranks write and hash together: checkpoints, saved states.

The bytes are those of `Layout.checkpoint_header` and `protocol.state.checkpoint_chunks`, and the digest is the blob's.
Neither the file nor its digest tells how many ranks made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from peer.durable import write_at
from protocol.ids import Digest
from protocol.layout import Layout, TensorSlice
from protocol.merkle import CHUNK, leaf_hash, tree_hash
from protocol.state import STAGING_BYTES

HASH = 32


class ShardedFile:
    """The file of one layout. `parts`: each rank's slices of the tensors, in layout order."""

    def __init__(self, layout: Layout, parts: Mapping[int, Sequence[TensorSlice]]):
        self.layout = layout
        self.parts = parts
        header = len(layout.checkpoint_header())
        self._starts = list(accumulate((4 * t.numel for t in layout.tensors), initial=header))
        self.size = self._starts[-1]

    def ranges(self, rank: int) -> list[range]:
        """Return the bytes that a rank holds; rank 0 also has the header."""
        found = [range(0, self._starts[0])] if rank == 0 else []
        for part in self.parts[rank]:
            start = self._starts[part.index] + 4 * part.start
            if found and found[-1].stop == start:
                found[-1] = range(found[-1].start, start + 4 * part.numel)
            else:
                found.append(range(start, start + 4 * part.numel))
        return found

    # -- hashing and writing -----------------------------------------------------------------------------------

    def report_size(self, rank: int) -> int:
        """Return the bytes of `report`, which every rank can compute."""
        return sum(HASH if self._is_leaf(r) else r.stop - r.start for r in self._cuts(rank))

    def report(
        self,
        rank: int,
        tensors: Iterable[Tensor],
        file: int | None = None,
        after: Callable[[int], None] = lambda size: None,
    ) -> bytes:
        """Return a rank's contribution to the digest: hashes of whole leaves, and the bytes of incomplete ones.

        `tensors`: the rank's slices, 1-d fp32, in order; each is used before the next one is requested. `file`: a
        descriptor to write the bytes to, at their place. `after` is called with the number of bytes after each piece.
        Raises OSError, and ValueError when the tensors are fewer than the rank holds.
        """
        out = bytearray()
        cuts = iter(self._cuts(rank))
        cut, pending = next(cuts, None), bytearray()
        for piece in self._bytes(rank, tensors):
            at = 0
            while cut is not None and at < len(piece):
                want = cut.stop - cut.start - len(pending)
                some = piece[at : at + want]
                at += len(some)
                if len(some) < want or pending:
                    pending += some
                if len(some) < want:
                    break
                data = memoryview(pending) if pending else some
                out += leaf_hash(data) if self._is_leaf(cut) else data
                if file is not None:
                    write_at(file, data, cut.start)
                after(len(data))
                cut, pending = next(cuts, None), bytearray()
        if cut is not None:
            raise ValueError(
                f"rank {rank} has no values for bytes {cut.start + len(pending)} to {cut.stop} of its file"
            )
        return bytes(out)

    def digest(self, reports: Sequence[bytes | memoryview]) -> Digest:
        """Return the file's digest from every rank's report, in the order of ranks."""
        leaves: dict[int, bytes] = {}
        torn: dict[int, dict[int, bytes]] = {}
        for rank, report in enumerate(reports):
            at = 0
            for cut in self._cuts(rank):
                size = HASH if self._is_leaf(cut) else cut.stop - cut.start
                data = bytes(report[at : at + size])
                at += size
                if self._is_leaf(cut):
                    leaves[cut.start // CHUNK] = data
                else:
                    torn.setdefault(cut.start // CHUNK, {})[cut.start] = data
        for number, pieces in torn.items():
            leaves[number] = leaf_hash(b"".join(pieces[start] for start in sorted(pieces)))
        return tree_hash([leaves[n] for n in range(-(-self.size // CHUNK))])

    def _cuts(self, rank: int) -> list[range]:
        """Return the rank's ranges, cut where a leaf ends."""
        found = []
        for whole in self.ranges(rank):
            start = whole.start
            while start < whole.stop:
                stop = min(whole.stop, (start // CHUNK + 1) * CHUNK)
                found.append(range(start, stop))
                start = stop
        return found

    def _is_leaf(self, cut: range) -> bool:
        return cut.start % CHUNK == 0 and (cut.stop % CHUNK == 0 or cut.stop == self.size)

    def _bytes(self, rank: int, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
        if rank == 0:
            yield memoryview(self.layout.checkpoint_header())
        for tensor in tensors:
            whole = (tensor,) if tensor.device.type == "cpu" else tensor.split(STAGING_BYTES // 4)
            for some in whole:
                yield some.detach().contiguous().cpu().numpy().data.cast("B")

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, path: Path, rank: int, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return a rank's slices of a checked file, by name: 1-d fp32, as `place` returns them. Raises OSError."""
        return self._read(path, self.parts[rank], place)

    def read_tensor(self, path: Path, name: str, place: Callable[[Tensor], Tensor]) -> Tensor:
        """Return one whole tensor of a file that was checked in the same way. Raises OSError."""
        index = next(i for i, t in enumerate(self.layout.tensors) if t.name == name)
        return self._read(path, [TensorSlice(index, 0, self.layout.tensors[index].numel)], place)[name]

    def _read(self, path: Path, parts: Sequence[TensorSlice], place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with open(path, "rb") as file:
            for part in parts:
                tensor = torch.empty(part.numel, dtype=torch.float32)
                file.seek(self._starts[part.index] + 4 * part.start)
                if file.readinto(tensor.numpy().data.cast("B")) != 4 * part.numel:
                    raise OSError(f"{path} is cut off")
                found[self.layout.tensors[part.index].name] = place(tensor)
        return found

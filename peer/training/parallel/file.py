"""A file of tensors that many ranks write and hash together, each the bytes that it holds: checkpoints, saved states.

The bytes are those of `Layout.checkpoint_header` and `protocol.state.checkpoint_chunks`, the digest that of the blob:
nobody can tell from a file, nor from its digest, how many ranks made it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from protocol.ids import Digest
from protocol.layout import Layout, Part
from protocol.merkle import CHUNK, leaf_hash, tree_hash
from protocol.state import STAGE

HASH = 32


@dataclass(frozen=True)
class Span:
    """Consecutive bytes of a file."""

    start: int
    stop: int


class PartFile:
    """The file of one layout. `parts`: each rank's, in layout order."""

    def __init__(self, layout: Layout, parts: Mapping[int, Sequence[Part]]):
        self.layout = layout
        self.parts = parts
        header = len(layout.checkpoint_header())
        self._starts = list(accumulate((4 * t.numel for t in layout.tensors), initial=header))
        self.size = self._starts[-1]

    def spans(self, rank: int) -> list[Span]:
        """The bytes that a rank holds; the header is rank 0's too."""
        found = [Span(0, self._starts[0])] if rank == 0 else []
        for part in self.parts[rank]:
            start = self._starts[part.index] + 4 * part.start
            if found and found[-1].stop == start:
                found[-1] = Span(found[-1].start, start + 4 * part.numel)
            else:
                found.append(Span(start, start + 4 * part.numel))
        return found

    # -- hashing and writing -----------------------------------------------------------------------------------

    def report_size(self, rank: int) -> int:
        """Bytes of `report`: known to all."""
        return sum(HASH if self._is_leaf(s) else s.stop - s.start for s in self._cuts(rank))

    def report(
        self,
        rank: int,
        tensors: Iterable[Tensor],
        file: int | None = None,
        after: Callable[[int], None] = lambda size: None,
    ) -> bytes:
        """What rank 0 needs of a rank to digest the file: hashes of whole leaves, and the bytes of parts of one.

        `tensors`: the rank's parts, 1-d fp32, in order; each is used before the next is asked for. `file`: a descriptor
        to write the bytes to, where they belong. `after` is told of bytes hashed, often. Raises OSError.
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
                    _write_all(file, data, cut.start)
                after(len(data))
                cut, pending = next(cuts, None), bytearray()
        return bytes(out)

    def digest(self, reports: Sequence[bytes | memoryview]) -> Digest:
        """The file's digest, from what each rank reports, in the order of ranks."""
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

    def _cuts(self, rank: int) -> list[Span]:
        """The rank's spans, cut where a leaf ends."""
        found = []
        for span in self.spans(rank):
            start = span.start
            while start < span.stop:
                stop = min(span.stop, (start // CHUNK + 1) * CHUNK)
                found.append(Span(start, stop))
                start = stop
        return found

    def _is_leaf(self, cut: Span) -> bool:
        return cut.start % CHUNK == 0 and (cut.stop % CHUNK == 0 or cut.stop == self.size)

    def _bytes(self, rank: int, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
        if rank == 0:
            yield memoryview(self.layout.checkpoint_header())
        for tensor in tensors:
            whole = (tensor,) if tensor.device.type == "cpu" else tensor.split(STAGE // 4)
            for some in whole:
                yield some.detach().contiguous().cpu().numpy().data.cast("B")

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, path: Path, rank: int, device: torch.device) -> dict[str, Tensor]:
        """A rank's parts of a file that was checked, by name: 1-d, fresh. Raises OSError."""
        found: dict[str, Tensor] = {}
        with open(path, "rb") as file:
            for part in self.parts[rank]:
                tensor = torch.empty(part.numel, dtype=torch.float32)
                file.seek(self._starts[part.index] + 4 * part.start)
                if file.readinto(tensor.numpy().data.cast("B")) != 4 * part.numel:
                    raise OSError(f"{path} is cut off")
                found[self.layout.tensors[part.index].name] = tensor.to(device)
        return found


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written

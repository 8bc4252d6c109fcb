"""What every codec offers: fixed-size records of chunks, encoding with error feedback, strict decoding in slices.

A blob is a header of 40 bytes and one record a chunk, tensors in layout order, chunks in the order of their
coordinates. A record's size depends on nothing but the codec and the chunk's width, so any chunk's record is found by
arithmetic, and records can be made on different devices and joined. `docs/codec.md` has the bytes.

Work goes in *runs*: consecutive chunks of one width in one tensor. Runs bound the memory; their length changes no bit.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from protocol.errors import CodecError
from protocol.layout import CODEC_CHUNK, Layout
from protocol.state import flat

MAGIC = b"CRN1"
FORMAT = 1
HEADER = 40
RUN_CHUNKS = 256
"""Chunks in a run on a CPU: 2**20 coordinates, 4 MiB of fp32, stay near the caches."""
RUN_CHUNKS_DEVICE = 8192
"""Chunks in a run on an accelerator: 2**25 coordinates, so that the launches do not show."""

Blob = bytes | bytearray | memoryview


class RecordError(Exception):
    """Row `row` of a run of records is not valid. Never leaves this package: it becomes a CodecError with the place."""

    def __init__(self, row: int, reason: str):
        super().__init__(reason)
        self.row = row
        self.reason = reason


def refuse(bad: Tensor, reason: str) -> None:
    """Raises RecordError with the first row for which `bad` (bool [n]) holds."""
    if bad.any():
        raise RecordError(int(bad.nonzero()[0]), reason)


@dataclass(frozen=True)
class Run:
    """`count` consecutive chunks of `width` coordinates in tensor `index`, from coordinate `start` of it.

    `offset` is where the first of their records lies in the blob.
    """

    index: int
    start: int
    count: int
    width: int
    offset: int

    @property
    def numel(self) -> int:
        return self.count * self.width


@dataclass(frozen=True)
class Decoded:
    """What an update says of a run or a tensor, flattened.

    `positions is None`: `values` has one fp32 for each coordinate. Otherwise `values[i]` belongs to the coordinate
    `positions[i]` (int64, strictly increasing, relative to the start of the run or tensor).
    """

    values: Tensor
    positions: Tensor | None


class Codec(ABC):
    """A codec for one layout. Blobs are bytes-like; tensors fp32, contiguous, all of the layout's names."""

    identifier: int
    """The codec's byte in the header."""
    kept: int
    """Coordinates kept of a full chunk, for the header; 0 when that is no parameter of the codec."""
    everyone_sends: bool
    """Every update says something of every coordinate, also when it says 0."""

    def __init__(self, layout: Layout):
        if sys.byteorder != "little":
            raise CodecError("Cairn's codecs read tensors' memory as little endian: this machine is big endian")
        self.layout = layout
        sizes = [self._tensor_size(t.numel) for t in layout.tensors]
        self._offsets = list(accumulate(sizes, initial=HEADER))
        self.size: int = self._offsets[-1]
        """Exactly how many bytes every blob has."""

    @property
    def header(self) -> bytes:
        """The first bytes of every blob."""
        return MAGIC + bytes([self.identifier, FORMAT]) + self.kept.to_bytes(2, "little") + self.layout.digest

    # -- what a codec defines -------------------------------------------------------------------------------

    @abstractmethod
    def record_size(self, width: int) -> int:
        """Bytes of the record of a chunk of `width` coordinates, 1 to 4096."""

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """fp32 [n, width] to uint8 [n, record_size(width)], leaving in x what decoding it does not give.

        Raises RecordError for values that are not finite or above MAX_INPUT.
        """

    @abstractmethod
    def _decode(self, records: Tensor, width: int) -> Decoded:
        """uint8 [n, record_size(width)] from a stranger. Raises RecordError."""

    @abstractmethod
    def _energies(self, records: Tensor, width: int) -> Tensor:
        """The sum of squares of each record's values: fp64 [n], the same bits everywhere. Raises RecordError."""

    # -- encoding -------------------------------------------------------------------------------------------

    def encode(self, feedback: Mapping[str, Tensor]) -> bytearray:
        """Compress the error feedback e into a blob, in place e <- e - decode(blob), bit for bit.

        Which of several equally large coordinates a sparse codec keeps is not defined; what it keeps is what it
        subtracts. Raises CodecError when e has a value that is not finite or absurdly large (e is then spoilt).
        """
        blob = bytearray(self.header)
        for index, tensor in enumerate(self.layout.tensors):
            blob += self.encode_chunks(index, 0, flat(feedback, tensor))
        return blob

    def encode_chunks(self, index: int, first: int, values: Tensor) -> bytearray:
        """The records of chunks from `first` on of a tensor: `values` is their part of its flattened error feedback.

        `values` (fp32, contiguous, 1-d) covers whole chunks, or goes to the tensor's end; it is reduced in place by
        what was encoded. A blob is the header and these records in order, whoever made which. Raises CodecError.
        """
        numel, start = self.layout.tensors[index].numel, first * CODEC_CHUNK
        stop = start + values.numel()
        if values.dim() != 1 or first < 0 or stop > numel or (stop != numel and stop % CODEC_CHUNK):
            raise CodecError(f"{self._place(index)}: coordinates {start} to {stop} of {numel} are not whole chunks")
        records = bytearray()
        for run in self.runs(index, start=start, stop=stop, device=values.device):
            x = values[run.start - start : run.start - start + run.numel].view(run.count, run.width)
            try:
                records += self._encode(x).contiguous().view(-1).cpu().numpy().data
            except RecordError as e:
                raise CodecError(f"{self._place(index, run, e.row)}: {e.reason}") from None
        return records

    # -- decoding -------------------------------------------------------------------------------------------

    def check(self, blob: Blob) -> None:
        """Raises CodecError, with the place, unless every byte is as the format wants it. Memory is bounded."""
        self.check_header(blob)
        for index in range(len(self.layout.tensors)):
            for run in self.runs(index):
                self.decode_run(blob, run)

    def check_header(self, blob: Blob) -> None:
        """Raises CodecError unless the blob has the right size and header: what `decode_run` takes for granted."""
        if len(blob) != self.size:
            raise CodecError(f"an update of {len(blob)} bytes: under this run's codec and model it has {self.size}")
        if bytes(blob[:HEADER]) != self.header:
            raise CodecError("an update for another codec, format or model: its header is not the run's")

    def add_to(self, blob: Blob, into: Mapping[str, Tensor]) -> None:
        """into <- into + decode(blob): puts an update that missed its round back into the error feedback.

        Raises CodecError before anything is changed.
        """
        self.check(blob)
        for index, tensor in enumerate(self.layout.tensors):
            target = flat(into, tensor)
            for run in self.runs(index, device=target.device):
                part = target[run.start : run.start + run.numel]
                decoded = self.decode_run(blob, run, target.device)
                if decoded.positions is None:
                    part.add_(decoded.values)
                else:
                    part[decoded.positions] = part[decoded.positions] + decoded.values

    def decode_tensor(self, blob: Blob, index: int, device: torch.device | str = "cpu") -> Decoded:
        """What the blob says of one tensor. Raises CodecError."""
        self.check_header(blob)
        runs = list(self.runs(index, device=device))
        parts = [self.decode_run(blob, run, device) for run in runs]
        values = torch.cat([p.values for p in parts])
        if all(p.positions is None for p in parts):
            return Decoded(values, None)
        every = [
            (torch.arange(run.numel, device=device) if p.positions is None else p.positions) + run.start
            for run, p in zip(runs, parts, strict=True)
        ]
        return Decoded(values, torch.cat(every))

    def decode_run(self, blob: Blob, run: Run, device: torch.device | str = "cpu") -> Decoded:
        """What a blob whose header was checked says of one run. Raises CodecError."""
        return self._read(blob, run, device, self._decode)

    def energies(self, blob: Blob, index: int, device: torch.device | str = "cpu") -> list[float]:
        """Sums of squares of the decoded values of each chunk of a tensor, for exact norms. Raises CodecError."""
        out: list[float] = []
        for run in self.runs(index, device=device):
            out += self._read(blob, run, device, self._energies).tolist()
        return out

    # -- where things are -----------------------------------------------------------------------------------

    def runs(
        self,
        index: int,
        limit: int | None = None,
        start: int = 0,
        stop: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Iterator[Run]:
        """The runs, of at most `limit` chunks, that cover coordinates `start` (a chunk's first) to `stop` of a tensor.

        A tensor's shorter last chunk is a run of its own. Without a limit: what suits the device.
        """
        numel = self.layout.tensors[index].numel
        end = numel if stop is None else stop
        most = limit or (RUN_CHUNKS if torch.device(device).type == "cpu" else RUN_CHUNKS_DEVICE)
        size, base = self.record_size(CODEC_CHUNK), self._offsets[index]
        whole = end // CODEC_CHUNK
        for first in range(start // CODEC_CHUNK, whole, most):
            count = min(most, whole - first)
            yield Run(index, first * CODEC_CHUNK, count, CODEC_CHUNK, base + first * size)
        if rest := end - whole * CODEC_CHUNK:
            yield Run(index, whole * CODEC_CHUNK, 1, rest, base + whole * size)

    def _tensor_size(self, numel: int) -> int:
        whole, rest = divmod(numel, CODEC_CHUNK)
        return whole * self.record_size(CODEC_CHUNK) + (self.record_size(rest) if rest else 0)

    def _read(self, blob: Blob, run: Run, device: torch.device | str, how):
        size = self.record_size(run.width)
        # A copy: the view may be of a read-only file, and must not change between the check and the use.
        records = torch.frombuffer(
            bytearray(memoryview(blob)[run.offset : run.offset + run.count * size]), dtype=torch.uint8
        )
        try:
            return how(records.view(run.count, size).to(device), run.width)
        except RecordError as e:
            raise CodecError(f"{self._place(run.index, run, e.row)}: {e.reason}") from None

    def _place(self, index: int, run: Run | None = None, row: int = 0) -> str:
        name = self.layout.tensors[index].name[:120]
        return f"tensor {name!r}" + (f", chunk {run.start // CODEC_CHUNK + row}" if run else "")

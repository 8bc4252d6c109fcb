"""The parameters of a run's model: their names, shapes and canonical order. Everyone's updates and states use it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from protocol.errors import MalformedError
from protocol.ids import Digest, sha256
from protocol.merkle import CHUNK

CODEC_CHUNK = 4096
"""Coordinates in a codec chunk. Chunks lie over each flattened tensor; the last of a tensor may be shorter."""

MAX_TENSORS = 100_000
MAX_HEADER = 64 * 1024 * 1024
MOMENTUM = "outer_momentum/"
"""Prefix of the outer optimiser's momentum tensors in a state."""


@dataclass(frozen=True)
class TensorShape:
    """One parameter: its name and shape. Always fp32 in states, flattened row-major in updates."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def chunks(self) -> int:
        """Codec chunks that cover it."""
        return -(-self.numel // CODEC_CHUNK)


@dataclass(frozen=True)
class Layout:
    """All tensors, in ascending order of their names' UTF-8 bytes."""

    tensors: tuple[TensorShape, ...]

    def __post_init__(self):
        names = [t.name.encode() for t in self.tensors]
        if not names or len(names) > MAX_TENSORS or any(a >= b for a, b in zip(names, names[1:], strict=False)):
            raise MalformedError("a layout lists 1 to 100,000 tensors, each once, by ascending name")
        if any(n <= 0 for t in self.tensors for n in t.shape):
            raise MalformedError("a layout's tensors have positive dimensions")

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """From names to shapes, in any order."""
        return cls(tuple(TensorShape(n, tuple(shapes[n])) for n in sorted(shapes, key=str.encode)))

    @cached_property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    @cached_property
    def chunks(self) -> int:
        return sum(t.chunks for t in self.tensors)

    @cached_property
    def digest(self) -> Digest:
        """Names the layout: SHA-256 of its canonical JSON."""
        return Digest(sha256(b"cairn/v1/layout", json.dumps([[t.name, t.shape] for t in self.tensors]).encode()))

    def with_momentum(self) -> Layout:
        """The layout of a state whose outer optimiser keeps momentum."""
        shapes = {t.name: t.shape for t in self.tensors}
        return Layout.of(shapes | {MOMENTUM + n: s for n, s in shapes.items()})

    def model_part(self) -> Layout:
        """Without the outer optimiser's momentum."""
        return Layout(tuple(t for t in self.tensors if not t.name.startswith(MOMENTUM)))

    # -- checkpoints: canonical safetensors ----------------------------------------------------------------

    def checkpoint_header(self) -> bytes:
        """The first bytes of a checkpoint file of this layout: a safetensors header, padded with spaces so that
        the tensors (fp32, little endian, in layout order, without gaps) begin at a chunk's boundary."""
        entries: dict[str, object] = {}
        offset = 0
        for t in self.tensors:
            entries[t.name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [offset, offset + 4 * t.numel]}
            offset += 4 * t.numel
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
        size = -(-(8 + len(text)) // CHUNK) * CHUNK
        return (size - 8).to_bytes(8, "little") + text.ljust(size - 8, b" ")

    @cached_property
    def checkpoint_size(self) -> int:
        """Bytes of a checkpoint file of this layout."""
        return len(self.checkpoint_header()) + 4 * self.numel

    @classmethod
    def from_checkpoint(cls, start: bytes) -> Layout:
        """The layout of the checkpoint whose file starts with these bytes (the header at least).

        Strict: only a file whose header is exactly `checkpoint_header` of its layout is accepted.
        Raises MalformedError.
        """
        size = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 0 < size <= MAX_HEADER or len(start) < 8 + size:
            raise MalformedError("this is not a Cairn checkpoint: its header is cut off or too large")
        try:
            entries = json.loads(start[8 : 8 + size])
            shapes = {name: tuple(int(n) for n in entry["shape"]) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise MalformedError("this is not a Cairn checkpoint: its header does not parse") from None
        layout = cls.of(shapes)
        if layout.checkpoint_header() != start[: 8 + size]:
            raise MalformedError("this is not a Cairn checkpoint: its header is not in canonical form")
        return layout


def checkpoint_header_size(start: bytes) -> int:
    """How many bytes of a checkpoint file `Layout.from_checkpoint` needs, from its first 8. Raises MalformedError."""
    size = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 0 < size <= MAX_HEADER:
        raise MalformedError("this is not a Cairn checkpoint: its header is cut off or too large")
    return 8 + size

"""The parameters of a run's model: their names, shapes and canonical order. Everyone's updates and states use it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from protocol.errors import MalformedError
from protocol.ids import Digest, sha256
from protocol.merkle import CHUNK, MAX_BLOB
from protocol.plain_text import is_plain

ValueKind = Literal["F32", "BF16", "U8"]
"""The values of a tensor in a file, in safetensors' words."""
VALUE_BYTES: Mapping[ValueKind, int] = {"F32": 4, "BF16": 2, "U8": 1}

BLOCK = 4096
"""Coordinates in a block. Blocks lie over each flattened tensor; the last of a tensor may be shorter."""

MAX_TENSORS = 100_000
MAX_TENSOR_NAME = 256
"""Bytes of a tensor's name in UTF-8."""
MAX_DIMENSIONS = 8
MAX_HEADER = 64 * 1024 * 1024
MAX_NUMEL = (MAX_BLOB - MAX_HEADER - 8) // 4
"""Parameters of a layout: a checkpoint holds no more."""
RESERVED = "outer_"
"""Prefix of the tensors that a state holds beside the model's. No tensor of a model begins with it."""
MOMENTUM = f"{RESERVED}momentum/"
"""Prefix of the outer optimizer's momentum tensors in a state."""
REFERENCE_NORMS = "outer_reference_norms"
"""A state's tensor of reference norms: fp32 [tensors of the model's layout], in its order (`outer.clip_factors`)."""


def is_outer_tensor(name: str) -> bool:
    """Return whether a state's tensor belongs to the outer step. No model may have a tensor of such a name."""
    return name.startswith(MOMENTUM) or name == REFERENCE_NORMS


@dataclass(frozen=True)
class TensorShape:
    """One parameter: its name and shape, flattened row-major in updates.

    `kind`: its values in a file. Always fp32 in states; other kinds are in the file of a frozen base.
    """

    name: str
    shape: tuple[int, ...]
    kind: ValueKind = "F32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values in a file."""
        return VALUE_BYTES[self.kind] * self.numel

    @property
    def blocks(self) -> int:
        """Blocks that cover it."""
        return -(-self.numel // BLOCK)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Coordinates `start` to `stop` of a layout's tensor `index`: whole blocks, or up to the tensor's end.

    Shards of the mean consist of them, and the part of a state that one of several processes holds.
    """

    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def blocks(self) -> int:
        """Blocks that cover it."""
        return -(-self.numel // BLOCK)


@dataclass(frozen=True)
class Layout:
    """All tensors, in ascending order of their names' UTF-8 bytes."""

    tensors: tuple[TensorShape, ...]

    def __post_init__(self):
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise MalformedError(f"a layout lists 1 to {MAX_TENSORS:,} tensors, not {len(self.tensors):,}")
        for t in self.tensors:
            _check_tensor(t)
        names = [t.name.encode() for t in self.tensors]
        if any(a >= b for a, b in zip(names, names[1:], strict=False)):
            raise MalformedError("a layout lists each tensor once, by ascending name")
        if self.numel > MAX_NUMEL:
            raise MalformedError(f"a layout of {self.numel:,} parameters: a checkpoint holds at most {MAX_NUMEL:,}")

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Return a layout of fp32 tensors from a mapping of names to shapes, in any order."""
        return cls.in_order(TensorShape(n, tuple(shape)) for n, shape in shapes.items())

    @classmethod
    def in_order(cls, tensors: Iterable[TensorShape]) -> Layout:
        """Return a layout of these tensors, which come in any order."""
        return cls(tuple(sorted(tensors, key=lambda t: _utf8(t.name))))

    @cached_property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    @cached_property
    def blocks(self) -> int:
        return sum(t.blocks for t in self.tensors)

    @cached_property
    def full_slices(self) -> tuple[TensorSlice, ...]:
        """All tensors, each as one slice."""
        return tuple(TensorSlice(i, 0, t.numel) for i, t in enumerate(self.tensors))

    @cached_property
    def digest(self) -> Digest:
        """Names the layout: SHA-256 of its canonical JSON."""
        return Digest(sha256(b"cairn/v1/layout", json.dumps([[t.name, t.shape] for t in self.tensors]).encode()))

    def with_momentum(self) -> Layout:
        """Return the layout of a state whose outer optimizer keeps momentum."""
        shapes = {t.name: t.shape for t in self.tensors}
        return Layout.of(shapes | {MOMENTUM + n: s for n, s in shapes.items()})

    def with_reference_norms(self) -> Layout:
        """Return the layout of a state that keeps a reference norm for each of the model's tensors."""
        shapes = {t.name: t.shape for t in self.tensors}
        return Layout.of(shapes | {REFERENCE_NORMS: (len(self.of_model().tensors),)})

    def of_model(self) -> Layout:
        """Return the layout of the model alone, without the tensors of the outer step."""
        return Layout(tuple(t for t in self.tensors if not is_outer_tensor(t.name)))

    # -- checkpoints: canonical safetensors ----------------------------------------------------------------

    def checkpoint_header(self) -> bytes:
        """Return the first bytes of a checkpoint file of this layout: a safetensors header, padded with spaces.

        The tensors (little endian, in layout order, without gaps) then begin at a chunk's boundary.
        """
        entries: dict[str, object] = {}
        offset = 0
        for t in self.tensors:
            end = offset + t.nbytes
            entries[t.name] = {"dtype": t.kind, "shape": list(t.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
        size = -(-(8 + len(text)) // CHUNK) * CHUNK
        return (size - 8).to_bytes(8, "little") + text.ljust(size - 8, b" ")

    @cached_property
    def checkpoint_size(self) -> int:
        """Bytes of a checkpoint file of this layout."""
        return len(self.checkpoint_header()) + sum(t.nbytes for t in self.tensors)

    @classmethod
    def from_checkpoint(cls, start: bytes) -> Layout:
        """Return the layout of the checkpoint whose file starts with these bytes (the header at least).

        Strict: only a file whose header is exactly `checkpoint_header` of its layout is accepted.
        Raises MalformedError.
        """
        size = checkpoint_header_size(start)
        if len(start) < size:
            raise MalformedError("this is not a Cairn checkpoint: its header is cut off")
        layout = cls(tuple(_header_entries(bytes(start[8:size]))))
        if layout.checkpoint_header() != start[:size]:
            raise MalformedError("this is not a Cairn checkpoint: its header is not in canonical form")
        return layout


def _check_tensor(t: TensorShape) -> None:
    name = _utf8(t.name)
    # The name "__metadata__" means something else in safetensors.
    if not 1 <= len(name) <= MAX_TENSOR_NAME or not is_plain(t.name) or t.name == "__metadata__":
        raise MalformedError(
            f"{t.name[:80]!r} is not the name of a tensor: want 1 to {MAX_TENSOR_NAME} printable bytes"
        )
    if len(t.shape) > MAX_DIMENSIONS or any(type(n) is not int or not 0 < n <= MAX_NUMEL for n in t.shape):
        raise MalformedError(
            f"tensor {t.name} has not at most {MAX_DIMENSIONS} dimensions, each from 1 to {MAX_NUMEL:,}"
        )


def _utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise MalformedError(f"{name[:80]!r} is not the name of a tensor: it is not Unicode text") from None


# One entry of `checkpoint_header`. A foreign header is read entry by entry with this pattern, not as JSON. 64 MiB of
# JSON can expand to gigabytes of lists, and a long number takes time that grows with the square of its length.
_ENTRY = re.compile(
    rb'"((?:[ !#-\[\]-~]|\\[ -~]){1,%d})":{"dtype":"F32","shape":\[((?:\d{1,13},){0,%d}\d{1,13})?\],'
    rb'"data_offsets":\[\d{1,15},\d{1,15}\]}([,}])' % (6 * MAX_TENSOR_NAME, MAX_DIMENSIONS - 1)
)


def _header_entries(text: bytes) -> Iterator[TensorShape]:
    """Yield the tensors that a header lists, as long as it is in canonical form.

    Raises MalformedError where it is not.
    """
    at = 1
    for _ in range(MAX_TENSORS):
        entry = _ENTRY.match(text, at)
        if entry is None:
            break
        try:
            name = json.loads(b'"' + entry[1] + b'"')
        except ValueError:
            break
        yield TensorShape(name, tuple(int(n) for n in entry[2].split(b",")) if entry[2] else ())
        if entry[3] == b"}":
            return
        at = entry.end()
    raise MalformedError("this is not a Cairn checkpoint: its header is not in canonical form")


def checkpoint_header_size(start: bytes) -> int:
    """Return the number of bytes of a checkpoint file that `Layout.from_checkpoint` needs, from its first 8.

    Raises MalformedError.
    """
    size = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 0 < size <= MAX_HEADER:
        raise MalformedError("this is not a Cairn checkpoint: its header is cut off or too large")
    return 8 + size

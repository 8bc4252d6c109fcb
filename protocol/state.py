"""A state as bytes: its canonical checkpoint file, and the state digest, which is that file's blob digest.

A holder of a state can therefore serve it chunk by chunk, and a fetching peer can check every chunk against the
chain. The file is safetensors: anything that reads those reads a checkpoint.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.layout import Layout, TensorShape, TensorSlice, ValueKind
from protocol.merkle import CHUNK, leaf_hash, tree_hash
from protocol.spec import OuterSpec

FileBytes = bytes | bytearray | memoryview | mmap.mmap
"""The bytes of a file, in memory or mapped."""
STAGING_BYTES = 256 * CHUNK
"""Bytes of a tensor on an accelerator that are copied to memory at a time."""
DTYPES: Mapping[ValueKind, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
HASH_BATCH = 256
"""Chunks that wait to be hashed at a time."""


def state_layout(model: Layout, outer: OuterSpec) -> Layout:
    """Return the layout of a run's states: the model's tensors, and those that the outer step keeps (its memory)."""
    layout = model.with_momentum() if outer.optimizer == "nesterov" else model
    return layout.with_reference_norms() if outer.clip == "median" else layout


def flat_view(tensors: Mapping[str, Tensor], shape: TensorShape) -> Tensor:
    """Return the named tensor as a 1-d view of the same memory.

    Raises MalformedError unless it is there, of the layout's kind (fp32 in states), contiguous and of its shape (or
    flattened).
    """
    tensor = tensors.get(shape.name)
    if tensor is None:
        raise MalformedError(f"tensor {shape.name[:120]!r} of the run's layout is missing")
    tensor = tensor.detach()
    if tensor.dtype != DTYPES[shape.kind] or not tensor.is_contiguous():
        raise MalformedError(f"tensor {shape.name[:120]!r} is not contiguous {shape.kind}: it is {tensor.dtype}")
    if tuple(tensor.shape) not in (shape.shape, (shape.numel,)):
        raise MalformedError(f"tensor {shape.name[:120]!r} has shape {tuple(tensor.shape)}, not {shape.shape}")
    return tensor.view(-1)


def local_views(
    tensors: Mapping[str, Tensor], layout: Layout, slices: Sequence[TensorSlice] | None, prefix: str = ""
) -> dict[int, tuple[int, Tensor]]:
    """Return the local slice of each of the layout's tensors, by its index: its first coordinate, and a 1-d view of it.

    `slices` None: all of everything. Otherwise `tensors` has, by name, these slices, at most one of a tensor: 1-d,
    fp32.
    `prefix` goes before the layout's names. Raises MalformedError when they do not fit.
    """
    found: dict[int, tuple[int, Tensor]] = {}
    for s in layout.full_slices if slices is None else slices:
        whole = layout.tensors[s.index]
        shape = whole.shape if s.numel == whole.numel else (s.numel,)
        found[s.index] = (s.start, flat_view(tensors, TensorShape(prefix + whole.name, shape)))
    return found


def checkpoint_chunks(layout: Layout, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the checkpoint file of a state, or a base's file, in chunks of CHUNK bytes, the last one shorter.

    Most are views of the tensors' own memory: use each before the state changes. Raises MalformedError for tensors that
    do not fit the layout.
    """
    flat = [flat_view(tensors, t) for t in layout.tensors]
    header = memoryview(layout.checkpoint_header())
    yield from (header[i : i + CHUNK] for i in range(0, len(header), CHUNK))
    pending = bytearray()  # the start of a chunk that spans tensors
    for view in _byte_views(flat):
        at = 0
        if pending:
            at = min(CHUNK - len(pending), len(view))
            pending += view[:at]
            if len(pending) < CHUNK:
                continue
            yield memoryview(pending)
            pending = bytearray()
        whole = at + (len(view) - at) // CHUNK * CHUNK
        yield from (view[i : i + CHUNK] for i in range(at, whole, CHUNK))
        pending += view[whole:]
    if pending:
        yield memoryview(pending)


def _byte_views(tensors: list[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of each flat tensor: views where it is in memory, copies of STAGING_BYTES where it is not."""
    for tensor in tensors:
        for some in (tensor,) if tensor.device.type == "cpu" else tensor.split(STAGING_BYTES // 4):
            yield some.cpu().view(torch.uint8).numpy().data


def state_leaves(layout: Layout, tensors: Mapping[str, Tensor], threads: int | None = None) -> list[bytes]:
    """Return the leaf hashes of a state's checkpoint file, by `threads` at once (by default one a core, at most 8)."""
    chunks = checkpoint_chunks(layout, tensors)
    threads = threads or min(8, os.cpu_count() or 1)
    if threads == 1:
        return [leaf_hash(chunk) for chunk in chunks]
    leaves: list[bytes] = []
    # hashlib releases the interpreter's lock while it hashes a chunk.
    with ThreadPoolExecutor(threads) as pool:
        while batch := list(islice(chunks, HASH_BATCH)):
            leaves += pool.map(leaf_hash, batch)
    return leaves


def state_digest(layout: Layout, tensors: Mapping[str, Tensor], threads: int | None = None) -> Digest:
    """Return the state's digest: that of its checkpoint file as a blob."""
    return tree_hash(state_leaves(layout, tensors, threads))


def tensors_from_checkpoint(layout: Layout, data: FileBytes) -> dict[str, Tensor]:
    """Return the tensors in a checkpoint file of this layout: fp32 copies, in memory of their own.

    The bytes are taken to be what a digest vouched for. Raises MalformedError when they are not of this layout.
    """
    return dict(tensors_in(layout, data))


def tensors_in(layout: Layout, data: FileBytes) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the same tensors one by one, by name; of a base's file in the kinds of its layout."""
    header = layout.checkpoint_header()
    if len(data) != layout.checkpoint_size:
        raise MalformedError(f"a checkpoint of {len(data)} bytes: for this model it has {layout.checkpoint_size}")
    if data[: len(header)] != header:
        raise MalformedError("this checkpoint is of another model, or its header is not in canonical form")
    offset = len(header)
    with memoryview(data) as view:
        for shape in layout.tensors:
            tensor = torch.empty(shape.numel, dtype=DTYPES[shape.kind])
            size = tensor.nbytes
            tensor.view(torch.uint8).numpy().data[:] = view[offset : offset + size]
            yield shape.name, tensor.view(shape.shape)
            offset += size

"""A process's shard of the saved state: copied and written beside the training, or at once.

A step changes the tensors that are to be saved, so they are copied to memory between two steps. The copies are written,
hashed and flushed to the disk while training continues. The file has whole tensors, whatever the number of ranks, so
the next start may have another layout. To copy is collective (tensors are gathered one by one). To write is not, until
all ranks meet for the digest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from peer.training.background import BackgroundTask, gather_reports, write_file, write_shard
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.outer_state import OuterOperations
from peer.training.parallel.sharded_file import ShardedFile
from peer.training.saved_state import FEEDBACK, POSITION, PROGRESS
from protocol.ids import Digest
from protocol.layout import Layout, TensorSlice


class _Cancelled(Exception):
    """The rest of the file is not wanted any more."""


class TensorToSave(NamedTuple):
    """A tensor that is to be saved. `fresh`: nobody else holds it, so it need not be copied in memory."""

    name: str
    tensor: Tensor
    fresh: bool = False


def copy_size(file: ShardedFile, device: torch.device, *, offloaded: bool = False) -> int:
    """Return the bytes of memory that a copy of a file's tensors needs, on all ranks together.

    `offloaded`: feedback and progress are in the machine's memory already, so their copies are not pinned.
    """

    def size(part: TensorSlice) -> int:
        at_home = offloaded and file.layout.tensors[part.index].name.startswith((f"{FEEDBACK}/", f"{PROGRESS}/"))
        return 4 * part.numel if at_home else _allocation(4 * part.numel, device)

    return sum(size(part) for parts in file.parts.values() for part in parts)


def _allocation(size: int, device: torch.device) -> int:
    # torch allocates pinned memory in powers of two.
    return 1 << (size - 1).bit_length() if device.type == "cuda" and size else size


class StateWriter:
    """The only process of a peer, or one rank.

    Methods are called on all ranks in the same order, except `wait` and `digest`; properties may be read on one rank. A
    state is copied by `copy_state`, then written by `start_write` and `finish_write`; or by `write_now`. There is one
    copy at a time, and one thread.
    """

    def __init__(
        self, layout: Layout, inner: InnerOptimizer, outer: OuterOperations, background_hook: Callable[[], None]
    ):
        """Write the state of these. `background_hook` is called for every chunk by the thread that writes."""
        self._layout = layout
        self._inner = inner
        self._outer = outer
        self._group = outer.group
        self._background_hook = background_hook
        self.pinned: dict[str, Tensor] = {}
        self._copies: list[Tensor] = []
        self._reserved = 0
        """Bytes of memory, on all ranks, that the next copy uses again or frees."""
        self._file: ShardedFile | None = None
        """The file that was copied or written last."""
        self._reports: list[bytes] | None = None
        self._writing: BackgroundTask[bytes] | None = None
        self._cancelled = threading.Event()
        self._size = self._written = 0

    @property
    def optimizer_steps(self) -> int:
        """Number of steps that the optimizer has made."""
        return self._inner.moments()[0]

    @property
    def copy_size(self) -> int:
        """Bytes of memory that a copy needs, on all ranks, beyond those that are reserved for it already."""
        return self._size_of(self._state_file()) - self._reserved

    def _size_of(self, file: ShardedFile) -> int:
        return copy_size(file, self._inner.device, offloaded=self._outer.offload.enabled)

    def copy_state(self) -> None:
        """Copy feedback, progress and moments to memory. Not while a state is written.

        In a replayable run: parameters and moments.
        """
        self._copies = []  # freed first
        device, self._file = self._inner.device, self._state_file()
        self._reserved = self._size_of(self._file)
        tensors = self._tensors(self._file)
        if device.type == "cuda":
            self._copies = [self._to_pinned(t) if t.tensor.device.type == "cuda" else _in_memory(t) for t in tensors]
            torch.cuda.current_stream(device).synchronize()
        else:
            self._copies = [_in_memory(t) for t in tensors]

    def _to_pinned(self, saved: TensorToSave) -> Tensor:
        """Copy to pinned memory, which the GPU writes by itself. It is slow to allocate, so it is reused."""
        flat = saved.tensor.detach().reshape(-1)
        buffer = self.pinned.get(saved.name)
        if buffer is None or buffer.numel() != flat.numel():
            try:
                buffer = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)
            except RuntimeError:  # the system pins no more memory: slower, and as good
                buffer = torch.empty(flat.numel(), dtype=flat.dtype)
            self.pinned[saved.name] = buffer
        return buffer.copy_(flat, non_blocking=True)

    def _release_copies(self) -> list[Tensor]:
        copies, self._copies = self._copies, []
        self._reserved = self._group.world * sum(
            _allocation(4 * t.numel(), self._inner.device) for t in self.pinned.values()
        )
        return copies

    def start_write(self, path: Path) -> None:
        """Write the copy to its place in a file, in the background; other ranks may be writing it as well."""
        file, copies, rank = self._file, self._release_copies(), self._group.rank
        if file is None:
            raise ValueError("nothing was copied that could be written")
        self._cancelled.clear()
        self._size, self._written = sum(map(len, file.ranges(rank))), 0
        self._writing = BackgroundTask(lambda: write_shard(file, rank, _consumed(copies), path, self._after))

    def _after(self, size: int) -> None:
        self._written += size
        if self._cancelled.is_set():
            raise _Cancelled
        self._background_hook()

    @property
    def is_written(self) -> bool:
        """True when `finish_write` will not wait for this process's disk."""
        return self._writing is not None and self._writing.is_done

    @property
    def written_share(self) -> float:
        """Share of this process's shard that is written: 0 to 1."""
        return self._written / self._size if self._size else 0.0

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the shard is written, or that has failed, at most for `seconds`."""
        if self._writing is not None:
            self._writing.wait(seconds)

    def finish_write(self) -> None:
        """Wait until all have written; rank 0 then knows the `digest`. Raises OSError on all ranks."""
        writing, self._writing = self._writing, None
        if writing is None or self._file is None:
            raise ValueError("nothing is being written")
        self._reports = gather_reports(self._group, self._file, writing.result)

    def digest(self) -> Digest:
        """Return the digest of the file whose writing ended last. On rank 0, by any thread."""
        if self._file is None or self._reports is None:
            raise ValueError("no file was written")
        return self._file.digest(self._reports)

    def cancel_write(self, seconds: float | None = None) -> None:
        """Drop the copy and end its writing; wait for the end, at most for `seconds`."""
        self._release_copies()
        self._cancelled.set()
        self.wait(seconds)
        self._writing = None

    def write_now(self, path: Path) -> None:
        """Write the same tensors into a file at once; rank 0 then knows the `digest`. Raises OSError."""
        self._file = self._state_file()
        tensors = (saved.tensor.reshape(-1) for saved in self._tensors(self._file))
        self._reports = write_file(self._group, self._file, tensors, path)

    def _state_file(self) -> ShardedFile:
        """Return the file of all that there is to save now."""
        shapes = {t.name: t.shape for t in self._layout.tensors}
        held = self._inner.moments()[1]
        groups = (POSITION,) if self._outer.replayable else (FEEDBACK, PROGRESS)
        named = {f"{group}/{n}": s for group in groups for n, s in shapes.items()}
        for name, shape in shapes.items() if held else ():
            # A rank holds no moments of another stage's parameters; a single process, none of those without gradients.
            keys = [f"{moment}/{name}" for moment in self._inner.moments_of(name)]
            named |= {key: shape for key in keys if self._group.world > 1 or key in held}
        return self._outer.file_of(Layout.of(named))

    def _tensors(self, file: ShardedFile) -> Iterator[TensorToSave]:
        """Yield this process's slices in the file's order: names sort by group, then as in the layout. Collective."""
        moments, names = self._inner.moments()[1], {t.name for t in file.layout.tensors}
        for group in sorted({name.partition("/")[0] for name in names}):
            if group == FEEDBACK:
                found = iter(self._outer.feedback.items())
            elif group == PROGRESS:
                found = self._outer.progress()
            elif group == POSITION:
                found = self._outer.owned_of(lambda name: None)
            else:
                here = {n for n in self._inner.parameters if f"{group}/{n}" in names}
                found = self._outer.owned_of(lambda n, g=group: self._moment(moments, f"{g}/{n}"), here)
            for name, tensor in found:
                yield TensorToSave(f"{group}/{name}", tensor, fresh=group == PROGRESS)

    def _moment(self, held: Mapping[str, Tensor], key: str) -> Tensor:
        """Return what this process has of a moment: zeros if its parameter has had no gradient."""
        return held[key] if key in held else torch.zeros_like(self._inner.parameters[key.partition("/")[2]])


def _in_memory(saved: TensorToSave) -> Tensor:
    return (saved.tensor if saved.fresh else saved.tensor.detach().clone()).reshape(-1)


def _consumed(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors in order; the memory of each is free when the next one is requested."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()

"""Work in a thread of its own beside the training, and a process's shard of a saved state that is written there.

A step changes the tensors that are to be saved, so they are copied to memory between two steps. The copies are written,
hashed and flushed to the disk while training continues.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from peer.training.parallel.group import SoleRank
from peer.training.parallel.sharded_file import ShardedFile

T = TypeVar("T")

SYNC_BYTES = 64 * 1024 * 1024
"""Bytes that are written before they are flushed. Peers may wait for the flush of a small file, which may have to wait
for all that is not on the disk yet."""


class BackgroundTask(Generic[T]):
    """A call that runs in a thread of its own. Its exception is raised by `result`."""

    def __init__(self, work: Callable[[], T], name: str = "save"):
        self._result: Future[T] = Future()
        # A daemon: a disk that hangs does not keep a process that has to end.
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result.set_result(work())
        except BaseException as e:  # noqa: BLE001 - raised again in `result`
            self._result.set_exception(e)

    @property
    def is_done(self) -> bool:
        return self._result.done()

    def result(self) -> T:
        """Wait for the call, and return its result."""
        return self._result.result()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, at most for `seconds`."""
        self._thread.join(seconds)


class _Cancelled(Exception):
    """The rest of the file is not wanted any more."""


class TensorToSave(NamedTuple):
    """A tensor that is to be saved. `fresh`: nobody else holds it, so it need not be copied in memory."""

    name: str
    tensor: Tensor
    fresh: bool = False


def copy_size(file: ShardedFile, device: torch.device) -> int:
    """Return the bytes of memory that a copy of a file's tensors needs, on all ranks together."""
    return sum(_allocation(4 * part.numel, device) for parts in file.parts.values() for part in parts)


def _allocation(size: int, device: torch.device) -> int:
    # torch allocates pinned memory in powers of two.
    return 1 << (size - 1).bit_length() if device.type == "cuda" and size else size


class ShardCheckpointWriter:
    """One process's shard of a saved file: `copy`, then `start_write`, then `report`, which waits for the end.

    One copy at a time, and one thread. `background_hook` is called for every chunk that is written.
    """

    def __init__(self, rank: int, device: torch.device, background_hook: Callable[[], None] = lambda: None):
        self._rank = rank
        self._device = device
        self._background_hook = background_hook
        self.pinned: dict[str, Tensor] = {}
        self._copies: list[Tensor] = []
        self._file: ShardedFile | None = None
        self._writing: BackgroundTask[bytes] | None = None
        self._cancelled = threading.Event()
        self._size = self._written = 0

    @property
    def reserved(self) -> int:
        """Bytes of memory that the next copy uses again or frees."""
        return sum(_allocation(t.nbytes, self._device) for t in (self.pinned.values() or self._copies))

    def copy(self, file: ShardedFile, tensors: Iterable[TensorToSave]) -> None:
        """Copy this process's tensors (fp32, in the file's order) to memory. Not while it writes."""
        self._copies = []  # freed first
        self._file = file
        if self._device.type == "cuda":
            self._copies = [self._to_pinned(t) for t in tensors]
            torch.cuda.current_stream(self._device).synchronize()
        else:
            self._copies = [(t.tensor if t.fresh else t.tensor.detach().clone()).reshape(-1) for t in tensors]

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

    def start_write(self, path: Path) -> None:
        """Write the copy to its place in a file, in the background; other ranks may be writing it as well."""
        file, copies = self._file, self._copies
        if file is None:
            raise ValueError("nothing was copied that could be written")
        self._file, self._copies = None, []
        self._cancelled.clear()
        self._size, self._written = sum(s.stop - s.start for s in file.ranges(self._rank)), 0
        self._writing = BackgroundTask(lambda: write_shard(file, self._rank, _consumed(copies), path, self._after))

    def _after(self, size: int) -> None:
        self._written += size
        if self._cancelled.is_set():
            raise _Cancelled
        self._background_hook()

    @property
    def is_written(self) -> bool:
        """True when `report` will not wait."""
        return self._writing is not None and self._writing.is_done

    @property
    def written_share(self) -> float:
        """Share of this process's shard that is written: 0 to 1."""
        return self._written / self._size if self._size else 0.0

    def wait(self) -> None:
        """Wait until the shard is written, or that has failed."""
        if self._writing is not None:
            self._writing.wait()

    def report(self) -> bytes:
        """Return `ShardedFile.report` of the shard, which is then on the disk. Raise OSError."""
        writing, self._writing = self._writing, None
        if writing is None:
            raise ValueError("nothing is being written")
        return writing.result()

    def cancel_write(self, seconds: float | None = None) -> None:
        """Drop the copy and end its writing; wait for the end, at most for `seconds`."""
        self._file, self._copies = None, []
        self._cancelled.set()
        if self._writing is not None:
            self._writing.wait(seconds)
            self._writing = None


def _consumed(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors in order; the memory of each is free when the next one is requested."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def write_shard(
    file: ShardedFile,
    rank: int,
    tensors: Iterable[Tensor],
    path: Path,
    after: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Write a rank's shard of a file and flush it. Return its report. Raise OSError.

    `after` is called with the number of bytes after each piece.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    pending = 0

    def wrote(size: int) -> None:
        nonlocal pending
        after(size)
        pending += size
        if pending >= SYNC_BYTES:
            os.fsync(descriptor)
            pending = 0

    try:
        report = file.report(rank, tensors, descriptor, wrote)
        os.fsync(descriptor)
        return report
    finally:
        os.close(descriptor)


def write_file(group: SoleRank, file: ShardedFile, tensors: Iterable[Tensor], path: Path | None) -> list[bytes] | None:
    """Write a file that the ranks own together, and flush it. Return its reports, on rank 0. Collective.

    `tensors`: this rank's slices, 1-d fp32, in order. Without a path nothing is written. Raise OSError on all ranks;
    some of the file may then be there.
    """
    left = iter(tensors)

    def report() -> bytes:
        try:
            return file.report(group.rank, left) if path is None else write_shard(file, group.rank, left, path)
        except OSError:
            for _ in left:  # this may be collective: an error waits until all ranks are done with it
                pass
            raise

    with group.together():
        if path is not None and group.rank == 0:
            path.unlink(missing_ok=True)
    return gather_reports(group, file, report)


def gather_reports(group: SoleRank, file: ShardedFile, report: Callable[[], bytes]) -> list[bytes] | None:
    """Return what `report` returns on each rank, on rank 0. Collective. Raise OSError on all ranks."""
    mine = b""
    with group.together():
        mine = report()
    return group.gather(mine, [file.report_size(rank) for rank in range(group.world)])

"""What is done beside the training: work in a thread of its own, and what a process copies and writes there.

A step changes the tensors that are to be saved, so they are copied to memory between two steps; the copies are written,
hashed and brought to the disk while training goes on.
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

from peer.training.parallel.file import PartFile

T = TypeVar("T")

SYNC_BYTES = 64 * 1024 * 1024
"""So much is written before it is brought to the disk: a small file's own sync, for which peers wait, may have to wait
for all that is not on the disk yet."""


class Beside(Generic[T]):
    """`work` in a thread of its own. What it raises is raised by `result`."""

    def __init__(self, work: Callable[[], T]):
        self._result: Future[T] = Future()
        # A daemon: a disk that hangs does not keep a process that has to end.
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
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
        """Waits for it."""
        return self._result.result()

    def wait(self, seconds: float | None = None) -> None:
        """Until the thread has ended, or so long."""
        self._thread.join(seconds)


class _GivenUp(Exception):
    """Nobody wants the rest of a file."""


class Live(NamedTuple):
    """A tensor that is to be saved. `fresh`: nobody else holds it, so that it need not be copied in memory."""

    name: str
    tensor: Tensor
    fresh: bool = False


def copy_size(file: PartFile, device: torch.device) -> int:
    """Bytes of memory that a copy of a file's tensors takes, by all ranks."""
    return sum(_room(4 * part.numel, device) for parts in file.parts.values() for part in parts)


def _room(size: int, device: torch.device) -> int:
    # torch takes pinned memory in powers of two.
    return 1 << (size - 1).bit_length() if device.type == "cuda" and size else size


class PartSaver:
    """One process's part of a saved file: `keep` copies it, `begin` has it written, `report` waits for that.

    One copy at a time, and one thread. `aside` is called for every chunk that is written: others have a turn.
    """

    def __init__(self, rank: int, device: torch.device, aside: Callable[[], None] = lambda: None):
        self._rank = rank
        self._device = device
        self._aside = aside
        self._pinned: dict[str, Tensor] = {}
        self._copies: list[Tensor] = []
        self._file: PartFile | None = None
        self._writing: Beside[bytes] | None = None
        self._enough = threading.Event()
        self._size = self._written = 0

    @property
    def held(self) -> int:
        """Bytes of memory that the next copy will use again, or let go of."""
        return sum(_room(t.nbytes, self._device) for t in (self._pinned.values() or self._copies))

    def keep(self, file: PartFile, tensors: Iterable[Live]) -> None:
        """Copy this process's tensors (fp32, in the file's order) to memory: what changes them then changes no copy.

        Not while it writes.
        """
        self._copies = []  # of before: let go of first
        self._file = file
        if self._device.type == "cuda":
            self._copies = [self._to_pinned(t) for t in tensors]
            torch.cuda.current_stream(self._device).synchronize()
        else:
            self._copies = [(t.tensor if t.fresh else t.tensor.detach().clone()).reshape(-1) for t in tensors]

    def _to_pinned(self, live: Live) -> Tensor:
        """To memory that the GPU writes to by itself. To get such memory takes long: it is kept for the next time."""
        flat = live.tensor.detach().reshape(-1)
        buffer = self._pinned.get(live.name)
        if buffer is None or buffer.numel() != flat.numel():
            try:
                buffer = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)
            except RuntimeError:  # the system pins no more: slower, and as good
                buffer = torch.empty(flat.numel(), dtype=flat.dtype)
            self._pinned[live.name] = buffer
        return buffer.copy_(flat, non_blocking=True)

    def begin(self, path: Path) -> None:
        """Write what was kept to where it belongs in a file, which others may be writing, too."""
        file, copies = self._file, self._copies
        if file is None:
            raise ValueError("nothing was kept that could be written")
        self._file, self._copies = None, []
        self._enough.clear()
        self._size, self._written = sum(s.stop - s.start for s in file.spans(self._rank)), 0
        self._writing = Beside(lambda: write_part(file, self._rank, _let_go(copies), path, self._after))

    def _after(self, size: int) -> None:
        self._written += size
        if self._enough.is_set():
            raise _GivenUp
        self._aside()

    @property
    def is_written(self) -> bool:
        """`report` need not wait."""
        return self._writing is not None and self._writing.is_done

    @property
    def written(self) -> float:
        """What share of this process's part of the file."""
        return self._written / self._size if self._size else 0.0

    def wait(self) -> None:
        """Until it is written, or has failed."""
        if self._writing is not None:
            self._writing.wait()

    def report(self) -> bytes:
        """What the file's digest needs of this part (`PartFile.report`), once it is on the disk. Raises OSError."""
        writing, self._writing = self._writing, None
        if writing is None:
            raise ValueError("nothing is being written")
        return writing.result()

    def give_up(self, seconds: float | None = None) -> None:
        """Forget what was kept, and end what is being written: wait for that, or so long."""
        self._file, self._copies = None, []
        self._enough.set()
        if self._writing is not None:
            self._writing.wait(seconds)
            self._writing = None


def _let_go(tensors: list[Tensor]) -> Iterator[Tensor]:
    """One after the other; each one's memory is free when the next is asked for."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def write_part(
    file: PartFile, rank: int, tensors: Iterable[Tensor], path: Path, after: Callable[[int], None] = lambda size: None
) -> bytes:
    """Write a rank's part of a file, onto the disk; its report. `after` is told of bytes written. Raises OSError."""
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

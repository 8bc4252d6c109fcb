"""Work in a thread of its own beside the training, and the writing of files that ranks own together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

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


def write_shard(
    file: ShardedFile,
    rank: int,
    tensors: Iterable[Tensor],
    path: Path,
    after: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Write a rank's shard of a file and flush it. Return its report. Raises OSError.

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

    `tensors`: this rank's slices, 1-d fp32, in order. Without a path nothing is written. Raises OSError on all ranks;
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
    """Return what `report` returns on each rank, on rank 0. Collective. Raises OSError on all ranks."""
    mine = b""
    with group.together():
        mine = report()
    return group.gather(mine, [file.report_size(rank) for rank in range(group.world)])

"""An update's file while it is being made: written from its start on, so that others can have the first chunks while
the last are compressed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from peer.errors import ChannelError
from peer.training.durable import publish
from protocol.merkle import CHUNK

TELL_SECONDS = 0.1
"""How often the node is told how far it is, at most."""

Tell = Callable[[Path, int], None]


class GrowingFile:
    """`take` is for `Codec.encode`; then `finish`, and `close` whatever became of it.

    It is there to be early, and never in the way: what goes wrong with it is not raised, and then it only stops.
    """

    def __init__(self, path: Path, size: int, tell: Tell):
        """`size`: bytes of the whole update. `tell(path, final)`: the first `final` bytes of the file will not change
        any more; it may raise ChannelError."""
        self.path = path
        self._size = size
        self._tell = tell
        self._written = self._told = 0
        self._told_at = 0.0
        self._file = None
        self._failed = False

    def take(self, start: memoryview) -> None:
        """The blob's first bytes, which are final."""
        if self._failed or (len(start) < self._size and len(start) - self._written < CHUNK):
            return
        try:
            if self._file is None:
                self._file = open(self.path, "wb", buffering=0)
            while self._written < len(start):
                self._written += self._file.write(start[self._written :]) or 0
            now = time.monotonic()
            if self._written == self._size or now >= self._told_at + TELL_SECONDS:
                self._tell(self.path, self._written)
                self._told_at = now
        except (OSError, ChannelError):
            # The update is more than its haste: it is written once it is whole, and who reads this file reads on.
            self._failed = True

    def finish(self, path: Path) -> bool:
        """Bring the whole file to the disk, under its name; False when it is not whole, or that failed."""
        if self._failed or self._file is None or self._written < self._size:
            return False
        try:
            os.fsync(self._file.fileno())
            publish(self.path, path)
        except OSError:
            self._failed = True
        return not self._failed

    def close(self) -> None:
        """What was not finished is gone."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.path.unlink(missing_ok=True)

"""Where the thread that trains on a CPU stands aside while another does what cannot wait.

Both need the interpreter's lock hundreds of times for a round. The training thread yields the cores to everybody (its
niceness), so it may lose its core while it holds that lock, and the other, for which peers wait, with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from peer.training.spent import Doing


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.why = Doing.APPLYING
        """What it was closed for last."""

    @property
    def is_closed(self) -> bool:
        return not self._open.is_set()

    def wait(self) -> None:
        """Go on when it is open: called often."""
        if not self._open.is_set():
            self._open.wait()

    @contextmanager
    def closed(self, why: Doing) -> Iterator[None]:
        """Closed for a while, by one thread at a time."""
        self.why = why
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

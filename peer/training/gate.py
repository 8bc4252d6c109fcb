"""Where the thread that trains on a CPU stands aside while another does what cannot wait.

Both need the interpreter's lock hundreds of times for a round. The training thread yields the cores to everybody (its
niceness), so it may lose its core while it holds that lock, and the other, for which peers wait, with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @property
    def is_closed(self) -> bool:
        return not self._open.is_set()

    def wait(self) -> None:
        """Go on when it is open: called often."""
        if not self._open.is_set():
            self._open.wait()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Closed for a while, by one thread at a time."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

"""State that belongs to one thread at a time, and says so when another one touches it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ThreadOwned:
    """Base class of an object that one thread owns: at first the thread that made it.

    A message between threads passes the object on: the sender calls `hand_over` first, the receiver `adopt`. A
    violation is a bug, never a state of the world, so it raises AssertionError.
    """

    def __init__(self) -> None:
        self._owner: int | None = threading.get_ident()

    def assert_owner(self) -> None:
        """Raise AssertionError unless the calling thread owns this object."""
        if self._owner != threading.get_ident():
            raise AssertionError(f"{type(self).__name__} is used by a thread that does not own it")

    def hand_over(self) -> None:
        """End the calling thread's ownership. Raises AssertionError when it has none."""
        self.assert_owner()
        self._owner = None

    def adopt(self) -> None:
        """Make the calling thread the owner. Raises AssertionError when another thread is."""
        if self._owner is not None:
            self.assert_owner()
        self._owner = threading.get_ident()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Adopt this object for the block, and hand it over afterwards."""
        self.adopt()
        try:
            yield
        finally:
            self.hand_over()

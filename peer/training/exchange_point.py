"""The one place where the step loop and the base state meet: a lock, and the few values that both need.

Each thread owns its state (see `thread_owned`). The lock guards what the other thread may read of it:

- The step loop changes the model's parameters and the optimizer's moments only while it holds the lock. The request
  handler's thread, which makes updates, therefore always finds them between two steps.
- Anchor, error feedback and its contents change only under the lock. The thread that trains therefore copies a
  consistent state when it saves them.
"""

from __future__ import annotations

import threading
from types import TracebackType

from peer.training.throughput import MeanLoss
from peer.training.windows import WindowAccounting


class ExchangePoint:
    """A lock, used as a context manager. Its values may be read at any time and are set under the lock only."""

    windows: WindowAccounting
    loss: MeanLoss
    """Mean loss of the steps since the last update."""
    holds_state: bool
    """False before the first state is loaded, and after one was lost in a failed apply or load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        with self:
            self.windows, self.loss, self.holds_state = WindowAccounting(), MeanLoss(), False

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            self.assert_held()
        super().__setattr__(name, value)

    def assert_held(self) -> None:
        """Raise AssertionError unless the calling thread holds the lock."""
        if self._holder != threading.get_ident():
            raise AssertionError("a thread touches shared training state without the exchange point's lock")

    def acquire(self, *, blocking: bool = True) -> bool:
        """Return whether the calling thread has the lock now; it calls `release` afterwards."""
        if not self._lock.acquire(blocking=blocking):
            return False
        self._holder = threading.get_ident()
        return True

    def release(self) -> None:
        self.assert_held()
        self._holder = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

"""A mapping of bounded size: for a new entry beyond the bound, the oldest one is evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dict of at most `limit` entries: the one set first is evicted for a new one.

    `renew` and `move_to_end` make an entry the newest.
    """

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self.limit:
            self.popitem(last=False)

    def renew(self, key: K, value: V) -> None:
        """Set an entry and make it the newest."""
        self[key] = value
        if key in self:  # with a limit of 0 nothing is kept
            self.move_to_end(key)

"""Packs documents into windows, so that none is cut.

Best fit (Johnson 1974) with a bounded number of open windows: a document goes into the fullest window with room for it.
The same documents in the same order give the same windows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from protocol.spec import BEGINS

OPEN = 256
"""Windows that are filled at a time."""


class WindowPacker:
    """Fills windows of `window` marked tokens, and gives each full one to `emit` (uint32 [window]).

    The rest of a window is padded with the token `pad`, as one document of which nothing is trained.
    """

    def __init__(self, window: int, pad: int, emit: Callable[[np.ndarray], None]):
        self.windows = 0
        """Number of windows so far."""
        self._window, self._pad, self._emit = window, pad, emit
        self._open: list[tuple[int, int, list[np.ndarray]]] = []
        """(room, number, pieces), by ascending room and number."""
        self._begun = 0

    def add(self, tokens: np.ndarray) -> None:
        """Add a document of 1 to `window` marked tokens."""
        at = bisect_left(self._open, (len(tokens), -1))
        if at < len(self._open):
            room, number, pieces = self._open.pop(at)
        else:
            room, number, pieces = self._window, self._begun, []
            self._begun += 1
        pieces.append(tokens)
        room -= len(tokens)
        if room:
            self._open.insert(bisect_left(self._open, (room, number)), (room, number, pieces))
            if len(self._open) > OPEN:
                self._end(*self._open.pop(0))
        else:
            self._end(room, number, pieces)

    def finish(self) -> None:
        """End the windows that are open."""
        for opened in self._open:
            self._end(*opened)
        self._open = []

    def _end(self, room: int, _: int, pieces: list[np.ndarray]) -> None:
        padding = np.full(room, self._pad, dtype=np.uint32)
        padding[:1] |= np.uint32(BEGINS)
        self.windows += 1
        self._emit(np.concatenate([*pieces, padding]))

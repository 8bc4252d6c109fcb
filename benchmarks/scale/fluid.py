"""Blobs as fluids on the peers' lines, in steps of time.

A fetching peer shares its link equally among the blobs that it fetches. All peers together can send the sum of all
uplinks, since a peer relays the chunks that it has. This is shared max-min fairly among the fetching peers. No more
of a blob is available than its author has sent once, over the author's own link. Packets (`links`) go first.

Of the peers the first `watched` are looked at, and get their share of what all can give.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from benchmarks.scale.links import Clock, Links

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Fluid:
    """`held(receiver, blob)` is called when a blob has come whole."""

    def __init__(
        self,
        clock: Clock,
        links: Links,
        held: Callable[[int, Any], None],
        *,
        columns: int,
        tick: float,
        efficiency: float,
    ):
        """`columns`: blobs that may be under way at one time.

        `tick`: seconds of a step. `efficiency`: the share of the lines that blobs can fill.
        """
        self._clock, self._links, self._held, self._tick = clock, links, held, tick
        self._efficiency = efficiency
        peers = links.watched
        self._share = peers / len(links.up)
        self._up, self._down = np.array(links.up), np.array(links.down[:peers])
        self._left = np.zeros((peers, columns))
        self._active = np.zeros((peers, columns), bool)
        self._gone = np.zeros(columns)
        """Bytes of each blob that its source has sent once."""
        self._size = np.zeros(columns)
        self._source = np.zeros(columns, int)
        self._column: dict[Hashable, int] = {}
        self._blob: list[Any] = [None] * columns
        self._users = np.zeros(columns, int)
        self._free = list(range(columns))
        self._running = False
        self._last = 0.0
        self.got: Floats = np.zeros(peers)
        """Bytes of blobs that each peer got."""

    def fetch(self, receiver: int, blob: Hashable, source: int | None, size: float) -> None:
        """Begin. `source` None: many have it whole."""
        column = self._column.get(blob)
        if column is None:
            column = self._column[blob] = self._room()
            self._blob[column] = blob
            self._size[column], self._source[column] = size, -1 if source is None else source
            self._gone[column] = size if source is None else 0.0
        if not self._active[receiver, column]:
            self._active[receiver, column] = True
            self._left[receiver, column] = size
            self._users[column] += 1
        if not self._running:
            self._running = True
            self._last = self._clock.now
            for crossed in (self._links.crossed_up, self._links.crossed_down):
                crossed[:] = [0.0] * len(crossed)
            self._clock.at(self._clock.now + self._tick, self._step)

    def drop(self, receiver: int, blob: Hashable) -> None:
        """Stop."""
        column = self._column.get(blob)
        if column is not None and self._active[receiver, column]:
            self._end(receiver, column)

    def _end(self, receiver: int, column: int) -> None:
        self._active[receiver, column] = False
        self._left[receiver, column] = 0.0
        self._users[column] -= 1

    def _room(self) -> int:
        """Return a column for a blob, reusing the oldest one that nobody fetches any more."""
        if not self._free:
            idle = [b for b, column in self._column.items() if not self._users[column]]
            for blob in idle[: max(1, len(idle) // 2)]:
                self._free.append(self._column.pop(blob))
        return self._free.pop()

    def _step(self) -> None:
        now = self._clock.now
        passed, self._last = now - self._last, now
        links = self._links
        up = np.maximum(self._up * passed - np.array(links.crossed_up), 0) * self._efficiency
        down = np.maximum(self._down * passed - np.array(links.crossed_down), 0) * self._efficiency
        # Packets that exceed this step's share of a link use the next step's.
        for crossed, rate in ((links.crossed_up, self._up), (links.crossed_down, self._down)):
            crossed[:] = np.maximum(np.array(crossed) - rate * passed, 0).tolist()
        self._send_once(up)
        active, left = self._active, self._left
        limit = np.where(active, np.minimum(left, self._gone - (self._size - left)), 0.0)
        room = down.copy()
        supply = float(up.sum()) * self._share
        for _ in range(3):
            wants = np.minimum(limit.sum(1), room)
            give = fair_shares(wants, supply)
            moved = _shared(limit, give)
            left -= moved
            limit -= moved
            taken = moved.sum(1)
            room -= taken
            self.got += taken
            whole = float(taken.sum())
            if whole < 1e-6:
                break
            supply -= whole
        for receiver, column in zip(*np.nonzero(active & (left < 1.0)), strict=True):
            self._end(int(receiver), int(column))
            self._held(int(receiver), self._blob[column])
        self._running = bool(self._active.any())
        if self._running:
            self._clock.at(now + self._tick, self._step)

    def _send_once(self, up: Floats) -> None:
        """Let each source send new chunks first; its link is shared among its own blobs."""
        wanted = (self._users > 0) & (self._gone < self._size)
        columns = np.nonzero(wanted)[0]
        if len(columns):
            each = np.bincount(self._source[columns], minlength=len(up))
            more = up[self._source[columns]] / each[self._source[columns]]
            self._gone[columns] = np.minimum(self._gone[columns] + more, self._size[columns])


def fair_shares(wants: Floats, supply: float) -> Floats:
    """Return max-min fair shares of a supply."""
    if wants.sum() <= supply:
        return wants
    order = np.sort(wants)
    below = np.concatenate(([0.0], np.cumsum(order)[:-1]))
    count = len(wants) - np.arange(len(wants))
    level = (supply - below) / count
    first = int(np.argmax(level <= order))
    return np.minimum(wants, level[first])


def _shared(limit: Floats, give: Floats) -> Floats:
    """Share `give` equally in each row, at most `limit` for each entry (one round of sharing)."""
    count = np.maximum((limit > 0).sum(1), 1)
    return np.minimum(limit, (give / count)[:, None])

"""The downloads that people wait for: a run's assets and checkpoints, and how far each one has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from peer.node.rate_meter import RateMeter
from peer.store import Store
from protocol.ids import Digest
from protocol.merkle import CHUNK
from protocol.units import byte_size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Download:
    """A download under way: what it is, for people, the bytes that are held and of the whole, and bytes per second."""

    what: str
    blob: str
    held: int
    size: int
    per_second: float


@dataclass(eq=False)
class _Fetch:
    what: str
    size: int
    began: float
    before: int
    """Bytes that were on disk before it began."""

    meter: RateMeter = field(default_factory=RateMeter)


class DownloadTable:
    """The downloads of one node. The log has a line when one begins, and one when it has ended."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic):
        self._store = store
        self._clock = clock
        self._fetches: dict[Digest, _Fetch] = {}

    @contextmanager
    def noted(self, what: str, blob: Digest, size: int) -> Iterator[None]:
        """Count a blob among the downloads while the block lasts. `what` is its name, such as "the checkpoint"."""
        if blob in self._fetches:  # somebody else fetches it as well
            yield
            return
        log.info("fetching %s %s (%s)", what, blob.short, byte_size(size))
        fetch = self._fetches[blob] = _Fetch(what, size, self._clock(), self._held(blob, size))
        try:
            yield
        finally:
            del self._fetches[blob]
        seconds = max(0.001, self._clock() - fetch.began)
        speed = byte_size(max(0, size - fetch.before) / seconds)
        log.info("%s %s is here, after %.1f s (%s/s)", what, blob.short, seconds, speed)

    def under_way(self) -> list[Download]:
        """Return the present downloads, the oldest first. It is called about once a second."""
        now, found = self._clock(), []
        for blob, fetch in self._fetches.items():
            held = self._held(blob, fetch.size)
            if (arriving := self._store.in_progress(blob)) is not None:
                fetch.before = max(fetch.before, arriving.rechecked * CHUNK)
            rate = fetch.meter.note(max(0, held - fetch.before), now)
            found.append(Download(fetch.what, str(blob), held, fetch.size, round(rate, 1)))
        return found

    def _held(self, blob: Digest, size: int) -> int:
        """Return the bytes of a blob that are here."""
        if self._store.has(blob):
            return size
        arriving = self._store.in_progress(blob)
        return 0 if arriving is None else max(0, size - arriving.left * CHUNK)

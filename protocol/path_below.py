"""The records that a tree has dropped at its root: the path from the genesis to the root, by digest.

Their certificates are on disk. Each costs 40 bytes here, since a run may have a million: its digest, and a word that is
sorted by the digest's first bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

from protocol.ids import Digest

_HEIGHT_BITS = 32


class PathBelow:
    """The records below the root, by height: the genesis has 0."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._words = array("Q")
        """Of each record: the first 32 bits of its digest, then its height; in ascending order."""

    def __len__(self) -> int:
        return len(self._digests) // 32

    def append(self, record: Digest) -> None:
        """Add the record after the last one."""
        insort(self._words, _first_word(record) + len(self))
        self._digests += record

    def at(self, height: int) -> Digest:
        """Return the record after which round `height` comes."""
        return Digest(bytes(self._digests[32 * height : 32 * height + 32]))

    def height(self, record: Digest) -> int | None:
        """Return the round that follows a record; None for one that is not on the path."""
        first = _first_word(record)
        i = bisect_left(self._words, first)
        while i < len(self._words) and self._words[i] >> _HEIGHT_BITS == first >> _HEIGHT_BITS:
            height = self._words[i] - first
            if self.at(height) == record:
                return height
            i += 1
        return None


def _first_word(record: Digest) -> int:
    """Return the word of this record if its height were 0."""
    return int.from_bytes(record[:4], "big") << _HEIGHT_BITS

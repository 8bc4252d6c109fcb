"""Names that peers and accounts chose for themselves: not unique, so shown with the key where two are alike."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from protocol.ids import PeerKey

_KEY_AT_END = re.compile(r"[0-9a-f]{8}\W*$")


class ChosenNames:
    """The names of keys, and how many keys have each."""

    def __init__(self):
        self._names: dict[PeerKey, str] = {}
        self._count: Counter[str] = Counter()

    def set(self, key: PeerKey, name: str) -> None:
        """Note a key's name, in place of an earlier one; "": it has none."""
        if (old := _alike(self._names.pop(key, ""))) and self._count[old] == 1:
            del self._count[old]
        elif old:
            self._count[old] -= 1
        if name:
            self._names[key] = name
            self._count[_alike(name)] += 1

    def shown(self, key: PeerKey) -> str:
        """Return a key's name, or its first digits; both if others have the name, or it ends like a key."""
        if (name := self._names.get(key)) is None:
            return key.short
        alike = _alike(name)
        return f"{name} {key.short}" if self._count[alike] > 1 or _KEY_AT_END.search(alike) else name


def _alike(name: str) -> str:
    """Return what is equal for names that differ in case or in Unicode's compatibility forms only."""
    return unicodedata.normalize("NFKC", name).casefold()

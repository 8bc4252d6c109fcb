"""The windows on which an auditor measures an update's gain: claimed ones against unclaimed ones. Pure.

The seed that draws the update's audit draws them, too (`audits`). The claimed are drawn from each quarter of the
update's windows, which exposes an author that stopped early. The unclaimed are any others of the training data.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.assignment import windows_of
from protocol.audits import WINDOWS_COMPARED
from protocol.ids import PeerKey, sha256

QUARTERS = 4


@dataclass(frozen=True, slots=True)
class ComparedWindows:
    """Windows of the training data: claimed ones by quarter of the update, and unclaimed ones."""

    claimed: tuple[tuple[int, ...], ...]
    unclaimed: tuple[int, ...]


def compared_windows(
    audit_seed: bytes, key: PeerKey, first: int, windows: int, seed: int, total: int
) -> ComparedWindows:
    """Return the windows to compare for a key's update that claims this number of windows from `first` on.

    `audit_seed` is the one that drew the audit, `seed` the spec's, `total` the number of its training windows. Raises
    MalformedError for an update of more windows than an assignment gives at once.
    """
    assigned = windows_of(seed, key, first, windows, total).tolist()
    bounds = [windows * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    claimed = tuple(
        tuple(assigned[low + i] for i in _draw(audit_seed, key, quarter, high - low, WINDOWS_COMPARED // QUARTERS))
        for quarter, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False))
    )
    taken = sorted(set(assigned))
    places = _draw(audit_seed, key, QUARTERS, total - len(taken), WINDOWS_COMPARED)
    return ComparedWindows(claimed, tuple(_free(taken, place) for place in places))


def _draw(audit_seed: bytes, key: PeerKey, part: int, size: int, count: int) -> list[int]:
    """Return up to `count` different numbers below `size`: H(tag | seed | key | part | i) modulo it, in turn."""
    found: dict[int, None] = {}
    turn = 0
    while len(found) < min(count, size):
        name = part.to_bytes(1, "little") + turn.to_bytes(4, "little")
        found[int.from_bytes(sha256(b"cairn/v1/audit-windows", audit_seed, key, name), "little") % size] = None
        turn += 1
    return list(found)


def _free(taken: list[int], place: int) -> int:
    """Return the window at a place among those that are not taken; `taken` ascends."""
    low, high = 0, len(taken)
    while low < high:  # the first taken window before which more than `place` are free
        middle = (low + high) // 2
        if taken[middle] - middle > place:
            high = middle
        else:
            low = middle + 1
    return place + low

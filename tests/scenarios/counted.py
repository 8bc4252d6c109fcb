"""The work of trainers in all their lives, and the accepted part of it.

It reads nothing: its methods receive the peers' statuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peer.node.snapshot import Snapshot
from protocol.ids import PeerKey
from tests.e2e.chains import Branch


@dataclass
class Life:
    """Windows, as the peer last showed them: trained in this life, of these covered by no update yet, the next one."""

    trained: int = 0
    open: int = 0
    next_window: int = 0


@dataclass
class Tally:
    """One peer's. The last life is the one that it lives now, or lived last."""

    lives: list[Life] = field(default_factory=lambda: [Life()])
    destroyed: int = 0
    """Windows that no update covered when the power went, and that the next life trained again."""

    was_cut: Life | None = None
    """The life that a power cut ended, until the next one says where it goes on from."""

    @property
    def trained(self) -> int:
        return sum(life.trained for life in self.lives)

    @property
    def next_window(self) -> int:
        """Of the last life that said."""
        return next((life.next_window for life in reversed(self.lives) if life.next_window), 0)


@dataclass(frozen=True)
class Goodput:
    """In windows. `lost`: trained again, or skipped for ever. `destroyed` of them by power cuts in mid-round."""

    accepted: int
    lost: int
    destroyed: int

    @property
    def share(self) -> float:
        """Accepted, of what was trained and is decided; 0 when nothing was."""
        return self.accepted / max(1, self.accepted + self.lost)

    def __add__(self, other: Goodput) -> Goodput:
        return Goodput(self.accepted + other.accepted, self.lost + other.lost, self.destroyed + other.destroyed)

    def __str__(self) -> str:
        whole = max(1, self.accepted + self.lost)
        cuts = f", {self.destroyed / whole:.1%} destroyed in mid-round by power cuts" if self.destroyed else ""
        return f"{self.share:.1%} of {whole:,} windows{cuts}"


class Counted:
    """Counters, updated when peers show a status (`shown`), when one starts (`starts`), and before a power cut
    (`cut`)."""

    def __init__(self, window: int):
        self._window = window
        self._of: dict[str, Tally] = {}

    def starts(self, name: str) -> None:
        if name in self._of:
            self._of[name].lives.append(Life())

    def shown(self, name: str, s: Snapshot) -> None:
        tally = self._of.setdefault(name, Tally())
        life = tally.lives[-1]
        life.trained, life.open = max(life.trained, s.trained_windows), s.open_windows
        life.next_window = max(life.next_window, s.next_window)
        if (before := tally.was_cut) is not None and life.next_window:
            tally.destroyed += max(0, min(before.open, before.next_window - (life.next_window - life.trained)))
            tally.was_cut = None

    def trained(self, name: str) -> int:
        """Windows, in all lives so far."""
        return self._of[name].trained if name in self._of else 0

    def cut(self, name: str, s: Snapshot | None, age: float) -> None:
        """Count a power cut of a peer whose last status is `age` seconds old: it has trained on at the same speed."""
        if s is None:
            return
        self.shown(name, s)
        tally = self._of[name]
        since = round(s.tokens_per_second / self._window * age) if s.phase in ("training", "exchanging") else 0
        life = tally.lives[-1]
        life.trained, life.next_window, life.open = life.trained + since, life.next_window + since, life.open + since
        tally.was_cut = life

    def goodput(self, name: str, key: PeerKey, branch: Branch) -> Goodput:
        """Count by the branch that won. Windows that were trained and may still be accepted are in neither sum."""
        tally = self._of.get(name, Tally())
        own = [u.body for c in branch.path for u in c.record.body.updates if u.author == key]
        accepted, end = sum(u.windows for u in own), max((u.end_window for u in own), default=0)
        again = tally.trained - max(end, tally.next_window)
        return Goodput(accepted, end - accepted + max(0, again), tally.destroyed)

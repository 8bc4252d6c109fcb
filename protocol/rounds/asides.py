"""Branches that are left out of the fork choice for a while: as too light, or because their blobs cannot be had.

One whose blobs could not be had comes back only with them: when its time is over they are asked for again, and until
they are here it draws nobody away from what can be had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.ids import Digest, PeerKey
from protocol.rounds.context import Context

MAX_ASIDE = 64
EARLY = 2
"""Where moves failed more often than that, nobody's coming ends an aside before its time: a try may take minutes."""


@dataclass(slots=True)
class _Aside:
    since: float
    until: float
    tries: int
    light: bool
    failures: int
    """Moves there that could not be made though all blobs were held."""
    absent: frozenset[PeerKey]
    """Contributors of its record that were no members then: what they hold can be had when one is heard of again."""
    contributors: int
    active: bool = True
    due: float | None = None
    """Since when its blobs are to be asked for again."""
    turns: int = 0


class Asides:
    """Those of one machine's chain."""

    def __init__(self, context: Context):
        self._c = context
        self._asides: dict[Digest, _Aside] = {}
        self.tip: Digest | None = None
        """Where the one leads to whose blobs are asked for again; None when there is none."""
        self._turn: Digest | None = None
        """It is that one's turn,"""
        self._turn_since = 0.0
        """since then."""
        self._look_at = 0.0
        self._tips: dict[Digest, Digest] = {}
        self._tips_for: tuple | None = None

    def add_light(self, record: Digest, until: float) -> None:
        """Leave a branch out until a time."""
        self._add(record, until, light=True, failures=0)

    def add(self, record: Digest, *, failed: bool = False) -> bool:
        """Leave a branch out for a patience, but no longer than until somebody is back who was away; then, until its
        blobs are here. Where a move `failed` though they were: twice as long each time. False when there is no other
        branch."""
        old = self._asides.get(record)
        failures = failed + (0 if old is None else old.failures)
        return self._add(record, self._rest(failures), light=False, failures=failures)

    def _rest(self, failures: int) -> float:
        return self._c.now + self._c.policy.patience_seconds * 2 ** min(max(0, failures - 1), 6)

    def _add(self, record: Digest, until: float, *, light: bool, failures: int) -> bool:
        c = self._c
        if c.chain.floor is not None and c.chain.is_ancestor(record, c.chain.floor):
            return False
        old = self._asides.pop(record, None)
        tries = 0 if old is None else old.tries + 1
        absent = frozenset() if light else self._away(record)
        number = len(c.chain.certificate(record).record.body.updates)
        self._asides[record] = _Aside(c.now, until, tries, light, failures, absent, number)
        c.chain.set_aside(record)
        while len(self._asides) > MAX_ASIDE:
            oldest = next(iter(self._asides))
            c.chain.take_back(oldest)
            del self._asides[oldest]
        return True

    def _away(self, record: Digest) -> frozenset[PeerKey]:
        c = self._c
        authors = c.chain.certificate(record).record.body.contributors
        return frozenset(k for k in authors if k != c.me and k not in c.members and not c.members.has_left(k))

    # -- what ends them --------------------------------------------------------------------------------------

    def reconsider(self, record: Digest) -> None:
        """What is built on branches that are aside for the first time has come to a record that is worth a look."""
        for aside, a in self._asides.items():
            if a.active and a.tries == 0 and self._c.chain.is_ancestor(aside, record):
                a.until = self._c.now

    def heard_at(self, head: Digest, since: float) -> None:
        """A member that we hear of since a time is at this head. When it came after a branch up to there was set aside
        (for nobody gave its blobs), they can perhaps be had again."""
        chain = self._c.chain
        for aside, a in self._asides.items():
            news = a.active and not a.light and a.due is None and a.since < since and a.failures <= EARLY
            if news and aside in chain and chain.is_ancestor(aside, head):
                a.until = self._c.now

    def advance(self, is_here: Callable[[Digest], bool]) -> None:
        """End what is over. `is_here(tip)`: whether all blobs are held that a move to a record needs."""
        c = self._c
        look = c.now >= self._look_at
        if look:
            self._look_at = c.now + c.policy.heartbeat_seconds / 2  # who is back need not be looked for at each message
        for record, a in list(self._asides.items()):
            if a.active and not c.chain.is_aside(record) or record not in c.chain:
                del self._asides[record]  # final, or gone
            elif a.active and a.light and a.until <= c.now:
                self._end(record)
            elif a.active and not a.light and a.due is None:
                # Back from a split: most likely nobody withheld anything.
                if a.until <= c.now or look and a.failures <= EARLY and any(self._is_back(k) for k in a.absent):
                    a.due = c.now
        while self._take_turn():
            record = self._turn
            if record is None or self.tip is None:
                return
            if is_here(self.tip):
                self._end(record)
            elif c.now >= self._turn_since + c.policy.patience_seconds:
                self._leave_alone(record)
            else:
                return

    def _take_turn(self) -> bool:
        """Whose blobs are asked for: one at a time, or one could hide another behind itself. Who had the fewest
        contributors comes last: alone one can make any number of branches."""
        c = self._c
        due = [r for r, a in self._asides.items() if a.active and a.due is not None]
        key = (frozenset(due), c.chain.head, len(c.chain))
        if key != self._tips_for or any(tip not in c.chain for tip in self._tips.values()):
            self._tips_for = key
            self._tips = {r: tip for r in due if (tip := c.chain.head_with(r)) is not None}
        if self._turn not in self._tips:
            # Not those that are lighter than the head: nobody would move there.
            order = {r: (-self._asides[r].contributors, self._asides[r].turns, self._asides[r].due) for r in self._tips}
            self._turn = min(order, key=lambda r: order[r], default=None)
            self._turn_since = c.now
            if self._turn is not None:
                self._asides[self._turn].turns += 1
        self.tip = None if self._turn is None else self._tips[self._turn]
        return self._turn is not None

    def _leave_alone(self, record: Digest) -> None:
        a = self._asides[record]
        a.tries += 1
        a.since, a.until, a.due = self._c.now, self._rest(a.failures), None
        a.absent = self._away(record)

    def _end(self, record: Digest) -> None:
        a = self._asides[record]
        a.active, a.due = False, None
        self._c.chain.take_back(record)

    def _is_back(self, key: PeerKey) -> bool:
        """Heard again and again: one heartbeat can come by others, from behind a split."""
        member = self._c.members.get(key)
        return member is not None and member.heard - member.since >= self._c.policy.heartbeat_seconds

    def times(self) -> list[float]:
        """When something will be due."""
        found = [a.until for a in self._asides.values() if a.active and a.due is None]
        return found if self._turn is None else [*found, self._turn_since + self._c.policy.patience_seconds]

    def __len__(self) -> int:
        return len(self._asides)

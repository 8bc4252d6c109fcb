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


@dataclass(slots=True)
class _Aside:
    since: float
    until: float
    tries: int
    light: bool
    excused: set[PeerKey]
    """Members whose coming has ended an aside of this record before its time: each may once, or who withholds an update
    could bring its record back by leaving and coming again."""
    absent: frozenset[PeerKey]
    """Contributors of its record that were no members then: what they hold can be had when one is heard of again."""
    active: bool = True
    asked: float | None = None
    """Since when its blobs are asked for again."""


class Asides:
    """Those of one machine's chain."""

    def __init__(self, context: Context):
        self._c = context
        self._asides: dict[Digest, _Aside] = {}
        self.tip: Digest | None = None
        """What the head would be if all blobs that are asked for again were here; None when that is the head."""
        self._tip_for: tuple | None = None

    def add_light(self, record: Digest, until: float) -> None:
        """Leave a branch out until a time."""
        self._add(record, until, light=True)

    def add(self, record: Digest) -> None:
        """Leave a branch out for a patience, later for two, but no longer than until somebody is back who was
        away; then, until its blobs are here."""
        tries = 0 if (old := self._asides.get(record)) is None else old.tries + 1
        self._add(record, self._rest(tries), light=False)

    def _rest(self, tries: int) -> float:
        return self._c.now + self._c.policy.patience_seconds * (1 if tries == 0 else 2)

    def _add(self, record: Digest, until: float, *, light: bool) -> None:
        c = self._c
        if c.chain.floor is not None and c.chain.is_ancestor(record, c.chain.floor):
            return  # there is no other
        old = self._asides.pop(record, None)
        tries = 0 if old is None else old.tries + 1
        absent = frozenset() if light else self._away(record)
        self._asides[record] = _Aside(c.now, until, tries, light, set() if old is None else old.excused, absent)
        c.chain.set_aside(record)
        while len(self._asides) > MAX_ASIDE:
            oldest = next(iter(self._asides))
            c.chain.take_back(oldest)
            del self._asides[oldest]

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

    def heard_at(self, member: PeerKey, head: Digest, since: float) -> None:
        """A member that we hear of since a time is at this head. When it came after a branch up to there was set aside
        (for nobody gave its blobs), they can perhaps be had again."""
        chain = self._c.chain
        for aside, a in self._asides.items():
            if not a.active or a.tries == 0 or a.since >= since or member in a.excused:
                continue
            if aside in chain and chain.is_ancestor(aside, head):
                a.until = self._c.now
                a.excused.add(member)

    def advance(self, is_here: Callable[[Digest], bool]) -> None:
        """End what is over. `is_here(tip)`: whether all blobs are held that a move to a record needs."""
        c, asked = self._c, {}
        for record, a in list(self._asides.items()):
            if record not in c.chain:
                del self._asides[record]
            elif not a.active:
                continue
            elif a.light:
                if a.until <= c.now:
                    self._end(record, a)
            elif a.asked is None:
                # Back from a split: most likely nobody withheld anything.
                back = {k for k in a.absent - a.excused if self._is_back(k)}
                if back or a.until <= c.now:
                    a.excused |= back
                    a.asked = c.now
            if a.active and a.asked is not None:
                asked[record] = a
        self._look(frozenset(asked))
        if self.tip is not None and is_here(self.tip):
            for record, a in asked.items():
                if c.chain.is_ancestor(record, self.tip):
                    self._end(record, a)
            self._look(frozenset(record for record, a in asked.items() if a.active))
        for record, a in asked.items():
            if a.active and a.asked is not None and c.now >= a.asked + c.policy.patience_seconds:
                a.tries += 1
                a.since, a.until, a.asked = c.now, self._rest(a.tries), None
                a.absent = self._away(record)

    def _look(self, asked: frozenset[Digest]) -> None:
        chain = self._c.chain
        key = (asked, chain.head, len(chain))
        if key != self._tip_for:
            self._tip_for = key
            tip = chain.best(asked) if asked else chain.head
            self.tip = None if tip == chain.head else tip

    def _end(self, record: Digest, aside: _Aside) -> None:
        aside.active, aside.asked = False, None
        self._c.chain.take_back(record)

    def _is_back(self, key: PeerKey) -> bool:
        """Heard again and again: one heartbeat can come by others, from behind a split."""
        member = self._c.members.get(key)
        return member is not None and member.heard - member.since >= self._c.policy.heartbeat_seconds

    def times(self) -> list[float]:
        """When something will be due."""
        patience = self._c.policy.patience_seconds
        return [a.until if a.asked is None else a.asked + patience for a in self._asides.values() if a.active]

    def __len__(self) -> int:
        return len(self._asides)

"""Who passes on a member's messages to those who do not hear it themselves (two peers behind NATs, a line that is cut).

Slices of updates go the same ways (`passing`).

Each heartbeat names the members of whom its author hears nothing first-hand. Of those who hear both, RELAYS pass their
messages on: the first that come on a ring of all members, from a place that author and receiver give. Everyone computes
the same few, from heartbeats alone; which they are does not change when others come and go. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from protocol.ids import PeerKey, sha256, short_id
from protocol.messages import Heartbeat, Signed

RELAYS = 2
"""One may be about to leave."""


class Relaying:
    """The members as their newest heartbeats show them. Only members count: anybody can make keys."""

    def __init__(self, heartbeats: Mapping[PeerKey, Signed[Heartbeat]]):
        """Of all members, oneself included; those without an admission are left out."""
        beats = {k: beat.body for k, beat in heartbeats.items() if beat.body.admission}
        self._short = {k: short_id(k) for k in beats}
        self._unheard = {k: frozenset(body.unreachable) for k, body in beats.items() if body.unreachable}
        self._ring = sorted((sha256(k), k) for k in beats)

    def needy(self, author: PeerKey) -> list[PeerKey]:
        """The members who do not hear this one, as far as they have said."""
        if author not in self._short:
            return []
        a = self._short[author]
        return [k for k, its in self._unheard.items() if a in its and k != author]

    def relays(self, author: PeerKey, to: PeerKey) -> list[PeerKey]:
        """Who is to pass on what `author` says to `to`: at most RELAYS members who hear both, and whom `to` hears."""
        if author not in self._short or to not in self._short:
            return []
        chosen = list[PeerKey]()
        start = bisect_left(self._ring, (sha256(author + to), author))
        for _, key in self._ring[start:] + self._ring[:start]:
            if self.hears_both(key, author, to):
                chosen.append(key)
            if len(chosen) == RELAYS:
                break
        return chosen

    def hears_both(self, key: PeerKey, author: PeerKey, to: PeerKey) -> bool:
        """Whether a member is a third one that hears `author` and `to`, and whom `to` hears."""
        if key in (author, to) or key not in self._short or author not in self._short or to not in self._short:
            return False
        mine, its = self._unheard.get(to, frozenset()), self._unheard.get(key, frozenset())
        return self._short[key] not in mine and self._short[author] not in its and self._short[to] not in its

    def misses(self, to: PeerKey, author: PeerKey) -> bool:
        """Whether `to` has said that it hears nothing of this member first-hand."""
        return author in self._short and self._short[author] in self._unheard.get(to, frozenset())

    def misses_some(self, to: PeerKey) -> bool:
        """Whether it has said so of anybody."""
        return to in self._unheard

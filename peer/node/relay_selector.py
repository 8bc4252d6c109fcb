"""Selection of the members that relay messages between two members that cannot reach each other. Pure.

Each heartbeat names the members that its author receives nothing from directly: for example, both are behind NATs, or
the network between them is cut. Of the members in contact with both, RELAYS forward the messages. They are the first
ones on a ring of all members, starting at a place that author and receiver give. Every member computes the same relays
from heartbeats alone, and other members that come and go do not change them. Update slices take the same path
(`slice_relay`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from protocol.ids import PeerKey, sha256, short_id
from protocol.messages import Heartbeat, Signed

RELAYS = 2
"""Number of relays for one author and one receiver: one of them may be about to leave."""


class RelaySelector:
    """The members as their newest heartbeats describe them. Only members count, since anybody can make keys."""

    def __init__(self, heartbeats: Mapping[PeerKey, Signed[Heartbeat]]):
        """`heartbeats`: of all members, our own included; heartbeats without an admission are ignored."""
        beats = {k: beat.body for k, beat in heartbeats.items() if beat.body.admission}
        self._short = {k: short_id(k) for k in beats}
        self._unreachable = {k: frozenset(body.unreachable) for k, body in beats.items() if body.unreachable}
        self._ring = sorted((sha256(k), k) for k in beats)

    def cut_off_from(self, author: PeerKey) -> list[PeerKey]:
        """Return the members whose heartbeats say that they receive nothing from this author directly."""
        if author not in self._short:
            return []
        a = self._short[author]
        return [k for k, unreachable in self._unreachable.items() if a in unreachable and k != author]

    def relays(self, author: PeerKey, to: PeerKey) -> list[PeerKey]:
        """Return the members that forward messages of `author` to `to`: at most RELAYS, each connected to both."""
        if author not in self._short or to not in self._short:
            return []
        chosen = list[PeerKey]()
        start = bisect_left(self._ring, (sha256(author + to), author))
        for _, key in self._ring[start:] + self._ring[:start]:
            if self.connects(key, author, to):
                chosen.append(key)
            if len(chosen) == RELAYS:
                break
        return chosen

    def connects(self, key: PeerKey, author: PeerKey, to: PeerKey) -> bool:
        """Return whether `key` is a third member in contact with `author` and `to`, in both directions with `to`."""
        if key in (author, to) or key not in self._short or author not in self._short or to not in self._short:
            return False
        unreachable_by_to, unreachable_by_key = (
            self._unreachable.get(to, frozenset()),
            self._unreachable.get(key, frozenset()),
        )
        return (
            self._short[key] not in unreachable_by_to
            and self._short[author] not in unreachable_by_key
            and self._short[to] not in unreachable_by_key
        )

    def is_cut_off(self, to: PeerKey, author: PeerKey) -> bool:
        """Return whether `to` has said that it receives nothing from this author directly."""
        return author in self._short and self._short[author] in self._unreachable.get(to, frozenset())

    def is_cut_off_from_some(self, to: PeerKey) -> bool:
        """Return whether `to` has said that it receives nothing from some member directly."""
        return to in self._unreachable

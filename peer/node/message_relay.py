"""Relaying between two members that cannot reach each other, by members in contact with both.

Each heartbeat names the members from which its author receives nothing directly: for example, both are behind NATs, or
the network between them is cut. Of the members in contact with both, RELAYS forward the messages. They are the first
ones on a ring of all members, from a place determined by author and receiver. Every member computes the same relays
from heartbeats alone, and other members that come and go do not change them. Update slices take the same path
(`slice_relay`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peer.node.outbox import Outbox
from peer.node.peer_table import PeerTable
from protocol.bounded import BoundedDict
from protocol.ids import Digest, PeerKey, sha256, short_id
from protocol.messages import MAX_UNREACHABLE, Heartbeat, Signed

RELAYS = 2
"""Number of relays for one author and one receiver: one of them may be about to leave."""

UNREACHABLE_BEATS = 3.0
"""Heartbeat intervals without a direct message after which a member counts as unreachable."""

FORWARDED_PER_BEAT = 16
"""Messages of one author that are forwarded within one heartbeat interval: an honest author sends a few a round."""

SEARCHED = 32
"""Members that are looked at for the relays of one author to one member."""

REMEMBERED = 8192
"""Number of messages remembered as forwarded, so that each is forwarded once."""


class RelaySelector:
    """The choice of relays, from the contacts that the members' newest heartbeats name.

    Only members count, since anybody can make keys.
    """

    def __init__(self, heartbeats: Mapping[PeerKey, Signed[Heartbeat]]):
        """`heartbeats`: of all members, our own included; heartbeats without an admission are ignored."""
        beats = {k: beat.body for k, beat in heartbeats.items() if beat.body.admission}
        self._short = {k: short_id(k) for k in beats}
        self._unreachable = {k: frozenset(body.unreachable) for k, body in beats.items() if body.unreachable}
        self._ring = sorted((sha256(k), k) for k in beats)
        self._heard_by: dict[PeerKey, list[tuple[bytes, PeerKey]]] = {}
        """Those of the ring from which a member receives directly."""

        self._hearing: dict[PeerKey, list[tuple[bytes, PeerKey]]] = {}
        """Those of the ring that receive from a member directly."""

    def cut_off_from(self, author: PeerKey) -> list[PeerKey]:
        """Return the members whose heartbeats say that they receive nothing from this author directly."""
        if author not in self._short:
            return []
        a = self._short[author]
        return [k for k, unreachable in self._unreachable.items() if a in unreachable and k != author]

    def relays(self, author: PeerKey, to: PeerKey) -> list[PeerKey]:
        """Return the members that forward messages of `author` to `to`: at most RELAYS, each connected to both.

        At most SEARCHED members are looked at: of those that receive from `author`, or of those from which `to`
        receives, whichever are fewer. Otherwise a few that name everybody as unreachable would have all members look at
        all others for each author.
        """
        if author not in self._short or to not in self._short:
            return []
        if to not in self._heard_by:
            unreachable = self._unreachable.get(to, frozenset())
            self._heard_by[to] = [at for at in self._ring if self._short[at[1]] not in unreachable]
        if author not in self._hearing:
            deaf = {author, *self.cut_off_from(author)}
            self._hearing[author] = [at for at in self._ring if at[1] not in deaf]
        ring = min(self._hearing[author], self._heard_by[to], key=len)
        chosen: list[PeerKey] = []
        start = bisect_left(ring, (sha256(author + to), author))
        for i in range(min(len(ring), SEARCHED)):
            key = ring[(start + i) % len(ring)][1]
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

    def is_cut_off(self, author: PeerKey, to: PeerKey) -> bool:
        """Return whether `to` has said that it receives nothing from this author directly."""
        return author in self._short and self._short[author] in self._unreachable.get(to, frozenset())

    def is_cut_off_from_some(self, to: PeerKey) -> bool:
        """Return whether `to` has said that it receives nothing from some member directly."""
        return to in self._unreachable


@dataclass(eq=False)
class MessageRelay:
    """The forwarding of other members' messages by one node. `clock` gives monotonic seconds."""

    me: PeerKey
    peers: PeerTable
    outbox: Outbox
    beat_seconds: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.own_heartbeat: Signed[Heartbeat] | None = None
        """Our newest: it names the members that we have no direct contact with."""
        self._selector, self._selector_due = RelaySelector({}), 0.0
        self._counts: Counter[PeerKey] = Counter()
        self._receivers: dict[PeerKey, list[PeerKey]] = {}
        """The members to which we relay from each author, by the selector: to find them takes milliseconds."""
        self._forwarded: BoundedDict[Digest, None] = BoundedDict(REMEMBERED)
        self._unreachable: tuple[int, ...] = ()
        self._unreachable_due = 0.0

    def note_own(self, heartbeat: Signed[Heartbeat]) -> None:
        """Note our newest heartbeat."""
        self.own_heartbeat = heartbeat

    @property
    def selector(self) -> RelaySelector:
        """The relays by the newest heartbeats. Computed once in a heartbeat interval, not for each of many messages."""
        now = self.clock()
        if now >= self._selector_due:
            beats = {k: e.heartbeat for k, e in self.peers.entries().items()}
            if self.own_heartbeat is not None:
                beats[self.me] = self.own_heartbeat
            self._selector = RelaySelector(beats)
            self._selector_due = now + self.beat_seconds
            self._counts.clear()  # FORWARDED_PER_BEAT begins again
            self._receivers.clear()
        return self._selector

    def relays_from(self, author: PeerKey) -> list[PeerKey]:
        """Return the members that relay from `author` to us; none when it reaches us directly."""
        selector = self.selector
        return selector.relays(author, self.me) if selector.is_cut_off(author, self.me) else []

    def forward(self, message: Signed) -> None:
        """Forward a message that its author sent us to the members that we relay to, once and up to a limit."""
        author, selector = message.author, self.selector
        if message.digest in self._forwarded or self._counts[author] >= FORWARDED_PER_BEAT:
            return
        if author not in self._receivers and (cut_off := selector.cut_off_from(author)):  # it is a member then
            self._receivers[author] = [k for k in cut_off if self.me in selector.relays(author, k)]
        to = self._receivers.get(author)
        if not to:
            return
        self._counts[author] += 1
        self._forwarded[message.digest] = None
        self.outbox.broadcast(to, message)

    def unreachable(self) -> tuple[int, ...]:
        """Return the short ids of the members whose messages others are to relay to us, for our heartbeat."""
        now = self.clock()
        if now >= self._unreachable_due:
            found = self.peers.unreachable(now, UNREACHABLE_BEATS * self.beat_seconds)[:MAX_UNREACHABLE]
            self._unreachable, self._unreachable_due = tuple(short_id(k) for k in found), now + self.beat_seconds / 2
        return self._unreachable

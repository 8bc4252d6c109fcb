"""Forwarding of members' messages to the members that do not receive them directly (see `relay_selector`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from peer.node.outbox import Outbox
from peer.node.peer_table import PeerTable
from peer.node.relay_selector import RelaySelector
from protocol.bounded import BoundedDict
from protocol.ids import Digest, PeerKey, short_id
from protocol.messages import MAX_UNREACHABLE, Heartbeat, Signed

UNHEARD_BEATS = 3.0
"""Heartbeat intervals without a direct message after which a member counts as unheard."""

FORWARDED_PER_BEAT = 16
"""Messages of one author that are forwarded within one heartbeat interval: an honest author sends a few a round."""

REMEMBERED = 8192
"""Number of messages remembered as forwarded, so that each is forwarded once."""


@dataclass(eq=False)
class MessageRelay:
    """One node's part in relaying. `clock` gives monotonic seconds."""

    me: PeerKey
    peers: PeerTable
    outbox: Outbox
    beat_seconds: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._own: Signed[Heartbeat] | None = None
        self._selector, self._selector_due = RelaySelector({}), 0.0
        self._counts: Counter[PeerKey] = Counter()
        self._forwarded: BoundedDict[Digest, None] = BoundedDict(REMEMBERED)
        self._unheard: tuple[int, ...] = ()
        self._unheard_due = 0.0

    def set_own_heartbeat(self, heartbeat: Signed[Heartbeat]) -> None:
        """Note our newest heartbeat: it names the members that we have no direct contact with."""
        self._own = heartbeat

    @property
    def selector(self) -> RelaySelector:
        """The relays by the newest heartbeats. Computed once in a heartbeat interval, not for each of many messages."""
        now = self.clock()
        if now >= self._selector_due:
            beats = {k: e.heartbeat for k, e in self.peers.entries().items()}
            if self._own is not None:
                beats[self.me] = self._own
            self._selector = RelaySelector(beats)
            self._selector_due = now + self.beat_seconds
            self._counts.clear()
        return self._selector

    def relays_from(self, author: PeerKey) -> list[PeerKey]:
        """Return the members that relay from `author` to us; none when it reaches us directly."""
        selector = self.selector
        return selector.relays(author, self.me) if selector.is_cut_off(self.me, author) else []

    def forward(self, message: Signed) -> None:
        """Forward a message that its author sent us to the members that we relay to, once and up to a limit."""
        author, selector = message.author, self.selector
        if message.digest in self._forwarded or self._counts[author] >= FORWARDED_PER_BEAT:
            return
        to = [k for k in selector.cut_off_from(author) if self.me in selector.relays(author, k)]
        if not to:
            return
        self._counts[author] += 1
        self._forwarded[message.digest] = None
        self.outbox.broadcast(to, message)

    def unheard(self) -> tuple[int, ...]:
        """Return the short ids of the members whose messages others are to relay to us, for our heartbeat."""
        now = self.clock()
        if now >= self._unheard_due:
            found = self.peers.unheard(now, UNHEARD_BEATS * self.beat_seconds)[:MAX_UNREACHABLE]
            self._unheard, self._unheard_due = tuple(short_id(k) for k in found), now + self.beat_seconds / 2
        return self._unheard

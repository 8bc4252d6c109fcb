"""Who is in the swarm and where: the newest heartbeat of every member and observer. Pure; bounded."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import PeerKey
from protocol.messages import Heartbeat, Signed


@dataclass(slots=True)
class Entry:
    """One known peer."""

    heartbeat: Signed[Heartbeat]
    heard: float
    """When it was last heard of, by our clock."""

    direct: float
    """When it was last heard first-hand; at first, when it was first heard of."""


MAX_LOST = 256
"""Members that fell silent whose addresses are remembered."""


class Directory:
    """The peers heard of within `forget_seconds`; at most `limit` members and `observers` others."""

    def __init__(self, me: PeerKey, *, forget_seconds: float, limit: int, observers: int = 64):
        self._me = me
        self._forget = forget_seconds
        self.limit = limit
        """Members at most: as many as the policy of the open round lets in."""
        self._observers = observers
        self._entries: dict[PeerKey, Entry] = {}
        self._gone: dict[PeerKey, int] = {}
        self._lost: dict[PeerKey, tuple[str, ...]] = {}

    def hear(
        self, heartbeat: Signed[Heartbeat], now: float, *, direct: bool = True, welcome: bool = False
    ) -> bool | None:
        """Take a heartbeat. True: a peer that was not known; False: news of a known one; None: old or unwelcome.

        `direct`: it came from its author. `welcome`: there is room for it, whoever else is here.
        """
        key, body = heartbeat.author, heartbeat.body
        if key == self._me or body.sequence <= self._gone.get(key, -1):
            return None
        known = self._entries.get(key)
        if known is not None:
            if direct:
                known.direct = now
            if body.sequence <= known.heartbeat.body.sequence:
                return None
            known.heartbeat, known.heard = heartbeat, now
            return False
        admitted = bool(body.admission)
        same_sort = sum(bool(e.heartbeat.body.admission) == admitted for e in self._entries.values())
        if not welcome and same_sort >= (self.limit if admitted else self._observers):
            return None
        self._entries[key] = Entry(heartbeat, now, now)
        self._lost.pop(key, None)
        return True

    def goodbye(self, key: PeerKey, sequence: int) -> None:
        """A member left: heartbeats from before that are not news.

        Others leave by being forgotten: anybody can make keys, and come and go with another one all the time.
        """
        self._lost.pop(key, None)
        known = self._entries.get(key)
        if known is None or not known.heartbeat.body.admission or sequence < known.heartbeat.body.sequence:
            return
        del self._entries[key]
        self._gone[key] = sequence
        while len(self._gone) > self.limit:
            self._gone.pop(next(iter(self._gone)))

    def forget_silent(self, now: float) -> list[PeerKey]:
        """Drop those not heard of for long; they are returned."""
        silent = [k for k, e in self._entries.items() if now - e.heard > self._forget]
        for key in silent:
            body = self._entries.pop(key).heartbeat.body
            if body.admission and body.addresses:
                self._lost[key] = tuple(body.addresses)
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        return silent

    def lost(self) -> dict[PeerKey, tuple[str, ...]]:
        """Members that fell silent without a goodbye, and where they were: a line may have been cut between us."""
        return dict(self._lost)

    def has_left(self, key: PeerKey) -> bool:
        """It said goodbye, and nothing since."""
        return key in self._gone and key not in self._entries and key not in self._lost

    def unheard(self, now: float, seconds: float) -> list[PeerKey]:
        """Members (not observers) that are there, and of whom nothing came first-hand for so many seconds."""
        return [
            k
            for k, e in self._entries.items()
            if now - e.direct > seconds and e.heartbeat.body.admission and now - e.heard <= self._forget
        ]

    def peers(self) -> list[PeerKey]:
        """Everyone known."""
        return list(self._entries)

    def is_member(self, key: PeerKey) -> bool:
        """Whether this is a known peer that was admitted."""
        entry = self._entries.get(key)
        return entry is not None and bool(entry.heartbeat.body.admission)

    def entries(self) -> dict[PeerKey, Entry]:
        """A copy of what is known."""
        return dict(self._entries)

    def heartbeats(self) -> list[Signed[Heartbeat]]:
        """The newest heartbeat of each, to pass on to a newcomer."""
        return [e.heartbeat for e in self._entries.values()]

    def addresses(self) -> list[str]:
        """Members' addresses, not strangers', to enter the swarm by: the newest heard first."""
        newest = sorted(self._entries.values(), key=lambda e: -e.heard)
        return list(dict.fromkeys(a for e in newest if e.heartbeat.body.admission for a in e.heartbeat.body.addresses))

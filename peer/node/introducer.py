"""Introduction of newcomers: a new peer is sent the others' heartbeats, and the others are sent its heartbeat.

So members find each other even when the DHT fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from peer.node.coordinator_discovery import CoordinatorLocator
from peer.node.outbox import Outbox
from peer.node.peer_table import PeerTable
from peer.node.tasks import Tasks
from protocol.bounded import BoundedDict
from protocol.ids import PeerKey, sha256
from protocol.messages import Heartbeat, Signed

CROWD = 32
"""Number of members above which only a few introduce a newcomer: a thousand members would each send it 700 KB, and its
heartbeat to everyone."""

INTRODUCERS = 4
"""Number of members that introduce a newcomer even when another has already: a packet may be lost."""

ENOUGH_INTRODUCERS = 2
"""Number of other peers that must have sent us a newcomer's heartbeat before we leave its introduction to them: one of
them may be a liar."""

REMEMBERED = 8192
"""Number of newcomers whose introducers are remembered."""

INTERVAL_BEATS = 2
"""Heartbeat intervals within which nobody is introduced twice."""


@dataclass(eq=False)
class Introducer:
    """One node's introductions. `clock` gives monotonic seconds."""

    me: PeerKey
    peers: PeerTable
    outbox: Outbox
    locator: CoordinatorLocator
    tasks: Tasks
    beat_seconds: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._introduced: dict[PeerKey, float] = {}
        self._introducers: BoundedDict[PeerKey, set[PeerKey]] = BoundedDict(REMEMBERED)
        """For each newcomer the other peers that introduced it: at most ENOUGH_INTRODUCERS of them."""

    def note_introduction(self, newcomer: PeerKey, sender: PeerKey) -> None:
        """Note that another peer has sent us the newcomer's heartbeat."""
        senders = self._introducers.setdefault(newcomer, set())
        if len(senders) < ENOUGH_INTRODUCERS:
            senders.add(sender)

    def introducers_of(self, newcomer: PeerKey) -> frozenset[PeerKey]:
        """Return the other peers that are known to have introduced a newcomer."""
        return frozenset(self._introducers.get(newcomer, ()))

    def on_new_peer(self, heartbeat: Signed[Heartbeat], *, direct: bool) -> None:
        """Introduce a newcomer, if that is for us to do. `direct`: it sent its heartbeat itself."""
        if len(self.peers.keys()) <= CROWD or self._is_chosen(heartbeat.author):
            self._introduce(heartbeat)
        elif direct:
            self.tasks.spawn(self._introduce_if_nobody_does(heartbeat), "introduction")

    def _introduce(self, heartbeat: Signed[Heartbeat]) -> None:
        now = self.clock()
        for key in [k for k, then in self._introduced.items() if now - then > INTERVAL_BEATS * self.beat_seconds]:
            del self._introduced[key]
        if heartbeat.author in self._introduced:
            return
        self._introduced[heartbeat.author] = now
        self.outbox.send(heartbeat.author, self.peers.heartbeats())
        if (record := self.locator.newest) is not None:
            self.outbox.send(heartbeat.author, (record,))
        if heartbeat.body.admission:
            # Strangers are not introduced: anybody can make keys, and would crowd out the members.
            for key in self.peers.keys():
                if key != heartbeat.author:
                    self.outbox.send(key, (heartbeat,))

    def _is_chosen(self, newcomer: PeerKey) -> bool:
        """Return whether we are one of the few members that the newcomer's key chooses."""
        distance = sha256(newcomer, self.me)
        nearer = (k for k in self.peers.keys() if k != newcomer and sha256(newcomer, k) < distance)
        return sum(1 for _ in islice(nearer, INTRODUCERS)) < INTRODUCERS

    async def _introduce_if_nobody_does(self, heartbeat: Signed[Heartbeat]) -> None:
        """Introduce a newcomer that nobody else introduced within a heartbeat: we may be its only contact."""
        await asyncio.sleep(self.beat_seconds)
        if len(self.introducers_of(heartbeat.author)) < ENOUGH_INTRODUCERS:
            self._introduce(heartbeat)

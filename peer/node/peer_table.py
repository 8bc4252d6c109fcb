"""The peers that can be reached, by the newest heartbeat of every member and observer. Pure and bounded.

This table is for reaching peers. The round machine decides which members take part in rounds
(`protocol.rounds.members`), and forgets a silent one after `member_seconds`. This table keeps it for longer, because it
may still hold blobs or be reachable again. The chain says who is banned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from peer.swarm.addresses import parse_address
from protocol.bounded import BoundedDict
from protocol.errors import MalformedError
from protocol.ids import PeerKey
from protocol.messages import Heartbeat, Signed
from protocol.rounds.policy import RoundPolicy

MAX_LOST = 256
"""Maximum number of members that fell silent whose addresses are remembered."""

MAX_NONMEMBERS = 64
"""Maximum number of peers without an admission: observers, and anybody else."""


class News(Enum):
    """The result of noting a heartbeat."""

    NEW_PEER = auto()
    UPDATE = auto()
    """A newer heartbeat of a peer in the table."""
    NONE = auto()
    """An old heartbeat, or one that is not accepted."""


@dataclass(slots=True)
class PeerEntry:
    """One peer of the table."""

    heartbeat: Signed[Heartbeat]
    last_news: float
    """Time of the last news of it, directly or through others, by our monotonic clock in seconds."""

    last_direct: float
    """Time of the last message received from the peer itself; at first, the time of its first heartbeat."""

    is_first_hand: bool = False
    """True once the peer itself has sent us a heartbeat: there was a connection with it."""

    @property
    def is_admitted(self) -> bool:
        """True for a peer whose heartbeats carry the owner's admission."""
        return bool(self.heartbeat.body.admission)


class PeerTable:
    """A table of the peers with news within `forget_seconds`: at most `limit` members and `nonmembers` others."""

    def __init__(self, me: PeerKey, *, forget_seconds: float, limit: int, nonmembers: int = MAX_NONMEMBERS):
        self._me = me
        self._forget = forget_seconds
        self._nonmembers = nonmembers
        self._entries: dict[PeerKey, PeerEntry] = {}
        self._gone: BoundedDict[PeerKey, int] = BoundedDict(limit)
        """The sequence of the goodbye of each member that left."""
        self._lost: BoundedDict[PeerKey, tuple[str, ...]] = BoundedDict(MAX_LOST)

    @property
    def limit(self) -> int:
        """Maximum number of members, and of members that left."""
        return self._gone.limit

    def apply_policy(self, policy: RoundPolicy) -> None:
        self._gone.limit = policy.max_members

    def note_heartbeat(
        self, heartbeat: Signed[Heartbeat], now: float, *, direct: bool = True, reserved: bool = False
    ) -> News:
        """Note a heartbeat, and return the news in it.

        `direct`: the author itself sent it. `reserved`: the author is accepted even when the table is full.
        """
        key, body = heartbeat.author, heartbeat.body
        if key == self._me or body.sequence <= self._gone.get(key, -1):
            return News.NONE
        known = self._entries.get(key)
        if known is not None:
            if direct:
                known.last_direct, known.is_first_hand = now, True
            if body.sequence <= known.heartbeat.body.sequence:
                return News.NONE
            known.heartbeat, known.last_news = heartbeat, now
            return News.UPDATE
        admitted = bool(body.admission)
        same_kind = sum(e.is_admitted == admitted for e in self._entries.values())
        if not reserved and same_kind >= (self.limit if admitted else self._nonmembers):
            return News.NONE
        self._entries[key] = PeerEntry(heartbeat, now, now, direct)
        self._lost.pop(key, None)
        return News.NEW_PEER

    def note_goodbye(self, key: PeerKey, sequence: int) -> None:
        """Remove a member that left; its heartbeats from before are no longer news.

        Peers without an admission are only removed when they fall silent: anybody can make keys, and would otherwise
        join and leave with a new key all the time.
        """
        self._lost.pop(key, None)
        known = self._entries.get(key)
        if known is None or not known.is_admitted or sequence < known.heartbeat.body.sequence:
            return
        del self._entries[key]
        self._gone[key] = sequence

    def forget_silent(self, now: float) -> list[PeerKey]:
        """Remove the peers without news for `forget_seconds`, and return them."""
        silent = [k for k, e in self._entries.items() if now - e.last_news > self._forget]
        for key in silent:
            body = self._entries.pop(key).heartbeat.body
            if body.admission and body.addresses:
                self._lost[key] = tuple(body.addresses)
        return silent

    def lost(self) -> dict[PeerKey, tuple[str, ...]]:
        """Return the addresses of members that fell silent without a goodbye: the network may have been cut."""
        return dict(self._lost)

    def has_left(self, key: PeerKey) -> bool:
        """Return whether this peer said goodbye and has sent nothing since."""
        return key in self._gone and key not in self._entries and key not in self._lost

    def unreachable(self, now: float, seconds: float) -> list[PeerKey]:
        """Return the members that are present, and have themselves sent us nothing for these seconds."""
        members = {k: e for k, e in self._entries.items() if e.is_admitted}
        return [k for k, e in members.items() if now - e.last_direct > seconds and now - e.last_news <= self._forget]

    def keys(self) -> list[PeerKey]:
        return list(self._entries)

    def is_admitted(self, key: PeerKey) -> bool:
        """Return whether this peer is in the table, with an admission. The round machine may not count on it."""
        return key in self._entries and self._entries[key].is_admitted

    def entries(self) -> dict[PeerKey, PeerEntry]:
        return dict(self._entries)

    def heartbeats(self) -> list[Signed[Heartbeat]]:
        """Return the newest heartbeat of each peer, to send to a newcomer."""
        return [e.heartbeat for e in self._entries.values()]

    def addresses(self) -> list[str]:
        """Return the multiaddresses of members, not of strangers: those with the latest news first.

        Only addresses that name the member, or one could have others dial anybody. Invites and the store take these.
        """
        newest = sorted((e for e in self._entries.values() if e.is_admitted), key=lambda e: -e.last_news)
        return [a for e in newest for a in dict.fromkeys(e.heartbeat.body.addresses) if _names(a, e.heartbeat.author)]


@lru_cache(maxsize=4096)
def _names(address: str, key: PeerKey) -> bool:
    try:
        return parse_address(address)[0] == key
    except MalformedError:
        return False

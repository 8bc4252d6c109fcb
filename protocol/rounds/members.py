"""Who takes part: members by their last heartbeat, within a bound, and whom rounds no longer wait for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from protocol.ids import Digest, PeerKey
from protocol.messages import Goodbye, Heartbeat, Signed
from protocol.rounds.policy import Policy

MAX_STRIKES = 6

REPEATERS = 8
"""Of more members than twice so many not everyone repeats others' messages: of a thousand, each would send all of them
to all, a thousand times what one proposer sends."""


class Member:
    """An admitted peer that was heard of lately."""

    __slots__ = ("key", "beat", "heard", "since")

    def __init__(self, key: PeerKey, beat: Heartbeat, now: float):
        self.key = key
        self.beat = beat
        self.heard = now
        self.since = now

    def trains_in(self, parent: Digest) -> bool:
        """Whether its last heartbeat says that it works on the round after `parent`."""
        return self.beat.head == parent and self.beat.phase in ("training", "exchanging", "leaving")


class Strikes:
    """Who let a round down, and until which round that counts: twice as long each time. Bounded."""

    def __init__(self, bound: int):
        self._bound = bound
        self._strikes: dict[PeerKey, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._strikes)

    def grow(self, bound: int) -> None:
        """Room for more."""
        self._bound = max(self._bound, bound)

    def strike(self, key: PeerKey, number: int) -> None:
        strikes = min(MAX_STRIKES, self._strikes.pop(key, (0, 0))[0] + 1)
        self._strikes[key] = (strikes, number + 2**strikes)
        while len(self._strikes) > self._bound:
            del self._strikes[next(iter(self._strikes))]

    def forgive(self, key: PeerKey) -> None:
        self._strikes.pop(key, None)

    def holds(self, key: PeerKey, number: int) -> bool:
        """Whether it still counts in round `number`."""
        return number <= self._strikes.get(key, (0, -1))[1]


class Members:
    """Bounded by the policy's `max_members`. Newcomers never evict contributors of the last round, nor each other."""

    def __init__(self, policy: Policy, me: PeerKey):
        self._policy = policy
        self._me = me
        self._members: dict[PeerKey, Member] = {}
        self._veterans: frozenset[PeerKey] = frozenset()
        self._gone: dict[PeerKey, int] = {}
        self._late = Strikes(policy.max_members)
        self.withheld = Strikes(policy.max_members)
        """Of those whose updates committees could not get, or not use: records of ours do not list them for a while."""
        self.discredited = Strikes(policy.max_members)
        """Of those whose updates broke the codec's rules: for a while their claims end no round."""
        self.lagging = Strikes(policy.max_members)
        """Of laggards that were waited for in vain (see `awaiting`): for a while nobody waits for them as such."""
        self._parent: Digest | None = None
        self._number = 0
        self._counted: dict[PeerKey, int] = {}
        """Members that train in the watched round and have not announced: their windows."""
        self._settled: set[PeerKey] = set()
        self.windows = 0
        """Sum of `_counted`."""

    def govern(self, policy: Policy) -> None:
        """The policy of another round."""
        self._policy = policy
        self._late.grow(policy.max_members)
        self.withheld.grow(policy.max_members)
        self.discredited.grow(policy.max_members)
        self.lagging.grow(policy.max_members)

    def dismiss(self, key: PeerKey) -> None:
        """It is no member any more, whatever it says."""
        if key in self._members:
            self._forget(key)

    def is_my_turn(self, of: Digest, turn: int) -> bool:
        """Whether we are one of about REPEATERS members, others each time, who repeat what others have said."""
        every = max(1, len(self) // REPEATERS)
        return (int.from_bytes(self._me[:4], "big") + int.from_bytes(of[:4], "big") + turn) % every == 0

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def get(self, key: PeerKey) -> Member | None:
        return self._members.get(key)

    def heard(self, message: Signed[Heartbeat], now: float) -> bool:
        """Take a heartbeat. False when it is not news (replayed, reordered), or there is no room for its author."""
        key, beat = message.author, message.body
        if key == self._me or beat.sequence <= self._gone.get(key, -1):
            return False
        member = self._members.get(key)
        if member is not None:
            if beat.sequence <= member.beat.sequence:
                return False
            member.beat = beat
            member.heard = now
            self._count(member)
            return True
        if len(self._members) >= self._policy.max_members and not self._make_room(key, now):
            return False
        member = self._members[key] = Member(key, beat, now)
        self._count(member)
        return True

    def goodbye(self, message: Signed[Goodbye]) -> bool:
        """Forget a member that leaves of its own will. False when a newer heartbeat contradicts it."""
        member = self._members.get(message.author)
        if member is None or message.body.sequence <= member.beat.sequence:
            return False
        self._forget(message.author)
        self._gone[message.author] = message.body.sequence
        while len(self._gone) > self._policy.max_members:
            del self._gone[next(iter(self._gone))]
        return True

    def has_left(self, key: PeerKey) -> bool:
        """Whether it said that it leaves, lately."""
        return key in self._gone

    def expire(self, now: float) -> list[PeerKey]:
        """Forget who was not heard of for `member_seconds`; who they were."""
        silent = [m.key for m in self if now - m.heard > self._policy.member_seconds]
        for key in silent:
            self._forget(key)
        return silent

    def contributed(self, contributors: Iterable[PeerKey]) -> None:
        """These were in the last round: they keep their places, and what they let rounds wait for is forgiven."""
        self._veterans = frozenset(contributors)
        for key in self._veterans:
            self.forgive(key)
            self.discredited.forgive(key)
            self.lagging.forgive(key)

    def is_veteran(self, key: PeerKey) -> bool:
        return key in self._veterans

    def _make_room(self, key: PeerKey, now: float) -> bool:
        if self.expire(now):
            return True
        if key not in self._veterans:
            return False
        newcomers = [m for m in self if m.key not in self._veterans]
        if not newcomers:
            return False
        self._forget(max(newcomers, key=lambda m: m.since).key)
        return True

    def _forget(self, key: PeerKey) -> None:
        del self._members[key]
        self.windows -= self._counted.pop(key, 0)

    # -- the sum of a round's work, kept as heartbeats come ----------------------------------------------------

    @property
    def training(self) -> int:
        """Members that train in the watched round and have not announced."""
        return len(self._counted)

    def watch(self, parent: Digest, number: int) -> None:
        """Count for the round after a record, of this number, from now on."""
        self._parent = parent
        self._number = number
        self._counted.clear()
        self._settled.clear()
        self.windows = 0
        for member in self:
            self._count(member)

    def settle(self, key: PeerKey) -> None:
        """It has announced: what its heartbeats say from now on is for the next round."""
        self._settled.add(key)
        self.windows -= self._counted.pop(key, 0)

    def _count(self, member: Member) -> None:
        self.windows -= self._counted.pop(member.key, 0)
        counts = member.key not in self._settled and not self.discredited.holds(member.key, self._number)
        if self._parent is not None and counts and member.trains_in(self._parent):
            windows = min(member.beat.windows, self._policy.max_update_windows)
            self._counted[member.key] = windows
            self.windows += windows

    # -- whom a round does not wait for: those who kept earlier rounds waiting in vain ------------------------

    def strike(self, key: PeerKey, number: int) -> None:
        """It kept round `number` waiting until the deadline: the next rounds, twice as many each time, do not wait."""
        self._late.strike(key, number)

    def forgive(self, key: PeerKey) -> None:
        """It delivered in time."""
        self._late.forgive(key)

    def is_waited_for(self, key: PeerKey, number: int) -> bool:
        return not self._late.holds(key, number)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and its bound."""
        top = self._policy.max_members
        return {
            "members": (len(self._members), top),
            "goodbyes": (len(self._gone), top),
            "strikes": (len(self._late), top),
            "withheld": (len(self.withheld), top),
            "discredited": (len(self.discredited), top),
            "lagging": (len(self.lagging), top),
            "counted": (len(self._counted), top),
            "settled": (len(self._settled), 2 * top),
        }

"""The members by their last heartbeat, within a bound, and the reputation that decides whom rounds wait for.

This table decides who takes part in rounds. Another one is for reaching peers (`peer.node.peer_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from protocol.bounded import BoundedDict
from protocol.ids import Digest, PeerKey
from protocol.messages import CLOCK_TOLERANCE, TRAINING_PHASES, Goodbye, Heartbeat, Signed
from protocol.rounds.policy import RoundPolicy

MAX_PENALTY = 6
"""Doublings of a penalty: 2**6 = 64 rounds."""

LAPSE_ROUNDS = 32
"""Rounds after a penalty that take back one doubling. A peer that stalls whenever it is awaited never has them."""

LAST_BEATS = 4
"""Peers whose newest sequence is remembered after they fell silent, as a multiple of `max_members`."""

REPEATERS = 8
"""About this number of members repeat others' messages, once there are more than twice as many. If everybody did, each
of a thousand would send all of them to all: a thousand times the traffic of one proposer."""


class Member:
    """An admitted peer that was heard from lately."""

    __slots__ = ("key", "beat", "heard", "since")

    def __init__(self, key: PeerKey, beat: Heartbeat, now: float):
        self.key = key
        self.beat = beat
        self.heard = now
        """The time of its last heartbeat."""

        self.since = now

    @property
    def takes_part(self) -> bool:
        """True unless its last heartbeat says that it only follows, or is still on the way to a state."""
        return self.beat.phase not in ("joining", "syncing", "observing", "resting")

    def trains_in(self, parent: Digest) -> bool:
        """Return whether its last heartbeat says that it works on the round after `parent`."""
        return self.beat.head == parent and self.beat.phase in (*TRAINING_PHASES, "leaving")


class Penalties:
    """Peers that failed a round, and the round until which that counts. Bounded.

    The next penalty is twice as long, unless this one is forgiven, or has long been over.
    """

    def __init__(self, bound: int):
        self._penalties: BoundedDict[PeerKey, tuple[int, int]] = BoundedDict(bound)

    def __len__(self) -> int:
        return len(self._penalties)

    def grow(self, bound: int) -> None:
        self._penalties.limit = max(self._penalties.limit, bound)

    def penalise(self, key: PeerKey, number: int) -> None:
        """Add a penalty from round `number` on: for the next 2, 4, ... 64 rounds.

        One doubling is taken back for every LAPSE_ROUNDS since the last penalty ended.
        """
        count, until = self._penalties.get(key, (0, number))
        count = min(MAX_PENALTY, max(0, count - max(0, number - until) // LAPSE_ROUNDS) + 1)
        self._penalties.renew(key, (count, number + 2**count))

    def withdraw(self, key: PeerKey, number: int) -> None:
        """Take back a penalty that was added in round `number`, with its doubling. An earlier one is over then, too."""
        count, until = self._penalties.get(key, (0, 0))
        if count == 1 and until == number + 2:
            self.forgive(key)
        elif count and until == number + 2**count:
            self._penalties[key] = (count - 1, number - 1)

    def forgive(self, key: PeerKey) -> None:
        self._penalties.pop(key, None)

    def applies_to(self, key: PeerKey, number: int) -> bool:
        """Return whether a penalty still counts in round `number`."""
        return number <= self._penalties.get(key, (0, -1))[1]


class Members:
    """The members that one machine knows, at most `max_members`, and their penalties.

    When the table is full, a peer of a higher rank displaces one of a lower rank, the newest first. More stake is a
    higher rank: it alone costs work. Among equals, contributors of the last round come first, then peers with accepted
    work, then the others. A peer of the lowest rank displaces nobody: anybody can make keys.
    """

    def __init__(self, policy: RoundPolicy, me: PeerKey, standing: Callable[[PeerKey], tuple[int, bool]]):
        """Start without members.

        `standing` returns a peer's stake at the chain's head, in windows, and whether the chain has work of it.
        """
        self._policy = policy
        self._me = me
        self._standing = standing
        self._members: dict[PeerKey, Member] = {}
        self._established: frozenset[PeerKey] = frozenset()
        """Contributors of the last round."""

        self._gone: BoundedDict[PeerKey, int] = BoundedDict(policy.max_members)
        """Peers that said goodbye, with the sequence of it."""

        self._last: BoundedDict[PeerKey, int] = BoundedDict(LAST_BEATS * policy.max_members)
        """The newest sequence of peers with accepted work or stake that fell silent: what was recorded of them brings
        none back."""

        self._unix_ms = 0
        """The time by our own clock, in the unit of sequences."""

        self.late = Penalties(policy.max_members)
        """For keeping a round waiting until the deadline, or an update that is invalid or a copy: for a while nobody
        waits for these peers. Being listed later does not clear it, or else a peer that announces in every second round
        would stall the others."""

        self.unavailable = Penalties(policy.max_members)
        """For certified blobs that nobody gave us: for a while we wait for theirs only briefly."""

        self.withheld = Penalties(policy.max_members)
        """For updates that committees could not get or use: our own records do not list these peers for a while."""

        self.distrusted = Penalties(policy.max_members)
        """For updates that broke the codec's rules or were copies: for a while the claims of these peers end no
        round."""

        self.lagging = Penalties(policy.max_members)
        """For lagging members awaited in vain (see `awaited_members`): for a while nobody waits for them as such."""

        self.silent = Penalties(policy.max_members)
        """Penalties of voters and proposers whose silence made an attempt fail. Only a certified vote clears them,
        since a record may list a peer that never votes."""

        self.equivocated = Penalties(policy.max_members)
        """For announcing two updates in one round. Nothing clears it but time: the proof is signed."""

        self._forgiven_when_listed = (self.unavailable, self.withheld, self.distrusted, self.lagging)
        self._penalties = {
            "late": self.late, "unavailable": self.unavailable, "withheld": self.withheld,
            "distrusted": self.distrusted, "lagging": self.lagging, "silent": self.silent,
            "equivocated": self.equivocated,
        }  # fmt: skip
        self._parent: Digest | None = None
        self._countable: Callable[[PeerKey], int] = lambda key: 0
        self._number = 0
        self._counted: dict[PeerKey, int] = {}
        """Windows of members that train in the watched round and have not announced."""

        self._announced: set[PeerKey] = set()
        self.windows = 0
        """Sum of `_counted`."""

    def adopt_policy(self, policy: RoundPolicy) -> None:
        self._policy = policy
        self._gone.limit = policy.max_members
        self._last.limit = LAST_BEATS * policy.max_members
        for penalties in self._penalties.values():
            penalties.grow(policy.max_members)

    def note_time(self, unix_ms: int) -> None:
        """Note the time by our own clock, in the unit of sequences."""
        self._unix_ms = unix_ms

    def dismiss(self, key: PeerKey) -> None:
        """Remove a member, whatever it sends."""
        if key in self._members:
            self._forget(key)

    def is_my_turn(self, of: Digest, turn: int) -> bool:
        """Return whether we are one of about REPEATERS members, others each turn, that repeat others' messages."""
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

    def add_heartbeat(self, message: Signed[Heartbeat], now: float) -> bool:
        """Note a heartbeat. Return False when it is not new (replayed, reordered), or its author has no room."""
        key, beat = message.author, message.body
        if key == self._me or not self.is_new(key, beat.sequence):
            return False
        member = self._members.get(key)
        if member is not None:
            member.beat = beat
            member.heard = now
            self._count(member)
            return True
        if len(self._members) >= self._policy.max_members and not self._make_room(key, now):
            return False
        member = self._members[key] = Member(key, beat, now)
        self._count(member)
        return True

    def is_new(self, key: PeerKey, sequence: int) -> bool:
        """Return whether a heartbeat of this sequence is newer than all that we remember of its author."""
        member = self._members.get(key)
        newest = max(self._gone.get(key, -1), self._last.get(key, -1))
        return sequence > max(newest, -1 if member is None else member.beat.sequence)

    def goodbye(self, message: Signed[Goodbye]) -> bool:
        """Forget a member that leaves of its own will. Return False when a newer heartbeat contradicts it."""
        member = self._members.get(message.author)
        if member is None or message.body.sequence <= member.beat.sequence:
            return False
        self._forget(message.author)
        self._gone[message.author] = message.body.sequence
        return True

    def has_left(self, key: PeerKey) -> bool:
        """Return whether a peer has said goodbye; it may be back."""
        return key in self._gone

    def expire(self, now: float) -> list[PeerKey]:
        """Forget the members that were silent for `member_seconds`, and return their keys."""
        silent = [m.key for m in self if now - m.heard > self._policy.member_seconds]
        for key in silent:
            sequence = self._forget(key)
            # One whose clock was far ahead could not come back for as long.
            if any(self._rank(key)) and sequence <= self._unix_ms + 1000 * CLOCK_TOLERANCE:
                self._last.renew(key, sequence)
        return silent

    def note_contributors(self, contributors: Iterable[PeerKey], *, on_time_in: int | None = None) -> None:
        """Note the contributors of the last round: they keep their places, and their penalties are forgiven.

        `on_time_in`: its number, if the first attempt succeeded. Then others had their updates in time, and only we
        had waited for them in vain.
        """
        self._established = frozenset(contributors)
        for key in self._established:
            for penalties in self._forgiven_when_listed:
                penalties.forgive(key)
            if on_time_in is not None:
                self.late.withdraw(key, on_time_in)

    def is_unreliable(self, key: PeerKey, number: int) -> bool:
        """Return whether round `number` must not depend on a peer's vote."""
        return self.silent.applies_to(key, number) or self.equivocated.applies_to(key, number)

    def is_doubted(self, key: PeerKey, number: int) -> bool:
        """Return whether a peer's claims of windows do not bring round `number` closer to its end."""
        return self.distrusted.applies_to(key, number) or self.is_unreliable(key, number)

    def has_room_for(self, key: PeerKey) -> bool:
        """Return whether a peer's messages come before strangers': it is a member, or has accepted work or stake."""
        return any(self.rank(key))

    def rank(self, key: PeerKey) -> tuple[int, ...]:
        """Return a peer's claim to a place in a full table of the round: ours first, strangers' are all zeros."""
        return (key == self._me, *self._rank(key), key in self._members)

    def _rank(self, key: PeerKey) -> tuple[int, ...]:
        stake, has_worked = self._standing(key)
        return stake, key in self._established, has_worked

    def _make_room(self, key: PeerKey, now: float) -> bool:
        if self.expire(now):
            return True
        if not any(own := self._rank(key)):
            return False
        rank, _, last = min((self._rank(m.key), -m.since, m.key) for m in self)
        if rank < own:
            self._forget(last)
        return rank < own

    def _forget(self, key: PeerKey) -> int:
        """Remove a member, and return its newest sequence."""
        sequence = self._members.pop(key).beat.sequence
        self.windows -= self._counted.pop(key, 0)
        return sequence

    # -- the sum of a round's work, kept as heartbeats come ----------------------------------------------------

    @property
    def training(self) -> int:
        """Number of members that train in the watched round and have not announced."""
        return len(self._counted)

    def watch(self, parent: Digest, number: int, countable: Callable[[PeerKey], int]) -> None:
        """Count for the round after a record, of this number, from now on. `countable`: the most of a peer's claim."""
        self._parent = parent
        self._countable = lru_cache(2 * self._policy.max_members)(countable)
        self._number = number
        self._counted.clear()
        self._announced.clear()
        self.windows = 0
        for member in self:
            self._count(member)

    def stop_watching(self) -> None:
        """Count for no round: its parent has left the tree, and heartbeats may still name it."""
        self._parent = None

    def counted(self, key: PeerKey, windows: int) -> int:
        """Return how many windows of a peer's claim count for the watched round."""
        return min(windows, self._countable(key))

    def note_announced(self, key: PeerKey) -> None:
        """Note that a peer has announced: its heartbeats count for the next round from now on."""
        self._announced.add(key)
        self.windows -= self._counted.pop(key, 0)

    def _count(self, member: Member) -> None:
        self.windows -= self._counted.pop(member.key, 0)
        counts = member.key not in self._announced and not self.is_doubted(member.key, self._number)
        if self._parent is not None and counts and member.trains_in(self._parent):
            windows = self.counted(member.key, member.beat.windows)
            self._counted[member.key] = windows
            self.windows += windows

    def sizes(self) -> dict[str, tuple[int, int]]:
        top = self._policy.max_members
        return {
            "members": (len(self._members), top),
            "goodbyes": (len(self._gone), top),
            "last beats": (len(self._last), LAST_BEATS * top),
            **{name: (len(penalties), top) for name, penalties in self._penalties.items()},
            "counted": (len(self._counted), top),
            "announced": (len(self._announced), 2 * top),
        }

"""The next source of missing certificates: one or two at a time, in turn, with longer pauses after failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.bounded import BoundedDict
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, sha256
from protocol.rounds.deadlines import Deadlines
from protocol.rounds.members import Member
from protocol.stake import is_majority

MAX_PAUSE = 60.0

MAX_STRANGER_CLAIMS = 8
"""Maximum number of claims of non-members (the coordinator's observer is one): anybody can make keys."""

MAX_REQUESTS = 2
SECOND_SECONDS = 2.0
"""A second source is asked when the first has not answered for this time: it may be silent on purpose."""

ANSWER_MARGIN_SECONDS = 1e-6
"""Seconds beyond the time for an answer before the request counts as failed."""

MAX_PATIENCES = 10
"""Upper bound on joining, in multiples of `member_seconds`: a chain of thousands of rounds takes minutes. Otherwise an
admitted peer could hold a newcomer with records that lead nowhere. A peer that `is_left_behind` waits on."""

SAID_AGAIN_SECONDS = 600.0
"""Seconds after which a peer that waits because it is left behind says so again."""


@dataclass(slots=True)
class _Claim:
    head: Digest
    since: float
    member: bool
    renewed: float


class ChainSync:
    """The heads that others claim in heartbeats, and the requests for their records that are under way."""

    def __init__(self, bound: int, heartbeat_seconds: float, me: PeerKey):
        self._bound = bound
        self._me = me
        self._pause = heartbeat_seconds
        self._grace = min(0.5, heartbeat_seconds / 2)
        """Seconds to wait before a request: a record that was just certified usually arrives by itself."""

        self._answer_within = max(30.0, 10 * heartbeat_seconds)
        self._claims: dict[PeerKey, _Claim] = {}
        self._failures: BoundedDict[PeerKey, tuple[int, float]] = BoundedDict(bound)
        """Failed requests in a row, and the time until which the source is not asked."""

        self._last_asked: BoundedDict[PeerKey, float] = BoundedDict(bound)
        self._asked: dict[PeerKey, float] = {}
        """The peers of the requests under way, and the times of these."""

        self._news_at = 0.0
        """The time of the last answer that brought something."""

    def grow(self, bound: int) -> None:
        self._bound = self._failures.limit = self._last_asked.limit = max(self._bound, bound)

    def claim(self, source: PeerKey, head: Digest, chain: Chain, now: float, *, member: bool) -> None:
        """Note the head that a peer claims, as long as the tree has never had it."""
        if chain.has_seen(head):
            self._claims.pop(source, None)
            return
        old = self._claims.get(source)
        if old is not None and old.head == head:
            old.member, old.renewed = member, now
            return
        if old is None and not (self._has_room(now) if member else self._has_room_for_a_stranger(now)):
            return
        # A source that was ahead and still is has been ahead since then.
        self._claims[source] = _Claim(head, now if old is None else old.since, member, now)

    def _has_room(self, now: float) -> bool:
        return len(self._claims) < self._bound or self._drop_a_stranger(now)

    def _has_room_for_a_stranger(self, now: float) -> bool:
        if sum(not claim.member for claim in self._claims.values()) < MAX_STRANGER_CLAIMS:
            return len(self._claims) < self._bound
        return self._drop_a_stranger(now - self._answer_within)

    def _drop_a_stranger(self, silent_since: float) -> bool:
        """Drop the longest silent stranger, of those silent since `silent_since` or whose last request failed."""
        strangers = [
            source
            for source, claim in self._claims.items()
            if not claim.member and (claim.renewed <= silent_since or source in self._failures)
        ]
        if strangers:
            self.forget(min(strangers, key=lambda source: self._claims[source].renewed))
        return bool(strangers)

    def forget(self, source: PeerKey) -> None:
        self._claims.pop(source, None)
        self._failures.pop(source, None)
        self._last_asked.pop(source, None)
        self._asked.pop(source, None)

    def wanted(self, chain: Chain) -> list[PeerKey]:
        """Return the sources that claim a head that is not in the tree.

        Claimed weights are ignored: only the records show which head is better.
        """
        for source in [source for source, claim in self._claims.items() if chain.has_seen(claim.head)]:
            del self._claims[source]
        return list(self._claims)

    def is_ahead(self, chain: Chain) -> bool:
        """Return whether a source that has not failed us claims a head that is not in the tree, or was asked."""
        return bool(self._asked) or any(source not in self._failures for source in self.wanted(chain))

    @property
    def may_ask(self) -> bool:
        """True unless as many requests are under way as may be."""
        return len(self._asked) < MAX_REQUESTS

    def next_request(self, chain: Chain, deadlines: Deadlines, *, eager: bool) -> PeerKey | None:
        """Return the peer to ask now, and mark it as asked: those with stake first, then members, then by turns.

        Of these, sources that have failed come last. While the answer of another is late, they are not asked at all:
        over a slow link, two answers at once may both come too late. `eager`: do not wait for records that may arrive
        without a request.
        """
        for source, since in list(self._asked.items()):
            if self._is_late(since, deadlines):
                self.failed(source, deadlines.now)
        wanted = [source for source in self.wanted(chain) if source not in self._asked]
        if self._asked:
            if not self.may_ask or not deadlines.due("second source", min(self._asked.values()) + SECOND_SECONDS):
                return None
            wanted = [source for source in wanted if source not in self._failures]
        due = [source for source in wanted if deadlines.due("chain request", self._earliest(source, eager))]
        if not due:
            return None
        stakes = chain.stakes(chain.head)
        source = min(due, key=lambda s: self._turn(s, has_stake=s in stakes))
        self.ask(source, deadlines.now)
        self._is_late(deadlines.now, deadlines)  # registers the deadline
        return source

    def _is_late(self, asked_at: float, deadlines: Deadlines) -> bool:
        """Return whether the time for the answer to a request is over."""
        return deadlines.due("chain answer", asked_at + self._answer_within + ANSWER_MARGIN_SECONDS)

    def _turn(self, source: PeerKey, *, has_stake: bool) -> tuple[bool, bool, bool, float, bytes]:
        """Return the order of sources. Its last part is each peer's own, so that no key comes first for everybody."""
        is_member, has_failed = self._claims[source].member, source in self._failures
        drawn = sha256(self._me, source)
        return not has_stake, not is_member, has_failed, self._last_asked.get(source, -1.0), drawn

    def ask(self, source: PeerKey, now: float) -> None:
        """Mark a request as under way."""
        self._asked[source] = now
        self._last_asked.renew(source, now)

    def answered(self, source: PeerKey, *, useful: bool, now: float) -> None:
        """Note an answer; one that brought nothing new counts as a failure, unless another's came before it."""
        asked_at = self._asked.pop(source, now)
        if useful:
            self._failures.pop(source, None)
            self._news_at = now
        elif asked_at >= self._news_at:
            self.failed(source, now)

    def failed(self, source: PeerKey, now: float) -> None:
        """Note that a source gave no answer, or a malformed one: pause twice as long each time."""
        self._asked.pop(source, None)
        count = min(10, self._failures.get(source, (0, 0.0))[0] + 1)
        self._failures.renew(source, (count, now + min(MAX_PAUSE, self._pause * 2**count)))

    def _earliest(self, source: PeerKey, eager: bool) -> float:
        since = 0.0 if eager else self._claims[source].since + self._grace
        return max(since, self._failures.get(source, (0, 0.0))[1])

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {
            "claims": (len(self._claims), self._bound),
            "failures": (len(self._failures), self._bound),
            "asked": (len(self._last_asked), self._bound),
            "requests": (len(self._asked), MAX_REQUESTS),
        }


class JoinTimer:
    """The time of joining, in which a newcomer collects the others' records before it loads a state and trains.

    `member_seconds`: those after which it is over if nothing arrives of what others claim to have.
    """

    def __init__(self, now: float, member_seconds: float):
        self._wait_until = self._grew = now
        self._member_seconds = member_seconds
        self._say_again_at = 0.0

    def begin(self, now: float, seconds: float) -> None:
        """Start. Peers that are present send a heartbeat within this time."""
        self._wait_until, self._grew = now + seconds, now

    def grew(self, now: float) -> None:
        """Note that missing records arrived, and that their source has more."""
        self._grew = now

    def is_over(self, deadlines: Deadlines, *, ahead: bool, equal: bool) -> bool:
        """Return whether it is over. `ahead`: a peer has records that we miss; `equal`: one has a head that we know."""
        waited = deadlines.due("joining", self._wait_until)
        grew = min(self._grew, self._wait_until + MAX_PATIENCES * self._member_seconds)
        at_last = max(self._wait_until, grew) + self._member_seconds
        return (not ahead and (equal or waited)) or deadlines.due("joining at last", at_last)

    def is_late(self, deadlines: Deadlines) -> bool:
        """Return whether nothing has arrived for MAX_PATIENCES times `member_seconds`, or little for twice as long."""
        longest = MAX_PATIENCES * self._member_seconds
        grew = min(self._grew, self._wait_until + longest)
        return deadlines.due("joining late", max(self._wait_until, grew) + longest)

    def is_stalled(self, now: float) -> bool:
        """Return whether nothing has arrived for `member_seconds`: at first, and then once in SAID_AGAIN_SECONDS."""
        if now < max(self._wait_until, self._grew) + self._member_seconds or now < self._say_again_at:
            return False
        self._say_again_at = now + SAID_AGAIN_SECONDS
        return True


def is_left_behind(chain: Chain, members: Iterable[Member], me: PeerKey, *, is_late: bool = False) -> bool:
    """Return whether most members have records that this tree has never had, by stake at the head.

    A peer that began to train then would make a chain of its own, which nobody follows. While nobody has stake, most
    are counted; those at a known head that are still joining do not count then, since they may be left behind too.

    Once it `is_late`, only most of all keys hold anybody back: or else fewer with invented heads would keep a young run
    from its first round. Then stake counts where no key could make it by records of its own.
    """
    members = list(members)
    ahead = {m.key for m in members if not chain.has_seen(m.beat.head)}
    stakes = chain.stakes(chain.fork_choice_root if is_late else chain.head)
    decided = is_majority(stakes, ahead, {m.key for m in members} | {me})
    if decided is not None:
        return decided
    if is_late:
        return 2 * len(ahead) > len(members) + 1  # we too
    return 2 * len(ahead) > sum(m.key in ahead or m.beat.phase != "joining" for m in members)

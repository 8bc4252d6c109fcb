"""Observations of each round at first hand: times, training peers, and absent peers with reasons.

They are for people: no credit and no decision depends on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from coordinator.non_participation import NonParticipation, non_participants
from coordinator.swarm import ReceivedHeartbeat
from protocol.bounded import BoundedDict
from protocol.ids import Digest, PeerKey
from protocol.ledger.credits import RoundCredits
from protocol.messages import TRAINING_PHASES, RoundRecord, Signed, UpdateHeader

MAX_ROUNDS = 20_000
MAX_WITH_ABSENCES = 1_000
"""Older rounds keep their times, and lose their absent peers."""

MAX_ANNOUNCED = 64
"""Rounds whose times of announcement are kept."""

MAX_AUTHORS = 10_000
MAX_PROPOSALS = 64
MAX_EARLY_PROPOSALS = 16
"""Proposals that are kept until their round begins here, one of each author: each may list thousands of peers."""

TYPICAL = 8


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A proposed record: its digest, when it was received (unix seconds), and the peers that it lists."""

    record: Digest
    at: float
    contributors: frozenset[PeerKey]


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """One decided round; times in unix seconds of this coordinator's clock, None for what was not observed.

    `began` is when the record before was certified, `announced` when the first update was, `proposed` when the winning
    record was. `training` counts the peers that trained when it was certified; `sent` and `received` are bytes by the
    peers' own counters.
    """

    round: int
    record: Digest
    began: float | None
    announced: float | None
    proposed: float | None
    certified: float
    training: int
    sent: int | None
    received: int | None
    absent: tuple[NonParticipation, ...] | None
    absent_total: int

    @property
    def train(self) -> float | None:
        """Seconds until the first update was announced."""
        return _between(self.began, self.announced)

    @property
    def exchange(self) -> float | None:
        """Seconds from then until the record was proposed: updates are transferred and checked."""
        return _between(self.announced, self.proposed)

    @property
    def commit(self) -> float | None:
        """Seconds from then until it was certified: votes, and in a reduced round the reduced shards."""
        return _between(self.proposed, self.certified)

    @property
    def after(self) -> float | None:
        """Seconds from the first announcement until it was certified."""
        return _between(self.announced, self.certified)

    @property
    def whole(self) -> float | None:
        """Seconds from the record before to this one."""
        return _between(self.began, self.certified)


@dataclass(frozen=True, slots=True)
class TypicalDurations:
    """Medians of the last rounds, in seconds: the whole round, and the time after the first announcement."""

    whole: float
    after: float


class RoundObservations:
    """Collects what the observer receives (`receive`), and each record as it becomes the newest (`decide`).

    It is bounded: one early announcement and proposal of each author, MAX_PROPOSALS of a round, MAX_ROUNDS rounds. Of a
    message it keeps only what it needs later, since whole ones of strangers would fill the memory.
    """

    def __init__(self, member_seconds: Callable[[], float], now: Callable[[], float]):
        self._member_seconds = member_seconds
        self._now = now
        self._rounds: BoundedDict[Digest, RoundObservation] = BoundedDict(MAX_ROUNDS)
        self._head: Digest | None = None
        self.began: float | None = None
        """When the round that is being trained began (unix seconds)."""

        self._announced: dict[PeerKey, float] = {}
        self._proposed: dict[Digest, _Proposal] = {}
        # By author, with the parent: their round has not begun here, or they are of another branch.
        self._early_updates: BoundedDict[PeerKey, tuple[Digest, float]] = BoundedDict(MAX_AUTHORS)
        self._early_proposals: BoundedDict[PeerKey, tuple[Digest, _Proposal]] = BoundedDict(MAX_EARLY_PROPOSALS)
        self._announcements: BoundedDict[Digest, Mapping[PeerKey, float]] = BoundedDict(MAX_ANNOUNCED)
        self._before: frozenset[PeerKey] = frozenset()
        self._paused_at = 0.0
        self._bytes: dict[PeerKey, tuple[int, int]] = {}
        self._unsaved: deque[RoundObservation] = deque(maxlen=MAX_WITH_ABSENCES)

    def get(self, record: Digest) -> RoundObservation | None:
        """Return the observation of the round that this record ended."""
        return self._rounds.get(record)

    def __iter__(self) -> Iterator[RoundObservation]:
        """Iterate over every round, in the order of observation."""
        return iter(self._rounds.values())

    def __len__(self) -> int:
        return len(self._rounds)

    def is_followed_by(self, credits: RoundCredits) -> bool:
        """Return whether a round comes after the newest one here, rather than on another branch."""
        return self._head in (None, credits.parent)

    def announcements(self, record: Digest) -> Mapping[PeerKey, float]:
        """Return the seconds from the round's first announcement to each peer's, of a recent round."""
        return self._announcements.get(record, {})

    @property
    def first_announced(self) -> float | None:
        """When the first update of the round that is being trained was announced (unix seconds)."""
        return min(self._announced.values(), default=None)

    def typical(self) -> TypicalDurations | None:
        """Return the typical durations; None before a whole round was observed."""
        newest = [s for s in list(self._rounds.values())[-TYPICAL:] if s.whole is not None]
        if not newest:
            return None
        after = [s.after for s in newest if s.after is not None]
        return TypicalDurations(median(s.whole or 0.0 for s in newest), median(after) if after else 0.0)

    def restore(self, seen: list[RoundObservation]) -> None:
        """Take over the observations of an earlier process, oldest first; to be called before anything else."""
        for s in seen[-MAX_ROUNDS:]:
            self._rounds[s.record] = s
        for s in list(self._rounds.values())[:-MAX_WITH_ABSENCES]:
            self._rounds[s.record] = replace(s, absent=None)

    def take_unsaved(self) -> list[RoundObservation]:
        """Return the observations since the last call, to be stored."""
        taken = list(self._unsaved)
        self._unsaved.clear()
        return taken

    def note_pause(self) -> None:
        """Note that the run is paused.

        A round without an announcement begins when the run resumes, as it does for its peers.
        """
        self._paused_at = self._now()
        if self.began is not None and not self._announced:
            self.began = self._paused_at

    def receive(self, message: Signed) -> None:
        """Take in a verified announcement or proposal; other messages are ignored."""
        body, author, now = message.body, message.author, self._now()
        if isinstance(body, UpdateHeader):
            if body.parent == self._head:
                self._accept_update(author, now)
            else:
                self._early_updates.renew(author, (body.parent, now))
        elif isinstance(body, RoundRecord):
            proposal = _Proposal(message.digest, now, frozenset(body.contributors))
            if body.parent == self._head:
                self._accept_proposal(proposal)
            else:
                self._early_proposals.renew(author, (body.parent, proposal))

    def _accept_update(self, author: PeerKey, at: float) -> None:
        if author not in self._announced and len(self._announced) < MAX_AUTHORS:
            self._announced[author] = at

    def _accept_proposal(self, proposal: _Proposal) -> None:
        if proposal.record not in self._proposed and len(self._proposed) < MAX_PROPOSALS:
            self._proposed[proposal.record] = proposal

    def decide(self, credits: RoundCredits, members: Mapping[PeerKey, ReceivedHeartbeat]) -> RoundObservation:
        """Note that a record became the newest, with the members at this moment; return the observation."""
        now = self._now()
        if credits.parent != self._head:
            self._turn_to(credits.parent, None if (p := self._rounds.get(credits.parent)) is None else p.certified)
        inside = frozenset(e.peer for e in credits.lines)
        first = self.first_announced
        # A reduced record changes while it gets its shards, so it is identified by the peers that it lists.
        proposed = min((p.at for p in self._proposed.values() if p.contributors == inside), default=None)
        if proposed is not None and first is not None:
            proposed = max(proposed, first)
        came = first is not None or proposed is not None  # else it was decided before this coordinator was there
        limit = self._member_seconds()
        training = sum(_works(h, limit) for h in members.values())
        found = non_participants(credits, inside, self._before, self._announced, proposed, members, limit)
        sent, received = self._traffic(members)
        seen = RoundObservation(
            credits.round, credits.record, self.began if came else None, first, proposed, now, training, sent,
            received, tuple(found[:MAX_LISTED]), len(found),
        )  # fmt: skip
        self._rounds.renew(seen.record, seen)
        if first is not None:
            self._announcements[seen.record] = {p: at - first for p, at in self._announced.items()}
        self._unsaved.append(seen)
        self._forget()
        self._before = inside
        self._turn_to(credits.record, now)
        return seen

    def _turn_to(self, head: Digest, began: float | None) -> None:
        self._head, self.began = head, None if began is None else max(began, self._paused_at)
        self._announced, self._proposed = {}, {}
        for author, (parent, at) in list(self._early_updates.items()):
            if parent == head:
                del self._early_updates[author]
                self._accept_update(author, at)
        for author, (parent, proposal) in list(self._early_proposals.items()):
            if parent == head:
                del self._early_proposals[author]
                self._accept_proposal(proposal)

    def _traffic(self, members: Mapping[PeerKey, ReceivedHeartbeat]) -> tuple[int | None, int | None]:
        """Return bytes sent and received since the last round; None if that was not observed.

        A counter that has become smaller was restarted.
        """
        known = bool(self._bytes)
        sent = received = 0
        counters = {}
        for peer, h in members.items():
            up, down = h.heartbeat.bytes_up, h.heartbeat.bytes_down
            before = self._bytes.get(peer)
            if before is not None:
                sent += up - before[0] if up >= before[0] else up
                received += down - before[1] if down >= before[1] else down
            counters[peer] = (up, down)
        self._bytes = counters
        return (sent, received) if known else (None, None)

    def _forget(self) -> None:
        if len(self._rounds) > MAX_WITH_ABSENCES:
            for back, s in enumerate(reversed(self._rounds.values())):
                if back == MAX_WITH_ABSENCES:
                    self._rounds[s.record] = replace(s, absent=None)
                    break


MAX_LISTED = 100
"""Maximum number of absent peers that are kept of a round."""


def _works(h: ReceivedHeartbeat, member_seconds: float) -> bool:
    return h.heartbeat.phase in TRAINING_PHASES and h.seconds_since <= member_seconds


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)

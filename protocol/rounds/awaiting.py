"""Whom the first in rank waits for before it proposes, and since when there is nobody left."""

from __future__ import annotations

from itertools import islice

from protocol.ids import Digest, PeerKey
from protocol.rounds.ballot import Ballot
from protocol.rounds.context import Context
from protocol.rounds.members import Member

FAR = 8
"""Who is so many rounds behind, or more, is not waited for."""


class Awaiting:
    """For one round after the other."""

    def __init__(self, context: Context):
        self._c = context
        self._struck = False
        self._blocker: PeerKey | None = None
        """One of those that are waited for: while it is, nobody else need be looked at."""
        self._lagged = False
        """It was a laggard when nobody else was left."""
        self._before: frozenset[Digest] = frozenset()
        """The records before the round's parent: who holds the state of one is behind."""
        self._lasted = 0.0
        """How long the round before took, in seconds; 0 when that is not known."""

    def open(self, b: Ballot, lasted: float) -> None:
        """A round begins; the one before it took so many seconds, 0 when that is not known."""
        self._struck = False
        self._blocker = None
        self._lagged = False
        self._before = frozenset(islice(self._c.chain.ancestors(b.parent), 1, 1 + FAR))
        self._lasted = lasted

    def awaited(self, b: Ballot) -> list[PeerKey]:
        """Whom the first in rank still waits for, laggards last."""
        keys = [*b.headers, *(m.key for m in self._c.members if m.key not in b.headers)]
        return sorted((key for key in keys if self._is_awaited(b, key)), key=lambda key: self._lags(b, key))

    def _is_awaited(self, b: Ballot, key: PeerKey) -> bool:
        c = self._c
        if not c.members.is_waited_for(key, b.number):
            return False
        header, member = b.headers.get(key), c.members.get(key)
        if header is not None:
            # Who announced and has fallen silent since sends no more of it.
            silent = member is None and c.now > b.heard[key] + c.policy.member_seconds
            lacks = b.is_candidate(header) and not c.blobs.holds(header.body.blob)
            return lacks and not b.reduces and not silent
        if member is None:
            return False
        if self._lags(b, key):
            may_come = self._is_fresh(member) and not c.members.lagging.holds(key, b.number)
            return may_come and c.now < b.began + self._patience(is_behind=member.beat.head in self._before)
        if member.heard >= b.began:
            return member.trains_in(b.parent)
        # Not heard of in this round yet: it was with us a moment ago, and most likely still is.
        return self._is_fresh(member) and member.beat.phase in ("training", "exchanging")

    def _is_fresh(self, member: Member) -> bool:
        return self._c.now - member.heard <= 2 * self._c.policy.heartbeat_seconds

    def _lags(self, b: Ballot, key: PeerKey) -> bool:
        """Whether it has said in this round that it still holds a state before (it fetches what makes the next, and
        applies it), or that it has done nothing yet that it could announce."""
        member = self._c.members.get(key)
        if member is None or key in b.headers or member.heard < b.began:
            return False
        if member.beat.head in self._before:
            return member.beat.phase in ("training", "exchanging")
        return member.trains_in(b.parent) and not member.beat.windows

    def look(self, b: Ballot) -> None:
        """Note when nobody is waited for any more, and who was waited for in vain."""
        c = self._c
        if b.ready is not None or self._struck or b.announced is None:
            return
        late = c.now >= b.announced + c.policy.exchange_seconds
        if not late and self._blocker is not None and self._is_awaited(b, self._blocker):
            return
        if self._lagged:
            self._strike_laggards(b)
        awaited = self.awaited(b)
        self._blocker = awaited[0] if awaited else None
        self._lagged = self._blocker is not None and self._lags(b, self._blocker)
        if not awaited:
            b.ready = c.now
            for author, header in b.headers.items():
                if b.reduces or c.blobs.holds(header.body.blob):
                    c.members.forgive(author)
        elif late:
            self._struck = True
            for key in awaited:
                c.members.strike(key, b.number)
                c.report(
                    "info", "late", f"peer {key.short} kept the round waiting: the next ones do not wait for it", key
                )

    def _strike_laggards(self, b: Ballot) -> None:
        """The round waited for these alone, and in vain: whatever they say of themselves by now."""
        members = self._c.members
        for key in {
            self._blocker,
            *(m.key for m in members if self._lags(b, m.key) and not self._is_awaited(b, m.key)),
        }:
            if key is not None and key not in b.headers and not members.lagging.holds(key, b.number):
                members.lagging.strike(key, b.number)

    def _patience(self, *, is_behind: bool) -> float:
        """Seconds from a round's beginning that laggards are waited for: where training takes as long as that, it costs
        nothing. Who is behind: as long as the round before took, but two heartbeats at least."""
        policy = self._c.policy
        seconds = max(self._lasted, 2 * policy.heartbeat_seconds) if is_behind else policy.heartbeat_seconds
        return min(seconds, policy.exchange_seconds)

    def times(self, b: Ballot) -> list[float]:
        """When something will be due."""
        return [b.began + self._patience(is_behind=which) for which in (False, True)]

"""The members that the first proposer waits for, and the time from which there are none."""

from __future__ import annotations

from itertools import islice

from protocol.ids import Digest, PeerKey
from protocol.messages import TRAINING_PHASES
from protocol.rounds.context import Context
from protocol.rounds.exchange import Exchange
from protocol.rounds.members import Member
from protocol.rounds.round_state import RoundState

MAX_LAG = 8
"""A member that is more than this number of rounds behind is not awaited."""


class AwaitedMembers:
    """The members that the first proposer of one round still waits for."""

    def __init__(self, context: Context, round_: RoundState, exchange: Exchange, seconds_before: float):
        """`seconds_before`: duration of the previous round; 0 when that is not known."""
        self._context = context
        self._round = round_
        self._exchange = exchange
        self._seconds_before = seconds_before
        self._penalised = False
        self._blocker: PeerKey | None = None
        """One of those that are awaited: as long as it is, nobody else needs to be examined."""

        self._lagged = False
        """The blocker was lagging when nobody else was awaited."""

        self._recent_records: frozenset[Digest] = frozenset(
            islice(context.chain.ancestors(round_.parent), 1, 1 + MAX_LAG)
        )
        """Ancestors of the round's parent. A member whose state is one of these is lagging."""

    def awaited(self) -> list[PeerKey]:
        """Return the members that the first proposer still waits for, lagging ones last."""
        headers = self._round.headers
        keys = [*headers, *(m.key for m in self._context.members if m.key not in headers)]
        return sorted((key for key in keys if self._is_awaited(key)), key=self._lags)

    def _is_awaited(self, key: PeerKey) -> bool:
        context, round_ = self._context, self._round
        if context.members.late.applies_to(key, round_.number):
            return False
        header, member = round_.headers.get(key), context.members.get(key)
        if header is not None:
            # A peer that announced and then fell silent sends no more of its update.
            if not self._exchange.awaits(header):
                return False
            expires = round_.received_at[key] + context.policy.member_seconds
            return member is not None or not context.deadlines.due("silent", expires)
        if member is None:
            return False
        if self._lags(key):
            may_come = not context.members.lagging.applies_to(key, round_.number) and self._is_fresh(member)
            return may_come and not self._waited_long_enough(is_behind=member.beat.head in self._recent_records)
        if member.heard >= round_.began:
            return member.trains_in(round_.parent)
        # Not heard from in this round yet: it was with us a moment ago, and most likely still is.
        return member.beat.phase in TRAINING_PHASES and self._is_fresh(member)

    def _is_fresh(self, member: Member) -> bool:
        return not self._context.deadlines.due("silent", member.heard + 2 * self._context.policy.heartbeat_seconds)

    def _lags(self, key: PeerKey) -> bool:
        """Return whether a member said in this round that it holds an earlier state, or has nothing to announce yet."""
        member = self._context.members.get(key)
        if member is None or key in self._round.headers or member.heard < self._round.began:
            return False
        if member.beat.head in self._recent_records:
            return member.beat.phase in TRAINING_PHASES
        return member.trains_in(self._round.parent) and not member.beat.windows

    def update(self) -> None:
        """Note when nobody is awaited any more, and penalise those that were awaited in vain."""
        context, round_ = self._context, self._round
        if round_.ready_at is not None or self._penalised or round_.announced_at is None:
            return
        late = context.deadlines.due("exchange", round_.announced_at + context.policy.exchange_seconds)
        if not late and self._blocker is not None and self._is_awaited(self._blocker):
            return
        if self._lagged:
            self._penalise_lagging()
        awaited = self.awaited()
        self._blocker = awaited[0] if awaited else None
        self._lagged = self._blocker is not None and self._lags(self._blocker)
        if not awaited:
            round_.mark_ready(context.now)
        elif late:
            self._penalised = True
            for key in awaited:
                context.members.late.penalise(key, round_.number)
                text = f"peer {key.short} kept the round waiting: the next ones do not wait for it"
                context.notify("info", "late", text, key)

    def _penalise_lagging(self) -> None:
        """Penalise the members that the round last waited for in vain, even if newer heartbeats say otherwise."""
        members, number = self._context.members, self._round.number
        lagging = {m.key for m in members if self._lags(m.key) and not self._is_awaited(m.key)}
        for key in sorted({*lagging} if self._blocker is None else {self._blocker, *lagging}):
            if key not in self._round.headers and not members.lagging.applies_to(key, number):
                members.lagging.penalise(key, number)

    def _waited_long_enough(self, *, is_behind: bool) -> bool:
        """Return whether lagging members were awaited for long enough since the round's beginning.

        If training takes as long as that, waiting costs nothing. A member that is behind gets as long as the round
        before took, but at least two heartbeats.
        """
        policy = self._context.policy
        seconds = max(self._seconds_before, 2 * policy.heartbeat_seconds) if is_behind else policy.heartbeat_seconds
        return self._context.deadlines.due("lagging", self._round.began + min(seconds, policy.exchange_seconds))

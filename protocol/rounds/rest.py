"""A rest of this peer: its user wants the devices for a while.

    Rest      what is trained is handed in: an update of it is announced at once, if the open round has none of ours
              the trainer is released: when it owes nothing any more, or HAND_IN_SECONDS after the request
              the open round is decided with our vote, without a trainer: votes need the updates only
              from then on the peer observes
    Resume    a new trainer is acquired, and goes to the head, as after a start

From the request on, heartbeats say "resting". So rounds do not wait for this peer, and its stake counts against no
record.
"""

from __future__ import annotations

from protocol.rounds import events as ev
from protocol.rounds.actions import AcquireTrainer, ReleaseTrainer
from protocol.rounds.consensus import Consensus
from protocol.rounds.context import Context
from protocol.rounds.state_sync import StateSync

REST_SECONDS = 5.0
"""The longest time from a request until the devices are free: to hand in, to save, and to end."""

HAND_IN_SECONDS = 1.5
"""The part of it for the trainer to make the last update. Work that is not handed in is in its saved state."""


class RestSteps:
    """The steps of one peer into a rest and out of it."""

    def __init__(self, context: Context, sync: StateSync, consensus: Consensus):
        self._context = context
        self._sync = sync
        self._consensus = consensus
        self._until = 0.0
        """The time at which the trainer is released, whatever it owes."""

        self._is_released = False

    @property
    def is_hurrying(self) -> bool:
        """True while an update of what was trained is due at once."""
        return self._context.is_resting and not self._is_released

    def follow(self, event: ev.Rest | ev.Resume) -> bool:
        """Begin a rest, or end it. Return False when nothing changes: it rests or trains already, or never trains."""
        return self._begin() if isinstance(event, ev.Rest) else self._end()

    def _begin(self) -> bool:
        context = self._context
        if context.is_resting or context.observer:
            return False
        context.begin_rest()
        self._until = context.now + HAND_IN_SECONDS
        return True

    def _end(self) -> bool:
        context = self._context
        if not context.is_resting:
            return False
        if context.observer:
            self._consensus.abandon()
        # Otherwise the round of our last update is still open. Its header stands: a second one would contradict it.
        context.end_rest()
        if self._is_released:
            self._is_released = False
            self._sync.start_over(has_trainer=True)
            context.emit(AcquireTrainer())
        return True

    def advance(self) -> bool:
        """Release the trainer, or begin to observe, if it is time. Return whether the peer began to observe."""
        context = self._context
        if not context.is_resting or context.observer:
            return False
        if not self._is_released:
            owes = self._sync.is_busy or self._sync.is_keeping or self._has_work
            if owes and not context.deadlines.due("rest", self._until):
                return False
            self._is_released = True
            self._sync.release()
            context.emit(ReleaseTrainer())
        if self._is_voting:
            return False
        self._consensus.abandon()
        for action in context.blobs.request({}, self._consensus.holders, context.deadlines):
            context.emit(action)
        context.observe()
        self._sync.start_over(has_trainer=False)
        return True

    @property
    def _is_voting(self) -> bool:
        """True while the round that we announced in is open, and on the best branch."""
        consensus, round_ = self._consensus, self._consensus.round
        if round_ is None or round_.announced_at is None or round_.parent != self._context.chain.head:
            return False
        return consensus.is_working

    @property
    def _has_work(self) -> bool:
        """True when an update can be announced."""
        consensus = self._consensus
        has_windows = consensus.is_working and consensus.work.windows >= 1
        return has_windows and not self._is_voting and not self._context.is_paused

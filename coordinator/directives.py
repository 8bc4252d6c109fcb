"""The effects of the owner's newest directive at the coordinator (docs/control.md)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass

from coordinator.indexed_chain import IndexedChain
from protocol.ids import PeerKey, RunId
from protocol.messages import Directive, RoundChanges
from protocol.spec import RoundSpec

MAX_MARKS = 100
"""Newest marks that are kept."""


@dataclass(frozen=True, slots=True)
class RunMark:
    """The moment of a directive that charts show, in unix seconds by the owner's clock; `text` is for people."""

    time: float
    kind: str
    """One of MARK_KINDS."""
    text: str


MARK_KINDS = ("paused", "resumed", "ended", "rolled back")


class EffectiveRoundPolicy:
    """The round policy of the spec with the owner's changes: when rounds are late, peers silent."""

    def __init__(self, spec: RoundSpec):
        self._spec = spec
        self._before, self._after = spec, spec
        self._from = 0

    def change(self, changes: RoundChanges, from_round: int, training_round: int) -> None:
        """Apply the changes of the newest directive, which are relative to the spec."""
        self._before = self.at(training_round)
        new = {name: value for name, value in asdict(changes).items() if value is not None}
        self._after, self._from = self._spec.model_copy(update=new), from_round

    def at(self, training_round: int) -> RoundSpec:
        """Return the policy that holds while this round is trained."""
        return self._after if training_round >= self._from else self._before


class DirectiveEffects:
    """The round policy in force, the owner's order, and the banned keys."""

    def __init__(self, spec: RoundSpec, chain: IndexedChain):
        self._policy = EffectiveRoundPolicy(spec)
        self._chain = chain
        self.order: tuple[str, str] | None = None
        """The run is "paused" or "ended" by its owner, and that as a message; None while it runs."""

        self.bans: dict[PeerKey, str] = {}
        """The banned keys, each with the reason for its ban. A directive has the reason of its own order alone."""

        self._last = Directive(RunId(bytes(32)), 0)
        self.order_reason = ""
        """The reason of the pause or end."""

        self.marks: deque[RunMark] = deque(maxlen=MAX_MARKS)
        """Pauses, resumptions, ends and rollbacks, oldest first."""

    @property
    def round_policy(self) -> RoundSpec:
        """The round policy in the round that is being trained."""
        return self._policy.at(self._chain.training_round)

    def apply(self, directive: Directive) -> None:
        self._policy.change(directive.changes, directive.from_round, self._chain.training_round)
        last, self._last = self._last, directive
        self._mark(last, directive)
        is_as_before = (last.run_status, last.since) == (directive.run_status, directive.since)
        if not is_as_before:
            self.order_reason = directive.reason
        # While the run is paused or over, a ban without a reason repeats that of the pause or end.
        is_repeated = directive.run_status != "running" and directive.reason == last.reason
        why = "" if is_repeated else directive.reason
        self.bans = {key: self.bans.get(key, why) for key in directive.banned}
        self.order = None
        if directive.run_status != "running":
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(directive.since))
            why = f": {self.order_reason}" if self.order_reason else ""
            self.order = (directive.run_status, f"{directive.run_status} by the run's owner since {since}{why}")

    def _mark(self, last: Directive, new: Directive) -> None:
        """Add the marks of a directive that follows another."""
        if (back := new.rollback) is not None and back.epoch > last.epoch:
            self.marks.append(RunMark(new.sequence / 1000, "rolled back", f"to round {back.round}"))
        if new.run_status != last.run_status:
            kind = "resumed" if new.run_status == "running" else new.run_status
            self.marks.append(RunMark(float(new.since or new.sequence / 1000), kind, new.reason))

"""Tracks active alerts, and the events that each webhook has still to receive. Stored as one JSON.

Durations do not depend on how the clock is set meanwhile: all times move with it. Times from before a restart are at
most now.

Strangers can make the cause of an alert come and go. So an alert that fires again within a day of its end is sent at
once, but resolved later: each time its cause must be gone for longer. A cause that returns before that is sent again,
every RETURN_SECONDS at most: it may be a worse one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coordinator.alerts.rules import OVER, RULES, AlertInput, AlertRule, Memory

log = logging.getLogger(__name__)

FORM = 1
REPEAT_SECONDS = 6 * 3600.0
AGAIN_SECONDS = 86_400.0
"""Seconds after its end within which an alert counts as firing again."""

CLEAR_SECONDS = (0.0, 3600.0, 4 * 3600.0, 16 * 3600.0, AGAIN_SECONDS)
"""Seconds that a cause must be gone, by how often the alert fired again; the last one repeats."""

MAX_WAITING = 64
"""Maximum number of undelivered events for a webhook; the oldest is dropped first."""

RETURN_SECONDS = 1800.0
"""Seconds after an event from which a cause that was gone, of an alert that is not resolved yet, is sent again."""

SET_SECONDS = 1.0
"""Seconds by which a clock is set at least; what is less may be its own gait."""

KEEP_SECONDS = 86_400.0
"""Seconds after which an undelivered event is dropped."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An active alert; `since` in unix seconds."""

    name: str
    since: float
    message: str


@dataclass(frozen=True, slots=True)
class AlertEvent:
    """An event to deliver: `kind` is "fired", "ongoing", "resolved" or "test". The same id marks the same event."""

    id: str
    name: str
    kind: str
    message: str
    since: float
    time: float


@dataclass(slots=True)
class _State:
    """The state of one rule; times in unix seconds.

    `wrong_since` and `right_since` begin the unbroken judgement, `sent_at` is the time of the last event. `ended_at` is
    when the alert was resolved last, `again` how often it fired within AGAIN_SECONDS of that. `returned`: its cause was
    gone, and is back.
    """

    wrong_since: float | None = None
    right_since: float | None = None
    since: float | None = None
    sent_at: float = 0.0
    ended_at: float = 0.0
    again: int = 0
    returned: bool = False
    message: str = ""
    memory: Memory = field(default_factory=dict)


class AlertTracker:
    """Tracks the alerts. `hooks` are the webhooks' names, `saved` is the `to_json` from before the restart.

    `on_dropped` is called for each event that has waited for too long, or behind too many.
    """

    def __init__(
        self, hooks: Sequence[str], saved: Mapping[str, Any] | None = None, *, repeat: float = REPEAT_SECONDS,
        on_dropped: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self._repeat = repeat
        self._states = {r.name: _State() for r in RULES}
        self._waiting: dict[str, list[AlertEvent]] = {hook: [] for hook in hooks}
        self._on_dropped = on_dropped
        self._faulty: set[str] = set()
        self._started_at: float | None = None
        """When the coordinator started, by the clock as it was set last."""
        if saved and saved.get("form") == FORM:
            for name, state in saved["rules"].items():
                if name in self._states:
                    self._states[name] = _State(**state)
            for hook, events in saved["waiting"].items():
                if hook in self._waiting:
                    self._waiting[hook] = [AlertEvent(**e) for e in events]

    def to_json(self) -> dict[str, Any]:
        return {
            "form": FORM,
            "rules": {name: asdict(s) for name, s in self._states.items()},
            "waiting": {hook: [asdict(e) for e in events] for hook, events in self._waiting.items()},
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._states)

    @property
    def active(self) -> tuple[Alert, ...]:
        """The active alerts, oldest first."""
        alerts = [Alert(n, s.since, s.message) for n, s in self._states.items() if s.since is not None]
        return tuple(sorted(alerts, key=lambda a: a.since))

    def update(self, seen: AlertInput) -> list[AlertEvent]:
        """Apply all rules to an input, and return the new events; each waits for every webhook from now on.

        A fault of a rule is logged once, and the others are applied.
        """
        self._follow_clock(seen)
        events: list[AlertEvent] = []
        for rule in RULES:
            try:
                events += self._judge(rule, self._states[rule.name], seen)
                self._faulty.discard(rule.name)
            except Exception:  # a fault in a rule must not silence the others
                if rule.name not in self._faulty:
                    log.exception(
                        "the rule of the alert %s has a fault: until it is gone only the others count", rule.name
                    )
                self._faulty.add(rule.name)
        for waiting in self._waiting.values():
            waiting += events
            fresh = [e for e in waiting if seen.time - e.time <= KEEP_SECONDS][-MAX_WAITING:]
            for _ in range(len(waiting) - len(fresh)):
                self._on_dropped()
            waiting[:] = fresh
        return events

    def _follow_clock(self, seen: AlertInput) -> None:
        """Move all times with a clock that was set; after a restart, to at most now."""
        started_at, before = seen.time - seen.up, self._started_at
        if before is None:
            self._started_at = started_at
            self._move_times(lambda at: min(at, seen.time))
        elif abs(started_at - before) > SET_SECONDS:
            self._started_at = started_at
            self._move_times(lambda at: at + started_at - before)

    def _move_times(self, moved: Callable[[float], float]) -> None:
        for s in self._states.values():
            s.wrong_since, s.right_since, s.since = (
                None if at is None else moved(at) for at in (s.wrong_since, s.right_since, s.since)
            )
            s.sent_at, s.ended_at = moved(s.sent_at), moved(s.ended_at)
            s.memory.update({name: moved(s.memory[name]) for name in ("since", "at") if name in s.memory})
        for waiting in self._waiting.values():
            waiting[:] = [replace(e, since=moved(e.since), time=moved(e.time)) for e in waiting]

    def _judge(self, rule: AlertRule, s: _State, seen: AlertInput) -> Iterator[AlertEvent]:
        now, rests = seen.time, rule.rests and seen.health in OVER
        if rests:
            s.memory.clear()
        message = "" if rests else rule.judge(s.memory, seen)
        if message is None:
            return
        was_gone = s.right_since is not None and now - s.right_since >= rule.clear
        s.returned = bool(message) and s.since is not None and (s.returned or was_gone)
        s.wrong_since = (now if s.wrong_since is None else s.wrong_since) if message else None
        s.right_since = (now if s.right_since is None else s.right_since) if not message else None

        def event(kind: str) -> AlertEvent:
            return AlertEvent(
                f"{rule.name}-{s.since:.0f}-{kind}-{now:.0f}", rule.name, kind, s.message, s.since or now, now
            )

        clear = 0.0 if rests else max(rule.clear, CLEAR_SECONDS[min(s.again, len(CLEAR_SECONDS) - 1)])
        if message:
            is_news = rule.each and message != s.message
            s.message = message
            if s.since is None and now - (s.wrong_since or now) >= rule.after:
                s.again = s.again + 1 if 0 <= now - s.ended_at < AGAIN_SECONDS else 0
                s.since, s.sent_at = s.wrong_since, now
                yield event("fired")
            elif s.since is not None and (is_news or s.returned and now - s.sent_at >= RETURN_SECONDS):
                s.sent_at, s.returned = now, False
                yield event("fired")
            elif s.since is not None and not 0 <= now - s.sent_at < self._repeat:
                s.sent_at = now
                yield event("ongoing")
        elif s.since is not None and now - (s.right_since or now) >= clear:
            yield event("resolved")
            s.since, s.sent_at, s.ended_at, s.message = None, 0.0, now, ""

    def next_for(self, hook: str) -> AlertEvent | None:
        """Return the oldest event that this webhook has not received."""
        return next(iter(self._waiting[hook]), None)

    def done(self, hook: str, event: AlertEvent) -> None:
        """Remove an event: it was received, or never will be."""
        waiting = self._waiting[hook]
        waiting[:] = [e for e in waiting if e.id != event.id]


def back_off(failures: int) -> float:
    """Return the seconds to wait after a number of failures in a row: 1, 2, 4, ... up to five minutes."""
    return min(300.0, math.ldexp(1.0, min(failures, 10) - 1))

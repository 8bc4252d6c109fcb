"""The alert rules: pure functions of an `AlertInput`. `memory` belongs to one rule and survives a restart.

A rule returns a message if something is wrong, "" if nothing is, and None if it cannot say at this moment, for example
just after the start. None leaves everything as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

STARTUP_SECONDS = 120.0
"""Seconds after the start in which peers that are not seen yet are no news: heartbeats arrive one by one."""

DROP_SECONDS = 600.0
DROP_SHARE = 0.3
DROP_FORGET_SECONDS = 3600.0
"""Seconds after a drop at which the remaining number of peers becomes the normal one."""

CONVICTION_SECONDS = 3600.0
"""Seconds for which a conviction is an alert."""

MAX_CONVICTIONS = 64
"""Convictions that are remembered, the newest ones."""

MIN_ROUNDS = 8
DISK_SHARE, DISK_BYTES = 0.05, 20 * 10**9

OVER = ("finished", "ended", "paused")

Memory = dict[str, Any]
"""Under "since" and "at" it has unix seconds, which the tracker moves when the clock is set."""


@dataclass(frozen=True, slots=True)
class AlertInput:
    """The input of all rules at one time.

    `up` is seconds since the coordinator's start, `round_limit` the seconds that a round may last, `losses` those of
    the newest rounds, newest first. `diverged` names the peers that report another state digest than the chain.
    """

    time: float
    up: float
    health: str
    message: str
    problem: str
    caught_up: bool
    round: int
    round_limit: float
    losses: tuple[float, ...]
    training: int
    diverged: tuple[str, ...]
    disk_free: int
    disk_size: int
    validation_losses: tuple[float, ...] = ()
    """Validation losses, newest first; NaN for a state with non-finite output."""

    archive_problem: str = ""
    convictions: tuple[tuple[str, str], ...] = ()
    """The newest convictions, newest first: an identifier of the case, and whom it convicts of what."""

    resting: int = 0
    """Peers that their users have paused, of those that contributed to a round: a newcomer may say that, too."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A rule with its delays.

    `judge` gives the message, which must hold for `after` seconds to fire, and be gone for `clear` seconds to resolve.
    `each`: another message while the alert is active is news, and fires again. `rests`: nothing is wrong while the run
    is over or paused, and an active alert is resolved at once.
    """

    name: str
    judge: Callable[[Memory, AlertInput], str | None]
    after: float = 0.0
    clear: float = 0.0
    each: bool = False
    rests: bool = False


def loss(memory: Memory, s: AlertInput) -> str | None:
    """Judge the loss: not a number, or two rounds in a row far above the median of those before, by their own spread.

    The normal loss at the time of firing stays the measure: a spike does not become normal by lasting.
    """
    if s.losses and not math.isfinite(s.losses[0]):
        return f"the loss of round {s.round - 1} is {s.losses[0]}: roll back to a checkpoint before it"
    if (limit := memory.get("limit")) is None:
        before = [x for x in s.losses[2:] if math.isfinite(x)]
        if len(before) < MIN_ROUNDS:
            return ""
        normal = median(before)
        spread = 1.4826 * median(abs(x - normal) for x in before)
        limit = normal + max(0.25, 0.05 * normal, 6 * spread)
        if min(s.losses[:2]) <= limit:
            return ""
        memory["normal"], memory["limit"] = normal, limit
    elif s.losses and max(s.losses[:2]) <= limit:
        memory.clear()
        return ""
    return f"the loss is {s.losses[0]:.2f}, and was {memory['normal']:.2f} before" if s.losses else None


def stalled(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether peers train, and the round has not ended for longer than one may take."""
    if memory.get("round") != s.round:
        memory.update(round=s.round, since=s.time)
    if s.up < STARTUP_SECONDS or not s.caught_up:
        return None
    if not s.training:
        memory["since"] = s.time  # nobody can be late
        return ""
    late = s.time - memory["since"]
    if late <= s.round_limit:
        return ""
    return f"{s.training} peers train, and round {s.round} has not ended for {late / 60:.0f} min"


def digests(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether members hold another state than the chain names for the same record."""
    del memory
    if s.up < STARTUP_SECONDS:
        return None
    if not s.diverged:
        return ""
    names = ", ".join(s.diverged[:5]) + (" and others" if len(s.diverged) > 5 else "")
    return f"{len(s.diverged)} peers hold another state than the chain names: {names}"


def peers(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether a third of the peers that trained within ten minutes are gone.

    Those that their users have paused are there. The alert is resolved when they return, or after an hour.
    """
    there, resting = s.training + s.resting, f" and {s.resting} rest" if s.resting else ""
    if s.up < STARTUP_SECONDS:
        memory.pop("seen", None)
        return None
    if (was := memory.get("was")) is not None:
        if there >= (1 - DROP_SHARE / 2) * was or s.time - memory["at"] > DROP_FORGET_SECONDS:
            memory.clear()
            return ""
        return f"{s.training} peers train{resting}, of {was}"
    # The maximum of each minute since the start: ten numbers, at any rate of checks.
    seen = {m: n for m, n in memory.get("seen", {}).items() if int(m) * 60 > s.up - DROP_SECONDS}
    minute = str(int(s.up // 60))
    seen[minute] = max(seen.get(minute, 0), there)
    memory["seen"] = seen
    was = max(seen.values())
    if was - there < 2 or there > (1 - DROP_SHARE) * was:
        return ""
    memory.update(was=was, at=s.time)
    return f"{s.training} peers train{resting}, of {was} a few minutes ago"


def disk(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether the run's folder is nearly full: 5% or 20 GB, whichever is less; resolved at a fifth more."""
    low = min(DISK_SHARE * s.disk_size, DISK_BYTES)
    if s.disk_free >= (1.2 * low if memory.get("low") else low):
        memory.clear()
        return ""
    memory["low"] = True
    return f"{s.disk_free / 1e9:.1f} GB of {s.disk_size / 1e9:.0f} GB are free where the run is kept"


def chain(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether the coordinator cannot follow the chain, or the peers are on more than one."""
    del memory
    if s.problem:
        return s.problem
    if s.up < STARTUP_SECONDS:
        return None
    return s.message if s.health == "split" else ""


def validation(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether the newest state is much worse than the best, or gives no finite numbers."""
    del memory
    if not s.validation_losses:
        return None
    if not math.isfinite(s.validation_losses[0]):
        return "the newest state that was judged gives no finite numbers: roll back to a checkpoint before it"
    best = min((x for x in s.validation_losses if math.isfinite(x)), default=s.validation_losses[0])
    if s.validation_losses[0] <= best + max(0.25, 0.05 * best):
        return ""
    return f"the validation loss is {s.validation_losses[0]:.2f}, and was {best:.2f}: look at the rounds between"


def archive(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether states are not archived, copied or evaluated."""
    del memory
    return s.archive_problem


def audits(memory: Memory, s: AlertInput) -> str | None:
    """Judge whether audits have convicted somebody within the last hour, as seen by this coordinator.

    The message names those of the newest record that convicts. Convictions that are there at the first look are no
    news.
    """
    known: list[str] | None = memory.get("known")
    if known is None:
        if not s.caught_up:
            return None
        known = [case for case, _ in s.convictions]
    fresh = [(case, said) for case, said in s.convictions if case not in known]
    memory["known"] = [*[case for case, _ in fresh], *known][:MAX_CONVICTIONS]
    if fresh:
        others = f"; and {len(fresh) - 1} more: see the run page" if len(fresh) > 1 else ""
        memory["at"], memory["message"] = s.time, fresh[0][1] + others
    return memory["message"] if s.time - memory.get("at", -math.inf) < CONVICTION_SECONDS else ""


RULES = (
    AlertRule("loss", loss),
    AlertRule("validation", validation),
    AlertRule("stalled", stalled, rests=True),
    AlertRule("digests", digests, after=10, clear=60),
    AlertRule("peers", peers, rests=True),
    AlertRule("audits", audits, each=True),
    AlertRule("disk", disk),
    AlertRule("archive", archive, after=600, clear=60),
    AlertRule("chain", chain, after=60, clear=30),
)

"""The weight of an update: its author's history bounds it, whatever the header claims. Pure.

A claim costs nothing, so it must not buy weight. An update weighs at most a quarter more than the mean of its author's
last five on the same branch, or as much as the last one. So a known peer that turns hostile has gained little when
audits convict it. An author with fewer updates may double with each: it mostly has no stake yet, so all are audited. A
newcomer weighs no more than the lower quartile of the known authors' windows, which nobody's limit is below. The rest
of a claim is the author's backlog, and counts in its next updates as far as their limit allows. A verdict or a
conviction makes the author a newcomer again, without a backlog: what it claimed falsely must not count later.

Chain weight, stake, credits and shares of the mean are all of weighed windows. Records state them, so a certificate can
be applied and credited by itself, and every chain checks them against this rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

KNOWN_ROUNDS = 64
"""Rounds after an author's newest accepted update in which it is no newcomer.

After the hold its windows are stake for as long.
"""

MEAN_UPDATES = 5
"""The last updates of an author that bound its next one: a weight doubles in about eight, sooner if it is small."""

COUNTED = 4
"""Times the limit of its weight that an update's claim counts when peers decide whether a round's target is reached.

Without a bound one key could end everybody's rounds. With 1, the few who are left when most have gone would train each
round for its longest time, until their limits have grown.
"""

BACKLOG_UPDATES = 16
"""Bound on an author's backlog, in updates of the largest claim: one that becomes ten times as fast stays below it."""


@dataclass(frozen=True, slots=True)
class AuthorHistory:
    """The accepted updates of an author on a branch. The default is that of a newcomer."""

    end_window: int = 0
    """End of its accepted windows: later ones must not start before it."""
    height: int = 0
    """The round that follows its newest accepted update."""
    weighed: tuple[int, ...] = ()
    """Weighed windows of its last updates since it was a newcomer: at most MEAN_UPDATES, newest last."""
    backlog: int = 0
    """Claimed windows that have not been weighed yet."""

    def limit(self, round_: int) -> int | None:
        """Return the most windows that its update may weigh in a round; None for a newcomer."""
        if not self.weighed or round_ - self.height >= KNOWN_ROUNDS:
            return None
        newest = self.weighed[-1]
        return max(newest, -(-sum(self.weighed) // 4)) if len(self.weighed) == MEAN_UPDATES else 2 * newest

    def after(self, round_: int, end_window: int, claimed: int, weighed: int, most: int) -> AuthorHistory:
        """Return the history with an update of a round that claims windows up to `end_window`. `most`: see `weigh`."""
        backlog = min(BACKLOG_UPDATES * most, self.backlog + claimed - weighed)
        before = () if self.limit(round_) is None else self.weighed
        return AuthorHistory(end_window, round_ + 1, (*before, weighed)[-MEAN_UPDATES:], backlog)

    def as_newcomer(self) -> AuthorHistory:
        """Return the history of an author whose work a verdict or a conviction voids: nothing waits."""
        return replace(self, weighed=(), backlog=0)


def countable(history: AuthorHistory, round_: int, newest: Sequence[int], most: int) -> int:
    """Return the most windows of an author's claim that bring a round closer to its target.

    `newest`: the weighed windows of the record before, if it has any; a newcomer's limit is their lower quartile.
    """
    of_newcomers = _lower_quartile(newest) if newest else most
    return min(most, COUNTED * max(history.limit(round_) or 0, of_newcomers))


def _lower_quartile(windows: Sequence[int]) -> int:
    return sorted(windows)[(len(windows) - 1) // 4]


def weigh(claims: Sequence[tuple[int, AuthorHistory]], round_: int, most: int) -> tuple[int, ...]:
    """Return the weighed windows of each update of a round, from its claimed windows (1 or more) and its author.

    A newcomer's limit is the lower quartile of what the others, who are no newcomers, weigh by their own limits. If all
    are newcomers, it is the lower quartile of the claims. Nobody's limit is below it, since a new key would have as
    much. No update weighs more than `most`, the largest claim that the run allows.
    """
    limits = [history.limit(round_) for _, history in claims]
    wanted = [min(most, claimed + history.backlog) for claimed, history in claims]
    known = [min(want, limit) for want, limit in zip(wanted, limits, strict=True) if limit is not None]
    of_newcomers = _lower_quartile(known or [claimed for claimed, _ in claims])
    return tuple(min(want, max(limit or 0, of_newcomers)) for want, limit in zip(wanted, limits, strict=True))

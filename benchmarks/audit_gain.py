"""The expected gain of a cheat that audits look for: `python -m benchmarks.audit_gain`.

The unit is the credit of one round of the peer, and the gain is that of one round of cheating. A cheat saves a share of
the work and is credited for all of it. When it is convicted, the credit of the hold rounds is void. It has also lost
the credit of the rounds in which it is barred, if its machine has no other use and no other key.

Honest work is worth its cost, so it neither gains nor loses. docs/results/audit_gain.md has the table that this command
prints.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from protocol.audits import MILLION, AuditRule
from protocol.messages import AuditCheck

HOLD_ROUNDS = 12
DECISION_ROUNDS = 3
"""Rounds from an update to the decision about it: reports of auditors, then of jurors, each carried by a record."""


@dataclass(frozen=True, slots=True)
class Cheat:
    """A way to work less. `saved`: share of the work. `by_loss`, `by_replay`: chances that a check finds it."""

    name: str
    saved: float
    by_loss: float
    by_replay: float


CHEATS = (
    Cheat("no training at all: noise, an old update, another's update", 1.0, 1.0, 1.0),
    Cheat("half of the steps", 0.5, 0.0, 1.0),
    Cheat("three quarters of the steps", 0.25, 0.0, 1.0),
    Cheat("all but a sixth of the steps, within the tolerance of a replay", 1 / 6, 0.0, 0.0),
)
WEIGHTS = (1 / 3, 1.0, 3.0)
"""Weighed windows of the peer's update, relative to the mean of its record."""


def audit_chance(rule: AuditRule, check: AuditCheck, weight: float, stake_rounds: float = 64.0) -> float:
    """Return the chance that a check is due for an update, as `protocol.audits.due_audits` draws it.

    `weight` is relative to the mean of the record. `stake_rounds`: the author's stake in updates like this one, at most
    64; 0 for a key without stake.
    """
    rate = rule.rate(check, 1) / MILLION  # of an update small enough for the least rate
    if not stake_rounds:
        return float(rate > 0)
    return min(1.0, max(rate / 3, rate * 64.0 / stake_rounds * weight))


def conviction_chance(cheat: Cheat, rule: AuditRule, weight: float, stake_rounds: float = 64.0) -> float:
    """Return the chance that one update of a cheat convicts it: one draw decides about both checks."""
    loss, replay = (audit_chance(rule, check, weight, stake_rounds) for check in ("loss", "replay"))
    return (replay + max(0.0, loss - replay) * cheat.by_loss) * cheat.by_replay


def expected_gain(
    cheat: Cheat, rule: AuditRule, weight: float, *, hold_rounds: int = HOLD_ROUNDS, counts_bar: bool = False,
    is_newcomer: bool = False,
) -> float:  # fmt: skip
    """Return the expected gain of one round of cheating, in credits of a round of this peer.

    It cheats in each round until it is convicted. `counts_bar`: the rounds of the first bar cost their credit. A
    newcomer has no stake and has done nothing else before.
    """
    chance = conviction_chance(cheat, rule, weight, 0.0 if is_newcomer else 64.0)
    if not chance:
        return cheat.saved
    rounds = 1 / chance + DECISION_ROUNDS
    voided = min(float(hold_rounds), rounds) if is_newcomer else float(hold_rounds)
    return cheat.saved - (voided + rule.bar_rounds * counts_bar) / rounds


def gain_table() -> list[str]:
    """Return the table of docs/results/audit_gain.md as lines: gains without the bar, and with it in brackets.

    The rates are the protocol's: no run can choose others.
    """
    weights = ("a third of the mean", "the mean", "three times the mean")
    lines = [f"| cheat | newcomer | {' | '.join(weights)} |", "| --- | ---: | ---: | ---: | ---: |"]
    for cheat in CHEATS:
        cells = [_cell(cheat, AuditRule(), 1.0, is_newcomer=True)]
        cells += [_cell(cheat, AuditRule(), weight, is_newcomer=False) for weight in WEIGHTS]
        lines.append(f"| {cheat.name} | {' | '.join(cells)} |")
    return lines


def _cell(cheat: Cheat, rule: AuditRule, weight: float, *, is_newcomer: bool) -> str:
    plain, barred = (
        expected_gain(cheat, rule, weight, counts_bar=counts, is_newcomer=is_newcomer) for counts in (False, True)
    )
    return f"{plain:+.2f} ({barred:+.2f})"


if __name__ == "__main__":
    sys.stdout.write("\n".join(gain_table()) + "\n")

"""The expected gain of a cheat that audits look for, computed from the protocol's rates.

The unit is the credit of one round of the peer, and the gain is that of one round of cheating. A cheat saves a share of
the work and is credited for all of it. When it is convicted, the credit of the hold rounds is void. It has also lost
the credit of the rounds in which it is barred, if its machine has no other use and no other key.

Honest work is worth its cost, so it neither gains nor loses. Nothing is drawn and nothing is measured: a simulation in
tests/unit/benchmarks/test_audit_gain.py holds the signs to the product's own rules.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  setting: decision_rounds, bar_rounds, stake_rounds
  gains: a list, each with cheat, saved (share of the work), found (whether a replay finds it), hold_rounds, weight
    (relative to the mean of the record; null: a newcomer), rounds (of cheating until the conviction; null: never
    convicted), voided (of these and of the rounds before), gain, gain_with_bar
  goals: a list of goal, value, met
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks import report
from protocol.audits import MILLION, AuditRule
from protocol.messages import AuditCheck
from protocol.stake import STAKE_ROUNDS

HOLDS = (12, 32)
"""The defaults of `credit.hold_rounds`, without replays and with them."""
DECISION_ROUNDS = 4
"""Rounds from an update to the decision about it: the draw, then reports of auditors and of jurors in records."""
STAKE = float(STAKE_ROUNDS)
"""The stake of a peer that is no newcomer: rounds of updates like this one."""


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


def audit_chance(rule: AuditRule, check: AuditCheck, weight: float, stake_rounds: float = STAKE) -> float:
    """Return the chance that a check is due for an update, as `protocol.audits.due_audits` draws it.

    `weight` is relative to the mean of the record. `stake_rounds`: the author's stake in updates like this one, at most
    64; 0 for a key without stake.
    """
    rate = rule.rate(check, 1) / MILLION  # of an update small enough for the least rate
    if not stake_rounds:
        return float(rate > 0)
    return min(1.0, max(rate / 3, rate * STAKE / stake_rounds * weight))


def conviction_chance(cheat: Cheat, rule: AuditRule, weight: float, stake_rounds: float = STAKE) -> float:
    """Return the chance that one update of a cheat convicts it: one draw decides about both checks."""
    loss, replay = (audit_chance(rule, check, weight, stake_rounds) for check in ("loss", "replay"))
    return (replay + max(0.0, loss - replay) * cheat.by_loss) * cheat.by_replay


def expected_gain(
    cheat: Cheat, rule: AuditRule, weight: float, hold_rounds: int, *, counts_bar: bool = False,
    is_newcomer: bool = False,
) -> float:  # fmt: skip
    """Return the expected gain of one round of cheating, in credits of a round of this peer.

    It cheats in each round until it is convicted. `counts_bar`: the rounds of the first bar cost their credit. A
    newcomer has no stake and has done nothing else before.
    """
    rounds, voided = _course(cheat, rule, weight, hold_rounds, is_newcomer=is_newcomer)
    return cheat.saved - (voided + rule.bar_rounds * counts_bar) / rounds if rounds else cheat.saved


def _course(
    cheat: Cheat, rule: AuditRule, weight: float, hold_rounds: int, *, is_newcomer: bool
) -> tuple[float | None, float]:
    """Return the expected rounds of cheating until the conviction (None: never), and the rounds that it voids."""
    chance = conviction_chance(cheat, rule, weight, 0.0 if is_newcomer else STAKE)
    if not chance:
        return None, 0.0
    rounds = 1 / chance + DECISION_ROUNDS
    return rounds, min(float(hold_rounds), rounds) if is_newcomer else float(hold_rounds)


def gains() -> list[dict[str, Any]]:
    """Return a row for each cheat and hold, as a newcomer and by each weight, at the rates of the protocol."""
    rule, out = AuditRule(), []
    for cheat, hold, weight in product(CHEATS, HOLDS, (None, *WEIGHTS)):
        new, at = weight is None, weight or 1.0
        rounds, voided = _course(cheat, rule, at, hold, is_newcomer=new)
        plain, barred = (expected_gain(cheat, rule, at, hold, counts_bar=bar, is_newcomer=new) for bar in (False, True))
        out.append({
            "cheat": cheat.name, "saved": cheat.saved, "found": bool(cheat.by_replay), "hold_rounds": hold,
            "weight": weight, "rounds": rounds, "voided": voided, "gain": plain, "gain_with_bar": barred,
        })  # fmt: skip
    return out


def goals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals of each hold: what a replay finds gains nothing."""
    out = []
    for hold in HOLDS:
        found = [r for r in rows if r["found"] and r["hold_rounds"] == hold]
        most = {
            "a newcomer gains nothing": max(r["gain"] for r in found if r["weight"] is None),
            "nobody with one key gains": max(r["gain_with_bar"] for r in found),
            "nobody with free keys gains": max(r["gain"] for r in found if r["weight"] is not None),
        }
        out += [report.goal(f"{what} by what a replay finds, hold {hold}", n, n <= 1e-9) for what, n in most.items()]
    return out


def show(results: Mapping[str, Any]) -> str:
    """Return the table: gains without the bar, and with it in brackets."""
    rows: dict[tuple[str, int], list[str]] = {}
    for r in results["gains"]:
        cells = rows.setdefault((r["cheat"], r["hold_rounds"]), [])
        cells.append(f"{r['gain']:+.2f} ({r['gain_with_bar']:+.2f})")
    columns = ["cheat", "hold", "newcomer", "a third of the mean", "the mean", "three times the mean"]
    return report.table(columns, [[*name, *cells] for name, cells in rows.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute, print, save. Return 1 when a goal is missed."""
    options = report.command_line(__doc__ or "", "audit_gain").parse_args(arguments)
    rows = gains()
    results = report.provenance("audit_gain", arguments) | {
        "setting": {"decision_rounds": DECISION_ROUNDS, "bar_rounds": AuditRule().bar_rounds, "stake_rounds": STAKE},
        "gains": rows,
        "goals": goals(rows),
    }  # fmt: skip
    return report.ended(results, options, show(results))


if __name__ == "__main__":
    sys.exit(main())

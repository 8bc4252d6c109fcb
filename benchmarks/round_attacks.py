"""The cost of attacks on rounds, in the simulator of tests/simulation.

Peers run the product's rounds on a simulated network without faults; no model is trained, and seconds are virtual. The
attackers behave for 40 s, so each has its share of the stake, and attack for 80 s. docs/results/adversaries.md has the
table.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  usual: for each swarm, while its attackers behave: seconds_a_round, and the windows of the others (means of the seeds)
  runs: a list, each with attack, swarm, part (of the attackers, of all work), seed, seconds_a_round, reverted (most
    rounds that an honest peer left for another branch), share (of the attackers, of the windows), ends (an honest peer
    believes that the run has all its windows), listed (share of the rounds that list the first honest peer, the victim
    if there is one), honest_work (windows of the honest peers on the chain, relative to the usual)
  goals: a list of goal, value, met
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from benchmarks import report
from tests.simulation.attackers import (
    Attacker,
    Censor,
    Deserter,
    FrontRunner,
    Make,
    NeverVotes,
    SiblingMaker,
    SoloCertifier,
    SybilLister,
    Withholding,
)
from tests.simulation.checkers import Damage
from tests.simulation.siege import Siege

ATTACKS = {
    "a private branch of 1 round, from 1 back": partial(SoloCertifier, length=1, back=1),
    "a private branch of 100 rounds, from the head": partial(SoloCertifier, length=100, back=0),
    "a private branch of 100 rounds, from 100 back": partial(SoloCertifier, length=100, back=100),
    "after leaving, 30 rounds from 6 back": partial(Deserter, length=30, back=6),
    "each round certified alone": FrontRunner,
    "100 siblings without updates on each head": partial(SiblingMaker, count=100, fresh=True),
    "records that list 40 unknown keys": partial(SybilLister, count=40),
    "never vote": NeverVotes,
    "updates withheld": Withholding,
    "vote only without one victim": Censor,
}


@dataclass(frozen=True)
class Swarm:
    """Peers by their speeds, in windows a virtual second; the last ones attack."""

    speeds: tuple[float, ...]
    attackers: int

    @property
    def part(self) -> float:
        """The attackers' part of the work, and so of the stake."""
        return sum(self.speeds[-self.attackers :]) / sum(self.speeds)

    def attacked_by(self, make: Make, seed: int) -> Damage:
        """Play one attack by the attackers of the swarm."""
        honest = len(self.speeds) - self.attackers
        return Siege([make] * self.attackers, honest=honest, seed=seed, speeds=self.speeds).run()


SWARMS = {
    "1 of 5": Swarm((2.0,) * 5, 1),
    "2 of 7": Swarm((2.0,) * 7, 2),
    "32%, beside 38% and three of 10%": Swarm((3.8, 1.0, 1.0, 1.0, 3.2), 1),
    "3 of 6": Swarm((2.0,) * 6, 3),
}
"""By name. In all but the last the attackers have less than a third of the stake, there half of it."""
SLOWEST = 1.5
"""Beside less than a third, a round takes at most this times its usual seconds."""


def usual(swarm: Swarm, seeds: Sequence[int]) -> dict[str, float]:
    """Return what a swarm does while its attackers behave."""
    found = [swarm.attacked_by(Attacker, seed) for seed in seeds]
    return {"seconds_a_round": mean(d.seconds_a_round for d in found), "windows": mean(d.honest_windows for d in found)}


def measured(attack: str, name: str, seed: int, without: Mapping[str, float]) -> dict[str, Any]:
    """Play one attack. Return its row of the results."""
    swarm = SWARMS[name]
    damage = swarm.attacked_by(ATTACKS[attack], seed)
    return {
        "attack": attack, "swarm": name, "part": swarm.part, "seed": seed,
        "seconds_a_round": damage.seconds_a_round, "reverted": damage.deepest, "share": damage.share,
        "ends": damage.ended, "listed": damage.victims, "honest_work": damage.honest_windows / without["windows"],
    }  # fmt: skip


def goals(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals with what was measured. Nothing is promised beside half of the stake."""
    few = minorities(results)
    reverted, ends = max(r["reverted"] for r in few), sum(r["ends"] for r in few)
    slow = slowest(few, results)
    excess = max(r["share"] - r["part"] for r in few)
    beside = "beside attackers of less than a third: "
    return [
        report.goal(beside + "no honest peer leaves more than the round under way", reverted, reverted <= 1),
        report.goal(beside + "nobody ends the run", ends, not ends),
        report.goal(beside + f"a round takes at most {SLOWEST} times as long", slow, slow <= SLOWEST),
        report.goal(beside + "they have at most a tenth more of the windows than their share", excess, excess <= 0.1),
    ]


def minorities(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs whose attackers have less than a third of the stake."""
    return [r for r in results["runs"] if 3 * r["part"] < 1]


def slowest(runs: Iterable[Mapping[str, Any]], results: Mapping[str, Any]) -> float:
    """Return the most time of a round in some runs, relative to the usual."""
    return max(r["seconds_a_round"] / results["usual"][r["swarm"]]["seconds_a_round"] for r in runs)


def rows(results: Mapping[str, Any], swarm: str) -> list[list[Any]]:
    """Return a row of the table for each attack: the mean of the seeds, and the worst."""
    out = []
    for attack in ATTACKS:
        some = [r for r in results["runs"] if (r["attack"], r["swarm"]) == (attack, swarm)]
        if some:
            work = [r["honest_work"] for r in some]
            out.append([
                f"{swarm}: {attack}", max(r["reverted"] for r in some), f"{slowest(some, results):.2f}",
                f"{mean(r['share'] for r in some):.0%}", f"{mean(work):.2f}", f"{min(work):.2f}",
                f"{min(r['listed'] for r in some):.0%}",
            ])  # fmt: skip
    return out


def show(results: Mapping[str, Any]) -> str:
    """Return the table."""
    columns = ["attack", "reverted", "time of a round, most", "attackers' windows", "honest work", "least",
               "victim listed, least"]  # fmt: skip
    return report.table(columns, [row for swarm in SWARMS for row in rows(results, swarm)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "round_attacks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args(arguments)
    seeds, attacks = (options.seeds[:1], list(ATTACKS)[-3:]) if options.quick else (options.seeds, list(ATTACKS))
    results: dict[str, Any] = report.provenance("round_attacks", arguments, seeds)
    without = results["usual"] = {name: usual(swarm, seeds) for name, swarm in SWARMS.items()}
    results["runs"] = [measured(attack, name, seed, without[name])
                       for attack in attacks for name in SWARMS for seed in seeds]  # fmt: skip
    results["goals"] = goals(results)
    return report.ended(results, options, show(results))


if __name__ == "__main__":
    sys.exit(main())

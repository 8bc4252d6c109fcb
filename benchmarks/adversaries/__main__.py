"""The gain of hostile peers, and the cost of audits to honest ones.

Honest updates are replayed on other machines (`honest`), and sixteen peers train while 3, 5 or 7 of them attack
(`swarm`), without defences, with some, and with all. Each defence is also left out by itself beside the attack that it
is for. A run ends when it has accepted its windows, so what the hostile make others train on counts as work.

`established`: the hostile have the stake of a clean record, which is when audits are rarest. Otherwise they are
newcomers, and each of their updates is checked.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report; setting
  honest: a list, each with commit, profile, parameters, seed, updates, comparisons; verdicts: comparisons by verdict
    (`passed`, `passed second`: in the other precision; `no report`; `failed`); pairs: the same by precisions and steps,
    with agreement of signs and ratio of norms
  large: rows as of `runs`, without an attack, of updates of 640 windows; those of 20 rounds are older
  runs: a list, each with attack (null: all honest), hostile, defences, established, seed; loss (validation, nats a
    token), loss_ratio (to the honest run of 16, same seed), ended (why it broke, or null), rounds (to the run's end),
    rounds_audited, named_after (rounds from the first fake to the conviction of each hostile peer), honest_convicted,
    honest_updates, refuted (auditors), fakes_accepted, fakes_credited (updates), fakes_credited_at_end (of the
    run: it is played on until all are convicted), updates_voided (of the
    hostile, honest ones also), audit_share, replay_share (of the honest peers' training), screen_share (CPU time of
    screens, of all training's), cpu_seconds, commit
  goals: a list of goal, value, met
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from typing import Any

import torch

from benchmarks import report
from benchmarks.adversaries import honest, swarm
from benchmarks.adversaries.lineup import ABSENT, ATTACKS, DEFENCES, LARGE, NAMED_WITHIN, SAVES, SMALL, SWARM, TINY
from benchmarks.adversaries.swarm import Scenario
from benchmarks.convergence.corpus import corpus

FOR = {
    "clip alone": ("flip, largest claim", "weights and clip"),
    "all but weights": ("flip, largest claim", "all"),
    "all but the clip": ("huge", "all"),
    "all but screens": ("stale", "all"),
    "all but loss checks": ("half", "all"),
    "all but replays": ("noise", "all"),
}
"""Defences with one left out: the attack that the missing one is for, and the defences to compare with."""
BROKEN = 100.0
"""The loss ratio of a run that broke."""
HONEST = ((TINY, 120), (SMALL, 12))
"""Swarms of honest peers, and how many of their updates are compared."""


TODAYS = ("9998d702932e61225fb37e3896a9f81a8429b4b0", "9581dd2b82e262540fc45a2ad55cd8cce83aed7a")
"""The commits of rows by today's rules of audits: the first with them, and later ones."""


def scenarios(seeds: Sequence[int]) -> Iterator[tuple[str, Scenario]]:
    """Yield the runs, each with the name of its defences: the first seed with five hostile peers comes first."""
    for seed in seeds:
        yield "all", Scenario("", 0, DEFENCES["all"], True, seed)
        for gone in (5, 3, 7) if seed == seeds[0] else (5,):
            yield "all", Scenario(ABSENT, gone, DEFENCES["all"], False, seed)
        for attack in ATTACKS:
            for name in ("all", "weights and clip", "plain mean"):
                yield name, Scenario(attack, 5, DEFENCES[name], True, seed)
        for name, (attack, _) in FOR.items():
            yield name, Scenario(attack, 5, DEFENCES[name], True, seed)
    for hostile in (7, 3):
        for attack in ATTACKS:
            for name in ("all", "weights and clip", "plain mean"):
                yield name, Scenario(attack, hostile, DEFENCES[name], True, seeds[0])
    for attack in ATTACKS:
        yield "all", Scenario(attack, 5, DEFENCES["all"], False, seeds[0])


def described(name: str, s: Scenario) -> dict[str, Any]:
    """Return the fields that say which run a row is."""
    return {"attack": s.attack or None, "hostile": s.hostile, "defences": name, "established": s.established,
            "seed": s.seed}  # fmt: skip


def with_ratios(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs with their loss relative to the honest run of all peers with the same seed."""
    clean = {r["seed"]: r["loss"] for r in runs if r["attack"] is None}
    return [
        {**r, "loss_ratio": None if r["loss"] is None or r["seed"] not in clean else r["loss"] / clean[r["seed"]]}
        for r in runs
    ]


def goals(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals with what was measured."""
    runs, found = results["runs"], []

    def goal(text: str, value: Any, met: bool) -> None:
        found.append(report.goal(text, value, met))

    compared = sum(h["comparisons"] for h in results["honest"])
    failed = sum(h["verdicts"]["failed"] for h in results["honest"])
    goal(
        "honest updates called bad: at most 1 of 10,000, of 10,000 or more",
        f"{failed} of {compared} replays, of {sum(h['updates'] for h in results['honest'])} updates",
        compared >= 10_000 and failed * 10_000 <= compared,
    )
    defended = [r for r in runs if r["defences"] == "all"]
    goal(
        "no honest peer convicted",
        sum(r["honest_convicted"] for r in defended),
        not any(r["honest_convicted"] for r in defended),
    )
    attacked = [r for r in defended if r["attack"] not in (None, ABSENT)]
    for attack in ATTACKS:
        of_it = [r for r in attacked if r["attack"] == attack]
        if of_it:
            peers = sum(r["hostile"] for r in of_it)
            named = sum(n <= NAMED_WITHIN for r in of_it for n in r["named_after"])
            goal(
                f"{attack}: 99% of hostile peers convicted within {NAMED_WITHIN} rounds",
                f"{named} of {peers}",
                named >= 0.99 * peers,
            )
            ratios = [r["loss_ratio"] for r in of_it if r["loss_ratio"] is not None]
            goal(
                f"{attack}: loss at most 1.05 of the honest run's",
                max(ratios, default=None),
                len(ratios) == len(of_it) and max(ratios, default=9) <= 1.05,
            )
            fakes, credited = (sum(r[k] for r in of_it) for k in ("fakes_accepted", "fakes_credited"))
            goal(f"{attack}: no fake keeps its credit", f"{credited} of {fakes}", credited == 0)
    for attack, saved, voided in gains(results):
        told = f"{voided / saved:.2g} voided for each saved"
        goal(f"{attack}: voids more updates of the hostile than it saves them", told, voided > saved)
    if results.get("large") and long_runs(results):
        share = mean(large_shares(results))
        goal(f"audits of updates of {LARGE.windows} windows cost at most 5% of their training", share, share <= 0.05)
    for name, (attack, other) in FOR.items():
        without = [r for r in runs if r["defences"] == name]
        seeds = {r["seed"] for r in without}
        wanted = (attack, other, 5, True)
        beside = [r for r in runs if (r["attack"], r["defences"], r["hostile"], r["established"]) == wanted]
        beside = [r for r in beside if r["seed"] in seeds]
        if without and beside:
            harm, usual = _harm(without), _harm(beside)
            goal(
                f"{name}: {attack} ends above 1.05, keeps credit, or takes twice as long to convict",
                f"{_told(harm)}; beside {other}: {_told(usual)}",
                harm["loss_ratio"] > max(1.05, usual["loss_ratio"])
                or harm["fakes_credited"] > usual["fakes_credited"]
                or harm["mean_rounds"] >= 2 * usual["mean_rounds"],
            )
    return found


def large_shares(results: Mapping[str, Any]) -> list[float]:
    """Return the cost of all checks of each run with large updates, as a share of its training."""
    return list(map(checks_share, long_runs(results)))


def long_runs(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs with large updates that are as long as credit is held."""
    return [r for r in results["large"] if r["rounds"] == LARGE.rounds]


def checks_share(run: Mapping[str, Any]) -> float:
    """Return the cost of all checks of a run, as a share of its training."""
    return run["audit_share"] + run["screen_share"]


def _harm(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what an attack did: worst loss ratio, or BROKEN; fakes credited; mean rounds until named."""
    ratios = [BROKEN if r["loss_ratio"] is None else r["loss_ratio"] for r in runs]
    after = [n for r in runs for n in r["named_after"]] + [
        NAMED_WITHIN + 1 for r in runs for _ in range(r["hostile"] - len(r["named_after"]))
    ]
    return {"loss_ratio": round(max(ratios), 3), "fakes_credited": sum(r["fakes_credited"] for r in runs),
            "mean_rounds": round(mean(after), 1)}  # fmt: skip


def _told(harm: Mapping[str, float]) -> str:
    """Return the numbers of `_harm` in words."""
    loss = "a broken run" if harm["loss_ratio"] == BROKEN else f"loss {harm['loss_ratio']:g} of the honest run's"
    after = harm["mean_rounds"]
    named = f"convicted after {after:g} rounds" if after <= NAMED_WITHIN else "nobody convicted"
    return f"{loss}, {harm['fakes_credited']} fakes credited, {named}"


def attacked(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs under attack with all defences."""
    return [r for r in results["runs"] if r["defences"] == "all" and r["attack"] not in (None, ABSENT)]


def gains(results: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Yield each attack that saves work, with the updates of training that it saved, and those that were voided."""
    for attack, share in SAVES.items():
        runs = [r for r in attacked(results) if r["attack"] == attack and "updates_voided" in r]
        if fakes := total(runs, "fakes_accepted"):
            yield attack, share * fakes, total(runs, "updates_voided")


def paying(results: Mapping[str, Any]) -> list[str]:
    """Return the attacks that saved the hostile more than was voided for them."""
    return [attack for attack, saved, voided in gains(results) if saved >= voided]


def show_gains(results: Mapping[str, Any]) -> str:
    """Return the table of what attacks save the hostile, and what they void for them."""
    rows = [[attack, f"{saved:g}", voided, f"{voided / saved:.2g}"] for attack, saved, voided in gains(results)]
    return report.table(["attack", "updates of work saved", "updates voided", "voided for each saved"], rows)


def total(runs: Iterable[Mapping[str, Any]], field: str) -> int:
    """Return the sum of a field."""
    return sum(r[field] for r in runs)


def named(runs: Iterable[Mapping[str, Any]]) -> int:
    """Return how many hostile peers were convicted in time."""
    return sum(n <= NAMED_WITHIN for r in runs for n in r["named_after"])


def _ratio(runs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the worst loss ratio of some runs."""
    ratios = [r["loss_ratio"] for r in runs]
    return None if not ratios else "broke" if None in ratios else f"{max(ratios):.3f}"


def show_attacks(results: Mapping[str, Any]) -> str:
    """Return the table of attacks: the worst of all seeds."""
    order = {name: n for n, name in enumerate((None, ABSENT, *ATTACKS))}
    keys = sorted({(not r["established"], r["hostile"], order[r["attack"]]) for r in results["runs"]})
    names, rows = list(order), []
    for newcomers, hostile, number in keys:
        wanted = (names[number], hostile, not newcomers)
        some = [r for r in results["runs"] if (r["attack"], r["hostile"], r["established"]) == wanted]
        all_ = [r for r in some if r["defences"] == "all"]
        after = [n for r in all_ for n in r["named_after"]]
        fights = names[number] in ATTACKS
        label = f"{hostile} of {SWARM.peers}: {names[number] or 'nobody attacks'}"
        row: list[Any] = [label + ", newcomers" * (newcomers and fights), len({r["seed"] for r in some})]
        row += [_ratio(r for r in some if r["defences"] == name) for name in ("plain mean", "weights and clip", "all")]
        row += [f"{named(all_)} of {total(all_, 'hostile')}", f"{mean(after):.1f}" if after else None,
                max(after, default=None)] if fights else [None] * 3  # fmt: skip
        row.append(f"{total(all_, 'fakes_credited')} of {total(all_, 'fakes_accepted')}" if fights else None)
        rows.append(row)
    columns = ["attack", "seeds", "plain mean", "weights and clip", "all", f"convicted within {NAMED_WITHIN}",
               "after rounds, mean", "most", "fakes credited"]  # fmt: skip
    return report.table(columns, rows)


def show_honest(results: Mapping[str, Any]) -> str:
    """Return the table of honest replays on other machines."""
    rows = [
        [f"`{(h['commit'] or 'unknown')[:8]}`, {p['precisions']}, {p['steps']} steps", p["n"],
         *(f"{p[share]:.4f}" for share in ("signs_mean", "signs_least")), f"{p['scale_least']:.3f}",
         *(p[verdict] for verdict in ("passed", "passed second", "no report", "failed"))]
        for h in results["honest"] for p in h["pairs"]
    ]  # fmt: skip
    columns = ["honest replays", "n", "signs", "least", "scale, least", "passed", "passed second", "no report"]
    return report.table([*columns, "failed"], rows)


def origins(results: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the commits of the runs, those of honest updates too, each with the number of its runs, the most first."""
    runs = (*results["runs"], *results["large"], *results["honest"])
    return Counter((r["commit"] or "unknown")[:8] for r in runs).most_common()


def show_without(results: Mapping[str, Any]) -> str:
    """Return the table of runs without one defence, beside runs that have it: five attack, with stake."""
    rows = []
    for name, (attack, other) in FOR.items():
        without, beside = (
            [r for r in results["runs"] if (r["defences"], r["attack"], r["hostile"]) == (d, attack, 5)
             and r["established"]] for d in (name, other)
        )  # fmt: skip
        seeds = {r["seed"] for r in without}
        for label, some in ((name, without), (other, [r for r in beside if r["seed"] in seeds])):
            if some and without:
                after = [n for r in some for n in r["named_after"]]
                rows.append([f"{attack}: {label}", len(some), _ratio(some),
                             f"{named(some)} of {total(some, 'hostile')}",
                             f"{mean(after):.1f}" if after else None,
                             f"{total(some, 'fakes_credited')} of {total(some, 'fakes_accepted')}"])  # fmt: skip
    columns = ["attack: defences", "runs", "loss, worst", f"convicted within {NAMED_WITHIN}", "after rounds, mean"]
    return report.table([*columns, "fakes credited"], rows)


def show_cost(results: Mapping[str, Any]) -> str:
    """Return the table of what audits cost, as shares of the training of the honest."""
    shares: list[tuple[str, Callable[[Mapping[str, Any]], float]]] = [
        ("loss checks", lambda r: r["audit_share"] - r["replay_share"]), ("replays", lambda r: r["replay_share"]),
        ("screens", lambda r: r["screen_share"]), ("in all", checks_share),
    ]  # fmt: skip
    rows = []
    groups = {
        "nobody attacks": [r for r in results["runs"] if r["attack"] is None and r["defences"] == "all"],
        "under attack, mean": attacked(results),
    }
    for label, some in groups.items():
        if some:
            rows.append([label, len(some), *(f"{mean(map(share, some)):.0%}" for _, share in shares)])
    if groups["under attack, mean"]:
        worst = max(groups["under attack, mean"], key=lambda r: r["audit_share"])
        label = f"most for checks ({worst['hostile']}: {worst['attack']})"
        rows.append([label, 1, *(f"{share(worst):.0%}" for _, share in shares)])
    for rounds in sorted({r["rounds"] for r in results.get("large", ())}):
        large = [r for r in results["large"] if r["rounds"] == rounds]
        told = f"nobody attacks, updates of {LARGE.windows} windows, {rounds} rounds"
        rows.append([told, len(large), *(f"{mean(map(share, large)):.2%}" for _, share in shares)])
    return report.table([f"updates of {SWARM.windows} windows", "runs", *(name for name, _ in shares)], rows)


def show(results: Mapping[str, Any]) -> str:
    """Return the tables."""
    return "\n\n".join(table(results) for table in (show_attacks, show_honest, show_without, show_cost))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save after each run. Runs that the JSON file has are kept. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "adversaries")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs that are played at once")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"honest": [], "runs": []}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    results |= report.provenance("adversaries", arguments, options.seeds) | {
        "setting": {"peers": SWARM.peers, "steps": SWARM.steps, "batch": SWARM.batch, "window": SWARM.window,
                    "rounds": SWARM.rounds, "lr": SWARM.lr},
    }  # fmt: skip

    def keep() -> None:
        results["runs"] = with_ratios(results["runs"])
        results["goals"] = goals(results)
        if options.json:
            report.save(options.json, results)

    done = {h["profile"] for h in results["honest"]}
    for profile, updates in HONEST:
        if profile.name not in done:
            found = honest.measured(profile, options.seeds[0], 4 if options.quick else updates)
            results["honest"].append(found | {"commit": results["commit"]})
            keep()
    results.setdefault("large", [])
    have = {r["seed"] for r in long_runs(results)}
    large = [
        ("all", Scenario("", 0, DEFENCES["all"], True, seed, LARGE.steps, LARGE.rounds))
        for seed in options.seeds if seed not in have and not options.quick
    ]  # fmt: skip
    missing = [*large, *_missing(options.seeds, options.quick, results["runs"])]
    if missing:
        corpus(SWARM.vocabulary, SWARM.window)  # processes that prepare it at once would refuse each other
    with ProcessPoolExecutor(options.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for n, row in enumerate(pool.map(_row, *zip(*missing, strict=True)) if missing else ()):
            results["large" if n < len(large) else "runs"].append(row | {"commit": results["commit"]})
            keep()
            print(row, file=sys.stderr, flush=True)
    keep()
    return report.ended(results, options, show(results))


def _row(name: str, scenario: Scenario) -> dict[str, Any]:
    began = time.process_time()
    row = described(name, scenario) | swarm.measured(scenario)
    return row | {"cpu_seconds": round(time.process_time() - began)}


def _missing(seeds: Sequence[int], quick: bool, done: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Scenario]]:
    names = ("attack", "hostile", "defences", "established", "seed")
    have = {tuple(r[k] for k in names) for r in done}
    every = scenarios(seeds)
    if quick:
        every = (pair for pair in scenarios(seeds[:1]) if pair[1].attack in ("", "noise") and pair[1].hostile < 6)
    for name, scenario in every:
        if tuple(described(name, scenario)[k] for k in names) not in have:
            yield name, scenario


if __name__ == "__main__":
    sys.exit(main())

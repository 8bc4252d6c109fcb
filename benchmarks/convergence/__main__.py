"""The comparison of loss and bytes: the same model, data, tokens and global batch for every method.

One process simulates all peers of a training. The same search finds the learning rate of every method (factors of
two, one seed), then every method runs on several seeds. Trainings are kept in build/convergence/results and not
repeated. `--study` names what to compare: main (the methods), or a study of Cairn's own choices; `--study all` is
everything, hours on 2 cores. Loss is nats a token on held-out addresses. `bytes/token` counts the gradient or update
of one peer once, for each token that it trains on. `MB up` counts all bytes that it sends: an all-reduce by ring, or
an update sent to each other peer. Seconds are arithmetic: measured compute, then bytes over the uplink and two round
trips
of 0.1 s for each exchange, none of it overlapped.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  setting: the profile: name, model, parameters, vocabulary, window, peers, batch, steps, tokens, lr, device
  main, and one for each study: a list of rows, each with
    label; method; options; lr; tried (loss by learning rate); loss (mean over seeds); losses (by seed)
    payload_bytes; up_bytes; exchanges (for which a peer waits: none with overlap); seconds (of this machine, by seed)
    curve: [tokens, validation loss, payload bytes, bytes up, exchanges] of the first seed
  goals: a list of goal, value, met
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.convergence import goals, links, measure, pool, tables
from benchmarks.convergence.corpus import FOLDER, corpus
from benchmarks.convergence.measure import Measured
from benchmarks.convergence.setting import PROFILES, Profile, Setting
from benchmarks.convergence.studies import MAIN, OWN_ROWS, QUICK, SEARCHED, STATELESS, STUDIES, Row
from protocol.errors import CairnError

NAMES = ("main", *STUDIES, *OWN_ROWS)
QUICK_STEPS = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "convergence")
    parser.add_argument("--profile", choices=tuple(PROFILES), default="tiny", help="the model's size")
    parser.add_argument("--study", action="append", choices=("all", *NAMES), help="what to compare (default: main)")
    parser.add_argument(
        "--row",
        action="append",
        metavar="TEXT",
        help="only rows with this text, and the main comparison's reference; studies that have a base keep all",
    )
    parser.add_argument("--rate", type=float, metavar="LR", help="one learning rate for all, and no search")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the main comparison (default 3)")
    parser.add_argument("--study-seeds", type=int, default=2, help="seeds of each study (default 2)")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time, one thread each (default 2)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the models: faster, needs a C++ compiler")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the main comparison's curves there (PNG)")
    chosen = parser.parse_args(arguments)
    names = [n for n in NAMES if n in (chosen.study or ["main"]) or "all" in (chosen.study or [])]
    own = {name: _chosen(rows, chosen.row) for name, rows in OWN_ROWS.items()}
    if without := [n for n in names if n in own and not own[n]]:
        parser.error(f"--row: no row of study {without[0]!r} has this text")
    profile, steps = PROFILES[chosen.profile], None
    seeds, study_seeds = range(chosen.seeds), range(chosen.study_seeds)
    if chosen.quick:
        names, steps, seeds = ["main"], QUICK_STEPS, range(1)
    try:
        corpus(profile.vocabulary, profile.window)  # once, before several processes want it
    except CairnError as e:
        print(f"benchmarks.convergence: {e}", file=sys.stderr)
        return 1
    drawn = {*(seeds if "main" in names else ()), *(study_seeds if set(names) - {"main"} else ())}
    provenance = report.provenance("convergence", arguments, sorted(drawn))
    run = partial(pool.results, folder=FOLDER / "results", processes=chosen.processes, compiled=chosen.compile)
    parameters = Setting.of(profile, 0).layout.numel
    print(f"{parameters:,} parameters, {profile.peers} peers of {profile.batch} windows of {profile.window} tokens, "
          f"{steps or profile.steps} inner steps each\n")  # fmt: skip
    if chosen.quick:
        profile = replace(profile, steps=QUICK_STEPS)
        sections = {"main": measure.at_rate(QUICK, profile.lr, chosen.profile, seeds, steps, run)}
    else:
        rows = [MAIN[0], *_chosen(MAIN[1:], chosen.row)]
        sections = _compared(names, rows, own, chosen.profile, seeds, study_seeds, chosen.rate, run)
    if chosen.plot and "main" in sections:
        title = f"{parameters:,} parameters, {profile.peers} peers, equal data, tokens and global batch"
        tables.figure(sections["main"], chosen.plot, title)
    results = provenance | {
        "setting": tables.setting(profile, parameters),
        **{name: [tables.as_json(m) for m in found] for name, found in sections.items()},
        "goals": [
            *(goals.judged(sections["main"], profile, parameters) if "main" in sections else []),
            *([goals.gap(sections["gap"], profile, parameters)] if "gap" in sections else []),
        ],
    }
    return report.ended(results, chosen, show(results))


def _chosen(rows: Sequence[Row], texts: Sequence[str] | None) -> list[Row]:
    return [r for r in rows if any(text in r.label for text in texts or [""])]


def _compared(
    names: Sequence[str],
    rows: Sequence[Row],
    own: Mapping[str, Sequence[Row]],
    profile: str,
    seeds: Sequence[int],
    study_seeds: Sequence[int],
    rate: float | None,
    run: measure.Run,
) -> dict[str, list[Measured]]:
    """Return the main comparison and the studies, by name. Studies use the learning rate that is best for their base.

    The base is the main comparison's own row in other words, so where that was run, its search is not run again. A
    study of OWN_ROWS needs only its learning rate, and one of SEARCHED finds its own.
    """
    sections: dict[str, list[Measured]] = {}
    if "main" in names:
        sections["main"] = _tuned(rows, profile, seeds, rate, run)
    studies = [n for n in names if n != "main"]
    lr = rate
    without = [n for n in studies if n not in SEARCHED and lr is None]
    if without or any(n not in OWN_ROWS for n in studies):
        same = [m.lr for m in sections.get("main", []) if m.row.options == STATELESS]
        if same:
            sections["base"] = measure.at_rate(STUDIES["base"], same[0], profile, study_seeds, None, run)
        else:
            sections["base"] = _tuned(STUDIES["base"], profile, study_seeds, rate, run)
        lr = sections["base"][0].lr
    for name in studies:
        if name in SEARCHED:
            sections[name] = _tuned(own.get(name) or STUDIES[name], profile, study_seeds, rate, run)
        elif lr is not None and name != "base":
            found = own[name] if name in own else STUDIES[name]
            sections[name] = measure.at_rate(found, lr, profile, study_seeds, None, run)
    return sections


def _tuned(rows: Sequence[Row], profile: str, seeds: Sequence[int], rate: float | None, run: measure.Run):
    if rate is not None:
        return measure.at_rate(rows, rate, profile, seeds, None, run)
    return measure.tuned(rows, profile, seeds, None, run)


def _base(name: str, sections: Mapping[str, list[Measured]]) -> Measured:
    """Return the base of a study's rows: the sparse method's base, or the first of its own rows."""
    return sections[name if name in OWN_ROWS else "base"][0]


def show(results: Mapping[str, Any]) -> str:
    """Return the tables: the methods, their time to one loss, and each study beside its base."""
    out = [methods(results), times(results)] if "main" in results else []
    out += [f"{name}\n\n{study(results, name)}" for name in NAMES if name != "main" and name in results]
    return "\n\n".join(out)


def methods(results: Mapping[str, Any]) -> str:
    """Return the table of the main comparison."""
    profile, parameters = profile_of(results), results["setting"]["parameters"]
    return report.table(tables.COLUMNS, tables.main_rows(rows_of(results)["main"], profile, parameters))


def study(results: Mapping[str, Any], name: str) -> str:
    """Return the table of a study, each row beside its base."""
    sections = rows_of(results)
    profile, parameters = profile_of(results), results["setting"]["parameters"]
    rows = tables.study_rows(sections[name], _base(name, sections), profile, parameters)
    return report.table(tables.STUDY_COLUMNS, rows)


def by_label(results: Mapping[str, Any], name: str = "main") -> dict[str, Measured]:
    """Return the rows of the main comparison or of a study, by label."""
    return {m.row.label: m for m in rows_of(results)[name]}


def times(results: Mapping[str, Any]) -> str:
    """Return a table of the seconds, by arithmetic, to a loss that the best row and the reference reach.

    Without a row of Cairn there is none.
    """
    found = rows_of(results)["main"]
    ours = [m for m in found if m.row.method == "cairn"]
    if not ours:
        return "no row of Cairn was measured, so there is no loss to reach"
    target = goals.target_loss(min(ours, key=lambda m: m.loss), found[0])
    rows = tables.time_rows(found, target, profile_of(results), goals.MBIT)
    return (
        f"to a validation loss of {target:.3f}, at {goals.MBIT:g} Mbit/s\n\n{report.table(tables.TIME_COLUMNS, rows)}"
    )


def behind(results: Mapping[str, Any], row: Measured, other: Measured) -> dict[int, tuple[float, float]]:
    """Return how far a row is behind another one, by the steps of its evaluations: (steps, share of the loss).

    The steps are those since the other one had the row's loss. Both are of the first seed's curve, and only at
    evaluations at which the other one has come so far.
    """
    curve, others = (next(iter(m.results.values())).curve for m in (row, other))
    step_tokens, found = profile_of(results).step_tokens, {}
    for point, theirs in zip(curve, others, strict=True):
        if (there := links.crossing(others, point[1])) is not None:
            found[round(point[0] / step_tokens)] = (point[0] - there[0]) / step_tokens, point[1] / theirs[1] - 1
    return found


def profile_of(results: Mapping[str, Any]) -> Profile:
    """Return the profile of a comparison that was saved."""
    return replace(PROFILES[results["setting"]["name"]], steps=results["setting"]["steps"])


def rows_of(results: Mapping[str, Any]) -> dict[str, list[Measured]]:
    """Return the rows of a comparison that was saved, by study."""
    profile = profile_of(results)
    return {name: [tables.from_json(row, profile) for row in results[name]] for name in NAMES if name in results}


if __name__ == "__main__":
    sys.exit(main())

"""The final loss of a small run beside peers who lie, and the cost of the rules against them to honest unequal peers.

A liar trains as the others do, and sends something else: its update with all signs flipped, at the true size or a
million times as large. Its claim of windows is true, or the largest that a round accepts (two targets). The honest run
of as many peers, with the same seed and tokens, is the control. In the other rows all are honest and one is faster: its
share of the mean is cut to `weight_cap`. The second table is arithmetic: a newcomer, or a peer that worked as the
others for long, does `speed` times the work of the slowest quarter. It says after how many rounds that peer has its
full weight, and after how many nothing of its work waits.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  setting: profile, parameters, rounds, inner_steps (of a round), lr, seed
  runs: a list, each with
    label, peers, liars, claim (of a liar, in targets; null: what it trained), scale (of its update, null: honest)
    speeds, weight_cap, loss (nats a token, validation; null: diverged), ended (the round in which it broke, or null)
  faster: a list of speed, known_rounds (with the others' work before), full_weight_rounds, backlog_rounds, lost
    (windows that are never weighed)
  goals: a list of goal, value, met
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks import report
from benchmarks.convergence.setting import PROFILES, Profile, Setting
from benchmarks.convergence.studies import NESTEROV
from benchmarks.convergence.swarm import Cairn
from protocol.errors import CodecError
from protocol.ids import PeerKey
from protocol.model import load_state
from protocol.outer import Contribution
from protocol.update_weights import AuthorHistory, weigh

HISTORY = AuthorHistory()
LR = 1e-2
STEPS = 10
"""Inner steps of a round."""
KNOWN = 40
"""Rounds in which a known peer did the others' work."""


@dataclass(frozen=True)
class Run:
    """One run. `claim`: of each liar, in targets, None for what it trained; `scale`: factor of its update."""

    label: str
    peers: int = 4
    liars: int = 0
    claim: float | None = None
    scale: float | None = None
    speeds: tuple[float, ...] = ()
    weight_cap: float = 1 / 3


ATTACKS = (
    Run("4 honest"),
    Run("1 of 4 flips signs, true claim", liars=1, scale=-1.0),
    Run("1 of 4 flips signs, largest claim", liars=1, scale=-1.0, claim=2.0),
    Run("2 of 4 send -10^6 of their update", liars=2, scale=-1e6),
    Run("2 of 4 send -10^6, largest claim", liars=2, scale=-1e6, claim=2.0),
    Run("2 honest", peers=2),
    Run("1 of 2 sends -10^6 of its update", peers=2, liars=1, scale=-1e6),
    Run("alone, -10^6 in one round of all", peers=1, liars=1, scale=-1e6),
    Run("1 honest alone", peers=1),
)
UNEQUAL = tuple(
    Run(f"{peers} honest, one 10 times as fast, cap {name}", peers=peers, speeds=(1.0, *[0.1] * (peers - 1)),
        weight_cap=cap)
    for peers in (2, 4)
    for name, cap in (("1", 1.0), ("1/3", 1 / 3))
)  # fmt: skip


class WithLiars(Cairn):
    """Cairn's rounds, with weights by the rule, and the first `liars` peers lying. Tokens are those truly trained."""

    def __init__(self, setting: Setting, run: Run):
        super().__init__(
            setting, LR, h=STEPS, kind="sign", beta=0.5, inner="muon",
            outer={**NESTEROV, "weight_cap": run.weight_cap}, conditions={"speeds": run.speeds},
        )  # fmt: skip
        self._run = run
        self._rounds = setting.profile.steps // STEPS
        self._most = 2 * STEPS * setting.profile.batch * setting.profile.peers
        self._histories: dict[PeerKey, AuthorHistory] = {}
        self.round = 0

    def _announce(self) -> None:
        super()._announce()
        if self.announced is None:
            return
        at, honest = self.announced
        self._trained = sum(c.windows for c in honest)
        liars = {self.setting.key(n) for n in range(self._run.liars)}
        sent = [self._lie(c) if c.author in liars else c for c in honest]
        before = [self._histories.get(c.author, HISTORY) for c in sent]
        claims = [(c.windows, history) for c, history in zip(sent, before, strict=True)]
        weighed = weigh(claims, self.round, self._most)
        for c, history, windows in zip(sent, before, weighed, strict=True):
            self._histories[c.author] = history.after(
                self.round, history.end_window + c.windows, c.windows, windows, self._most
            )
        self.announced = at, [replace(c, windows=w) for c, w in zip(sent, weighed, strict=True)]

    def _lie(self, c: Contribution) -> Contribution:
        run = self._run
        if run.peers == run.liars and self.round != self._rounds // 2:
            return c  # the sole peer lies once, in the middle
        values = {t.name: torch.zeros(t.shape) for t in self.codec.layout.tensors}
        self.codec.add_to(c.blob, values)
        for tensor in values.values():
            tensor.mul_(run.scale or 1.0)
        claim = c.windows if run.claim is None else round(run.claim * self._most / 2)
        return Contribution(c.author, claim, bytes(self.codec.encode(values)))

    def _apply(self) -> None:
        if self.announced is not None:
            accepted = self.accepted
            super()._apply()
            self.accepted = accepted + self._trained
            self.round += 1


def measured(profile: Profile, run: Run, seed: int) -> dict[str, Any]:
    """Train one run. Return its row of the results."""
    setting = Setting.of(replace(profile, peers=run.peers), seed)
    made = WithLiars(setting, run)
    loss, ended = None, None
    try:
        for number in range(profile.steps):
            made.step(number)
        made.finish()
    except (CodecError, FloatingPointError) as e:
        ended = made.round
        print(f"{run.label}: round {ended}: {e}", file=sys.stderr)
    else:
        model = setting.model()
        load_state(model, {t.name: made.base[t.name] for t in setting.layout.tensors})
        loss = setting.loss(model.eval(), 512)
    return asdict(run) | {"loss": loss, "ended": ended}


def faster(speed: int, known: int) -> dict[str, int]:
    """Return the rounds until a peer's update weighs what it trains, and until its backlog is gone.

    It did the others' work for `known` rounds; 0: it is a newcomer.
    """
    history, others, full, waits = HISTORY, [HISTORY] * 4, 0, 0
    most = 2 * (4 * 8 + 8 * speed)  # two targets, as by default
    for round_ in range(-max(1, known), 1000):
        claim = 8 if round_ < 0 else 8 * speed
        *rest, windows = weigh([*((8, h) for h in others), (claim, history)], round_ + 100, most)
        others = [h.after(round_ + 100, 0, 8, w, most) for h, w in zip(others, rest, strict=True)]
        if round_ < 0 and not known:
            continue
        history = history.after(round_ + 100, 0, claim, windows, most)
        waits += claim - windows
        if round_ >= 0 and not full and windows >= claim:
            full = round_ + 1
        if full and not history.backlog:
            return {"speed": speed, "known_rounds": known, "full_weight_rounds": full, "backlog_rounds": round_ + 1,
                    "lost": waits}  # fmt: skip
    raise AssertionError("its backlog never ends")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "liars")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    rounds = 4 if options.quick else 20
    profile = replace(PROFILES["tiny"], steps=rounds * STEPS)
    torch.set_num_threads(1)
    runs, provenance = [], report.provenance("liars", arguments, seeds=[options.seed])
    for run in (*ATTACKS, *UNEQUAL):
        runs.append(measured(profile, run, options.seed))
        print(f"{run.label}: {runs[-1]['loss']}", file=sys.stderr)
    setting = Setting.of(profile, options.seed)
    results = provenance | {
        "setting": {
            "profile": profile.name, "parameters": setting.layout.numel, "rounds": rounds, "inner_steps": STEPS,
            "lr": LR, "seed": options.seed,
        },
        "runs": runs,
        "faster": [faster(speed, known) for speed in (1, 2, 4, 10, 100) for known in (0, KNOWN)],
        "goals": goals(runs),
    }  # fmt: skip
    return report.ended(results, options, show(results))


def goals(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals: beside liars the model learns, so its loss is below that of equal odds for all tokens."""
    most = math.log(PROFILES["tiny"].vocabulary)
    beside = [r for r in runs if 0 < r["liars"] < r["peers"]]
    return [
        report.goal(
            f"{r['label']}: the model learns (a loss below {most:.2f})", r["loss"],
            r["ended"] is None and r["loss"] is not None and r["loss"] < most,
        ) for r in beside
    ]  # fmt: skip


def show(results: Mapping[str, Any]) -> str:
    """Return the tables."""
    runs = results["runs"]
    rows = [[r["label"], r["loss"] if r["ended"] is None else f"ended in round {r['ended']}"] for r in runs]
    columns = ["speed", "a newcomer's rounds to full weight", "until nothing waits", "windows lost"]
    columns += ["a known peer's", "until nothing waits", "windows lost"]
    speeds: dict[int, list[Any]] = {}
    for f in results["faster"]:
        speeds.setdefault(f["speed"], []).extend((f["full_weight_rounds"], f["backlog_rounds"], f["lost"]))
    of_faster = [[str(speed), *rounds] for speed, rounds in speeds.items()]
    return report.table(["run", "validation loss"], rows) + "\n\n" + report.table(columns, of_faster)


if __name__ == "__main__":
    sys.exit(main())

"""Updates that anybody can replay: what they cost in loss, and which fakes a replay and a loss check let pass.

A peer's update is a function of public values. It begins with fresh moments, from the state less the author's decoded
update before. There is no error feedback. A new state comes under the parameters between two steps, and each state has
one learning rate. Steps under way when an update is announced, or when a state comes, are dropped. That is half a
step on average each time, so `replayable, a step dropped` has one step less of each update in the same time.

Swarms. `36` and `72`: four equal peers with that many inner steps in a round, 6 of them before the new state comes.
`unequal`: six peers with 12, 24 or 36 steps, of which 0, 3 or 6 come before it.

Rules. `kept` is the default of a run: moments and parameters go on from round to round, and half of the error is fed
back. `fresh moments`, `no feedback` and `public start` change one thing of it. All rules train on equal windows, except
`replayable, a step dropped`. The schedule ends with the last round for all of them.

Audits. In each round one peer's update is replayed, in the same float environment and in others. Then fakes of it are
scored. `signs` is the share of equal signs. `weighted` counts each by its magnitude in the replay, relative to its
tensor's. `scale` is the least ratio of the norms of a tensor, the smaller by the larger. `gain` and `quarter` are the t
values of the loss check, on 64 claimed and 64 unclaimed windows.

Fakes. `share`: the part of the training that was done, counted in windows.
  stop X            ends early, scaled up
  extrapolate X     ends early, and adds its last tenth of the steps once more for each tenth that is left
  every, batch X    leaves out steps evenly; trains every step on fewer windows
  wrong_data        honest training on other windows
  stale             never rebased: all steps from the start
  copy, random, flip    another peer's update, random signs, all signs reversed
  crafted           honest, but the signs of the quarter of least magnitude are reversed

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report; of the first run
  runs: a list, each with command, commit, date, machine, profile, seed, swarm, rule, rounds, steps (inner steps, of
    all peers), windows (trained), dropped (windows, in steps that were dropped), loss (validation, nats a token;
    null: not finished), cpu_seconds; columns, and audits: a list of rows
  cost: for each swarm, rule by rule: loss of each seed, and the mean of loss / loss of `kept` - 1 of the same seed
  agreement: for each float environment, and for each fake: n, mean, sd, least, most of each score
  least_share: for each way to save work: the least share that passes each threshold of `signs` in any audit
  loss_check: for each kind of update: the share that passes, by the thresholds alone, and with the auditor's own
  goals: a list of goal, value, met
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.audit_scores import LR, PEERS, WINDOWS, Bench, Position, Trained
from benchmarks.convergence.replica import split
from benchmarks.convergence.setting import PROFILES, Setting
from peer.auditor.loss_check import GAIN, QUARTER, threshold_beside
from peer.auditor.replay import SCALE, SIGNS
from peer.training import inner_optimizer
from peer.training.inner_optimizer import StepResult
from peer.training.schedule import factor
from protocol.layout import is_outer_tensor
from protocol.outer import Contribution, apply
from protocol.state import state_layout

SWARMS = {"36": ((36, 6),) * 4, "72": ((72, 6),) * 4, "unequal": PEERS}
"""(inner steps of an update, those of them before the new state comes) of each peer."""
THRESHOLDS = (0.95, 0.97, 0.98, 0.99)
"""Thresholds of `signs` for which the least share of the work that passes is stated."""
MACHINES = ("pieces of 256", "bf16", "bf16, pieces of 256", "2 threads")
"""Environments that a machine may have. The noise is none: no machine is known to make it."""
IDLE = ("wrong_data", "copy", "random", "flip")
"""Fakes without any of the claimed work."""
STEADY = "steady, alone"
COLUMNS = ("round", "peer", "update", "share", "signs", "weighted", "scale", "gain", "quarter")


@dataclass(frozen=True)
class Rule:
    """The start of an update, and how much of the error is fed back.

    `even`: one learning rate for each state, and the new state comes between two steps.
    """

    moments: bool = True
    beta: float = 0.5
    public: bool = False
    even: bool = False
    drops: bool = False


REPLAYABLE = Rule(moments=False, beta=0.0, public=True, even=True)
RULES = {
    "kept": Rule(),
    "replayable": REPLAYABLE,
    "replayable, a step dropped": replace(REPLAYABLE, drops=True),
    "fresh moments": Rule(moments=False),
    "no feedback": Rule(beta=0.0),
    "public start": Rule(public=True),
}


@dataclass(frozen=True)
class Environment:
    """How floats are computed.

    `noise`: standard deviation of what is added to a gradient, relative to its tensor's root mean square. `own_noise`:
    the same, relative to each value.
    """

    threads: int = 1
    piece_tokens: int = inner_optimizer.PIECE_TOKENS
    bf16: bool = False
    noise: float = 0.0
    own_noise: float = 0.0


USUAL = Environment()
ENVIRONMENTS = {
    "pieces of 256": replace(USUAL, piece_tokens=256),
    "bf16": replace(USUAL, bf16=True),
    "bf16, pieces of 256": replace(USUAL, bf16=True, piece_tokens=256),
    "noise 0.001": replace(USUAL, noise=1e-3),
    "noise 0.01": replace(USUAL, noise=1e-2),
    "noise 0.01 of each value": replace(USUAL, own_noise=1e-2),
}
ONCE = {"2 threads": replace(USUAL, threads=2)}
"""Environments of the first audited round only: two threads are slow on a machine with other work."""


class Swarm(Bench):
    """One model that trains any update of any peer by a rule, in any float environment."""

    def __init__(self, setting: Setting, rounds: int, peers: Sequence[tuple[int, int]], rule: Rule):
        super().__init__(setting, rounds, tuple((steps - rule.drops, mark) for steps, mark in peers))
        self.rule, self.environment = rule, USUAL
        self._noise = torch.Generator().manual_seed(setting.seed)

    def factors(self, peer: int, round_: int) -> list[float]:
        """Return the factor of the learning rate of each step."""
        if not self.rule.even:
            return super().factors(peer, round_)
        (steps, mark), tokens = self.peers[peer], self.target * self.setting.profile.window
        before = [factor(self.schedule, (round_ - 0.5) * tokens)] * (mark if round_ else 0)
        return before + [factor(self.schedule, (round_ + 0.5) * tokens)] * (steps - len(before))

    def gradient(self, windows: Tensor, between: Callable[[], bool]) -> StepResult:
        """Compute the gradient of a step in the present float environment."""
        here = self.environment
        inner_optimizer.PIECE_TOKENS = here.piece_tokens
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=here.bf16):
            step = super().gradient(windows, between)
        if here.noise or here.own_noise:
            for gradient in (p.grad for p in self.replica.inner.parameters.values() if p.grad is not None):
                size = here.noise * gradient.square().mean().sqrt() + here.own_noise * gradient.abs()
                gradient.add_(torch.randn(gradient.shape, generator=self._noise) * size)
        return step

    def update(
        self,
        start: Position,
        state: Tensor,
        batches: Sequence[Tensor],
        factors: Sequence[float],
        mark: int | None,
        environment: Environment = USUAL,
        *,
        parts: bool = False,
    ) -> Trained:
        """Train an update in a float environment; with `parts` its progress after each step from the middle is kept."""
        self.environment = environment
        torch.set_num_threads(environment.threads)
        try:
            kept = range(len(batches) // 2, len(batches)) if parts else ()
            within = not self.rule.even and bool(mark)
            return self.train(start, state, batches, factors, mark, within=within, kept=kept)
        finally:
            self.environment = USUAL
            inner_optimizer.PIECE_TOKENS = USUAL.piece_tokens
            torch.set_num_threads(1)


@dataclass
class Member:
    """A peer between rounds."""

    position: Position
    feedback: Tensor

    def after(self, made: Trained, sent: Tensor, state: Tensor, rule: Rule) -> None:
        """Go on from an update of the round that began with `state`."""
        self.feedback = rule.beta * self.feedback + made.progress - sent
        self.position = Position(
            state - sent if rule.public else made.end.local, made.end.moments if rule.moments else None
        )


def run(
    setting: Setting, rounds: int, swarm: str, rule_name: str, audited: Sequence[int] = ()
) -> Iterator[dict[str, Any]]:
    """Train a swarm. Yield its entry of the results so far after each round. One update of each `audited` round is."""
    began, rule = time.process_time(), RULES[rule_name]
    bench = Swarm(setting, rounds, SWARMS[swarm], rule)
    state = bench.replica.flat.clone()
    base = {n: t.clone() for n, t in split(setting.layout, state).items()}
    for t in state_layout(setting.layout, bench.outer).tensors:
        if is_outer_tensor(t.name):
            base[t.name] = torch.zeros(t.shape)
    members = [Member(Position(state), torch.zeros_like(state)) for _ in bench.peers]
    audits: list[list[Any]] = []
    generator = torch.Generator().manual_seed(setting.seed)
    for round_ in range(rounds):
        made: list[tuple[Trained, Tensor]] = []
        blobs = []
        for peer, member in enumerate(members):
            steps, mark = bench.peers[peer][0], bench.peers[peer][1] if round_ else 0
            batches = [bench.windows(peer, round_, n) for n in range(steps)]
            parts = round_ in audited and peer == round_ % len(members)
            one = bench.update(member.position, state, batches, bench.factors(peer, round_), mark, parts=parts)
            blob, sent = bench.encoded(rule.beta * member.feedback + one.progress)
            made.append((one, sent))
            blobs.append(Contribution(setting.key(peer), steps * setting.profile.batch, blob))
        if round_ in audited:
            peer = round_ % len(members)
            audit = Audit(bench, peer, round_, members[peer].position, state)
            environments = ENVIRONMENTS | ONCE if round_ == min(audited) else ENVIRONMENTS
            audits += audit.rows(*made[peer], made[peer - 1][1], generator, environments)
            audits += [
                [
                    round_,
                    p,
                    "honest",
                    1.0,
                    None,
                    None,
                    None,
                    *Audit(bench, p, round_, members[p].position, state).check(sent),
                ]
                for p, (_, sent) in enumerate(made)
                if p != peer
            ]
        for member, (one, sent) in zip(members, made, strict=True):
            member.after(one, sent, state, rule)
        apply(base, blobs, bench.codec, bench.outer)
        state = torch.cat([base[t.name].reshape(-1) for t in setting.layout.tensors])
        loss = None
        if round_ == rounds - 1:
            bench.replica.flat.copy_(state)
            loss = setting.loss(bench.replica.model, 1024)
        steps = (round_ + 1) * sum(n for n, _ in bench.peers)
        yield {
            "profile": setting.profile.name, "seed": setting.seed, "swarm": swarm, "rule": rule_name, "rounds": rounds,
            "steps": steps, "windows": steps * setting.profile.batch,
            "dropped": rule.drops * (round_ + 1) * len(members) * setting.profile.batch, "loss": loss,
            "cpu_seconds": round(time.process_time() - began), "columns": list(COLUMNS), "audits": audits,
        }  # fmt: skip


class Audit:
    """The audit of one update of a replayable run."""

    def __init__(self, bench: Swarm, peer: int, round_: int, start: Position, state: Tensor):
        self.bench, self.peer, self.round_, self.start, self.state = bench, peer, round_, start, state
        self.mark = bench.peers[peer][1] if round_ else 0
        self.batches = [bench.windows(peer, round_, n) for n in range(bench.peers[peer][0])]
        self.factors = bench.factors(peer, round_)

    def rows(
        self,
        made: Trained,
        sent: Tensor,
        other: Tensor,
        generator: torch.Generator,
        environments: Mapping[str, Environment],
    ) -> Iterator[list[Any]]:
        """Yield a row of COLUMNS for the honest update, for its replays elsewhere, and for each fake of it."""

        def row(name: str, share: float | None, update: Tensor, *, checked: bool = True) -> list[Any]:
            scores = compared(update, sent, made.progress, self.bench.sizes)
            return [self.round_, self.peer, name, share, *scores, *(self.check(update) if checked else (None, None))]

        yield row("honest", 1.0, sent)
        replays = {name: self._train(environment=environment) for name, environment in environments.items()}
        pairs = {f"in {name}": (sent, replay) for name, replay in replays.items()}
        pairs["both in bf16, other pieces"] = (self._decoded(replays["bf16"]), replays["bf16, pieces of 256"])
        for name, (update, replay) in pairs.items():
            scores = compared(update, self._decoded(replay), replay, self.bench.sizes)
            yield [self.round_, self.peer, name, 1.0, *scores, None, None]
        for name, share, values in self._saved(made):
            yield row(name, round(share, 4), self._decoded(values))
        steps = len(self.batches)
        for taken, progress in made.partial.items():  # every early end, by the replay alone
            for way, values in (("ends", progress), ("extrapolates", _extrapolated(made, taken, steps))):
                if values is not None:
                    update = self._decoded(values * (steps / taken if way == "ends" else 1.0))
                    yield row(way, round(taken / steps, 4), update, checked=False)
        for name, update in self._worthless(made, sent, other, generator):
            yield row(name, None, update)

    def _train(
        self,
        batches: Sequence[Tensor] | None = None,
        taken: Sequence[int] | None = None,
        environment: Environment = USUAL,
        *,
        stale: bool = False,
    ) -> Tensor:
        """Return the progress of the steps `taken` (None: all), scaled up to all of them."""
        batches = self.batches if batches is None else batches
        taken = range(len(batches)) if taken is None else taken
        mark = sum(n < self.mark for n in taken)
        made = self.bench.update(
            self.start, self.state, [batches[n] for n in taken], [self.factors[n] for n in taken],
            None if stale else mark, environment,
        )  # fmt: skip
        return made.progress * (len(batches) / len(taken))

    def _decoded(self, progress: Tensor) -> Tensor:
        return self.bench.encoded(progress)[1]

    def _saved(self, made: Trained) -> Iterator[tuple[str, float, Tensor]]:
        """Yield (name, share of the work, progress) of the fakes that save work."""
        steps, batch = len(self.batches), len(self.batches[0])
        for percent in (50, 80, 90):
            taken = max(steps // 2, round(steps * percent / 100))
            yield f"stop {percent}", taken / steps, made.partial[taken] * (steps / taken)
        for percent in (80, 90):
            taken = round(steps * percent / 100)
            extrapolated = _extrapolated(made, taken, steps)
            if extrapolated is not None:
                yield f"extrapolate {percent}", taken / steps, extrapolated
        for percent, every in ((50, 2), (80, 5), (90, 10)):
            left = [n for n in range(steps) if n % every != every - 1]
            yield f"every {percent}", len(left) / steps, self._train(taken=left)
        for percent, windows in ((50, batch // 2), (81, batch * 13 // 16), (94, batch * 15 // 16)):
            cut = [b[:windows] for b in self.batches]
            yield f"batch {percent}", windows / batch, self._train(cut)

    def _worthless(
        self, made: Trained, sent: Tensor, other: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[str, Tensor]]:
        wrong = [self.bench.windows(self.peer, self.round_ + 1000, n) for n in range(len(self.batches))]
        yield "wrong_data", self._decoded(self._train(wrong))
        if self.mark:
            yield "stale", self._decoded(self._train(stale=True))
        yield "copy", other
        yield "random", sent.abs() * torch.randn(sent.shape, generator=generator).sign()
        yield "flip", -sent
        truth = made.progress.abs()
        least = torch.cat([t <= t.quantile(0.25) for t in truth.split(self.bench.sizes)])
        yield "crafted", torch.where(least, -sent, sent)

    def check(self, update: Tensor) -> tuple[float, float]:
        """Return the t values of the loss check: of the mean, and of the worst quarter of the update's windows."""
        chance = np.random.default_rng([self.bench.setting.seed, self.round_, self.peer])
        claimed = torch.cat(self.batches)
        quarter, each = len(claimed) // 4, WINDOWS // 4
        drawn = [q * quarter + chance.choice(quarter, each, replace=False) for q in range(4)]
        unclaimed = self.bench.setting.windows(len(self.bench.peers), self.round_ * WINDOWS, WINDOWS)
        windows = torch.cat([claimed[np.concatenate(drawn)], unclaimed])
        gain = self.bench.losses(self.state, windows) - self.bench.losses(self.state - update, windows)
        mean_, worst = t_values(gain[: 4 * each].view(4, each), gain[4 * each :])
        return round(mean_, 2), round(worst, 2)


def _extrapolated(made: Trained, taken: int, steps: int) -> Tensor | None:
    """Return the progress after `taken` steps, and on as straight as the last tenth of the steps went."""
    before = taken - max(1, steps // 10)
    if before not in made.partial:
        return None
    slope = (made.partial[taken] - made.partial[before]) / (taken - before)
    return made.partial[taken] + slope * (steps - taken)


def compared(update: Tensor, replay: Tensor, progress: Tensor, sizes: Sequence[int]) -> tuple[float, float, float]:
    """Return (signs, weighted, scale) of a decoded update beside a decoded replay, whose progress is given too."""
    equal = torch.signbit(update) == torch.signbit(replay)
    weights = torch.cat([p.abs() / (p.abs().mean() + 1e-30) for p in progress.split(sizes)]).double()
    norms = [(float(a.norm()), float(b.norm())) for a, b in zip(update.split(sizes), replay.split(sizes), strict=True)]
    scale = min(min(a, b) / max(a, b) if max(a, b) else 1.0 for a, b in norms)
    return (
        round(float(equal.double().mean()), 5),
        round(float((weights * equal).sum() / weights.sum()), 5),
        round(scale, 4),
    )


def t_values(claimed: Tensor, unclaimed: Tensor) -> tuple[float, float]:
    """Return the t value of the mean gain on claimed [quarters, n] over unclaimed windows [m], and the least quarter's.

    A t value is a difference of means by its standard error (Welch's).
    """

    def t(some: Tensor) -> float:
        error = (some.var() / some.numel() + unclaimed.var() / unclaimed.numel()).sqrt()
        return float((some.mean() - unclaimed.mean()) / (error + 1e-30))

    return t(claimed.flatten()), min(t(quarter) for quarter in claimed)


# -- what the runs say -------------------------------------------------------------------------------------------


def cost(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, for each profile and swarm, the losses of each rule by seed, and the mean excess over `kept`."""
    out: dict[str, Any] = {}
    done = [r for r in runs if r["loss"] is not None]
    for one in done:
        rules = out.setdefault(f"{one['profile']} {one['swarm']}, {one['rounds']} rounds", {})
        rules.setdefault(one["rule"], {"losses": {}})["losses"][str(one["seed"])] = one["loss"]
    for rules in out.values():
        usual = rules.get("kept", {"losses": {}})["losses"]
        for rule in rules.values():
            both = [loss / usual[s] - 1 for s, loss in rule["losses"].items() if s in usual]
            rule["excess"] = mean(both) if both else None
    return out


def _rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(runs):
        for row in one["audits"]:
            yield {
                "run": number,
                "swarm": f"{one['profile']} {one['swarm']}",
                **dict(zip(one["columns"], row, strict=True)),
            }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"n": len(values), "mean": mean(values), "sd": stdev(values) if len(values) > 1 else 0.0,
            "least": min(values), "most": max(values)}  # fmt: skip


def agreement(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spread of each score of each kind of update."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for row in _rows(runs):
        if row["update"] in ("ends", "extrapolates"):
            continue
        for score in ("signs", "weighted", "scale", "gain", "quarter"):
            if row.get(score) is not None:
                kinds.setdefault(row["update"], {}).setdefault(score, []).append(row[score])
    return {kind: {score: _spread(values) for score, values in scores.items()} for kind, scores in kinds.items()}


def rebased(runs: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of the updates replayed elsewhere had steps before their state came, as in an exchange."""
    rows = (r for r in _rows(runs) if r["update"] == "in bf16")
    return sum(r["round"] > 0 and SWARMS[runs[r["run"]]["swarm"]][r["peer"]][1] > 0 for r in rows)


def least_share(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, for each way to end early and each threshold, the spread over audits of the least share that passes."""
    audits: dict[tuple, list[tuple[float, float]]] = {}
    for row in _rows(runs):
        if row["update"] in ("ends", "extrapolates"):
            audits.setdefault((row["update"], row["run"], row["round"], row["peer"]), []).append(
                (row["share"], row["signs"])
            )
    out: dict[str, Any] = {}
    for way in ("ends", "extrapolates"):
        for threshold in THRESHOLDS:
            least = [
                min((share for share, signs in found if signs >= threshold), default=1.0)
                for (name, *_), found in audits.items()
                if name == way
            ]
            if least:
                out.setdefault(way, {})[str(threshold)] = _spread(least)
    return out


def loss_check(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how often each kind of update passes the loss check.

    `alone`: by GAIN and QUARTER on all windows. `with own`: also beside the update of the next peer of the round.
    `steady` counts from the fifth round on.
    """
    rows = [r for r in _rows(runs) if r["gain"] is not None]
    honest = {(r["run"], r["round"], r["peer"]): r for r in rows if r["update"] == "honest"}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        peers = sorted(
            p for run_, round_, p in honest if (run_, round_) == (row["run"], row["round"]) and p != row["peer"]
        )
        if not peers:
            continue
        own = honest[row["run"], row["round"], next((p for p in peers if p > row["peer"]), peers[0])]
        lower = threshold_beside(GAIN, own["gain"]), threshold_beside(QUARTER, own["quarter"])
        alone = row["gain"] >= GAIN and row["quarter"] >= QUARTER
        passed = {"alone": alone, "with own": row["gain"] >= lower[0] and row["quarter"] >= lower[1]}
        if row["round"] >= 4:
            passed[STEADY] = alone
        for way, it in passed.items():
            found.setdefault(row["update"], {}).setdefault(way, []).append(it)
    return {kind: {way: {"n": len(it), "passed": mean(it)} for way, it in ways.items()} for kind, ways in found.items()}


def summaries(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all that is derived from the runs."""
    found = {
        "cost": cost(runs),
        "agreement": agreement(runs),
        "least_share": least_share(runs),
        "loss_check": loss_check(runs),
    }
    return found | {"goals": goals(found)}


def goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals with what was measured; None where the runs have no audits of it."""
    out = []
    elsewhere = [found["agreement"][f"in {kind}"] for kind in MACHINES if f"in {kind}" in found["agreement"]]
    signs, scale = (min((s[score]["least"] for s in elsewhere), default=math.nan) for score in ("signs", "scale"))
    out.append(report.goal(
        f"each honest replay on another machine passes: signs at least {SIGNS}, scale at least {SCALE}",
        f"{signs}, {scale}" if elsewhere else None,
        bool(signs >= SIGNS and scale >= SCALE) if elsewhere else None,
    ))  # fmt: skip
    shares = [way[str(SIGNS)]["least"] for way in found["least_share"].values() if str(SIGNS) in way]
    share = min(shares, default=None)
    out.append(report.goal(
        "an early end that a replay passes has at least 90% of the steps", share,
        None if share is None else share >= 0.9,
    ))  # fmt: skip
    for text, way in (
        ("each honest update passes the loss check", "with own"),
        ("the same by its thresholds alone, from the fifth round on", STEADY),
    ):
        honest = found["loss_check"].get("honest", {}).get(way)
        out.append(report.goal(
            text, honest and f"{round(honest['n'] * honest['passed'])} of {honest['n']}",
            honest and honest["passed"] == 1,
        ))  # fmt: skip
    idle = [found["loss_check"][kind]["with own"] for kind in IDLE if kind in found["loss_check"]]
    passed = sum(round(it["n"] * it["passed"]) for it in idle)
    out.append(report.goal(
        "no update without the claimed work passes the loss check",
        f"{passed} of {sum(it['n'] for it in idle)}" if idle else None, passed == 0 if idle else None,
    ))  # fmt: skip
    return out


def false_alarms(results: Mapping[str, Any]) -> list[int]:
    """Return the round of each honest update that fails the loss check, counted from 0."""
    return sorted(
        row["round"] for row in _rows(results["runs"])
        if row["update"] == "honest" and row["gain"] is not None and (row["gain"] < GAIN or row["quarter"] < QUARTER)
    )  # fmt: skip


def show_cost(results: Mapping[str, Any]) -> str:
    """Return the table of losses."""
    seeds = sorted({seed for rules in results["cost"].values() for r in rules.values() for seed in r["losses"]})
    rows = [
        [f"{swarm}: {rule}", *(f"{r['losses'][n]:.3f}" if n in r["losses"] else None for n in seeds),
         None if r["excess"] is None else f"{r['excess']:+.1%}"]
        for swarm, rules in results["cost"].items() for rule, r in rules.items()
    ]  # fmt: skip
    return report.table(["swarm: rule", *(f"seed {n}" for n in seeds), "excess over kept"], rows)


def show_elsewhere(results: Mapping[str, Any]) -> str:
    """Return the table of honest replays in other float environments."""
    rows = [
        [kind.removeprefix("in "), s["signs"]["n"], *(f"{s['signs'][k]:.4f}" for k in ("mean", "sd", "least")),
         f"{s['scale']['least']:.3f}"]
        for kind, s in results["agreement"].items() if _is_elsewhere(kind)
    ]  # fmt: skip
    return report.table(["honest replay", "n", "signs", "sd", "least", "scale, least"], rows)


def _is_elsewhere(kind: str) -> bool:
    return kind.startswith(("in ", "both "))


def show_fakes(results: Mapping[str, Any]) -> str:
    """Return the table of fakes beside a replay and the loss check; the first line is honest."""
    rows = []
    for kind, s in results["agreement"].items():
        if _is_elsewhere(kind):
            continue
        gain, quarter = (f"{s[k]['least']:.1f} to {s[k]['most']:.1f}" for k in ("gain", "quarter"))
        alone, steady = (results["loss_check"][kind][way] for way in ("alone", STEADY))
        rows.append([kind, s["gain"]["n"], f"{s['signs']['most']:.3f}", gain, quarter, f"{alone['passed']:.0%}",
                     f"{steady['passed']:.0%} of {steady['n']}"])  # fmt: skip
    columns = ["update", "n", "signs, most", "gain", "quarter", "passes the loss check", "from the fifth round on"]
    return report.table(columns, rows)


def show_shares(results: Mapping[str, Any]) -> str:
    """Return the table of the least share of the work that passes a replay, over all audits."""
    ways = results["least_share"]
    rows = [[t, *(f"{way[t]['least']:.0%}" for way in ways.values())] for t in map(str, THRESHOLDS)] if ways else []
    return report.table(["threshold of signs", *(f"least share that passes, {way}" for way in ways)], rows)


def show(results: Mapping[str, Any]) -> str:
    """Return the tables."""
    return "\n\n".join(table(results) for table in (show_cost, show_elsewhere, show_fakes, show_shares))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save after each round. Finished runs that the JSON file has already are kept."""
    parser = report.command_line(__doc__ or "", "replayable")
    parser.add_argument("--profile", choices=sorted(LR), default="broad")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--swarms", nargs="+", choices=SWARMS, default=list(SWARMS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument(
        "--audited", type=int, nargs="*", help="rounds in which an update is audited (default: all but 0)"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds, rounds = (options.seeds[:1], 3) if options.quick else (options.seeds, options.rounds)
    audited = range(1, rounds) if options.audited is None else options.audited
    earlier = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"runs": []}
    runs = [r for r in earlier["runs"] if r["loss"] is not None]
    done = {tuple(r[k] for k in ("profile", "seed", "swarm", "rule", "rounds")) for r in runs}
    about = report.provenance("replayable", arguments, seeds)
    provenance = {k: earlier[k] for k in ("command", "commit", "recorded_in", "changed", "date", "machine", "seeds")
            if k in earlier} or about  # fmt: skip
    for seed, swarm, rule in ((s, w, r) for s in seeds for w in options.swarms for r in options.rules):
        if (options.profile, seed, swarm, rule, rounds) in done:
            continue
        setting = Setting.of(replace(PROFILES[options.profile], peers=len(SWARMS[swarm])), seed)
        entry: dict[str, Any] = {}
        for entry in run(setting, rounds, swarm, rule, audited if rule == "replayable" else ()):
            print(
                f"{options.profile} {swarm} {rule}, seed {seed}: {entry['cpu_seconds']} s", file=sys.stderr, flush=True
            )
            if options.json:
                report.save(
                    options.json, provenance | {"runs": [*runs, about | entry]} | summaries([*runs, about | entry])
                )
        runs.append(about | entry)
    provenance["seeds"] = sorted({r["seed"] for r in runs})
    results = provenance | {"runs": runs} | summaries(runs)
    return report.ended(results, options, show(results))


if __name__ == "__main__":
    sys.exit(main())

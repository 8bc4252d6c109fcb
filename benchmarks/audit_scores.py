"""Scores that tell honest updates from fake ones, measured on both: the calibration of an audit.

A swarm of unequal peers trains with the trainer's own inner and outer parts, the default codec, and overlap. A peer
trains on from its own parameters while its update is exchanged, and the next state comes under them in the middle of a
later step. An auditor replays each honest update in several ways, and scores it and the fakes that claim the same
windows. A score is the agreement of signs with the replay, or their partial correlation. The latter leaves out what the
mean of the others' updates, the last outer step and the author's last update explain. The last score needs no replay:
the loss that the update alone saves on 64 claimed windows, less what it saves on 64 others.

Replays. `start`: the parameters from which an update's first steps begin; `mark`: the steps before the rebase.
  unmarked       all steps from the new state, moments fresh
  after          only the steps after the mark, from the new state, moments fresh
  marked         start: the state before, less the author's last update; rebase at the mark; moments fresh
  pair           the last update by `marked`, then this one, from the parameters and moments that it left
  pair_feedback  the same, plus the error feedback that the last update would have left by its replay
  three, four    as `pair_feedback`, from one or two updates earlier
  stateful       start, moments and feedback are the author's own; only the place within a step is unknown

Modes. `kept` is the product: moments and parameters go on from round to round. `reset`: an update begins with fresh
moments. `public`: also from public parameters, which are the state before less the author's decoded update.

Fakes. Each is of one round only, by an author that was honest before.
  half           stops after half of the steps, scaled up
  half_batch     every step on half of its windows; own moments and feedback
  warm           the same without feedback; `mixed`: with half of it
  fresh          the same with fresh moments, without feedback, from the new state: what `unmarked` replays
  skip           the same as `fresh`, but every second step on whole batches, scaled up
  wrong_data     honest training on other windows
  stale          never rebased: all steps from the start
  copy, random, flip    another peer's update, random signs, all signs reversed
  crafted        honest, but the signs of the quarter of least magnitude are reversed

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report; of the newest run
  runs: a list, each with command, commit, date, machine, profile, seed, mode, mark (known by step or window), rounds,
    loss (validation, nats a token; null: not finished), cpu_seconds; columns, and audits: a list of rows. Score
    "agree X" is of signs, "pc X" the correlation
  summary: for each profile and mode, score by score (see `summary`)
  goals: none, since the scores are what thresholds are made of
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.convergence.replica import Replica, split
from benchmarks.convergence.setting import MIN_RATIO, PROFILES, WARMUP, Setting
from benchmarks.convergence.studies import NESTEROV
from peer.training.inner_optimizer import PIECE_TOKENS, StepResult
from peer.training.schedule import step_factor
from protocol.codec import make_codec
from protocol.layout import is_outer_tensor
from protocol.outer import Contribution, apply
from protocol.spec import CodecSpec, OuterSpec, Schedule
from protocol.state import state_layout

PEERS = ((12, 0), (24, 3), (36, 6), (12, 3), (24, 6), (36, 0))
"""(inner steps of an update, those of them before the rebase) of each peer."""
LR = {"tiny": 1e-2, "broad": 1.6e-2, "small": 8e-3}
CHAIN = 3
"""Rounds before the first that is scored from which replays in a row begin."""
MODES = ("kept", "reset", "public")
SETTLED = 4
"""Rounds at the start of a run that no threshold is made of: the rate is high and scores vary."""
WINDOWS = 64
"""Claimed windows of a loss score, in quarters over the update; and as many unclaimed ones."""
REPLAYS = ("unmarked", "after", "marked", "pair", "pair_feedback", "three", "four", "stateful")
LOSSES = ("loss", "loss_quarter")
FAKES = ("half", "half_batch", "mixed", "warm", "fresh", "skip", "wrong_data", "stale", "copy", "random",
         "flip", "crafted")  # fmt: skip
COLUMNS = ("round", "peer", "fake", *(f"{kind} {r}" for r in REPLAYS for kind in ("agree", "pc")), *LOSSES)


@dataclass(frozen=True)
class Position:
    """Parameters to train from (fp32 [parameters]) and the inner optimizer's moments; None: fresh."""

    local: Tensor
    moments: tuple[int, dict[str, Tensor]] | None = None


@dataclass(frozen=True)
class Trained:
    """The progress of an update (fp32 [parameters], downhill is positive), and its end.

    `partial`: the progress after some of its steps, by their number.
    """

    progress: Tensor
    partial: Mapping[int, Tensor]
    end: Position


class Bench:
    """One model that trains any update of any peer, as the product's trainer does, and scores it."""

    def __init__(self, setting: Setting, rounds: int, peers: Sequence[tuple[int, int]] | None = None):
        self.setting, self.rounds, self.peers = setting, rounds, PEERS if peers is None else peers
        self.replica = Replica(setting, LR[setting.profile.name], optimizer="muon")
        self.codec_spec = CodecSpec()
        self.outer = OuterSpec.model_validate(NESTEROV)
        self.codec = make_codec(self.codec_spec, setting.layout)
        self.sizes = [t.numel for t in setting.layout.tensors]
        self.target = sum(steps for steps, _ in self.peers) * setting.profile.batch
        tokens = rounds * self.target * setting.profile.window
        self.schedule = Schedule(
            kind="cosine", warmup_tokens=int(WARMUP * tokens), total_tokens=tokens, min_ratio=MIN_RATIO
        )

    def factors(self, peer: int, round_: int) -> list[float]:
        """Return the factor of the learning rate of each step: a function of the chain, the mark and the count."""
        (steps, mark), batch = self.peers[peer], self.setting.profile.batch
        window, own = self.setting.profile.window, steps * batch
        out = []
        for n in range(steps):
            late = round_ > 0 and n < mark
            after = n - mark if round_ > 0 else n  # the steps on this state, which came with step `mark`
            at, since = (round_ - 1, own + after * batch) if late else (round_, after * batch)
            usual = own if at > 0 else 0
            out.append(
                step_factor(self.schedule, at * self.target * window, self.target * window, since + batch / 2, usual)
            )
        return out

    def windows(self, peer: int, round_: int, step: int) -> Tensor:
        batch = self.setting.profile.batch
        return self.setting.windows(peer, (round_ * self.peers[peer][0] + step) * batch, batch)

    def gradient(self, windows: Tensor, between: Callable[[], bool]) -> StepResult:
        """Compute the gradient of a step. Raises FloatingPointError if it is not finite."""
        step = self.replica.inner.forward_backward(windows, between)
        if step is None or not step.is_finite:
            raise FloatingPointError("the loss or the gradient is not finite")
        return step

    def train(
        self,
        start: Position,
        state: Tensor,
        batches: Sequence[Tensor],
        factors: Sequence[float],
        mark: int | None,
        *,
        within: bool = False,
        kept: Container[int] | None = None,
    ) -> Trained:
        """Train from `start`; the `state` comes under the parameters before step `mark` (None: never).

        With `within` it comes between two pieces of that step, as in the trainer, if it has more than one. `kept`: the
        numbers of steps after which the progress is kept (None: half of them).
        """
        replica, inner, anchor = self.replica, self.replica.inner, start.local
        within = within and len(batches[0]) * self.setting.profile.window > PIECE_TOKENS
        replica.flat.copy_(start.local)
        inner.adamw.state.clear()
        if inner.muon:
            inner.muon.state.clear()
        if start.moments is not None:
            inner.set_moments(*start.moments)

        def rebase() -> None:
            nonlocal anchor
            with torch.no_grad():
                replica.flat.sub_(anchor).add_(state)
            anchor = state

        def between() -> bool:
            if mark is not None and n >= mark and anchor is not state:
                rebase()
            return True

        kept = (len(batches) // 2,) if kept is None else kept
        partial: dict[int, Tensor] = {}
        for n, (windows, factor) in enumerate(zip(batches, factors, strict=True)):
            if mark is not None and n >= mark + within and anchor is not state:
                rebase()
            step = self.gradient(windows, between)
            inner.set_rate(factor)
            inner.optimizer_step(step)
            if n + 1 in kept:
                partial[n + 1] = anchor - replica.flat
        made, moments = inner.moments()
        end = Position(replica.flat.clone(), (made, {k: v.clone() for k, v in moments.items()}))
        return Trained(anchor - replica.flat, partial, end)

    def encoded(self, values: Tensor) -> tuple[bytes, Tensor]:
        """Return an update's blob and its decoded values, fp32 [parameters]."""
        left = values.clone()
        blob = bytes(self.codec.encode(split(self.setting.layout, left)))
        return blob, values - left

    def losses(self, parameters: Tensor, windows: Tensor) -> Tensor:
        """Return the mean loss of each window: fp32 [windows]."""
        self.replica.flat.copy_(parameters)
        with torch.inference_mode():
            logits = self.replica.model(input_ids=windows[:, :-1], use_cache=False).logits
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), windows[:, 1:], reduction="none")
        return each.mean(1)

    def normalized(self, values: Tensor) -> Tensor:
        """Return values with a root mean square of 1 in each tensor, in double precision."""
        parts = [p / (p.square().mean().sqrt() + 1e-30) for p in values.double().split(self.sizes)]
        return torch.cat(parts)


@dataclass(frozen=True)
class Replayed:
    """The last replay of a row of updates, and an estimate of the error feedback that it would have left."""

    trained: Trained
    feedback: Tensor


@dataclass
class Author:
    """A peer between rounds: where it stands, its feedback, and what an auditor knows of its last update."""

    position: Position
    feedback: Tensor
    sent: Tensor
    replayed: tuple[Replayed, ...] = ()
    """Replays of the last update: of it alone, with the one before, with the two before."""

    def after(self, made: Trained, sent: Tensor, state: Tensor, beta: float, mode: str) -> None:
        """Go on from an update of the round that began with `state`."""
        self.feedback = beta * self.feedback + made.progress - sent
        self.sent = sent
        self.position = {
            "kept": made.end,
            "reset": Position(made.end.local),
            "public": Position(state - sent),
        }[mode]


def run(setting: Setting, rounds: int, mode: str = "kept", audited: int | None = None) -> Iterator[dict[str, Any]]:
    """Train a swarm and audit each round. Yield its entry of the results so far after each.

    `audited`: only this number of last rounds is scored.
    """
    began, bench = time.process_time(), Bench(setting, rounds)
    beta, first = bench.codec_spec.beta, rounds - (rounds if audited is None else audited)
    state = bench.replica.flat.clone()
    base = {n: t.clone() for n, t in split(setting.layout, state).items()}
    for t in state_layout(setting.layout, bench.outer).tensors:
        if is_outer_tensor(t.name):
            base[t.name] = torch.zeros(t.shape)
    authors = [Author(Position(state), torch.zeros_like(state), torch.zeros_like(state)) for _ in PEERS]
    before = state
    audits: list[list[Any]] = []
    generator = torch.Generator().manual_seed(setting.seed)
    for round_ in range(rounds):
        honest, blobs = [], []
        for peer, author in enumerate(authors):
            mark = PEERS[peer][1] if round_ else 0
            batches = [bench.windows(peer, round_, n) for n in range(PEERS[peer][0])]
            start = author.position
            made = bench.train(start, state, batches, bench.factors(peer, round_), mark, within=mark > 0)
            blob, sent = bench.encoded(beta * author.feedback + made.progress)
            honest.append((made, sent))
            blobs.append(Contribution(setting.key(peer), len(batches) * setting.profile.batch, blob))
        for peer, author in enumerate(authors):
            made, sent = honest[peer]
            if round_ < first - CHAIN:
                author.after(made, sent, state, beta, mode)
                continue
            others = [s for p, (_, s) in enumerate(honest) if p != peer]
            audit = Audit(
                bench, peer, round_, author, state, before, mode, chosen=round_ >= first and peer % 3 == round_ % 3
            )
            if round_ >= max(1, first):
                fakes = audit.fakes(made, sent, others[0], generator) if audit.chosen else {}
                audits += audit.rows({"honest": sent, **fakes}, others)
            author.replayed = tuple(audit.followed(sent))
            author.after(made, sent, state, beta, mode)
        before = state
        apply(base, blobs, bench.codec, bench.outer)
        state = torch.cat([base[t.name].reshape(-1) for t in setting.layout.tensors])
        loss = None
        if round_ == rounds - 1:
            bench.replica.flat.copy_(state)
            loss = setting.loss(bench.replica.model, 1024)
        yield {
            "profile": setting.profile.name, "seed": setting.seed, "mode": mode, "mark": "window", "rounds": rounds,
            "loss": loss, "cpu_seconds": round(time.process_time() - began), "columns": list(COLUMNS), "audits": audits,
        }  # fmt: skip


class Audit:
    """The audit of one peer's update of one round."""

    def __init__(
        self,
        bench: Bench,
        peer: int,
        round_: int,
        author: Author,
        state: Tensor,
        before: Tensor,
        mode: str,
        *,
        chosen: bool,
    ):
        """Replay the update; with `chosen` in every way."""
        self.bench, self.peer, self.round_, self.chosen = bench, peer, round_, chosen
        self.author, self.state, self.before = author, state, before
        steps, self.mark = PEERS[peer][0], PEERS[peer][1] if round_ else 0
        self.batches = [bench.windows(peer, round_, n) for n in range(steps)]
        self.factors = bench.factors(peer, round_)
        guess, fresh = Position(before - author.sent), Position(state)
        self.replays = {"marked": self._train(guess, self.mark)}
        self.own = author.position
        if not author.replayed:
            return
        for name, last in zip(("pair", "three", "four"), author.replayed, strict=False):
            if name != "four" or chosen:
                end = last.trained.end
                if mode == "public":
                    self.replays[name] = self.replays["marked"]
                else:
                    self.replays[name] = self._train(end if mode == "kept" else Position(end.local), self.mark)
        if chosen:
            self.replays["unmarked"] = self._train(fresh, 0) if self.mark else self.replays["marked"]
            self.replays["after"] = self._train(fresh, 0, self.mark) if self.mark else self.replays["marked"]
            self.replays["stateful"] = self._train(self.own, self.mark, exact=False)

    def followed(self, sent: Tensor) -> Iterator[Replayed]:
        """Yield the replays that later ones may begin with, now that this update was sent."""
        beta, zero = self.bench.codec_spec.beta, torch.zeros_like(sent)
        before = [zero, *(last.feedback for last in self.author.replayed)]
        for name, feedback in zip(("marked", "pair", "three"), before, strict=False):
            trained = self.replays[name]
            values = beta * feedback + trained.progress
            pairs = zip(values.split(self.bench.sizes), sent.split(self.bench.sizes), strict=True)
            scaled = [a * (b.abs().mean() / (a.abs().mean() + 1e-30)) for a, b in pairs]
            yield Replayed(trained, torch.cat(scaled) - sent)

    def _train(
        self, start: Position, mark: int | None, first: int = 0, *, half: bool = False, exact: bool = True
    ) -> Trained:
        batches = [b[: len(b) // 2] if half else b for b in self.batches[first:]]
        return self.bench.train(start, self.state, batches, self.factors[first:], mark, within=exact and bool(mark))

    def fakes(self, made: Trained, sent: Tensor, other: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return decoded fakes by name; see the module."""
        feedback, bench = self.bench.codec_spec.beta * self.author.feedback, self.bench
        warm = self._train(self.own, self.mark, half=True).progress
        wrong = [bench.windows(self.peer, self.round_ + 1000, n) for n in range(len(self.batches))]
        skipped = bench.train(Position(self.state), self.state, self.batches[::2], self.factors[::2], 0).progress
        values = {
            "half": feedback + 2 * made.partial[len(self.batches) // 2],
            "half_batch": feedback + warm,
            "mixed": feedback / 2 + warm,
            "warm": warm,
            "fresh": self._train(Position(self.state), 0, half=True).progress,
            "skip": skipped,
            "wrong_data": feedback + bench.train(self.own, self.state, wrong, self.factors, self.mark).progress,
            "stale": feedback + self._train(self.own, None).progress,
        }
        decoded = {name: bench.encoded(v)[1] for name, v in values.items()}
        noise = torch.randn(sent.shape, generator=generator).sign()
        truth = (feedback + made.progress).abs()
        least = torch.cat([t <= t.quantile(0.25) for t in truth.split(bench.sizes)])
        return {**decoded, "copy": other, "random": sent.abs() * noise, "flip": -sent,
                "crafted": torch.where(least, -sent, sent)}  # fmt: skip

    def rows(self, updates: Mapping[str, Tensor], others: Sequence[Tensor]) -> Iterable[list[Any]]:
        """Yield a row of COLUMNS for each update."""
        bench, beta = self.bench, self.bench.codec_spec.beta
        replays = {name: trained.progress for name, trained in self.replays.items()}
        for name, last in zip(("pair_feedback", "three", "four"), self.author.replayed, strict=False):
            if (progress := replays.get(name.removesuffix("_feedback"))) is not None:
                replays[name] = progress + beta * last.feedback
        if "stateful" in replays:
            replays["stateful"] = replays["stateful"] + beta * self.author.feedback
        known = [
            torch.stack(list(others)).mean(0),
            self.state - self.before,
            self.author.sent,
            torch.ones_like(self.state),
        ]
        basis, _ = torch.linalg.qr(torch.stack([bench.normalized(k) for k in known], 1))

        def rest(values: Tensor) -> Tensor:
            return values - basis @ (basis.T @ values)

        expected = {name: rest(bench.normalized(v)) for name, v in replays.items()}
        for fake, update in updates.items():
            signs = torch.where(torch.signbit(update), -1.0, 1.0)
            own = rest(signs.double())
            scores: list[float | None] = []
            for name in REPLAYS:
                if name in replays:
                    agree = float((torch.signbit(replays[name]) == torch.signbit(update)).float().mean())
                    scores += [agree, float(own @ expected[name] / (own.norm() * expected[name].norm()))]
                else:
                    scores += [None, None]
            scores += self._loss_scores(update)
            yield [self.round_, self.peer, fake, *(None if s is None else round(s, 4) for s in scores)]

    def _loss_scores(self, update: Tensor) -> list[float]:
        """Return the gain on claimed windows less that on others; and of the worst quarter of the steps."""
        chance = np.random.default_rng([self.bench.setting.seed, self.round_, self.peer])
        claimed = torch.cat(self.batches)
        quarter = len(claimed) // 4
        each = min(quarter, WINDOWS // 4)
        drawn = [q * quarter + chance.choice(quarter, each, replace=False) for q in range(4)]
        windows = torch.cat([claimed[np.concatenate(drawn)],
                             self.bench.setting.windows(len(PEERS), self.round_ * WINDOWS, WINDOWS)])  # fmt: skip
        gain = self.bench.losses(self.state, windows) - self.bench.losses(self.state - update, windows)
        quarters = gain[: 4 * each].view(4, each).mean(1) - gain[4 * each :].mean()
        return [float(quarters.mean()), float(quarters.min())]


# -- what the scores say -----------------------------------------------------------------------------------------


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, for each score, the honest distribution and each fake's, with the share of it below the threshold.

    A score is relative to the median of this peer's honest ones in the run, and then to the mean of the round's other
    honest peers. An agreement is taken above one half. `threshold`: the honest mean
    less 3.72 standard deviations (1 in 10,000 of a normal distribution), `least`: the least honest score.
    """
    out: dict[str, Any] = {}
    for score in COLUMNS[3:]:
        by_fake: dict[str, list[float]] = {}
        for one in (r for r in runs if score in r["columns"]):
            for fake, value in _relative(one, score):
                by_fake.setdefault(fake, []).append(value)
        honest = by_fake.pop("honest", [])
        if len(honest) < 2:
            continue
        threshold = mean(honest) - 3.72 * stdev(honest)
        out[score] = {
            "honest": {"n": len(honest), "mean": mean(honest), "sd": stdev(honest), "least": min(honest),
                       "most": max(honest), "raw": mean(_raw(runs, score))},
            "threshold": threshold,
            "fakes": {
                fake: {"n": len(v), "mean": mean(v), "least": min(v), "most": max(v),
                       "found": mean(x < threshold for x in v), "found_at_least": mean(x < min(honest) for x in v)}
                for fake, v in by_fake.items()
            },
        }  # fmt: skip
    return out


def _raw(runs: Sequence[Mapping[str, Any]], score: str) -> list[float]:
    audits = [(a, r["columns"].index(score)) for r in runs if score in r["columns"] for a in r["audits"]]
    return [a[at] for a, at in audits if a[2] == "honest" and a[0] >= SETTLED and a[at] is not None]


def _relative(one: Mapping[str, Any], score: str) -> Iterable[tuple[str, float]]:
    at, chance = one["columns"].index(score), 0.5 if score.startswith("agree") else 0.0
    rows = [(r, p, f, row[at] - chance) for row in one["audits"] for r, p, f in [row[:3]]
            if row[at] is not None and r >= SETTLED]  # fmt: skip
    honest = [(r, p, v) for r, p, f, v in rows if f == "honest"]
    if not honest:
        return
    kinds = {p: median(v for _, q, v in honest if q == p) for _, p, _ in honest}
    rounds = {r: [(p, v / kinds[p]) for s, p, v in honest if s == r] for r, _, _ in honest}
    for r, p, fake, value in rows:
        peers = [v for q, v in rounds[r] if q != p]
        yield fake, value / kinds[p] / (mean(peers) if peers else 1.0)


def show_relative(results: Mapping[str, Any], name: str) -> str:
    """Return the table of a profile and mode in `summary`: scores relative to the usual, fakes at best."""
    rows = []
    for score, s in results["summary"][name].items():
        if not score.startswith("pc "):
            h = s["honest"]
            rows.append([score, h["n"], *(f"{x:.3f}" for x in (h["mean"], h["sd"], h["least"], s["threshold"])),
                         *(f"{s['fakes'][fake]['most']:.2f}" for fake in FAKES)])  # fmt: skip
    return report.table(["score", "n", "honest", "sd", "least", "threshold", *FAKES], rows)


def show_raw(results: Mapping[str, Any], mode: str) -> str:
    """Return the table of a mode's agreement as it is: honest, and fakes at best."""
    runs = [r for r in results["runs"] if r["mode"] == mode]
    rows = []
    for replay in REPLAYS:
        by_fake: dict[str, list[float]] = {}
        for one in runs:
            at = one["columns"].index(f"agree {replay}") if f"agree {replay}" in one["columns"] else None
            for row in one["audits"]:
                if at is not None and row[at] is not None and row[0] >= SETTLED:
                    by_fake.setdefault(row[2], []).append(row[at])
        if len(honest := by_fake.get("honest", [])) > 1:
            rows.append([replay, len(honest), *(f"{x:.3f}" for x in (mean(honest), stdev(honest), min(honest))),
                         *(f"{max(by_fake[fake]):.3f}" for fake in FAKES)])  # fmt: skip
    return report.table(["replay", "n", "honest", "sd", "least", *FAKES], rows)


def show(results: Mapping[str, Any]) -> str:
    """Return the tables of each profile and mode."""
    out = [f"{name}\n\n{show_relative(results, name)}" for name, scores in results["summary"].items() if scores]
    modes = dict.fromkeys(r["mode"] for r in results["runs"])
    return "\n\n".join([*out, *(f"agreement, {mode}\n\n{show_raw(results, mode)}" for mode in modes)])


def summaries(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of each profile and mode."""
    kinds = sorted({(r["profile"], r["mode"], r["mark"]) for r in runs})
    return {
        f"{profile}, {mode}, mark by {mark}": summary(
            [r for r in runs if (r["profile"], r["mode"], r["mark"]) == (profile, mode, mark)]
        )
        for profile, mode, mark in kinds
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save after each round. Finished runs that the JSON file has already are kept."""
    parser = report.command_line(__doc__ or "", "audit_scores")
    parser.add_argument("--profile", choices=sorted(LR), default="broad")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--audited", type=int, help="score only this number of last rounds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds, rounds = (options.seeds[:1], SETTLED + 2) if options.quick else (options.seeds, options.rounds)
    runs = json.loads(options.json.read_text())["runs"] if options.json and options.json.exists() else []
    done = {(r["profile"], r["seed"], r["mode"]) for r in runs if r["loss"] is not None}
    runs = [r for r in runs if r["loss"] is not None]
    about = report.provenance("audit_scores", arguments, seeds)
    results = about | {"runs": runs, "summary": summaries(runs), "goals": []}
    for seed, mode in ((s, m) for s in seeds for m in options.modes):
        setting = Setting.of(replace(PROFILES[options.profile], peers=len(PEERS)), seed)
        if (options.profile, seed, mode) in done:
            continue
        entry: dict[str, Any] = {}
        for entry in run(setting, rounds, mode, options.audited):
            together = [*runs, about | entry]
            results = about | {"runs": together, "summary": summaries(together), "goals": []}
            print(f"{options.profile} seed {seed} {mode}: {entry['cpu_seconds']} s", file=sys.stderr, flush=True)
            if options.json:
                report.save(options.json, results)
        runs.append(about | entry)
    return report.ended(results, options, show(results))


if __name__ == "__main__":
    sys.exit(main())

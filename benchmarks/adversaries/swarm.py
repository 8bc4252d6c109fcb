"""A swarm of sixteen that trains while some of its peers are hostile, audited by the rules and checks of the product.

Peers train at once, in rounds without overlap, with one batched model for all. So an auditor, which trains a claim by
itself, rounds in another way than the author did. Each replay is made once and its scores are those of all honest
auditors; its cost counts for each of them. Hostile auditors and jurors report nothing, which is best for them.
An auditor that lets an ally pass loses its stake when a jury convicts that ally, and is then audited in each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from time import process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.adversaries.branch import Branch
from benchmarks.adversaries.lineup import ABSENT, NAMED_WITHIN, SWARM, Defences, Profile
from benchmarks.adversaries.world import Judge, State, World, claimed, peer_key
from benchmarks.convergence.fleet import Fleet
from benchmarks.convergence.setting import PROFILES, Setting
from benchmarks.convergence.studies import NESTEROV
from peer.auditor.job import SCREENED_BACK, ClaimedUpdate
from peer.auditor.screen import compare_blobs
from peer.training.schedule import replayable_factor
from protocol.assignment import windows_of
from protocol.audits import draw_auditors, due_audits
from protocol.errors import ChainError, CodecError
from protocol.ids import PeerKey
from protocol.layout import BLOCK
from protocol.messages import AuditCheck, Certificate, Score, Signed, UpdateHeader, WorkReport
from protocol.outer import Contribution

HONEST_ROUNDS = 5
"""Rounds in which established hostile peers train as the others do. Newcomers train for one, or as `stale` needs."""

STALE_ROUNDS = 4


@dataclass(frozen=True)
class Scenario:
    """One run. `established`: the hostile begin with as much stake as the others; otherwise with none."""

    attack: str
    hostile: int
    defences: Defences
    established: bool
    seed: int
    steps: int = SWARM.steps
    """Of each update."""
    rounds: int = SWARM.rounds
    """As in `Profile`."""

    @property
    def profile(self) -> Profile:
        """The size of the run."""
        return replace(SWARM, steps=self.steps, rounds=self.rounds)

    @property
    def first_attack(self) -> int:
        """The round in which the hostile peers begin."""
        return HONEST_ROUNDS if self.established else STALE_ROUNDS if self.attack == "stale" else 1


@dataclass
class Held:
    """The things that auditors need of a record: the state before it, accepted windows, and each update's blob."""

    number: int
    certificate: Certificate
    state: State
    accepted: int
    blobs: Mapping[PeerKey, bytes]
    checks: dict[tuple[PeerKey, AuditCheck, PeerKey | None], tuple[tuple[Score, ...], float]] = field(
        default_factory=dict
    )
    """Scores of each author's update by each check, and what the check cost, in windows of training.

    A replay is the same for all auditors. A loss check depends on the auditor's own update.
    """


class Swarm:
    """Sixteen peers, of whom the last `hostile` attack."""

    def __init__(self, scenario: Scenario):
        self.scenario, profile = scenario, scenario.profile
        world = self.world = World(profile, scenario.seed, scenario.defences.spec(NESTEROV))
        setting = Setting.of(replace(PROFILES["many"], peers=profile.peers, batch=profile.batch), scenario.seed)
        self.fleet = Fleet(setting, profile.lr, profile.peers, "muon")
        self.judge = Judge(world)
        self.keys = [peer_key(n) for n in range(profile.peers)]
        honest = profile.peers - scenario.hostile
        self.hostile = set(self.keys[honest:])
        founders = self.keys if scenario.established else self.keys[:honest]
        self.branch = Branch(world.spec, profile, scenario.defences.rule, sorted(founders))
        self.state = world.genesis()
        self.flats = [world.flat(self.state)]
        self.held: dict[bytes, Held] = {}
        self.sent: list[dict[PeerKey, bytes]] = []
        self.generator = torch.Generator().manual_seed(scenario.seed)
        self.reports: list[Signed[WorkReport]] = []
        self.dishonest: set[tuple[int, PeerKey]] = set()
        self.first_fake: dict[PeerKey, int] = {}
        self.named: dict[PeerKey, int] = {}
        self.wronged: set[PeerKey] = set()
        self.refuted: set[PeerKey] = set()
        self.work = {"trained": 0.0, "loss": 0.0, "replay": 0.0}
        """Windows of training, and what checks cost, in the same unit."""
        self.seconds = {"trained": 0.0, "screens": 0.0}
        """CPU time of all training, and of screens."""
        self.chooser = Random(scenario.seed)

    # -- one round ---------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Train, send, accept, audit."""
        branch, world, now = self.branch, self.world, self.branch.round
        accepted = branch.chain.weight(branch.head)
        blobs = self._blobs(now, accepted)
        updates = []
        for key, blob in blobs.items():
            windows = world.profile.windows
            if (now, key) in self.dishonest and self.scenario.attack.endswith("largest claim"):
                windows = world.profile.most
            updates.append(branch.header(key, windows, blob))
        certificate = branch.add(updates, self.reports)
        self.reports = branch.waiting
        self._note(certificate, now)
        body = certificate.record.body
        self.held[certificate.digest] = Held(now, certificate, dict(self.state), accepted, blobs)
        self.state = {n: t.clone() for n, t in self.state.items()}
        weights = body.weighed if self.scenario.defences.weights else [u.body.windows for u in body.updates]
        contributions = [Contribution(u.author, w, blobs[u.author]) for u, w in zip(body.updates, weights, strict=True)]
        world.apply(self.state, contributions)
        self.flats.append(world.flat(self.state))
        self.sent.append({u.author: blobs[u.author] for u in body.updates})
        if certificate.record.body.parent in self.held:
            self._audit(self.held[certificate.record.body.parent].certificate, certificate)

    def _blobs(self, now: int, accepted: int) -> dict[PeerKey, bytes]:
        """Return the update of each peer that may contribute."""
        attacks = now >= self.scenario.first_attack and self.scenario.attack not in ("", ABSENT)
        began = process_time()
        progress, half = self._train(accepted, stale=attacks and self.scenario.attack == "stale")
        self.seconds["trained"] += process_time() - began
        found = {}
        for number, key in enumerate(self.keys):
            if self.branch.chain.is_barred(key, self.branch.head):
                continue
            if self.scenario.attack == ABSENT and key in self.hostile:
                continue
            values = progress[number]
            self.work["trained"] += self.world.profile.windows * (key not in self.hostile)
            if attacks and key in self.hostile and self._has_turn(now, number):
                self.dishonest.add((now, key))
                self.first_fake.setdefault(key, now)
                made = self._attack(number, progress, half[number])
                found[key] = made if isinstance(made, bytes) else self._encoded(made)
            else:
                found[key] = self._encoded(values)
        return {key: self.world.codec.with_author(blob, key) for key, blob in found.items()}

    def _train(self, accepted: int, *, stale: bool) -> tuple[Tensor, Tensor]:
        """Return the progress of every peer, of all steps and of half of them: fp32 [peers, parameters]."""
        world, profile, fleet = self.world, self.world.profile, self.fleet
        fleet.forget_moments()
        starts = self.flats[-1].repeat(profile.peers, 1)
        if stale:
            starts[len(self.keys) - self.scenario.hostile :] = self.flats[-1 - STALE_ROUNDS]
        fleet.flat.copy_(starts)
        factor = replayable_factor(world.spec.inner.schedule, accepted * profile.window, world.spec.round.target_tokens)
        attacks = len(self.sent) >= self.scenario.first_attack
        wrong = attacks and self.scenario.attack == "wrong data"
        spread = attacks and self.scenario.attack == "half, spread"
        half = torch.empty_like(starts)
        for step in range(profile.steps):
            batches = []
            for key in self.keys:
                first = self.branch.chain.next_window(key, self.branch.head) + step * profile.batch
                if wrong and key in self.hostile:
                    first = 0
                drawn = windows_of(world.spec.seed, key, first, profile.batch, world.reader.total)
                if spread and key in self.hostile:
                    drawn = [*drawn[: profile.batch // 2]] * 2  # the gradient of half of the windows
                batches.append(world.reader.read(drawn))
            fleet.step(torch.stack(batches), factor)
            if step + 1 == profile.steps // 2:
                half.copy_(starts - fleet.flat)
        return starts - fleet.flat, half

    def _encoded(self, values: Tensor) -> bytes:
        return bytes(self.world.codec.encode(self.world.named(values.clone())))

    def _decoded(self, blob: bytes) -> Tensor:
        values = {t.name: torch.zeros(t.shape) for t in self.world.codec.layout.tensors}
        self.world.codec.add_to(blob, values)
        return self.world.flat(values)

    def _has_turn(self, now: int, number: int) -> bool:
        return self.scenario.attack != "turns" or now % self.scenario.hostile == number % self.scenario.hostile

    def _attack(self, number: int, progress: Tensor, half: Tensor) -> Tensor | bytes:
        """Return what a hostile peer sends: a blob, or values to encode. `progress`: of all peers' training."""
        key, last, values = self.keys[number], self.sent[-1], progress[number]
        honest = [k for k in self.keys if k in last and k not in self.hostile]
        other = last[honest[number % len(honest)]]
        match self.scenario.attack:
            case "noise":
                signs = torch.randint(0, 2, values.shape, generator=self.generator) * 2 - 1
                return self._decoded(other).abs() * signs
            case "copy":
                return other
            case "resend":
                return self.sent[self.scenario.first_attack - 1][key]
            case "half" | "turns":
                return 2 * half
            case "flip" | "flip, largest claim":
                return -values
            case "huge":
                return -1e6 * values
            case "concentrated":
                return self._concentrated(values)
            case "clone":
                ally = progress[len(self.keys) - self.scenario.hostile - 1]
                return ally + 0.1 * ally.abs().mean() * torch.randn(ally.shape, generator=self.generator)
            case _:
                return values

    def _concentrated(self, values: Tensor) -> Tensor:
        """Return values with the same signs and norms, but for one reversed block of each larger tensor."""
        made = values.clone()
        for tensor in self.world.named(made).values():
            blocks = tensor.view(-1).split(BLOCK)
            if len(blocks) > 1:
                norm = tensor.norm()
                for other in blocks[1:]:
                    other *= 1e-9
                blocks[0].mul_(-norm / blocks[0].norm())
        return made

    # -- audits ------------------------------------------------------------------------------------------------

    def _audit(self, certificate: Certificate, newest: Certificate) -> None:
        """Make the checks of a record that the newest draws, and those that the newest's reports ask for.

        `protocol.rounds.audit_scheduler` does the same, and does not wait with updates that are always audited.
        """
        branch, rule, stakes = self.branch, self.scenario.defences.rule, self.branch.stakes(certificate)
        convicted = branch.chain.reports_after(certificate.digest).convicted_stake
        following, seeds = branch.chain.reports_after(newest.digest), branch.chain.audit_seeds(certificate.digest)
        due = {
            audit.update: audit.check for audit in due_audits(certificate.record.body, seeds, stakes, rule, convicted)
        }
        for update in certificate.record.body.updates:
            check = due.get(update.digest)
            for auditor in draw_auditors(self._audit_seed(certificate, update), update.author, stakes, rule)[:1]:
                passed = check == "replay" or self._screened(update.author, auditor)
                if check == "loss":
                    passed = self._check(certificate, update, auditor, "loss") and passed
                if check == "replay" or (not passed and rule.replay_rate):
                    self._check(certificate, update, auditor, "replay")
        for report in newest.record.body.reports:
            if report.body.check != "replay" or report.body.passed:
                continue
            about = self.held[report.body.record].certificate
            update = next(u for u in about.record.body.updates if u.digest == report.body.update)
            for key in sorted({*following.auditors_of(report), *following.jury_of(report)} - {report.author}):
                if key in self.keys and key != update.author:
                    self._check(about, update, key, "replay")

    def _audit_seed(self, record: Certificate, update: Signed[UpdateHeader]) -> bytes:
        seed = self.branch.chain.audit_seed(record.digest, update)
        if seed is None:
            raise AssertionError("a loss check of a record that none follows")
        return seed

    def _screened(self, author: PeerKey, by: PeerKey) -> bool:
        """Screen an update of the record before the newest as the product does. Return whether it passed."""
        if not self.scenario.defences.screens or by in self.hostile:
            return True
        began, of_round = process_time(), self.sent[-2]
        updates = [of_round[author], *(blob for key, blob in of_round.items() if key != author)]
        earlier = [list(self.sent[-2 - back].values()) for back in SCREENED_BACK if 1 + back < len(self.sent)]
        scores = compare_blobs(self.world.codec, self.world.profile.vocabulary, updates, earlier, self.chooser)
        self.seconds["screens"] += process_time() - began
        return all(s.passed for s in scores)

    def _check(self, record: Certificate, update: Signed[UpdateHeader], by: PeerKey, check: AuditCheck) -> bool:
        """Make a check, and report it, unless its author is convicted already. Return whether the update passed."""
        if self.branch.chain.is_barred(update.author, self.branch.head):
            return True
        if by in self.hostile:
            return True
        scores = self._scores(self.held[record.digest], update, by, check)
        self.reports.append(self.branch.report(record, update, by, check, scores))
        return all(s.passed for s in scores)

    def _scores(self, held: Held, update: Signed[UpdateHeader], by: PeerKey, check: AuditCheck) -> tuple[Score, ...]:
        name = update.author, check, None if check == "replay" else by
        if (made := held.checks.get(name)) is None:
            made = held.checks[name] = self._made(held, update, by, check)
        scores, cost = made
        self.work[check] += cost
        return scores

    def _made(
        self, held: Held, update: Signed[UpdateHeader], by: PeerKey, check: AuditCheck
    ) -> tuple[tuple[Score, ...], float]:
        """Make a check. Return its scores and its cost."""
        claim, blob, before = _claim(update), held.blobs[update.author], self.judge.cost
        if check == "replay":
            scores = self.judge.replayed(held.state, claim, blob, held.accepted)
        else:
            mine = next((u for u in held.certificate.record.body.updates if u.author == by), None)
            own = None if mine is None else (_claim(mine), held.blobs[by])
            scores = self.judge.loss_checked(held.state, self._audit_seed(held.certificate, update), claim, blob, own)
        return scores, self.judge.cost - before

    def accepted_fakes(self) -> list[tuple[int, PeerKey]]:
        """Return the round and author of each fake that a record lists."""
        return [(n, key) for n, sent in enumerate(self.sent) for key in sent if (n, key) in self.dishonest]

    def credited(self) -> int:
        """Return how many of them are not void."""
        return len(set(self.accepted_fakes()) - self.branch.voided)

    def _note(self, certificate: Certificate, now: int) -> None:
        for decision in certificate.record.body.decisions:
            self.refuted.update(decision.refuted)
            if not decision.convicted:
                continue
            if (self.held[decision.record].number, decision.author) in self.dishonest:
                self.named.setdefault(decision.author, now)
            else:
                self.wronged.add(decision.author)


def _claim(update: Signed[UpdateHeader]) -> ClaimedUpdate:
    return claimed(update.author, update.body.first_window, update.body.end_window)


def measured(scenario: Scenario) -> dict[str, Any]:
    """Play a scenario until the run has its windows. Return its row of the results."""
    swarm = Swarm(scenario)
    profile, branch = scenario.profile, swarm.branch
    total, most = profile.rounds * profile.target, 3 * profile.rounds
    loss, ended, rounds, credited_at_end = None, None, None, None
    try:
        while branch.chain.weight(branch.head) < total and branch.round < most:
            swarm.play()
        loss, rounds, credited_at_end = swarm.world.loss(swarm.state), branch.round, swarm.credited()
        seeks = scenario.defences.replays and scenario.attack not in ("", ABSENT)
        last = scenario.first_attack + NAMED_WITHIN + (scenario.hostile - 1 if scenario.attack == "turns" else 0)
        while seeks and len(swarm.named) < len(swarm.hostile) and branch.round <= last:
            swarm.play()
    except (ChainError, CodecError, FloatingPointError) as e:  # ChainError: ruined peers send the same update
        ended = f"round {branch.round}: {e}"
    honest = [k for k in swarm.keys if k not in swarm.hostile]
    honest_updates = sum(len(sent.keys() & set(honest)) for sent in swarm.sent)
    work = swarm.work
    return {
        "loss": loss, "ended": ended, "rounds": rounds, "rounds_audited": branch.round,
        "named_after": sorted(n - swarm.first_fake[k] for k, n in swarm.named.items()),
        "honest_convicted": len(swarm.wronged), "honest_updates": honest_updates,
        "refuted": len(swarm.refuted), "fakes_accepted": len(swarm.accepted_fakes()),
        "fakes_credited": swarm.credited(), "fakes_credited_at_end": credited_at_end,
        "updates_voided": sum(key in swarm.hostile for _, key in branch.voided),
        "audit_share": (work["loss"] + work["replay"]) / max(1.0, work["trained"]),
        "replay_share": work["replay"] / max(1.0, work["trained"]),
        "screen_share": swarm.seconds["screens"] / swarm.seconds["trained"],
    }  # fmt: skip

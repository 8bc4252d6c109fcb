"""The sizes of the comparison, the attacks and the defences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.convergence.setting import PROFILES
from protocol.audits import AuditRule
from protocol.spec import OuterSpec


@dataclass(frozen=True)
class Profile:
    """A size. `steps`: inner steps of an update, of `batch` windows of `window` tokens each."""

    name: str
    model: Mapping[str, Any]
    vocabulary: int
    window: int
    peers: int
    batch: int
    steps: int
    rounds: int
    """Rounds in which all peers together train the run's tokens."""
    lr: float

    @property
    def windows(self) -> int:
        """Windows of an honest update."""
        return self.steps * self.batch

    @property
    def target(self) -> int:
        """Windows of a round of all peers."""
        return self.peers * self.windows

    @property
    def most(self) -> int:
        """The largest claim that the run allows, in windows."""
        return 4 * self.windows


SWARM = Profile("swarm", PROFILES["many"].model, 512, 64, peers=16, batch=4, steps=6, rounds=20, lr=1e-2)
HOLD_ROUNDS = 32
"""The run's `credit.hold_rounds`: a fake that is found later keeps its credit."""

LARGE = replace(SWARM, steps=160, rounds=HOLD_ROUNDS)
"""Its updates are the largest whose loss checks are as rare as those of small ones. Shorter runs settle no credit."""

TINY = Profile("0.13M", PROFILES["many"].model, 512, 64, peers=4, batch=4, steps=36, rounds=14, lr=1e-2)
SMALL = Profile("1.1M", PROFILES["small"].model, 1024, 128, peers=4, batch=4, steps=36, rounds=14, lr=8e-3)

ATTACKS = {
    "noise": "random signs, at an honest size",
    "copy": "another peer's update of the round before",
    "resend": "its own first update again and again",
    "half": "half of the steps, scaled up",
    "half, spread": "every step on half of its windows",
    "wrong data": "the same few windows again and again",
    "stale": "trained from the state of four rounds before",
    "flip": "its honest update with all signs reversed",
    "flip, largest claim": "the same, with a claim of four times what it trained",
    "huge": "its honest update times -1,000,000",
    "concentrated": "its honest signs, but one reversed block of each larger tensor holds all of its norm",
    "clone": "an honest peer's update of the same round, with a little noise: that peer shows it to them",
    "turns": "`half`, each in its turn; in others' turns it trains honestly",
}
"""The updates that hostile peers send."""

SAVES = {
    "noise": 1.0, "copy": 1.0, "resend": 1.0, "clone": 1.0, "half": 0.5, "half, spread": 0.5, "turns": 0.5,
}  # fmt: skip
"""The part of its training that a fake update saves its author, for attacks that save some."""

ABSENT = "absent"
"""Instead of an attack: the hostile peers are not there."""
NAMED_WITHIN = 30
"""Rounds within which a hostile peer is to be convicted."""


@dataclass(frozen=True)
class Defences:
    """The rules of a run. `weights`: claims are weighed by the record, and capped. `clip`: norms are clipped."""

    weights: bool = True
    clip: bool = True
    screens: bool = True
    loss_checks: bool = True
    replays: bool = True

    @property
    def outer(self) -> Mapping[str, Any]:
        """Fields of the outer step."""
        return {"clip": "median" if self.clip else "none"} | ({} if self.weights else {"weight_cap": 1.0})

    def spec(self, usual: Mapping[str, Any]) -> OuterSpec:
        """Return the outer step of a run."""
        return OuterSpec.model_validate({**usual, **self.outer})

    @property
    def rule(self) -> AuditRule:
        """The rule of audits."""
        usual = AuditRule()
        return replace(
            usual, loss_rate=usual.loss_rate * self.loss_checks, replay_rate=usual.replay_rate * self.replays
        )


DEFENCES = {
    "plain mean": Defences(weights=False, clip=False, screens=False, loss_checks=False, replays=False),
    "weights and clip": Defences(screens=False, loss_checks=False, replays=False),
    "clip alone": Defences(weights=False, screens=False, loss_checks=False, replays=False),
    "all": Defences(),
    "all but weights": Defences(weights=False),
    "all but the clip": Defences(clip=False),
    "all but screens": Defences(screens=False),
    "all but loss checks": Defences(loss_checks=False),
    "all but replays": Defences(replays=False),
}

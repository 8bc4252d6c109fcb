"""Cairn's own rounds, simulated: the trainer's `Inner` and `OuterState`, the run's codec and outer step.

Only the network and the clock are simulated. Every peer's update arrives, and a round's updates are applied `overlap`
ticks after they were announced. A tick is the time of one inner step of the fastest peer. Peers may be
slow, hold data of their own, die and be replaced, or come late; the round's end and the weights are by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.convergence.fleet import Fleet
from benchmarks.convergence.method import Method
from benchmarks.convergence.replica import Replica, split
from benchmarks.convergence.setting import Setting
from peer.training.offload import Offload
from peer.training.outer_state import OuterState
from protocol.codec import make_codec
from protocol.layout import is_outer_tensor
from protocol.outer import Contribution, apply
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import CodecSpec, OuterSpec
from protocol.state import state_layout
from protocol.untransmitted import untransmitted

COMMITTEE = 3
"""Members who reduce a part."""


@dataclass(frozen=True)
class Conditions:
    """The behaviour of volunteers. The default is four alike who stay.

    `speeds`: inner steps a tick, one for each peer, at most 1. `own_data`: each peer has one president's addresses.
    `churn`: the chance that a peer dies in a round, all that it has not announced lost; a stranger takes its place
    `away` rounds later. `late`: how many peers come only when half of the tokens are trained.
    """

    speeds: tuple[float, ...] = ()
    own_data: bool = False
    churn: float = 0.0
    away: int = 1
    late: int = 0

    @property
    def alike(self) -> bool:
        """All peers take every step together, from first to last."""
        return not self.churn and not self.late and all(s == 1.0 for s in self.speeds)


class Peer:
    """One volunteer: a replica and its outer side; `waiting` is what it has trained and not announced, in windows."""

    def __init__(self, swarm: Cairn, number: int):
        self.number = number
        self.replica = None if swarm.fleet else Replica(swarm.setting, swarm.lr, optimizer=swarm.inner)
        local = self.replica.tensors if self.replica else swarm.fleet.tensors(number) if swarm.fleet else {}
        self.side = OuterState(local, swarm.codec, swarm.codec_spec.beta, swarm.outer, Offload(swarm.setting.device))
        self.counter = 0
        self.waiting = 0
        self.due = 0.0
        self.back_in = 0
        self.load(swarm.base)

    def load(self, base: dict[str, Tensor]) -> None:
        """Continue from this state."""
        self.side.base = base
        self.side.rebase()


class Cairn(Method):
    """`h`: inner steps of a peer of full speed that fill a round. `overlap`: ticks from announcing to applying.

    `reduce`: rounds are reduced, in a part for each peer.
    """

    def __init__(
        self,
        setting: Setting,
        lr: float,
        *,
        h: int = 10,
        k: int = 64,
        kind: str = "sparse",
        beta: float = 0.95,
        outer: Mapping[str, Any] | None = None,
        overlap: int = 0,
        inner: str = "adamw",
        reduce: bool = False,
        conditions: Mapping[str, Any] | None = None,
    ):
        super().__init__(setting)
        self.lr, self.h, self.overlap, self.inner = lr, h, overlap, inner
        self.codec_spec = CodecSpec.model_validate({"kind": kind, "k": k, "beta": beta})
        self.outer = OuterSpec.model_validate({"optimizer": "plain", **(outer or {})})
        self.codec = make_codec(self.codec_spec, setting.layout)
        self.reduction = Reduction(self.codec) if reduce else None
        self.conditions = Conditions(**(conditions or {}))
        self.chance = np.random.default_rng(setting.seed)
        self.fleet = Fleet(setting, lr, setting.profile.peers, inner) if self.conditions.alike else None
        """All replicas at once, when all peers step at once."""
        first = self.fleet.row(0) if self.fleet else Replica(setting, lr).flat
        self.base: dict[str, Tensor] = {n: t.clone() for n, t in split(setting.layout, first).items()}
        for t in state_layout(setting.layout, self.outer).tensors:
            if is_outer_tensor(t.name):
                self.base[t.name] = torch.zeros(t.shape, device=setting.device)
        self.peers = [Peer(self, p) for p in range(setting.profile.peers - self.conditions.late)]
        self.strangers = setting.profile.peers
        self.accepted = 0
        """Windows."""
        self.announced: tuple[int, list[Contribution]] | None = None
        """(when they are applied, the updates of the round that is under way)."""
        self.tick = 0

    # A step of the comparison is one global batch; when peers are slow, it takes several ticks.
    def step(self, number: int) -> None:
        target = (number + 1) * self.setting.profile.batch * self.setting.profile.peers
        while self.accepted + self._under_way() + sum(p.waiting for p in self.peers) < target:
            self._tick()
        waiting = sum(p.waiting for p in self.peers)
        if self.announced is None and waiting >= self.h * self.setting.profile.batch * self.setting.profile.peers:
            self._announce()
            if not self.overlap:
                self._apply()

    def _under_way(self) -> int:
        return sum(c.windows for c in self.announced[1]) if self.announced else 0

    def _tick(self) -> None:
        self.tick += 1
        if self.announced and self.tick > self.announced[0]:
            self._apply()
        profile = self.setting.profile
        trained = self.accepted + self._under_way() + sum(p.waiting for p in self.peers)
        factor = self.setting.factor(min(1.0, (trained / (profile.batch * profile.peers) + 0.5) / profile.steps))
        for peer in self.peers:
            peer.due += 0.0 if peer.back_in else self._speed(peer)
        ready = [peer for peer in self.peers if peer.due >= 1.0]
        batches = [
            self.setting.windows(p.number, p.counter, profile.batch, own_data=self.conditions.own_data) for p in ready
        ]
        if self.fleet:
            self.fleet.step(torch.stack(batches), factor)
        for peer, windows in zip(ready, batches, strict=True):
            if peer.replica:
                peer.replica.step(windows, factor)
            peer.due -= 1.0
            peer.counter += profile.batch
            peer.waiting += profile.batch

    def _speed(self, peer: Peer) -> float:
        speeds = self.conditions.speeds
        return speeds[peer.number % len(speeds)] if speeds else 1.0

    def _announce(self) -> None:
        made = []
        for peer in self.peers:
            if peer.waiting:
                made.append(Contribution(self.setting.key(peer.number), peer.waiting, peer.side.announce()))
                peer.waiting = 0
        self.announced = (self.tick + self.overlap, made)
        size = self.codec.size * len(made) / self.setting.profile.peers
        if self.reduction is None:
            self.gathered(size, waits=not self.overlap)
        else:
            peers = self.setting.profile.peers
            sums = sum(self.reduction.size(peers, shard) for shard in range(peers))
            self.reduced(size, sums, COMMITTEE, waits=not self.overlap)

    def _apply(self) -> None:
        if self.announced is None:
            return
        _, updates = self.announced
        self.announced = None
        if self.reduction is None:
            apply(self.base, updates, self.codec, self.outer)
        else:
            self._apply_reduced(self.reduction, updates)
        self.accepted += sum(u.windows for u in updates)
        for peer in self.peers:
            peer.load(self.base)
        self._people_come_and_go()

    def _apply_reduced(self, by: Reduction, updates: list[Contribution]) -> None:
        count = self.setting.profile.peers
        sums = [by.reduce(updates, self.outer, count, part) for part in range(count)]
        apply_reduced(self.base, sums, by, self.outer)
        made = {u.author: bytes(u.blob) for u in updates}
        for peer in self.peers:
            blob = made.get(self.setting.key(peer.number))
            if blob is not None and (left := untransmitted(blob, sums, by)) is not None:
                peer.side.add_back(blob, left.to_bytes())

    def _people_come_and_go(self) -> None:
        there, profile = self.conditions, self.setting.profile
        for i, peer in enumerate(self.peers):
            if peer.back_in:
                peer.back_in -= 1
                if not peer.back_in:
                    self.peers[i] = Peer(self, self.strangers)
                    self.strangers += 1
            elif there.churn and self.chance.random() < there.churn:
                peer.back_in, peer.waiting = there.away, 0
        half = profile.steps * profile.batch * profile.peers / 2
        if len(self.peers) < profile.peers and self.accepted >= half:
            self.peers += [Peer(self, len(self.peers) + i) for i in range(profile.peers - len(self.peers))]

    def finish(self) -> None:
        self._apply()
        if any(peer.waiting for peer in self.peers):
            self._announce()
            self._apply()

    def state(self) -> Tensor:
        return torch.cat([self.base[t.name].reshape(-1) for t in self.setting.layout.tensors])

"""Sparse averaging with every detail a choice: what the defaults were found with.

With its defaults it equals `swarm` with the run's codec. It works on flat vectors and promises neither bits nor
bytes, so that a choice can be tried before it is built. A test holds that the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.convergence import blocks
from benchmarks.convergence.fleet import Fleet
from benchmarks.convergence.method import Method
from benchmarks.convergence.setting import Setting
from peer.training.muon import MOMENTUM
from protocol.layout import BLOCK
from protocol.outer import mean_weights
from protocol.spec import OuterSpec

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class Choice:
    """`power`: the mean of a coordinate is sum(w v) / (sum of the senders' w) ** power: 0 over all, 1 over senders.

    `density`: (share of the training done, k) from which on k holds instead. `score`: coordinates are chosen by
    magnitude, or by magnitude over the root of AdamW's second moment. `forget`: the inner optimizer is reset each
    round. `fragments`: each h / fragments steps another part of the tensors is sent (streaming, arXiv 2501.18512).
    `keep`: the share of what was learnt during the overlap that stays after a rebase. `h_late`: (share, h) as density.
    `carry`: the share of its error feedback that a peer's own model keeps after a round. The peer then trains on from
    its own progress, sent or not, and not from the common state. `absorb`: the fate of a peer's feedback for a
    coordinate that only others moved. It stays ("none"), is dropped ("drop"), or shrinks by their movement in its own
    direction ("same"). `embedding_k`: the number of coordinates that are sent of each block of the embedding, in 2
    bits; 0: as elsewhere. `restore`: each tensor's mean gets the mean of the updates' norms (arXiv 2604.21428).
    `outer_late`: (share, outer_lr) as density. `lead`: the number of first rounds in which the first peer's update
    alone counts. `muon_momentum`: of the inner Muon. `misses`: the chance that a round is decided without an update.
    Its values then return to the error feedback: "whole", as the next announcement decays neither them nor what was
    left, "decayed", or "never" (`returns`). The next update claims the windows of both. `hostile`: the share of peers
    who send their update negated and ten times as large. `aggregation`: the "mean", or what is to stand hostile
    updates. "majority" is the sign of most, as large as the mean of magnitudes. "trimmed" leaves out the largest and
    smallest quarter of each coordinate. "centred" moves the last round's mean by those differences from it, cut to
    their median norm (arXiv 2012.10333).
    """

    h: int = 10
    k: int = 64
    beta: float = 0.95
    power: float = 1.0
    outer_lr: float = 1.0
    momentum: float = 0.0
    clip: bool = True
    quantiser: str = "2 levels"
    transform: str = "none"
    score: str = "magnitude"
    density: tuple[tuple[float, int], ...] = ()
    h_late: tuple[tuple[float, int], ...] = ()
    forget: bool = False
    fragments: int = 1
    overlap: int = 0
    keep: float = 1.0
    carry: float = 0.0
    absorb: str = "none"
    inner: str = "adamw"
    embedding_k: int = 0
    restore: bool = False
    outer_late: tuple[tuple[float, float], ...] = ()
    lead: int = 0
    muon_momentum: float = MOMENTUM
    misses: float = 0.0
    returns: str = "whole"
    hostile: float = 0.0
    aggregation: str = "mean"


class Variant(Method):
    """See Choice. All peers are alike and stay."""

    def __init__(self, setting: Setting, lr: float, **choice):
        super().__init__(setting)
        self.c = Choice(**choice)
        peers = setting.profile.peers
        self.fleet = Fleet(setting, lr, peers, self.c.inner)
        if self.fleet.muon is not None:
            self.fleet.muon.optimizer.momentum = self.c.muon_momentum
        self.base = self.fleet.row(0).clone()
        self.velocity = torch.zeros_like(self.base)
        self.limits: dict[int, Tensor] = {}
        """By fragment."""
        self.anchor = self.base.repeat(peers, 1)
        self.e = torch.zeros_like(self.anchor)
        self.groups = _fragments(blocks.groups(setting.layout, setting.device), self.c.fragments)
        self.embedding = torch.tensor(["embed" in t.name for t in setting.layout.tensors]).to(setting.device)
        self.turn = 0
        self.since = 0
        self.pending: tuple[int, list[tuple[blocks.Group, Tensor, Tensor]]] | None = None
        self.centre = torch.zeros_like(self.base)
        """The last round's aggregate, which "centred" moves."""
        self.owed, self.weighed = torch.zeros(len(self.groups), peers), torch.ones(len(self.groups), peers)
        """Of each fragment, a peer's rounds that are not weighed yet, and the weight of its last accepted update."""
        self.generator = torch.Generator().manual_seed(setting.seed)

    def step(self, number: int) -> None:
        profile = self.setting.profile
        if self.pending and number >= self.pending[0]:
            self._apply()
        h = _at(self.c.h_late, number / profile.steps, self.c.h) / self.c.fragments
        factor = self.setting.factor((number + 0.5) / profile.steps)
        self.fleet.step(self.setting.global_batch(number), factor)
        self.since += 1
        if self.since >= h and self.pending is None:
            self._announce(number + 1)
            if not self.c.overlap:
                self._apply()

    def _announce(self, now: int) -> None:
        self.since = 0
        k = _at(self.c.density, now / self.setting.profile.steps, self.c.k)
        fragment = self.groups[self.turn % len(self.groups)]
        self.turn += 1
        sent, size = [], 0
        for group in fragment:
            here, local = group.at, self.fleet.flat
            self.e[:, here] = self.c.beta * self.e[:, here] + self.anchor[:, here] - local[:, here]
            self.anchor[:, here] = local[:, here]
            rows = blocks.transformed(self.e[:, group.at], self.c.transform)
            decoded, mask = self._compressed(rows, group, k, self.c.quantiser)
            if self.c.embedding_k:
                there = self.embedding[group.tensor]
                its = self._compressed(rows[:, there], group.only(there), self.c.embedding_k, "2 levels")
                decoded[:, there], mask[:, there] = its
                size += int(there.sum()) * (blocks.block_bytes(group.width, self.c.embedding_k, "2 levels")
                                            - blocks.block_bytes(group.width, k, self.c.quantiser))  # fmt: skip
            left = blocks.transformed(rows - decoded, self.c.transform, back=True)
            self.e[:, group.at] = left
            sent.append((group, decoded, mask))
            size += len(group.at) * blocks.block_bytes(group.width, k, self.c.quantiser)
        self.pending = (now + self.c.overlap, sent)
        self.gathered(size, waits=not self.c.overlap)

    def _compressed(self, rows: Tensor, group: blocks.Group, k: int, quantiser: str) -> tuple[Tensor, Tensor]:
        """fp32 [peers, blocks, width] as a decoder sees it, and what was sent of it (bool)."""
        peers, count, width = rows.shape
        kept = -(-width * k // BLOCK)
        flat = rows.reshape(-1, width)
        score = flat.abs()
        if self.c.score == "moment":
            moments = self.fleet.second_moments()[:, group.at]
            score = score / (moments.reshape(-1, width).sqrt() + 1e-12)
        at = score.topk(kept, dim=1).indices
        values = blocks.quantised(flat.gather(1, at), quantiser, self.generator)
        decoded = torch.zeros_like(flat).scatter_(1, at, values)
        mask = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, at, True)
        return decoded.view(rows.shape), mask.view(rows.shape)

    def _apply(self) -> None:
        if self.pending is None:
            return
        now, sent = self.pending
        self.pending = None
        if self.turn <= self.c.lead:
            sent = [(group, decoded[:1], mask[:1]) for group, decoded, mask in sent]
        sent, weights = self._decided(self._as_sent(sent))
        outer_lr = _at(self.c.outer_late, now / self.setting.profile.steps, self.c.outer_lr)
        for group, mean in self._means(sent, weights):
            here, mask = group.at, next(m for g, _, m in sent if g is group)
            if self.c.momentum:
                self.velocity[here] = self.c.momentum * self.velocity[here] + mean
                mean = mean + self.c.momentum * self.velocity[here]
            mean = outer_lr * mean
            self.base[here] -= mean
            if self.c.absorb != "none":
                left = self.e[:, here]
                stays = (mean == 0) | (mask if self.c.absorb != "same, own too" else False)
                self.e[:, here] = torch.where(stays, left, _absorbed(left, mean, self.c.absorb))
            progress = self.fleet.flat[:, here] - self.anchor[:, here]
            start = self.base[here] - self.c.carry * self.e[:, here]
            self.fleet.flat[:, here] = start + self.c.keep * progress
            self.anchor[:, here] = start
        if self.c.forget:
            self.fleet.forget_moments()

    def _as_sent(
        self, made: Sequence[tuple[blocks.Group, Tensor, Tensor]]
    ) -> list[tuple[blocks.Group, Tensor, Tensor]]:
        """Return the updates as they are sent: those of the hostile negated, and ten times as large."""
        peers = len(made[0][1])
        factors = torch.ones(peers, 1, 1, device=self.base.device)
        factors[: round(self.c.hostile * peers)] = -10.0
        return [(group, decoded * factors, mask) for group, decoded, mask in made]

    def _decided(
        self, sent: Sequence[tuple[blocks.Group, Tensor, Tensor]]
    ) -> tuple[list[tuple[blocks.Group, Tensor, Tensor]], Tensor]:
        """Return the updates that did not miss their round, and their shares of the mean: fp32 [updates]."""
        peers, fragment = len(sent[0][1]), (self.turn - 1) % len(self.groups)
        if not self.c.misses:
            return list(sent), torch.full((peers,), 1 / peers, device=self.base.device)
        owed, weighed = self.owed[fragment], self.weighed[fragment]
        owed += 1
        there = torch.rand(peers, generator=self.generator) >= self.c.misses
        if not there.any():
            there[:] = True
        # As in the product until 2b2603aa: at most twice the last weight, at most the cap's share, the rest later.
        weighed[there] = torch.minimum(owed[there], 2 * weighed[there])
        owed[there] -= weighed[there]
        shares = mean_weights([int(w) for w in weighed[there]], OuterSpec().weight_cap)
        for group, decoded, _ in sent:
            left = self.e[~there]
            if self.c.returns == "never":
                owed[~there] = 0
            else:
                left[:, group.at] += blocks.transformed(decoded[~there], self.c.transform, back=True)
            if self.c.returns == "whole":
                left[:, group.at] /= self.c.beta
            self.e[~there] = left
        weights = torch.tensor(shares, device=self.base.device)
        return [(group, decoded[there], mask[there]) for group, decoded, mask in sent], weights

    def _means(
        self, sent: Sequence[tuple[blocks.Group, Tensor, Tensor]], weights: Tensor
    ) -> list[tuple[blocks.Group, Tensor]]:
        """Return each group's mean of the updates, fp32 [blocks, width]."""
        shares = weights[:, None, None]
        factors = self._clip(sent)
        tensors = len(self.setting.layout.tensors)
        wanted, found = (torch.zeros(rows, tensors, device=self.base.device) for rows in (len(factors), 1))
        means = []
        for group, decoded, mask in sent:
            values = decoded * factors[:, group.tensor, None] if self.c.clip else decoded
            if self.c.aggregation == "mean":
                senders = ((mask & (decoded != 0)) * shares).sum(0)
                mean = (values * shares).sum(0) / senders.clamp(min=float(weights.min())) ** self.c.power
            else:
                mean = aggregate(self.c.aggregation, values, self.centre[group.at], group.tensor, tensors)
                self.centre[group.at] = mean
            means.append((group, blocks.transformed(mean, self.c.transform, back=True)))
            wanted.index_add_(1, group.tensor, values.square().sum(2))
            found.index_add_(1, group.tensor, mean.square().sum(1)[None, :])
        if not self.c.restore:
            return means
        scale = wanted.sqrt().mean(0) / found[0].sqrt().clamp(min=1e-30)
        return [(group, mean * scale[group.tensor, None]) for group, mean in means]

    def _clip(self, sent: Sequence[tuple[blocks.Group, Tensor, Tensor]]) -> Tensor:
        """Return the factors that bring each peer's update of a tensor to the limit: fp32 [peers, tensors].

        The limit is the lower median norm, within a factor 2 of the limit of the fragment's last round.
        """
        energies = torch.zeros(len(sent[0][1]), len(self.setting.layout.tensors), device=self.base.device)
        for group, decoded, _ in sent:
            energies.index_add_(1, group.tensor, decoded.square().sum(2))
        norms = energies.sqrt()
        limit = norms.sort(0).values[(len(norms) - 1) // 2]
        fragment = (self.turn - 1) % len(self.groups)
        if (before := self.limits.get(fragment)) is not None:
            bounded = torch.minimum(torch.maximum(limit, before / 2), 2 * before)
            limit = torch.where(before > 0, bounded, limit)
        self.limits[fragment] = limit
        return (limit / norms.clamp(min=1e-30)).clamp(max=1.0)

    def finish(self) -> None:
        self._apply()
        for _ in self.groups:
            if self.since or len(self.groups) > 1:
                self._announce(self.setting.profile.steps)
                self._apply()

    def state(self) -> Tensor:
        return self.base


def aggregate(how: str, values: Tensor, centre: Tensor, tensor: Tensor, tensors: int) -> Tensor:
    """Return what stands for the updates, fp32 [blocks, width], of fp32 [peers, blocks, width]: see Choice.

    `centre` has the last one, `tensor` each block's tensor of `tensors`.
    """
    if how == "majority":
        return values.sign().sum(0).sign() * values.abs().mean(0)
    if how == "trimmed":
        out = max(1, len(values) // 4)
        return values.sort(0).values[out:-out].mean(0)
    if how != "centred":
        raise ValueError(f"aggregation {how!r}: want mean, majority, trimmed or centred")
    apart = values - centre
    energies = torch.zeros(len(values), tensors, device=values.device)
    norms = energies.index_add_(1, tensor, apart.square().sum(2)).sqrt()
    cut = (norms.median(0).values / norms.clamp(min=1e-30)).clamp(max=1.0)
    return centre + (apart * cut[:, tensor, None]).mean(0)


def _absorbed(left: Tensor, moved: Tensor, how: str) -> Tensor:
    """Return the feedback of coordinates that were not sent, after others moved them by `moved`."""
    if how == "drop":
        return torch.zeros_like(left)
    if not how.startswith("same"):
        raise ValueError(f"absorb {how!r}: want none, drop, same, or same, own too")
    sign = left.sign()
    return left - sign * torch.minimum(left.abs(), (moved * sign).clamp(min=0))


def _fragments(found: Sequence[blocks.Group], parts: int) -> list[list[blocks.Group]]:
    """Return the groups in `fragments` parts, each with an equal share of every width's blocks."""
    if parts == 1:
        return [list(found)]
    return [[blocks.Group(g.width, g.at[i::parts], g.tensor[i::parts]) for g in found if len(g.at) > i]
            for i in range(parts)]  # fmt: skip


def _at(steps: Sequence[tuple[float, Value]], done: float, before: Value) -> Value:
    """Return the value that applies after this share of the training."""
    for share, value in steps:
        if done >= share:
            before = value
    return before

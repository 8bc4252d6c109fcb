"""A straight-line replay of a replayable run's update, from public values alone.

It shares the inner steps (`InnerOptimizer`), the codec and the outer step (`apply`) with the trainer, and none of the
trainer's own state. So it says what an update has to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf, sqrt
from pathlib import Path

import torch
from torch import Tensor

from peer.channel import RoundUpdates, UpdateMade
from peer.training.data import WindowReader
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.schedule import factor
from protocol.assignment import windows_of
from protocol.codec import make_codec
from protocol.ids import Digest, PeerKey
from protocol.layout import REFERENCE_NORMS
from protocol.model import build_model, parameters_of
from protocol.outer import Contribution, apply
from protocol.state import state_layout, tensors_from_checkpoint
from tests.support.trainer_world import World

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Claim:
    """The windows of an update, as its header names them."""

    first: int
    rebase: int
    end: int

    @classmethod
    def of(cls, made: UpdateMade) -> Claim:
        return cls(made.first_window, made.rebase_window, made.end_window)


class Replay:
    """The public values of a run up to some round: its world, and the records so far, in order."""

    def __init__(self, world: World, rounds: Sequence[RoundUpdates]):
        self.world, self.rounds = world, list(rounds)
        self.spec = world.spec
        self.codec = make_codec(self.spec.codec, self.spec.model.layout)
        shard = self.spec.data.train[0].digest
        files = {Digest.parse(shard): world.folder / f"{shard}.tokens"}
        self.reader = WindowReader(self.spec.data, files, report=lambda text: None)

    def update(self, author: PeerKey, claim: Claim, *, data_of: PeerKey | None = None) -> bytes:
        """Return the blob that an update with this claim, after the last record, must have.

        `data_of`: the key whose windows are trained, by default the author.
        """
        model = build_model(self.spec.model.config, device=CPU)
        inner = InnerOptimizer(self.spec.inner, model, CPU)
        local = parameters_of(model)
        windows = data_of or author
        with torch.no_grad():
            if claim.rebase == claim.first:
                state, accepted = self.state(len(self.rounds))
                anchor = {n: state[n].clone() for n in local}
                put(local, anchor)
            else:
                state, accepted = self.state(len(self.rounds) - 1)
                own = next(u for u in self.rounds[-1].updates if u.author == author)
                anchor = self.less(state, own.blob)
                put(local, anchor)
        self.train(inner, windows, claim.first, claim.rebase, accepted)
        if claim.rebase != claim.first:
            state, accepted = self.state(len(self.rounds))
            with torch.no_grad():
                for name, values in local.items():
                    values.copy_((values - anchor[name]) + state[name])
            anchor = {n: state[n].clone() for n in local}
        self.train(inner, windows, claim.rebase, claim.end, accepted)
        with torch.no_grad():
            return self.codec.with_author(self.codec.encode({n: anchor[n] - local[n] for n in local}), author)

    def state(self, rounds: int) -> tuple[dict[str, Tensor], int]:
        """Return the state after this number of records, and the windows accepted until then."""
        data = bytearray(self.world.genesis.read_bytes())
        layout = state_layout(self.spec.model.layout, self.spec.outer)
        state = {n: t.clone() for n, t in tensors_from_checkpoint(layout, data).items()}
        for record in self.rounds[:rounds]:
            apply(
                state,
                [Contribution(u.author, u.windows, u.blob.read_bytes()) for u in record.updates],
                self.codec,
                self.spec.outer,
            )
        return state, sum(u.windows for record in self.rounds[:rounds] for u in record.updates)

    def less(self, state: Mapping[str, Tensor], blob: Path, *, clips: bool = True) -> dict[str, Tensor]:
        """Return a state's parameters less an update as decoded, with norms of at most twice the references."""
        decoded = {t.name: torch.zeros(t.shape) for t in self.spec.model.layout.tensors}
        self.codec.add_to(blob.read_bytes(), decoded)
        references = state[REFERENCE_NORMS].tolist() if clips else [inf] * len(decoded)
        for values, reference in zip(decoded.values(), references, strict=True):
            norm = sqrt(fsum(values.flatten().double().square().tolist()))
            if norm > 2 * reference:
                values *= torch.tensor(2 * reference / norm, dtype=torch.float64).float()
        return {n: state[n] - d for n, d in decoded.items()}

    def train(self, inner: InnerOptimizer, key: PeerKey, first: int, end: int, accepted: int) -> None:
        """Make the steps on these windows of a key. `accepted`: windows that the chain of the state has accepted."""
        batch = self.spec.inner.batch
        middle = accepted * self.spec.data.window + self.spec.round.target_tokens / 2
        for counter in range(first, end, batch):
            indices = windows_of(self.spec.seed, key, counter, batch, total=self.reader.total)
            step = inner.forward_backward(self.reader.read(indices))
            assert step is not None
            inner.set_rate(factor(self.spec.inner.schedule, middle))
            inner.optimizer_step(step)

    def agreement(self, one: bytes, other: bytes) -> float:
        """Return the share of values whose signs are equal in two updates."""
        return float((self.signs(one) == self.signs(other)).float().mean())

    def signs(self, blob: bytes) -> Tensor:
        decoded = {t.name: torch.zeros(t.shape) for t in self.spec.model.layout.tensors}
        self.codec.add_to(blob, decoded)
        return torch.cat([t.flatten().sign() for t in decoded.values()])


def put(local: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in local.items():
        tensor.copy_(values[name])

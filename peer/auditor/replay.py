"""The replay: an update is trained again from public values, and compared with the author's bit by bit.

In a replayable run an update is a function of its author's key, its windows, two certified states and the author's
update in the record before (docs/trainer.md). So an honest one is found again, up to how devices round. Steps are the
trainer's own: `InnerOptimizer` and `OuterState`.

`signs` is the share of equal signs. Rows of an embedding whose tokens did not come had no gradient: weight decay alone
decides their signs, which anybody can foresee. An author chooses each block's magnitude, so a few large blocks can
outweigh all others, whose signs are right. So it is the least of three shares: of all values, of those without these
rows, and of all values by their energy in their tensor, as announced. `scale` is the like of the blocks' norms, of the
tensor that differs most: the root of the sum of the smaller energies over that of the larger.

CPUs train in fp32 and GPUs in bf16, which grows apart: after 48 steps of Muon 94% of signs were equal. So an update
that fails is replayed in the other precision, too. The better of both counts, and how far the two replays are apart
says how much an honest update may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.auditor.bf16_products import Bf16Products
from peer.auditor.job import ClaimedUpdate, Rebase
from peer.errors import AuditError, UncheckableUpdate
from peer.training.data import WindowReader
from peer.training.inner_optimizer import StepResult
from peer.training.round_files import RoundFiles
from peer.training.schedule import replayable_factor
from peer.training.single_process import SingleProcessBackend
from peer.training.step_loop import MAX_NON_FINITE, MAX_SKIPPED
from protocol.assignment import windows_of
from protocol.codec import Codec
from protocol.messages import Score
from protocol.spec import RunSpec

SIGNS, SCALE = 0.97, 0.8
"""Thresholds of an update that one replay finds again."""

DEVIATIONS = 1.5
"""An honest update differs at most by this times the difference of two replays in different precisions."""

LEAST_SIGNS = 0.75
"""If an honest update could differ more than that, a replay does not show that an update is one."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The blob that an honest author announces. `rows`: as by `InnerOptimizer.rows_with_gradient`."""

    blob: bytes
    rows: Mapping[str, Tensor]
    is_work: bool = True
    """False: a trainer announces no such update. Steps that were skipped are MAX_NON_FINITE in a row or too many."""


@dataclass(slots=True)
class _Steps:
    """The steps of a replay: all, those that changed nothing, and how many of these came last in a row."""

    made: int = 0
    skipped: int = 0
    in_a_row: int = 0

    @property
    def is_work(self) -> bool:
        return self.in_a_row < MAX_NON_FINITE and self.skipped <= self.made * MAX_SKIPPED

    def count(self, step: StepResult) -> None:
        self.made += 1
        self.skipped += step.is_skipped
        self.in_a_row = self.in_a_row + 1 if step.is_skipped else 0


def replay(
    spec: RunSpec,
    backend: SingleProcessBackend,
    reader: WindowReader,
    files: RoundFiles,
    update: ClaimedUpdate,
    accepted_windows: int,
    rebase: Rebase | None,
) -> Replayed:
    """Return the update that an honest author announces.

    The backend's base is the state that the author's first step began with. `accepted_windows`: those of all peers up
    to it. Raises CodecError, DataError, AuditError, TrainingError and OSError.
    """
    outer, first, steps = backend.outer, update.first_window, _Steps()
    if rebase is None:
        backend.begin_again(None)
    else:
        contributions = files.contributions(rebase.round)
        before = next((bytes(c.blob) for c in contributions if c.author == update.author), None)
        if before is None:
            raise AuditError("the update began before its state, and the record before has no update of its author")
        backend.begin_again(before)
        _train(spec, backend, reader, update, first, update.rebase_window, accepted_windows, steps)
        outer.advance(contributions)
        outer.rebase()
        first, accepted_windows = update.rebase_window, rebase.accepted_windows
    _train(spec, backend, reader, update, first, update.end_window, accepted_windows, steps)
    return Replayed(bytes(outer.announce()), backend.inner.rows_with_gradient(), steps.is_work)


def _train(
    spec: RunSpec,
    backend: SingleProcessBackend,
    reader: WindowReader,
    update: ClaimedUpdate,
    first: int,
    end: int,
    accepted_windows: int,
    steps: _Steps,
) -> None:
    """Make the steps over the author's windows [first, end), and count them. End after MAX_NON_FINITE skipped ones."""
    inner, batch = backend.inner, spec.inner.batch
    tokens = accepted_windows * spec.data.window_tokens
    inner.set_rate(replayable_factor(spec.inner.schedule, tokens, spec.round.target_tokens))
    for counter in range(first, end, batch):
        if steps.in_a_row >= MAX_NON_FINITE:
            break
        windows = reader.read(windows_of(spec.seed, update.author, counter, batch, reader.total))
        with Bf16Products() if inner.in_bf16 and inner.device.type == "cpu" else nullcontext():
            step = inner.forward_backward(windows)
            if step is not None:
                inner.optimizer_step(step)
                steps.count(step)


_Likeness = Callable[[Codec, bytes, Replayed], float]


def compare(codec: Codec, announced: bytes, replays: Sequence[Replayed]) -> tuple[Score, ...]:
    """Return the scores of an announced update beside its replay, by ascending name. Raises CodecError.

    `replays`: one, or one of each precision. A replay that is no work has nothing to compare with: the scores are
    0 if none is. Raises UncheckableUpdate when two are so far apart that they do not tell an honest update from others.
    """
    codec.check(announced)
    replays = [r for r in replays if r.is_work]
    if not replays:
        return Score("scale", 0.0, SCALE), Score("signs", 0.0, SIGNS)
    scale, signs = (max(like(codec, announced, replayed) for replayed in replays) for like in (_scale, _signs))
    least_scale, least_signs = SCALE, SIGNS
    if len(replays) > 1:
        least_scale, least_signs = _least(_scale, SCALE, codec, replays), _least(_signs, SIGNS, codec, replays)
        if least_signs < LEAST_SIGNS and signs >= least_signs:
            raise UncheckableUpdate(
                "replays in fp32 and in bf16 are too far apart: the update has too many steps to compare"
            )
    return Score("scale", scale, least_scale), Score("signs", signs, least_signs)


def _least(like: _Likeness, usual: float, codec: Codec, replays: Sequence[Replayed]) -> float:
    """Return the threshold by how much two replays are like each other."""
    first, second = replays
    return max(0.0, min(usual, 1 - DEVIATIONS * (1 - like(codec, first.blob, second))))


def _signs(codec: Codec, announced: bytes, replayed: Replayed) -> float:
    """Return the share of equal signs: of all values, of those that had a gradient, or by energy, the least."""
    equal = counted = equal_of_these = 0
    by_energy = 0.0
    for index, tensor in enumerate(codec.layout.tensors):
        one, two = codec.decode_tensor(announced, index).values, codec.decode_tensor(replayed.blob, index).values
        same = torch.signbit(one) == torch.signbit(two)
        equal += int(same.sum())
        energies = one.square()
        energy, same_energy = _total(energies), _total(energies.mul_(same))
        by_energy += tensor.numel * (same_energy / energy if energy else 1.0)
        if (rows := replayed.rows.get(tensor.name)) is not None:
            same = same.view(len(rows), -1)[rows]
        counted += same.numel()
        equal_of_these += int(same.sum())
    numel = codec.layout.numel
    return min(equal / numel, by_energy / numel, equal_of_these / max(1, counted))


def _total(values: Tensor) -> float:
    """Return a sum of fp32 values in fp64. In pieces: torch makes an fp64 copy of what it adds."""
    return sum(float(piece.sum(dtype=torch.float64)) for piece in values.split(2**20))


def _scale(codec: Codec, announced: bytes, replayed: Replayed) -> float:
    """Return how alike the norms of two updates' blocks are, of the tensor that differs most."""
    smaller, larger = ([0.0] * len(codec.layout.tensors) for _ in range(2))
    pairs = zip(codec.block_sum_squares(announced), codec.block_sum_squares(replayed.blob), strict=True)
    for (index, ones), (_, twos) in pairs:
        smaller[index] += sum(map(min, ones, twos))
        larger[index] += sum(map(max, ones, twos))
    return min((a / b) ** 0.5 if b else 1.0 for a, b in zip(smaller, larger, strict=True))

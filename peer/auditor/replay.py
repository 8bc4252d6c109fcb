"""The replay: an update is trained again from public values, and compared with the author's bit by bit.

In a replayable run an update is a function of its author's key, its windows, two certified states and the author's
update in the record before (docs/trainer.md). So an honest one is found again, up to the order in which devices add
numbers. Steps are the trainer's own: `InnerOptimizer` and `OuterState`.

`signs` is the share of equal signs. `scale` is, of the tensor that differs most, the smaller norm over the larger.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from peer.auditor.job import ClaimedUpdate, Rebase
from peer.errors import AuditError
from peer.training.data import WindowReader
from peer.training.round_files import RoundFiles
from peer.training.schedule import replayable_factor
from peer.training.single_process import SingleProcessBackend
from protocol.assignment import windows_of
from protocol.codec import Codec
from protocol.messages import Score
from protocol.spec import RunSpec

SIGNS, SCALE = 0.97, 0.8
"""Thresholds."""


def replay(
    spec: RunSpec,
    backend: SingleProcessBackend,
    reader: WindowReader,
    files: RoundFiles,
    update: ClaimedUpdate,
    accepted_windows: int,
    rebase: Rebase | None,
) -> bytes:
    """Return the blob that an honest author announces.

    The backend's base is the state that the author's first step began with. `accepted_windows`: those of all peers up
    to it. Raise CodecError, DataError, AuditError, TrainingError and OSError.
    """
    outer, first = backend.outer, update.first_window
    if rebase is None:
        backend.begin_again(None)
    else:
        contributions = files.contributions(rebase.round)
        before = next((bytes(c.blob) for c in contributions if c.author == update.author), None)
        if before is None:
            raise AuditError("the update began before its state, and the record before has no update of its author")
        backend.begin_again(before)
        _train(spec, backend, reader, update, first, update.rebase_window, accepted_windows)
        outer.advance(contributions)
        outer.rebase()
        first, accepted_windows = update.rebase_window, rebase.accepted_windows
    _train(spec, backend, reader, update, first, update.end_window, accepted_windows)
    return outer.announce()


def _train(
    spec: RunSpec,
    backend: SingleProcessBackend,
    reader: WindowReader,
    update: ClaimedUpdate,
    first: int,
    end: int,
    accepted_windows: int,
) -> None:
    """Make the steps over the author's windows [first, end)."""
    inner, batch = backend.inner, spec.inner.batch
    tokens = accepted_windows * spec.data.window
    inner.set_rate(replayable_factor(spec.inner.schedule, tokens, spec.round.target_tokens))
    for counter in range(first, end, batch):
        windows = reader.read(windows_of(spec.seed, update.author, counter, batch, reader.total))
        step = inner.forward_backward(windows)
        if step is not None:
            inner.optimizer_step(step)


def compare(codec: Codec, announced: bytes, replayed: bytes) -> tuple[Score, ...]:
    """Return the scores of an announced update beside its replay, by ascending name. Raise CodecError."""
    codec.check(announced)
    ratios = map(_ratio, codec.sum_squares(announced), codec.sum_squares(replayed))
    equal = sum(_equal_signs(codec, announced, replayed)) / codec.layout.numel
    return Score("scale", min(ratios), SCALE), Score("signs", equal, SIGNS)


def _equal_signs(codec: Codec, a: bytes, b: bytes) -> Iterator[int]:
    for index in range(len(codec.layout.tensors)):
        one, two = codec.decode_tensor(a, index).values, codec.decode_tensor(b, index).values
        yield int((torch.signbit(one) == torch.signbit(two)).sum())


def _ratio(a: float, b: float) -> float:
    """Return the smaller of two norms over the larger, from their squares; 1 if both are 0."""
    return (min(a, b) / max(a, b)) ** 0.5 if max(a, b) > 0 else 1.0

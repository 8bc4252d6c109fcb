"""The loss check: has an update learnt more about the windows that it claims than about others?

The gain of a window is how much the update alone, at full rate (base - decode(blob)), lowers its loss. Scores are t
values: differences of mean gains, divided by their standard errors (Welch 1947). `gain` compares the claimed windows
with the unclaimed ones. `quarter` is the least of the update's four quarters: an author that stops early gains
nothing in the last. A t value is free of the model's size, and of how far training has come.

A first look takes half of the windows, which suffices for most honest updates. Those that do not pass it clearly are
measured on the rest, too. When an update fails, its auditor's own update of the same record is measured in the same
way. An honest update then has to show half of what that one does, or what that one does less CHANCE, the lower. In a
run's first rounds, and late in it, one update gains too little for any fixed threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from peer.auditor.job import ClaimedUpdate
from peer.errors import UncheckableUpdate
from peer.training.data import WindowReader
from peer.training.single_process import SingleProcessBackend
from protocol.audit_windows import QUARTERS, ComparedWindows, compared_windows
from protocol.audits import WINDOWS_COMPARED
from protocol.messages import MAX_SCORE, Score
from protocol.spec import RunSpec

GAIN, QUARTER = 3.0, 1.0
"""Thresholds of an update that is measured by itself."""

CLEAR = 0.5
"""Scores by which an update passes both thresholds at a first look."""

OWN_SHARE = 0.5
"""Share of the auditor's own scores that an honest update reaches."""

CHANCE = 2.0
"""By this an honest score may always be less: the difference of two t values has a standard deviation of 1.4."""

LEAST_WINDOWS = 8
"""Windows of each kind: with fewer, a quarter of the update has no two."""

LEAST_DEVIATION = 1e-9
"""Least standard error of a difference, in nats: windows that all gain the same have none."""


@dataclass(frozen=True, slots=True)
class Gains:
    """Gains in nats per token: of claimed windows by quarter of the update, and of unclaimed ones."""

    claimed: tuple[Tensor, ...]
    unclaimed: Tensor

    def scores(self) -> tuple[float, float]:
        """Return the t values of the whole update and of its worst quarter."""
        everything = [value for quarter in self.claimed for value in quarter.tolist()]
        others = self.unclaimed.tolist()
        return t_value(everything, others), min(t_value(q.tolist(), others) for q in self.claimed)

    def with_more(self, more: Gains) -> Gains:
        """Return these gains and those of further windows."""
        claimed = (torch.cat(quarters) for quarters in zip(self.claimed, more.claimed, strict=True))
        return Gains(tuple(claimed), torch.cat([self.unclaimed, more.unclaimed]))


def threshold_beside(usual: float, own: float) -> float:
    """Return a threshold beside what the auditor's own update shows, which may be less than nothing."""
    return min(usual, max(own - max((1 - OWN_SHARE) * own, CHANCE), -CHANCE))


def t_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the difference of two means of at least two values, divided by its standard error; bounded as scores."""
    error = sqrt(_variance(a) / len(a) + _variance(b) / len(b))
    difference = sum(a) / len(a) - sum(b) / len(b)
    return min(MAX_SCORE, max(-MAX_SCORE, difference / max(error, LEAST_DEVIATION)))


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


@dataclass(frozen=True, slots=True)
class LossCheck:
    """Loss checks of updates of one record. The backend's base is the state before that record."""

    spec: RunSpec
    audit_seed: bytes
    """It draws the windows that are compared."""
    backend: SingleProcessBackend
    reader: WindowReader

    def scores(self, update: ClaimedUpdate, blob: bytes, own: tuple[ClaimedUpdate, bytes] | None) -> tuple[Score, ...]:
        """Return the scores of an update. `own`: the auditor's update of the record, if it has one.

        Fewer windows of its own than are compared here would show less of the same gain, and count for nothing.

        Raises UncheckableUpdate, DataError, CodecError and torch.OutOfMemoryError.
        """
        parts = self._looks(update)
        gains = self._gains(blob, parts[0])
        gain, quarter = gains.scores()
        if len(parts) > 1 and (gain < GAIN + CLEAR or quarter < QUARTER + CLEAR):
            gain, quarter = gains.with_more(self._gains(blob, parts[1])).scores()
        least_gain, least_quarter = GAIN, QUARTER
        enough = own is not None and own[0].windows >= min(update.windows, WINDOWS_COMPARED)
        if own is not None and enough and (gain < GAIN or quarter < QUARTER):
            own_gain, own_quarter = self._gains(own[1], self._windows(own[0])).scores()
            least_gain, least_quarter = threshold_beside(GAIN, own_gain), threshold_beside(QUARTER, own_quarter)
        return Score("gain", gain, least_gain), Score("quarter", quarter, least_quarter)

    def _gains(self, blob: bytes, compared: ComparedWindows) -> Gains:
        parts, outer, inner = (*compared.claimed, compared.unclaimed), self.backend.outer, self.backend.inner
        tokens = self.reader.read([window for windows in parts for window in windows])
        outer.begin_again(None)
        before = inner.window_losses(tokens)
        outer.begin_again(blob, clips=False)
        gains = before - inner.window_losses(tokens)
        *claimed, unclaimed = gains.split([*map(len, parts)])
        return Gains(tuple(claimed), unclaimed)

    def _looks(self, update: ClaimedUpdate) -> tuple[ComparedWindows, ...]:
        """Return the windows to measure first, and the rest. A small update has one look: its quarters are short."""
        compared = self._windows(update)
        if min(update.windows, len(compared.unclaimed)) < WINDOWS_COMPARED:
            return (compared,)
        quarter, unclaimed = WINDOWS_COMPARED // QUARTERS // 2, WINDOWS_COMPARED // 2
        first = ComparedWindows(tuple(q[:quarter] for q in compared.claimed), compared.unclaimed[:unclaimed])
        return first, ComparedWindows(tuple(q[quarter:] for q in compared.claimed), compared.unclaimed[unclaimed:])

    def _windows(self, update: ClaimedUpdate) -> ComparedWindows:
        compared = compared_windows(
            self.audit_seed, update.author, update.first_window, update.windows,
            self.spec.seed, self.reader.total,
        )  # fmt: skip
        if min(update.windows, len(compared.unclaimed)) < LEAST_WINDOWS:
            raise UncheckableUpdate(f"a loss check compares at least {LEAST_WINDOWS} windows: the update has too few")
        return compared

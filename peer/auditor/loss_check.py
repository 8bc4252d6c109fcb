"""The loss check: has an update learnt more about the windows that it claims than about others?

The gain of a window is how much the update alone, at full rate (base - decode(blob)), lowers its loss. Scores are t
values: differences of mean gains, divided by their standard errors (Welch 1947). `gain` compares the claimed windows
with the unclaimed ones. `quarter` is the least of the update's four quarters: an author that stops early gains
nothing in the last. A t value is free of the model's size, and of how far training has come.

When an update fails, its auditor's own update of the same record is measured in the same way. An honest update then
has to show half of what that one does: late in a run one update gains too little for any fixed threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from peer.auditor.job import ClaimedUpdate
from peer.errors import UncheckableUpdate
from peer.training.data import WindowReader
from peer.training.single_process import SingleProcessBackend
from protocol.audit_windows import ComparedWindows, compared_windows
from protocol.messages import MAX_SCORE, Score
from protocol.spec import RunSpec

GAIN, QUARTER = 3.0, 1.0
"""Thresholds of an update that is measured by itself."""

OWN_SHARE = 0.5
"""Share of the auditor's own scores that an honest update reaches."""

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


def _threshold(usual: float, own: float) -> float:
    """Return a threshold beside what the auditor's own update shows, which may be less than nothing."""
    return min(usual, own - (1 - OWN_SHARE) * abs(own))


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
        """Return the scores of an update. `own`: the auditor's update of the record, if it has one."""
        gain, quarter = self.gains(update, blob).scores()
        least_gain, least_quarter = GAIN, QUARTER
        if own is not None and (gain < GAIN or quarter < QUARTER):
            own_gain, own_quarter = self.gains(*own).scores()
            least_gain, least_quarter = _threshold(GAIN, own_gain), _threshold(QUARTER, own_quarter)
        return Score("gain", gain, least_gain), Score("quarter", quarter, least_quarter)

    def gains(self, update: ClaimedUpdate, blob: bytes) -> Gains:
        """Return what an update gains. Raises UncheckableUpdate, DataError, CodecError and torch.OutOfMemoryError."""
        compared, outer, inner = self._windows(update), self.backend.outer, self.backend.inner
        indices = [*(w for quarter in compared.claimed for w in quarter), *compared.unclaimed]
        if min(update.windows, len(compared.unclaimed)) < LEAST_WINDOWS:
            raise UncheckableUpdate(f"a loss check compares at least {LEAST_WINDOWS} windows: the update has too few")
        tokens = self.reader.read(indices)
        outer.begin_again(None)
        before = inner.window_losses(tokens)
        outer.begin_again(blob)
        gains = before - inner.window_losses(tokens)
        *claimed, unclaimed = gains.split([*map(len, compared.claimed), len(compared.unclaimed)])
        return Gains(tuple(claimed), unclaimed)

    def _windows(self, update: ClaimedUpdate) -> ComparedWindows:
        return compared_windows(
            self.audit_seed, update.author, update.first_window, update.windows,
            self.spec.seed, self.reader.total,
        )  # fmt: skip

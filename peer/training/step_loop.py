"""The inner steps of a peer: parameters, inner optimizer and batches, all of the thread that trains.

No channel here (that is `service`): a test drives this object directly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from peer.channel import Orders
from peer.errors import TrainingError
from peer.training.backend import TrainingBackend
from peer.training.base_state import BaseMove
from peer.training.data import Batches
from peer.training.device import memory_for
from peer.training.exchange_point import ExchangePoint
from peer.training.gate import YieldGate
from peer.training.inner_optimizer import StepResult
from peer.training.layers import Report
from peer.training.schedule import replayable_factor, step_factor
from peer.training.thread_owned import ThreadOwned
from peer.training.throughput import ThroughputMeter
from peer.training.time_breakdown import Activity, TimeBreakdown
from protocol.spec import RunSpec

MAX_NON_FINITE = 10
"""Consecutive steps without a finite loss and gradient, or with a gradient of 0, after which training stops."""

MAX_SKIPPED = 1 / 4
"""Share of an update's steps that may be such, when it is replayed. A replayable update is announced with half of it,
since on another device a few more may be such; or with one step of at least four."""


class StepLoop(ThreadOwned):
    """Owned by the thread that trains. The model's parameters change here and in `BaseState.swap_base` only."""

    def __init__(
        self,
        spec: RunSpec,
        backend: TrainingBackend,
        batches: Batches,
        exchange: ExchangePoint,
        gate: YieldGate,
        times: TimeBreakdown,
        *,
        overlap: bool,
        report: Report,
    ):
        """Train as `spec` says. `overlap`: training continues while our update is undecided."""
        super().__init__()
        self.batches = batches
        self.times = times
        self.throughput = ThroughputMeter(time.monotonic())
        self.trained_windows = 0
        """Windows of all steps of this process; a window that is trained twice counts twice."""
        self.has_started = False
        """True once a state was loaded."""
        self._spec = spec
        self._backend = backend
        self._inner = backend.inner
        self._exchange = exchange
        self._gate = gate
        self._overlap = overlap
        self._report = report
        self._orders = Orders(False, spec.max_update_windows, spec.round.target_tokens)
        self._non_finite = 0
        self._dropped = 0
        """Counts the calls of `drop`: a step that was under way then is not finished."""
        self._accepted_windows = 0
        """Windows of all peers that the held state's chain has accepted."""
        self._round = 0
        self._trained_before = 0
        """`trained_windows` when training continued from the held state."""
        self._usual_windows = 0
        """Windows that were trained on the last state that the next round's followed; 0 before there is one."""

    @property
    def may_train(self) -> bool:
        """True when a state is held and the next update may claim another step (without overlap: and none is open)."""
        self.assert_owner()
        windows = self._exchange.windows
        if self._orders.is_idle or (not self._overlap and windows.announced is not None):
            return False
        return self._exchange.holds_state and windows.room(self._orders.max_update_windows) >= self._spec.inner.batch

    def set_orders(self, orders: Orders) -> None:
        """Apply new orders; with `is_idle`, also drop the current step."""
        self.assert_owner()
        self._orders = orders

    def step(self, windows: Tensor, between: Callable[[], None] = lambda: None) -> StepResult | None:
        """Make one inner step on the batch at the present counter: tokens [batch, window + 1].

        `between` is called within the step, between pieces, and may call any other method. If it loses the state, moves
        the counter or calls `drop`, the step is dropped and the result is None. Raises TrainingError after
        MAX_NON_FINITE consecutive steps that are skipped, and when memory does not suffice.
        """
        self.assert_owner()
        first, dropped = self._exchange.windows.counter, self._dropped

        def go_on() -> bool:
            between()
            is_same = self._exchange.windows.counter == first and self._dropped == dropped
            return self._exchange.holds_state and is_same and not self._orders.is_idle

        step = self._inner.forward_backward(windows, go_on)
        if step is None:
            return None
        self._set_rate()
        self._gate.wait(self.times)
        with self._exchange_counted():
            with memory_for(self._backend.device, "hold the optimizer's moments"):
                self._inner.optimizer_step(step)
            self._exchange.windows = self._exchange.windows.trained(len(windows), skipped=step.is_skipped)
            self.trained_windows += len(windows)
            if step.is_finite:
                self.throughput.step(time.monotonic(), len(windows) * self._spec.data.window_tokens, step.loss)
                self._exchange.loss = self._exchange.loss.add(step.loss)
        self._count_skipped(step)
        return step

    def _count_skipped(self, step: StepResult) -> None:
        self._non_finite = self._non_finite + 1 if step.is_skipped else 0
        if self._non_finite >= MAX_NON_FINITE:
            raise TrainingError(
                f"{self._non_finite} steps in a row gave a loss or gradient that is not finite, or no gradient. If "
                "other peers train well, this GPU is at fault (memory, overclocking): test it or use another. If not, "
                "the run has diverged, and its owner has to begin a new one from a good state with a lower inner.lr "
                "(`cairn export .../checkpoints/round-N good`, then `cairn run init --from good --out second.toml`)"
            )
        if self._non_finite == 1:
            self._report("warning", "non-finite", "a step's loss or gradient was not finite, or 0: it is skipped")

    @contextlib.contextmanager
    def _exchange_counted(self) -> Iterator[None]:
        """Hold the exchange point; a wait for it counts as compressing, since an update is being made meanwhile."""
        if not self._exchange.acquire(blocking=False):
            with self.times.during(Activity.COMPRESSING, time.monotonic):
                self._exchange.acquire()
        try:
            yield
        finally:
            self._exchange.release()

    def follow(self, move: BaseMove) -> None:
        """Continue from the base that `BaseState.swap_base` or `load` put under the parameters."""
        self.assert_owner()
        self.has_started = True
        self._accepted_windows = move.accepted_windows
        trained = self.trained_windows - self._trained_before
        if trained and move.round == self._round + 1:
            self._usual_windows = trained
        self._round, self._trained_before = move.round, self.trained_windows
        if self._spec.audit.replayable:
            self.drop()
        self._set_rate()

    def drop(self) -> None:
        """Drop the step that is under way: in a replayable run all of a step is trained from one place."""
        self.assert_owner()
        self._dropped += 1

    def _set_rate(self) -> None:
        """Set the learning rate of a step now from the tokens that the swarm has trained, as far as this peer knows.

        In a replayable run from the accepted ones alone, and the spec.
        """
        if self._spec.audit.replayable:
            accepted = self._accepted_windows * self._spec.data.window_tokens
            target = self._spec.round.target_tokens
            self._inner.set_rate(replayable_factor(self._spec.inner.schedule, accepted, target))
            return
        since = self.trained_windows - self._trained_before + self._spec.inner.batch / 2
        accepted = self._accepted_windows * self._spec.data.window_tokens
        schedule, target = self._spec.inner.schedule, self._orders.target_tokens
        self._inner.set_rate(step_factor(schedule, accepted, target, since, self._usual_windows))

"""The loop of the thread that trains: between inner steps it deals with messages, and reports progress to the node.

Another thread does what cannot wait for a step (see `request_handler`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peer.channel import (
    SAVE_SECONDS,
    DataUnavailable,
    Failed,
    FromTrainer,
    Load,
    Note,
    Orders,
    Progress,
    Start,
    Stop,
    Stopped,
    TrainerEnd,
    WriteCheckpoint,
)
from peer.errors import ChannelError, SavedStateError
from peer.training.data import DataError, DataUnavailableError
from peer.training.device import choose_device, memory_for, out_of_memory
from peer.training.flops import mfu
from peer.training.layers import Level
from peer.training.request_handler import (
    BeginAgain,
    BetweenPasses,
    Handover,
    Message,
    RequestHandler,
    SaveAfterUpdate,
    SwapBase,
)
from peer.training.time_breakdown import Activity
from peer.training.trainer import Trainer
from protocol.errors import CairnError
from protocol.plain_text import one_line

PROGRESS_SECONDS = 0.2
"""Minimum time between two Progress messages."""

IDLE_SECONDS = 1.0
"""Longest wait for a message while there is nothing to train on and nothing to save."""

SAVING_SECONDS = 0.1
"""The same while a state is being saved: the checkpointer is then polled."""

DATA_SECONDS = 0.01
"""The same while the next batch is being read."""

DATA_RETRY_SECONDS = (1.0, 30.0)
"""First and longest wait after data could not be read."""

STOP_SHARE = 0.75
"""Share of the time for `Stop` that saving may use. The rest is for what is under way, and for the process's end."""

CPU_NICENESS = 10

MAX_NOTES = 100
"""Notes that wait to be sent; more at once are dropped, since no person would read them."""

MAX_NOTE = 4000
"""Characters of a note. One about data may quote 64 servers, and the node takes a bounded text."""

_ACTIVITIES: dict[type, Activity] = {
    SaveAfterUpdate: Activity.SAVING,
    SwapBase: Activity.APPLYING,
    BeginAgain: Activity.COMPRESSING,
    Load: Activity.APPLYING,
}


class _Stopping(Exception):
    """The node asked for the end."""


class TrainerService:
    """One trainer behind one channel. `run` returns the process's exit code."""

    def __init__(self, end: TrainerEnd):
        self._end = end
        self._requests = RequestHandler(end)
        self._notes: queue.Queue[Note] = queue.Queue(MAX_NOTES)
        self._data_retry: tuple[float, float] | None = None
        """(when to read again, how long the wait was) after data could not be read."""
        self._started = False
        self._progress_due = 0.0

    def run(self) -> int:
        """Serve until Stop. Raises ChannelError when the node has closed the channel."""
        self._requests.start()
        first = self._requests.next(None)
        start = first.message if first is not None else None
        if first is None or not isinstance(start, Start):
            self._end.send(Failed("start", f"the first message is {type(start).__name__}, not Start", fatal=True))
            return 1
        try:
            if choose_device(start.device, start.threads).type == "cpu":
                # The node shares these cores, and peers wait for its answers: training gets the time that is left.
                os.nice(CPU_NICENESS)
            trainer = self.make_trainer(start)
        except torch.OutOfMemoryError:
            self._end.send(Failed("start", str(out_of_memory(torch.device("cuda"), "build the model")), fatal=True))
            return 1
        except (CairnError, OSError) as e:
            self._end.send(Failed("start", str(e), fatal=True))
            return 1
        self._end.send(trainer.ready())
        self._started = True
        trainer.base.hand_over()
        first.done.set_result(trainer)
        in_order = False
        try:
            while True:
                self._turn(trainer)
        except _Stopping:
            in_order = True
            return 0
        except ChannelError:
            raise
        except CairnError as e:
            self._send_notes()
            self._end.send(Failed("train", str(e), fatal=True))
            return 1
        finally:
            trainer.close(in_order=in_order)

    def make_trainer(self, start: Start) -> Trainer:
        """Return the trainer that `start` describes. Raises CairnError, OSError or torch.OutOfMemoryError."""
        return Trainer(start, self._note, self._lost)

    def _turn(self, trainer: Trainer) -> None:
        """Deal with pending messages, then make one inner step; without a batch, wait for a message."""
        batch = self._batch(trainer)
        self._turn_to_waiting(trainer)
        self._send_notes()
        while (item := self._requests.next(0.0 if batch is not None else self._patience(trainer))) is not None:
            self._deal(trainer, item)
            batch = self._batch(trainer)
            self._turn_to_waiting(trainer)
        self._continue_saving(trainer)
        if trainer.checkpointer.is_mid_round_due:
            self.save(trainer, trainer.checkpointer.start_mid_round)
        if batch is None:
            self._send_progress(trainer, waiting=not trainer.steps.may_train or self._data_retry is not None)
            return
        trainer.steps.times.turn(Activity.TRAINING, time.monotonic())
        trainer.steps.step(batch, lambda: self._deal_with_pending(trainer))
        self._send_progress(trainer, waiting=False)

    def _turn_to_waiting(self, trainer: Trainer) -> None:
        """Count the time until a step begins as a wait."""
        activity = Activity.DATA if trainer.steps.may_train else Activity.WAITING
        trainer.steps.times.turn(activity, time.monotonic())

    # -- data ------------------------------------------------------------------------------------------------

    def _batch(self, trainer: Trainer) -> Tensor | None:
        """Return the next step's batch if it was read and may be trained on; have it read otherwise."""
        if not trainer.steps.may_train:
            return None
        if self._waits_to_retry:
            return None
        first = trainer.windows.counter
        if not trainer.steps.batches.request(first).done():
            return None
        try:
            batch = trainer.steps.batches.take(first)
        except DataError as e:
            first_wait, longest = DATA_RETRY_SECONDS
            wait = min(longest, 2 * self._data_retry[1]) if self._data_retry else first_wait
            self._data_retry = (time.monotonic() + wait, wait)
            self._note("error", "data", f"{e}; trying again in {wait:.0f} s")
            if isinstance(e, DataUnavailableError):
                self._end.send(DataUnavailable(e.shard))
            return None
        self._data_retry = None
        return batch

    @property
    def _waits_to_retry(self) -> bool:
        return self._data_retry is not None and time.monotonic() < self._data_retry[0]

    def _patience(self, trainer: Trainer) -> float:
        """Return the seconds to wait for a message when there is no batch to train on."""
        if trainer.steps.may_train and not self._waits_to_retry:
            return DATA_SECONDS
        return IDLE_SECONDS if trainer.checkpointer.is_idle else SAVING_SECONDS

    def _deal_with_pending(self, trainer: Trainer) -> None:
        while (item := self._requests.next(0.0)) is not None:
            self._deal(trainer, item)
        self._continue_saving(trainer)

    # -- messages --------------------------------------------------------------------------------------------

    def _deal(self, trainer: Trainer, item: Handover) -> None:
        activity = _ACTIVITIES.get(type(item.message), trainer.steps.times.activity)
        if isinstance(item.message, BetweenPasses):
            activity = item.message.activity
        with trainer.steps.times.during(activity, time.monotonic):
            self.process(trainer, item.message)
        item.done.set_result(None)
        self._send_notes()
        self._progress_due = 0.0
        self._send_progress(trainer, waiting=not trainer.steps.may_train)
        if isinstance(item.message, SwapBase):
            self.save(trainer, lambda: trainer.checkpointer.step(now=True))

    def process(self, trainer: Trainer, message: Message) -> None:
        """Do one message that the other thread hands over."""
        match message:
            case SaveAfterUpdate():
                # The state has the update as announced: whatever becomes of it, nothing is counted twice.
                self.save(trainer, trainer.checkpointer.start)
            case BeginAgain():
                with memory_for(trainer.backend.device, "go on from an update"), trainer.base.owned():
                    trainer.begin_again()
            case SwapBase(move):
                with memory_for(trainer.backend.device, "go on from a state"), trainer.base.owned():
                    trainer.swap_base(move)
            case BetweenPasses(work, _, doing):
                with memory_for(trainer.backend.device, doing), trainer.base.owned():
                    torch.cuda.empty_cache()
                    work()
            case Load():
                self._load(trainer, message)
            case WriteCheckpoint(out):
                self._write_state(trainer, out)
            case Orders():
                trainer.steps.set_orders(message)
            case Stop():
                saved = self.save(trainer, lambda: trainer.checkpointer.save_now(STOP_SHARE * SAVE_SECONDS))
                self._send_notes()
                self._end.send(Stopped(saved))
                raise _Stopping
            case Start():
                self._end.send(Failed("channel", "Start was sent twice: a new run needs a new trainer", fatal=False))

    def _load(self, trainer: Trainer, ask: Load) -> None:
        with memory_for(trainer.backend.device, "load a state"):
            try:
                with trainer.base.owned():
                    answer: FromTrainer = trainer.load(ask)
            except (CairnError, OSError) as e:
                answer = Failed("load", str(e), fatal=False)
        self._send_notes()
        self._end.send(answer)

    def _write_state(self, trainer: Trainer, out: Path) -> None:
        with memory_for(trainer.backend.device, "write a checkpoint"):
            try:
                with trainer.base.owned():
                    answer: FromTrainer = trainer.base.write(out)
            except (CairnError, OSError) as e:
                answer = Failed("write", f"the held state was not written: {e}", fatal=False)
        self._end.send(answer)

    def _continue_saving(self, trainer: Trainer) -> None:
        if not trainer.checkpointer.is_idle:
            self.save(trainer, trainer.checkpointer.step)

    def save(self, trainer: Trainer, do: Callable[[], None]) -> bool:
        """Do a part of saving. Return False when it failed, which is reported: a later one may succeed."""
        times, device = trainer.steps.times, trainer.backend.device
        try:
            with times.during(Activity.SAVING, time.monotonic), memory_for(device, "save what was learnt"):
                do()
        except SavedStateError as e:
            self._end.send(Note("warning", "saved-state", str(e)))
            return False
        return True

    # -- to the node -------------------------------------------------------------------------------------------

    def _send_progress(self, trainer: Trainer, *, waiting: bool) -> None:
        now = time.monotonic()
        steps = trainer.steps
        if not steps.has_started or now < self._progress_due:
            return
        self._progress_due = now + PROGRESS_SECONDS
        windows = trainer.windows
        rate = steps.throughput.tokens_per_second(now)
        self._end.send(
            Progress(
                windows.uncovered, steps.throughput.recent_loss, rate, waiting,
                mfu(rate, trainer.flops_per_token, trainer.peak_flops), trainer.backend.memory(),
                steps.times.shares(now), steps.trained_windows, windows.counter, steps.batches.bytes_received,
            )
        )  # fmt: skip

    def _lost(self, why: str, easier: bool) -> None:
        """End this process, for one of several ranks has ended, whatever the threads wait for. The node restarts it."""
        what = "memory" if easier else "train" if self._started else "start"
        with contextlib.suppress(ChannelError):
            self._end.send(Failed(what, why, fatal=True))
        os._exit(1)

    def _note(self, level: Level, kind: str, text: str) -> None:
        """Queue a note; called by any thread, sent by the loop."""
        with contextlib.suppress(queue.Full):
            self._notes.put_nowait(Note(level, kind, one_line(text, MAX_NOTE)))

    def _send_notes(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._end.send(self._notes.get_nowait())

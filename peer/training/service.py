"""The trainer's loop, of the thread that trains: between inner steps it does what the node asks, and says how it goes.

What cannot wait for a step is done by another thread (see `front`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from peer.channel import (
    SAVE_SECONDS,
    Apply,
    Failed,
    FromTrainer,
    Load,
    MakeUpdate,
    Note,
    Progress,
    Save,
    Saved,
    Start,
    Stop,
    Stopped,
    TrainerEnd,
    UpdateMade,
)
from peer.errors import ChannelError, SavedStateError, TrainingError
from peer.training.data import DataError
from peer.training.device import choose_device, out_of_memory
from peer.training.flops import mfu
from peer.training.front import Front, Item
from peer.training.spent import Doing
from peer.training.trainer import Move, Trainer
from protocol.errors import CairnError

PROGRESS_SECONDS = 0.2
IDLE_SECONDS = 1.0
SAVING_SECONDS = 0.1
"""How often it is looked after what is being saved while there is nothing to train on."""
DATA_WAIT = (1.0, 30.0)
"""First and longest wait after data could not be read."""

STOP_SHARE = 0.75
"""What saving may take of the time that there is to stop: the rest is for what is being done, and for leaving."""

CPU_NICENESS = 10

NOTES_MOST = 100

_DOING: dict[type, Doing] = {UpdateMade: Doing.SAVING, Move: Doing.APPLYING, Load: Doing.APPLYING, Save: Doing.SAVING}


class Stopping(Exception):
    """The node asked for the end."""


class Service:
    """One trainer behind one channel. `run` returns the process's exit code."""

    def __init__(self, end: TrainerEnd):
        self._end = end
        self._front = Front(end)
        self._notes: queue.Queue[Note] = queue.Queue(NOTES_MOST)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._coming: tuple[int, Future[Tensor]] | None = None
        self._data_failed: tuple[float, float] | None = None
        """(when to try again, how long the wait was)."""
        self._started = False
        self._progress_due = 0.0

    def run(self) -> int:
        """Serve until Stop. Raises ChannelError when the node is gone."""
        self._front.start()
        start = self._front.next(None)
        if not isinstance(start, Start):
            self._end.send(Failed("start", f"the first message is {type(start).__name__}, not Start", fatal=True))
            return 1
        try:
            if choose_device(start.device, start.threads).type == "cpu":
                # The node shares these cores, and others wait for its answers: training takes what is left.
                os.nice(CPU_NICENESS)
            trainer = self._front.trainer = Trainer(start, self._note, self._lost)
        except torch.OutOfMemoryError:
            self._end.send(Failed("start", str(out_of_memory(torch.device("cuda"), "build the model")), fatal=True))
            return 1
        except (CairnError, OSError) as e:
            self._end.send(Failed("start", str(e), fatal=True))
            return 1
        self._end.send(trainer.ready())
        self._started = True
        self._front.done()
        in_order = False
        try:
            while True:
                self._turn(trainer)
        except Stopping:
            in_order = True
            return 0
        except TrainingError as e:
            self._send_notes()
            self._end.send(Failed("train", str(e), fatal=True))
            return 1
        finally:
            trainer.close(in_order=in_order)
            self._reading.shutdown(wait=False, cancel_futures=True)

    def _turn(self, trainer: Trainer) -> None:
        """Messages that are there, then one inner step; or wait for whichever can come first."""
        batch = self._next_batch(trainer)
        self._turn_to_waiting(trainer)
        self._send_notes()
        while (item := self._front.next(0.0 if batch is not None else self._patience(trainer))) is not None:
            self._take(trainer, item)
            batch = self._next_batch(trainer)
            self._turn_to_waiting(trainer)
        self._go_on_saving(trainer)
        if trainer.saving.is_progress_due:
            self._save(trainer, trainer.saving.keep_progress)
        if batch is None:
            self._send_progress(trainer, waiting=not trainer.may_train or self._data_failed is not None)
            return
        self._ask_for(trainer, trainer.claims.counter + len(batch))  # read while the device computes
        trainer.spent.turn(Doing.TRAINING, time.monotonic())
        trainer.step(batch, lambda: self._take_what_is_there(trainer))
        self._send_progress(trainer, waiting=False)

    def _turn_to_waiting(self, trainer: Trainer) -> None:
        """Until a step begins."""
        trainer.spent.turn(Doing.DATA if trainer.may_train else Doing.WAITING, time.monotonic())

    # -- data ------------------------------------------------------------------------------------------------

    def _next_batch(self, trainer: Trainer) -> Tensor | None:
        """The batch of the next step when it is there and may be trained on; asks for it when it is not."""
        if not trainer.may_train:
            return None
        if self._data_failed and time.monotonic() < self._data_failed[0]:
            return None
        first = trainer.claims.counter
        if self._coming is None or self._coming[0] != first:
            self._ask_for(trainer, first)
        if self._coming is None or not self._coming[1].done():
            return None
        try:
            batch = self._coming[1].result()
        except DataError as e:
            wait = min(DATA_WAIT[1], 2 * self._data_failed[1]) if self._data_failed else DATA_WAIT[0]
            self._data_failed = (time.monotonic() + wait, wait)
            self._coming = None
            self._note("error", "data", f"{e}; trying again in {wait:.0f} s")
            return None
        self._data_failed = None
        return batch

    def _ask_for(self, trainer: Trainer, first: int) -> None:
        # In a thread of its own: a slow source of data must not keep the node waiting for answers.
        self._coming = (first, self._reading.submit(trainer.batches.take, first))

    def _patience(self, trainer: Trainer) -> float:
        """How long to wait for a message when there is no batch to train on."""
        if self._coming is not None and trainer.may_train:
            return 0.01
        if not trainer.saving.is_idle:
            return SAVING_SECONDS
        return IDLE_SECONDS

    def _take_what_is_there(self, trainer: Trainer) -> None:
        while (item := self._front.next(0.0)) is not None:
            self._take(trainer, item)
        self._go_on_saving(trainer)

    # -- messages --------------------------------------------------------------------------------------------

    def _take(self, trainer: Trainer, item: Item) -> None:
        with trainer.spent.during(_DOING.get(type(item), trainer.spent.doing), time.monotonic):
            self._do(trainer, item)
        self._front.done()
        self._send_notes()
        self._progress_due = 0.0
        self._send_progress(trainer, waiting=not trainer.may_train)
        if isinstance(item, Move):
            self._save(trainer, lambda: trainer.saving.go_on(now=True))

    def _do(self, trainer: Trainer, item: Item) -> None:
        match item:
            case UpdateMade():
                # The state knows of the update: whatever becomes of it, nothing is counted twice.
                self._save(trainer, trainer.saving.keep)
            case Move():
                self._settle(trainer, item)
            case Load():
                self._load(trainer, item)
            case Save():
                self._save_now(trainer)
            case Stop():
                saved = self._save(trainer, lambda: trainer.saving.now(STOP_SHARE * SAVE_SECONDS))
                self._send_notes()
                self._end.send(Stopped(saved))
                raise Stopping
            case Start():
                self._end.send(Failed("channel", "Start was sent twice: a new run needs a new trainer", fatal=False))
            case MakeUpdate() | Apply():
                raise TrainingError(f"{type(item).__name__} is for the front, and reached the thread that trains")

    def _settle(self, trainer: Trainer, move: Move) -> None:
        try:
            trainer.settle(move)
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.device, "go on from a state") from None

    def _load(self, trainer: Trainer, ask: Load) -> None:
        try:
            answer: FromTrainer = trainer.load(ask)
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.device, "load a state") from None
        except (CairnError, OSError) as e:
            answer = Failed("load", str(e), fatal=False)
        self._send_notes()
        self._end.send(answer)

    def _go_on_saving(self, trainer: Trainer) -> None:
        if not trainer.saving.is_idle:
            self._save(trainer, trainer.saving.go_on)

    def _save(self, trainer: Trainer, do: Callable[[], None]) -> bool:
        """Something of saving, which may fail: a later one may not."""
        try:
            with trainer.spent.during(Doing.SAVING, time.monotonic):
                do()
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.device, "save what was learnt") from None
        except SavedStateError as e:
            self._end.send(Note("warning", "saved-state", str(e)))
            return False
        return True

    def _save_now(self, trainer: Trainer) -> None:
        began = time.monotonic()
        try:
            trainer.save()
            self._end.send(Saved(time.monotonic() - began))
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.device, "save what was learnt") from None
        except SavedStateError as e:
            self._end.send(Failed("save", str(e), fatal=False))

    def _send_progress(self, trainer: Trainer, *, waiting: bool) -> None:
        now = time.monotonic()
        if trainer.record is None or now < self._progress_due:
            return
        self._progress_due = now + PROGRESS_SECONDS
        claims, pace = trainer.claims, trainer.pace
        rate = pace.tokens_per_second(now)
        self._end.send(
            Progress(
                claims.uncovered, pace.late_loss, rate, claims.steps, trainer.inner.learning_rate, waiting,
                mfu(rate, trainer.flops_per_token, trainer.peak_flops), trainer.work.memory(),
                trainer.spent.shares(now), trainer.trained, claims.counter,
            )
        )  # fmt: skip

    def _lost(self, why: str) -> None:
        """One of many ranks has ended: so does this process, whatever its threads wait for. The node starts anew."""
        with contextlib.suppress(ChannelError):
            self._end.send(Failed("train" if self._started else "start", why, fatal=True))
        os._exit(1)

    def _note(self, level, kind: str, text: str) -> None:
        """From any thread; sent by the loop. More than NOTES_MOST at once are not for people."""
        try:
            self._notes.put_nowait(Note(level, kind, text))
        except queue.Full:
            return

    def _send_notes(self) -> None:
        while True:
            try:
                self._end.send(self._notes.get_nowait())
            except queue.Empty:
                return

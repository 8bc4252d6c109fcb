"""The thread that receives the node's messages, and does what peers wait for while the other thread is in a step.

A round waits for every peer's update, and for nobody's step. So `MakeUpdate` and `Apply` are done and answered here, at
once. All else is handed over to the thread that trains, as messages in order: the node's own, and what an update or a
round leaves to do with the model.

`BaseState` belongs to whichever thread deals with a request: this one for `MakeUpdate` and `Apply`, the other for
`Load`, `SwapBase` and `BeginAgain`. This thread waits for the other's end of such a message before it adopts the base
state again.

On CUDA both threads issue to one stream: an apply's kernels run after those that the step has issued already. On a CPU,
and with several ranks, which do one thing at a time, the training thread yields meanwhile (see `gate`).

A GPU may have too little memory to process a round during a forward-backward pass. After the first failure such work
waits for the end of a pass, when no activations are held (`BetweenPasses`). An update of a replayable run is then made
again, since the failure changed nothing. A round is not repeated: the base is lost, and the node has a state loaded. An
update with error feedback cannot be repeated either, because part of the feedback is gone: the process ends, and the
next one knows of it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from peer.channel import Apply, Failed, FromTrainer, MakeUpdate, Note, Orders, ToTrainer, TrainerEnd, UpdateMade
from peer.errors import TrainingError
from peer.training.base_state import BaseMove
from peer.training.device import out_of_memory
from peer.training.time_breakdown import Activity
from peer.training.trainer import Trainer
from protocol.errors import CairnError, CodecError

T = TypeVar("T")

MAX_PENDING = 16
"""Messages that may wait for the training thread; beyond that the channel is not read."""


@dataclass(frozen=True, slots=True)
class SwapBase:
    """The base has moved, and the node has its answer: the model's parameters are to follow."""

    move: BaseMove


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """An update was made in a replayable run: training continues from it, or starts over when there is none."""


@dataclass(frozen=True, slots=True)
class SaveAfterUpdate:
    """An update was made: the state that has it as announced is to be saved."""


@dataclass(frozen=True, slots=True)
class BetweenPasses:
    """Work on the base state that does not fit into memory during a pass. `doing`: its name in an error."""

    work: Callable[[], None]
    activity: Activity
    doing: str


Message = ToTrainer | SwapBase | BeginAgain | SaveAfterUpdate | BetweenPasses


@dataclass(frozen=True, slots=True)
class Handover:
    """A message for the thread that trains, which completes `done` when it has dealt with it.

    The result of `Start` is the trainer; that of every other message is None.
    """

    message: Message
    done: Future[Trainer | None] = field(default_factory=Future)


class RequestHandler:
    """Start it before the training thread lowers its priority: a thread has its own niceness (on Linux)."""

    def __init__(self, end: TrainerEnd):
        self._end = end
        self._queue: queue.Queue[Handover | BaseException] = queue.Queue(MAX_PENDING)
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self._waits_for_pass = False
        """True once memory has run out beside a pass."""

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def next(self, seconds: float | None) -> Handover | None:
        """Return the next message for the training thread; None when none came in time (`None`: wait for one).

        Raises ChannelError when the node has closed the channel, and whatever else ended this object's thread.
        """
        try:
            item = self._queue.get(block=seconds != 0, timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def _hand_over(self, message: Message) -> Future[Trainer | None]:
        handover = Handover(message)
        self._queue.put(handover)
        return handover.done

    def _run(self) -> None:
        try:
            first = self._end.receive(None)
            trainer = self._hand_over(first).result() if first is not None else None
            if trainer is not None:
                self._serve(trainer)
        except BaseException as e:  # noqa: BLE001 - raised again in `next`, in the thread that ends the process
            self._queue.put(e)

    def _serve(self, trainer: Trainer) -> None:
        max_windows = trainer.spec.max_update_windows
        settled: Future[Trainer | None] = Future()
        settled.set_result(None)
        saved = settled
        while (message := self._end.receive(None)) is not None:
            match message:
                case Apply():
                    settled.result()
                    if (move := self._apply(trainer, message)) is not None:
                        settled = self._hand_over(SwapBase(move))
                case MakeUpdate():
                    settled.result()
                    saved.result()  # the state to be saved has the update before, not this one
                    is_made, is_begin_due = self._make_update(trainer, message, max_windows)
                    if is_begin_due:
                        settled = self._hand_over(BeginAgain())
                    if is_made:
                        saved = self._hand_over(SaveAfterUpdate())
                case Orders():
                    max_windows = message.max_update_windows
                    self._hand_over(message)
                case _:
                    settled = self._hand_over(message)  # answers keep their order

    def _make_update(self, trainer: Trainer, ask: MakeUpdate, max_windows: int) -> tuple[bool, bool]:
        """Make an update and answer. Return whether there is one, and whether training begins again after it."""
        work, repeats = partial(self._announce, trainer, ask, max_windows), trainer.spec.audit.replayable
        return self._deal(trainer, Activity.COMPRESSING, "make an update", work, repeats=repeats)

    def _announce(self, trainer: Trainer, ask: MakeUpdate, max_windows: int) -> tuple[bool, bool]:
        base = trainer.base
        try:
            answer = base.make_update(ask, max_windows)
        except (CairnError, OSError) as e:
            self._end.send(Failed("update", str(e), fatal=False))
            if isinstance(e, CodecError):
                # The progress is not finite any more, or cannot be compressed: no next try can succeed.
                raise TrainingError(f"what was learnt cannot be sent: {e}") from None
            return False, base.is_begin_due
        self._end.send(answer)
        return isinstance(answer, UpdateMade), base.is_begin_due

    def _apply(self, trainer: Trainer, ask: Apply) -> BaseMove | None:
        """Apply a round and answer. Return None when that failed."""
        work = partial(self._advance, trainer, ask)
        try:
            return self._deal(trainer, Activity.APPLYING, "apply a round", work, repeats=False)
        except TrainingError:
            self._end.send(Failed("apply", "memory ran out beside a step, and the state is lost", fatal=False))
            return None

    def _advance(self, trainer: Trainer, ask: Apply) -> BaseMove | None:
        answer: FromTrainer
        move = None
        try:
            move = trainer.base.advance(ask)
            answer = trainer.base.applied(move.record, ask.write_checkpoint)
        except (CairnError, OSError) as e:
            answer = Failed("apply", str(e), fatal=False)
        self._end.send(answer)
        return move

    def _deal(self, trainer: Trainer, activity: Activity, doing: str, work: Callable[[], T], *, repeats: bool) -> T:
        """Return the result of `work`, which is done here, or between two passes once memory has run out here.

        `repeats`: what failed here is done again. Otherwise raise TrainingError.
        """
        if not (self._waits_for_pass or trainer.folder.memory_ran_out):
            try:
                with self._owning(trainer, activity):
                    return work()
            except torch.OutOfMemoryError:
                self._waits_for_pass = True
                text = (
                    f"memory does not suffice to {doing} beside a step: from now on rounds wait for the end of a pass"
                )
                try:
                    trainer.folder.note_memory_ran_out()
                except OSError as e:
                    text += f", but the next start does not know of it ({e})"
                self._end.send(Note("warning", "memory", text))
                if not repeats:
                    raise out_of_memory(trainer.backend.device, f"{doing} beside a step") from None
        # Outside of the handler: the exception's frames hold tensors that are to be freed.
        result: Future[T] = Future()

        def do() -> None:
            try:
                result.set_result(work())
            except (CairnError, OSError) as e:
                result.set_exception(e)

        self._hand_over(BetweenPasses(do, activity, doing)).result()
        return result.result()

    @contextlib.contextmanager
    def _owning(self, trainer: Trainer, activity: Activity) -> Iterator[None]:
        """Own the base state for the block; on a CPU, and with several ranks, the training thread yields meanwhile."""
        yields = trainer.backend.device.type == "cpu" or trainer.backend.is_distributed
        device = trainer.backend.device
        with (
            trainer.base.owned(),
            trainer.gate.closed(activity) if yields else contextlib.nullcontext(),
            torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
        ):
            yield

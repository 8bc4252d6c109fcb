"""The trainer's front: the thread that hears the node, and does what others wait for while the other is in a step.

A round waits for each peer's update, and for nobody's step. So `MakeUpdate` and `Apply` are done and answered here, at
once; what they leave to do with the model, and every other message, goes to the thread that trains, in order.

Who owns what: while the training thread has nothing of the node's to do, the front may take an update or advance the
base, and the other thread may step, which is all that it does then. What both need (parameters, count of windows, pace)
is guarded by `Trainer.stepping`. From the moment that anything is handed to the training thread until it says `done`,
all of the `Trainer` is its own; but when that is only to keep what is to be saved of an update, which does not look at
the base, the front may advance it.

On CUDA both threads issue to one stream: an apply's kernels come after those that the step has issued already. On a
CPU, and with many ranks, which do one thing at a time, the training thread stands aside meanwhile (see `gate`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque

import torch

from peer.channel import Apply, Failed, FromTrainer, MakeUpdate, Orders, ToTrainer, TrainerEnd, UpdateMade
from peer.errors import TrainingError
from peer.training.device import out_of_memory
from peer.training.spent import Doing
from peer.training.trainer import Move, Trainer
from protocol.errors import CairnError, CodecError

WAITING_MOST = 16
"""What waits for the training thread; beyond that the channel is not read."""

Item = ToTrainer | UpdateMade | Move
"""A message to answer; an update that was made; a state to go on from."""


class Front:
    """`start` it before the training thread yields to others: a thread has its own niceness (on Linux)."""

    trainer: Trainer
    """To be set when the first message is answered."""

    def __init__(self, end: TrainerEnd):
        self._end = end
        self._work: queue.Queue[Item | BaseException] = queue.Queue(WAITING_MOST)
        self._left: deque[Item] = deque()
        """Handed to the training thread and not done, in order."""
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next(self, seconds: float | None) -> Item | None:
        """What the training thread is to do next; None when there is nothing within this time (None: wait for it).

        Each must be followed by `done`. Raises ChannelError when the node is gone, and whatever else ended the front.
        """
        try:
            item = self._work.get(block=seconds != 0, timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def done(self) -> None:
        """What `next` gave is answered, or settled."""
        with self._change:
            self._left.popleft()
            self._change.notify()

    def _hand(self, item: Item) -> None:
        with self._change:
            self._left.append(item)
        self._work.put(item)

    def _run(self) -> None:
        try:
            while True:
                message = self._end.receive(None)
                if isinstance(message, Apply | MakeUpdate):
                    # Answers keep their order, and a round is settled before anything is done with the next.
                    beside = UpdateMade if isinstance(message, Apply) else ()
                    with self._change:
                        self._change.wait_for(lambda b=beside: all(isinstance(item, b) for item in self._left))
                    for left in self._do(self.trainer, message):
                        self._hand(left)
                elif isinstance(message, Orders):
                    self.trainer.orders = message  # looked at before each step and each update
                elif message is not None:
                    self._hand(message)
        except BaseException as e:  # noqa: BLE001 - raised again in `next`, in the thread that ends the process
            self._work.put(e)

    def _do(self, trainer: Trainer, ask: Apply | MakeUpdate) -> list[Item]:
        """Do and answer it; what is left for the training thread."""
        aside = trainer.device.type == "cpu" or trainer.work.many
        why = Doing.APPLYING if isinstance(ask, Apply) else Doing.COMPRESSING
        with (
            trainer.gate.closed(why) if aside else contextlib.nullcontext(),
            torch.cuda.device(trainer.device) if trainer.device.type == "cuda" else contextlib.nullcontext(),
        ):
            if isinstance(ask, Apply):
                return self._apply(trainer, ask)
            return self._make_update(trainer, ask)

    def _make_update(self, trainer: Trainer, ask: MakeUpdate) -> list[Item]:
        try:
            answer = trainer.make_update(ask)
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.device, "make an update") from None
        except (CairnError, OSError) as e:
            self._end.send(Failed("update", str(e), fatal=False))
            if isinstance(e, CodecError):
                # What was learnt is not a number any more, or cannot be compressed: no next try can succeed.
                raise TrainingError(f"what was learnt cannot be sent: {e}") from None
            return []
        self._end.send(answer)
        return [answer] if isinstance(answer, UpdateMade) else []

    def _apply(self, trainer: Trainer, ask: Apply) -> list[Item]:
        began = time.monotonic()
        answer: FromTrainer
        move = None
        try:
            move = trainer.advance(ask)
            answer = trainer.applied(began, move.record, ask.write_checkpoint)
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.device, "apply a round") from None
        except (CairnError, OSError) as e:
            answer = Failed("apply", str(e), fatal=False)
        self._end.send(answer)
        return [move] if move is not None else []

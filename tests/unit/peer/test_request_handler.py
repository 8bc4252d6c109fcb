"""The request handler: it does what peers wait for while a step goes on, and answers keep their order all the same."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from peer.channel import (
    Applied,
    Apply,
    Failed,
    Load,
    MakeUpdate,
    Note,
    NothingDone,
    RoundUpdates,
    Start,
    Stop,
    UpdateMade,
)
from peer.channel.messages import from_line, to_line
from peer.channel.trainer_end import TrainerEnd
from peer.errors import ChannelError, TrainingError
from peer.training.base_state import BaseMove
from peer.training.gate import YieldGate
from peer.training.request_handler import (
    BeginAgain,
    BetweenPasses,
    Handover,
    RequestHandler,
    SaveAfterUpdate,
    SwapBase,
)
from peer.training.service import TrainerService
from peer.training.thread_owned import ThreadOwned
from peer.training.time_breakdown import Activity
from protocol.errors import CodecError
from protocol.ids import Digest, PeerKey
from tests.support.waiting import LIMIT, NEVER, wait_until

D, P = Digest(bytes(32)), Path("/x")
LOAD = Load(P, D, D, 0, (), (), 0, 0)
MAKE = MakeUpdate(0, D, P)
MADE = UpdateMade(D, P, 1, D, 0, 0, 4, 1, 2.0)
SAVE = SaveAfterUpdate()
START = Start(P, PeerKey(bytes(32)), P, shards={})


def apply_of(number: int) -> Apply:
    return Apply(RoundUpdates(number, D, ()), (), 0, 0)


def applied_of(number: int) -> Applied:
    return Applied(D, D, P / str(number))


class StandInBase(ThreadOwned):
    """A base state that notes its calls; `before` is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []
        self.before: Callable[[], None] = lambda: None
        self.answer: UpdateMade | NothingDone = MADE
        self.begins_again = False

    @property
    def is_begin_due(self) -> bool:
        self.assert_owner()
        return self.begins_again

    def advance(self, ask: Apply) -> BaseMove:
        self.assert_owner()
        self.before()
        self.did.append(f"advance {ask.update.round}")
        return BaseMove(D, ask.update.round, (), {}, 0, 0)

    def applied(self, record: Digest, checkpoint: Path | None) -> Applied:
        self.assert_owner()
        return applied_of(int(self.did[-1].split()[1]))

    def make_update(self, ask: MakeUpdate, max_windows: int) -> UpdateMade | NothingDone:
        self.assert_owner()
        self.before()
        self.did.append(f"make at most {max_windows}")
        return self.answer


@dataclass
class StandInFolder:
    """The note in the trainer's folder that memory ran out."""

    memory_ran_out: bool = False

    def note_memory_ran_out(self) -> None:
        self.memory_ran_out = True


@dataclass
class StandIn:
    """The parts of a trainer that the request handler uses."""

    base: StandInBase = field(default_factory=StandInBase)
    gate: YieldGate = field(default_factory=YieldGate)
    backend: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(device=torch.device("cpu"), is_distributed=False)
    )
    folder: StandInFolder = field(default_factory=StandInFolder)
    spec: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(max_update_windows=7, audit=SimpleNamespace(replayable=False))
    )


class Node:
    """The other end of the channel."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._file = connection.makefile("rb")

    def ask(self, *messages) -> None:
        self._socket.sendall(b"".join(map(to_line, messages)))

    def hear(self):
        return from_line(self._file.readline()[:-1])

    def silent(self, seconds: float = 0.1) -> bool:
        """Return whether no message came in this time."""
        self._socket.settimeout(seconds)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(LIMIT)

    def hang_up(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        self._file.close()
        self._socket.close()


@dataclass
class World:
    node: Node
    end: TrainerEnd
    handler: RequestHandler
    trainer: StandIn
    has_ended: bool = False

    def next(self, seconds: float | None) -> object:
        """Return the next message for this thread, which trains; `done` completes it."""
        handover = self.handler.next(seconds)
        self.handovers += [handover] if handover is not None else []
        return handover and handover.message

    def done(self) -> None:
        self.handovers.pop(0).done.set_result(None)

    def fails(self, error: type[BaseException], match: str = "") -> None:
        """Assert that the handler's thread ends with this error."""
        with pytest.raises(error, match=match):
            self.handler.next(LIMIT)
        self.has_ended = True

    handovers: list[Handover] = field(default_factory=list)


@pytest.fixture
def world() -> Iterator[World]:
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT)
    end = TrainerEnd(theirs)
    made = World(Node(ours), end, RequestHandler(end), StandIn())
    made.handler.start()
    made.node.ask(START)
    first = made.handler.next(LIMIT)
    assert first is not None and first.message == START
    made.trainer.base.hand_over()
    first.done.set_result(made.trainer)  # type: ignore[arg-type]
    yield made
    made.node.leave()
    for left in made.handovers:
        left.done.set_result(None)
    with pytest.raises((ChannelError, TrainingError, RuntimeError)):
        while not made.has_ended:
            if made.next(LIMIT) is not None:
                made.done()
        raise ChannelError("it has ended before")


def test_a_round_is_applied_and_an_update_made_while_the_other_thread_is_in_a_step(world):
    # This thread trains: it does not look at what waits for it.
    world.node.ask(MAKE)
    assert world.node.hear() == MADE
    world.node.ask(apply_of(0))
    assert world.node.hear() == applied_of(0)
    assert world.next(LIMIT) == SAVE  # the saved state is that before the round
    world.done()
    move = world.next(LIMIT)
    assert isinstance(move, SwapBase) and move.move.round == 0


def test_answers_keep_their_order_and_a_round_waits_for_those_before_it(world):
    world.node.ask(LOAD, apply_of(7))
    assert world.next(LIMIT) == LOAD
    assert world.node.silent() and not world.trainer.base.did
    world.end.send(applied_of(1))
    world.done()
    assert [world.node.hear(), world.node.hear()] == [applied_of(1), applied_of(7)]


def test_a_round_is_settled_before_the_next_thing_is_done(world):
    world.node.ask(apply_of(0), apply_of(1), MAKE, LOAD, Stop())
    assert world.node.hear() == applied_of(0)
    assert isinstance(world.next(LIMIT), SwapBase)
    assert world.node.silent() and world.trainer.base.did == ["advance 0"]
    world.done()
    assert world.node.hear() == applied_of(1)
    assert isinstance(world.next(LIMIT), SwapBase)
    assert world.node.silent() and world.trainer.base.did == ["advance 0", "advance 1"]
    world.done()
    assert world.node.hear() == MADE
    assert [world.next(LIMIT), world.next(LIMIT), world.next(LIMIT)] == [SAVE, LOAD, Stop()]


def test_an_update_waits_for_what_is_to_be_saved_of_the_last_one(world):
    world.node.ask(MAKE, MAKE)
    assert world.node.hear() == MADE
    assert world.next(LIMIT) == SAVE and world.node.silent()
    world.done()
    assert world.node.hear() == MADE


@pytest.mark.parametrize("answer", [MADE, NothingDone(D)])
def test_in_a_replayable_run_training_begins_again_before_anything_is_saved_or_the_base_moves(world, answer):
    world.trainer.base.begins_again, world.trainer.base.answer = True, answer
    world.node.ask(MAKE, apply_of(0))
    assert world.node.hear() == answer
    assert world.next(LIMIT) == BeginAgain()
    assert world.node.silent() and world.trainer.base.did == ["make at most 7"]
    world.done()
    if answer == MADE:
        assert world.next(LIMIT) == SAVE
        world.done()
    assert world.node.hear() == applied_of(0)


def test_a_settled_round_wakes_a_thread_that_waits_at_once(world):
    woke: list[object] = []

    def wait() -> None:
        woke.append(world.next(NEVER))
        world.done()

    thread = threading.Thread(target=wait)
    thread.start()
    world.node.ask(apply_of(0))
    world.node.hear()
    thread.join(LIMIT)
    assert woke and isinstance(woke[0], SwapBase)


def test_what_cannot_be_applied_is_told_once_and_leaves_nothing_to_settle(world):
    def spoilt() -> None:
        raise CodecError("not an update")

    world.trainer.base.before = spoilt
    world.node.ask(apply_of(0))
    assert world.node.hear() == Failed("apply", "not an update", False)
    wait_until(lambda: not is_closed(world.trainer.gate), "the gate opens after the answer")
    assert world.next(0) is None and not is_closed(world.trainer.gate)


def test_nothing_to_announce_leaves_nothing_to_save(world):
    world.trainer.base.answer = NothingDone(D)
    world.node.ask(MAKE)
    assert world.node.hear() == NothingDone(D)
    assert world.next(0) is None


@pytest.mark.parametrize(
    ("ask", "error", "raised"),
    [
        (MAKE, torch.OutOfMemoryError("no room"), TrainingError),  # a part has left the error feedback
        (MAKE, CodecError("not finite"), TrainingError),
        (apply_of(0), RuntimeError("a bug"), RuntimeError),
    ],
)
def test_what_no_next_try_can_mend_ends_the_thread_that_trains(world, ask, error, raised):
    def fail() -> None:
        raise error

    world.trainer.base.before = fail
    world.node.ask(ask)
    world.fails(raised)
    assert not is_closed(world.trainer.gate)


def is_closed(gate: YieldGate) -> bool:
    """Return whether the gate holds a thread for a while."""
    waiting = threading.Thread(target=gate.wait, daemon=True)
    waiting.start()
    waiting.join(0.2)
    return waiting.is_alive()


def full_once(world: World) -> None:
    """Let memory run out at the next call of the base state, and not again."""

    def fail() -> None:
        world.trainer.base.before = lambda: None
        raise torch.OutOfMemoryError("no room")

    world.trainer.base.before = fail


def does_between_passes(world: World) -> None:
    """Do as the thread that trains does with the next message."""
    service = TrainerService(world.end)
    assert isinstance(message := world.next(LIMIT), BetweenPasses)
    service.process(world.trainer, message)  # type: ignore[arg-type]
    world.done()


def test_an_update_without_memory_beside_a_pass_is_made_between_passes_as_is_all_after_it(world):
    world.trainer.spec.audit.replayable = True
    full_once(world)
    world.node.ask(MAKE)
    note = world.node.hear()
    assert isinstance(note, Note) and note.level == "warning" and "wait for the end of a pass" in note.text
    assert world.node.silent() and not world.trainer.base.did
    does_between_passes(world)
    assert world.node.hear() == MADE and world.next(LIMIT) == SAVE
    world.done()
    world.node.ask(apply_of(0))
    assert world.node.silent()
    does_between_passes(world)
    assert world.node.hear() == applied_of(0) and isinstance(world.next(LIMIT), SwapBase)
    assert world.trainer.base.did == ["make at most 7", "advance 0"]


def test_a_round_without_memory_beside_a_pass_needs_a_load_and_the_next_ones_wait(world):
    full_once(world)
    world.node.ask(apply_of(0))
    assert isinstance(world.node.hear(), Note)
    failed = world.node.hear()
    assert isinstance(failed, Failed) and failed.what == "apply" and not failed.fatal
    assert "memory ran out beside a step" in failed.reason and world.next(0) is None
    world.node.ask(LOAD)
    assert world.next(LIMIT) == LOAD
    world.done()
    world.node.ask(apply_of(1))
    does_between_passes(world)
    assert world.node.hear() == applied_of(1)


def test_the_next_process_waits_for_a_pass_at_once(world):
    full_once(world)
    world.node.ask(MAKE)
    world.node.hear()
    assert world.trainer.folder.memory_ran_out
    world.fails(TrainingError)


def test_a_note_that_cannot_be_kept_for_the_next_process_is_told(world):
    def fail() -> None:
        raise OSError("the disk is full")

    world.trainer.folder.note_memory_ran_out = fail
    full_once(world)
    world.node.ask(MAKE)
    assert "the next start does not know of it (the disk is full)" in world.node.hear().text
    world.fails(TrainingError)


def test_a_process_that_knows_of_full_memory_waits_for_a_pass(world):
    world.trainer.folder.note_memory_ran_out()
    world.node.ask(apply_of(0))
    assert world.node.silent()
    does_between_passes(world)
    assert world.node.hear() == applied_of(0)


def test_a_trainer_ends_when_memory_runs_out_between_passes_too(world):
    world.trainer.spec.audit.replayable = True

    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    world.trainer.base.before = fail
    world.node.ask(MAKE)
    world.node.hear()
    with pytest.raises(TrainingError, match="make an update: .*--gpu-memory") as e:
        does_between_passes(world)
    world.handovers.pop().done.set_exception(e.value)


def test_an_error_between_passes_is_answered_as_beside_one(world):
    full_once(world)
    world.node.ask(apply_of(0))
    world.node.hear(), world.node.hear()

    def spoilt() -> None:
        raise CodecError("not an update")

    world.trainer.base.before = spoilt
    world.node.ask(apply_of(1))
    does_between_passes(world)
    assert world.node.hear() == Failed("apply", "not an update", False)
    world.node.ask(MAKE)
    does_between_passes(world)
    assert world.node.hear() == Failed("update", "not an update", False)
    world.fails(TrainingError, "cannot be sent")


def test_a_node_that_is_gone_ends_the_thread_that_trains(world):
    world.node.hang_up()
    world.fails(ChannelError, "closed the channel")


def test_a_step_stands_aside_while_a_round_is_applied_and_not_longer(world):
    seen: list[bool] = []
    world.trainer.base.before = lambda: seen.append(is_closed(world.trainer.gate))
    world.node.ask(apply_of(0))
    world.node.hear()
    assert isinstance(world.next(LIMIT), SwapBase)
    assert seen == [True] and not is_closed(world.trainer.gate)


def test_a_closed_gate_holds_a_thread_until_it_opens():
    gate, passed = YieldGate(), threading.Event()

    def step() -> None:
        gate.wait()
        passed.set()

    with gate.closed(Activity.APPLYING):
        thread = threading.Thread(target=step)
        thread.start()
        assert not passed.wait(0.05)
    assert passed.wait(LIMIT)
    thread.join()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="niceness of threads is Linux's")
def test_a_thread_started_before_another_yields_keeps_its_niceness(world):
    mine: list[int] = []
    world.trainer.base.before = lambda: mine.append(os.getpriority(os.PRIO_PROCESS, 0))
    yielding = threading.Thread(target=lambda: os.nice(5))
    yielding.start()
    yielding.join()
    world.node.ask(MAKE)
    world.node.hear()
    assert mine == [os.getpriority(os.PRIO_PROCESS, 0)]

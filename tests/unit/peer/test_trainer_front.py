"""The trainer's front: what others wait for is done while a step goes on, and answers keep their order all the same."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from peer.channel import Applied, Apply, Failed, Load, MakeUpdate, NothingDone, RoundUpdates, Save, Stop, UpdateMade
from peer.channel.messages import from_line, to_line
from peer.channel.trainer_end import TrainerEnd
from peer.errors import ChannelError, TrainingError
from peer.training.front import Front
from peer.training.gate import Gate
from peer.training.spent import Doing
from peer.training.trainer import Move
from protocol.errors import CodecError
from protocol.ids import Digest
from tests.support.waiting import LIMIT, NEVER, wait_until

D, P = Digest(bytes(32)), Path("/x")
LOAD = Load(P, D, D, 0, (), (), 0, 0)
MAKE = MakeUpdate(0, D, P)
MADE = UpdateMade(D, P, 1, D, 0, 4, 1, 2.0)


def apply_of(number: int) -> Apply:
    return Apply(RoundUpdates(number, D, ()), (), False, 0, 0)


def applied_of(number: int) -> Applied:
    return Applied(D, D, float(number), None)


@dataclass
class StandIn:
    """A trainer that notes what it is asked; `before` is called first."""

    device: torch.device = torch.device("cpu")
    gate: Gate = field(default_factory=Gate)
    did: list[str] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    answer: UpdateMade | NothingDone = MADE

    def advance(self, ask: Apply) -> Move:
        self.before()
        self.did.append(f"advance {ask.update.round}")
        return Move(D, ask.update.round, (), {}, 0, 0)

    def applied(self, began: float, record: Digest, checkpoint: Path | None) -> Applied:
        return applied_of(int(self.did[-1].split()[1]))

    def make_update(self, ask: MakeUpdate, say: object) -> UpdateMade | NothingDone:
        self.before()
        self.did.append("make")
        return self.answer


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
        """Whether nothing was said in this time."""
        self._socket.settimeout(seconds)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(LIMIT)

    def leave(self) -> None:
        self._file.close()
        self._socket.close()


@dataclass
class World:
    node: Node
    end: TrainerEnd
    front: Front
    trainer: StandIn


@pytest.fixture
def world() -> Iterator[World]:
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT)
    end = TrainerEnd(theirs)
    made = World(Node(ours), end, Front(end), StandIn())
    made.front.trainer = made.trainer  # type: ignore[assignment]
    made.front.start()
    yield made
    made.node.leave()
    with pytest.raises((ChannelError, TrainingError, RuntimeError)):
        while True:  # until the front has ended
            if made.front.next(LIMIT) is not None:
                made.front.done()


def test_a_round_is_applied_and_an_update_made_while_the_other_thread_is_in_a_step(world):
    # This thread trains: it does not look at what waits for it.
    world.node.ask(MAKE)
    assert world.node.hear() == MADE
    world.node.ask(apply_of(0))
    assert world.node.hear() == applied_of(0)
    assert world.front.next(LIMIT) == MADE  # what is saved of the update is as it was before the round
    world.front.done()
    move = world.front.next(LIMIT)
    assert isinstance(move, Move) and move.round == 0


def test_answers_keep_their_order_and_a_round_waits_for_those_before_it(world):
    world.node.ask(LOAD, apply_of(7))
    assert world.front.next(LIMIT) == LOAD
    assert world.node.silent() and not world.trainer.did
    world.end.send(applied_of(1))
    world.front.done()
    assert [world.node.hear(), world.node.hear()] == [applied_of(1), applied_of(7)]


def test_a_round_is_settled_before_the_next_thing_is_done(world):
    world.node.ask(apply_of(0), apply_of(1), MAKE, Save(), Stop())
    assert world.node.hear() == applied_of(0)
    assert isinstance(world.front.next(LIMIT), Move)
    assert world.node.silent() and world.trainer.did == ["advance 0"]
    world.front.done()
    assert world.node.hear() == applied_of(1)
    assert isinstance(world.front.next(LIMIT), Move)
    assert world.node.silent() and world.trainer.did == ["advance 0", "advance 1"]
    world.front.done()
    assert world.node.hear() == MADE
    assert [world.front.next(LIMIT), world.front.next(LIMIT), world.front.next(LIMIT)] == [MADE, Save(), Stop()]


def test_an_update_waits_for_what_is_to_be_saved_of_the_last_one(world):
    world.node.ask(MAKE, MAKE)
    assert world.node.hear() == MADE
    assert world.front.next(LIMIT) == MADE and world.node.silent()
    world.front.done()
    assert world.node.hear() == MADE


def test_a_settled_round_wakes_a_thread_that_waits_at_once(world):
    woke: list[object] = []

    def wait() -> None:
        woke.append(world.front.next(NEVER))
        world.front.done()

    thread = threading.Thread(target=wait)
    thread.start()
    world.node.ask(apply_of(0))
    world.node.hear()
    thread.join(LIMIT)
    assert woke and isinstance(woke[0], Move)


def test_what_cannot_be_applied_is_told_once_and_leaves_nothing_to_settle(world):
    def spoilt() -> None:
        raise CodecError("not an update")

    world.trainer.before = spoilt
    world.node.ask(apply_of(0))
    assert world.node.hear() == Failed("apply", "not an update", False)
    wait_until(lambda: not world.trainer.gate.is_closed, "the gate opens after the answer")
    assert world.front.next(0) is None


def test_nothing_to_announce_leaves_nothing_to_save(world):
    world.trainer.answer = NothingDone(D)
    world.node.ask(MAKE)
    assert world.node.hear() == NothingDone(D)
    assert world.front.next(0) is None


@pytest.mark.parametrize(
    ("ask", "error", "raised"),
    [
        (apply_of(0), torch.OutOfMemoryError("no room"), TrainingError),
        (MAKE, torch.OutOfMemoryError("no room"), TrainingError),
        (MAKE, CodecError("not finite"), TrainingError),
        (apply_of(0), RuntimeError("a bug"), RuntimeError),
    ],
)
def test_what_no_next_try_can_mend_ends_the_thread_that_trains(world, ask, error, raised):
    def fail() -> None:
        raise error

    world.trainer.before = fail
    world.node.ask(ask)
    with pytest.raises(raised):
        world.front.next(LIMIT)
    assert not world.trainer.gate.is_closed
    world.front._work.put(raised("again, for the fixture"))


def test_a_node_that_is_gone_ends_the_thread_that_trains(world):
    world.node._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelError, match="closed the channel"):
        world.front.next(LIMIT)
    world.front._work.put(ChannelError("again, for the fixture"))


def test_a_step_stands_aside_while_a_round_is_applied_and_not_longer(world):
    seen: list[bool] = []
    world.trainer.before = lambda: seen.append(world.trainer.gate.is_closed)
    world.node.ask(apply_of(0))
    world.node.hear()
    assert isinstance(world.front.next(LIMIT), Move)
    assert seen == [True] and not world.trainer.gate.is_closed
    world.trainer.gate.wait()  # does not block


def test_a_closed_gate_holds_a_thread_until_it_opens():
    gate, passed = Gate(), threading.Event()

    def step() -> None:
        gate.wait()
        passed.set()

    with gate.closed(Doing.APPLYING):
        thread = threading.Thread(target=step)
        thread.start()
        assert not passed.wait(0.05)
    assert passed.wait(LIMIT)
    thread.join()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="niceness of threads is Linux's")
def test_a_thread_started_before_another_yields_keeps_its_niceness(world):
    mine: list[int] = []
    world.trainer.before = lambda: mine.append(os.getpriority(os.PRIO_PROCESS, 0))
    yielding = threading.Thread(target=lambda: os.nice(5))
    yielding.start()
    yielding.join()
    world.node.ask(MAKE)
    world.node.hear()
    assert mine == [os.getpriority(os.PRIO_PROCESS, 0)]

"""Ownership of the trainer's state by threads, and the lock under which one thread sees the other's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from safetensors.torch import load_file

from peer.channel import Apply
from peer.training.exchange_point import ExchangePoint
from peer.training.thread_owned import ThreadOwned
from peer.training.windows import WindowAccounting
from protocol.spec import CodecSpec
from tests.support.local_trainer import closed, loaded, train, update
from tests.support.trainer_world import World, accepted_round, finish
from tests.support.waiting import LIMIT

__all__ = ["closed"]  # a fixture


def error_in_a_thread(work: Callable[[], object]) -> BaseException | None:
    """Call `work` in another thread, and return what it raises."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            errors.append(None)
        except AssertionError as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return errors[0]


def test_only_the_owner_may_use_a_state_and_a_message_passes_it_on():
    state = ThreadOwned()
    state.assert_owner()
    assert isinstance(error_in_a_thread(state.assert_owner), AssertionError)
    assert isinstance(error_in_a_thread(state.adopt), AssertionError)
    state.hand_over()
    with pytest.raises(AssertionError):
        state.assert_owner()

    def deal() -> None:
        with state.owned():
            state.assert_owner()

    assert error_in_a_thread(deal) is None
    state.adopt()
    state.assert_owner()


def test_shared_values_are_set_by_the_thread_that_holds_the_lock_and_read_by_any():
    exchange = ExchangePoint()
    with pytest.raises(AssertionError):
        exchange.windows = WindowAccounting(1)
    with exchange:
        exchange.windows = WindowAccounting(1)
        assert not exchange.acquire(blocking=False)
        assert isinstance(error_in_a_thread(exchange.assert_held), AssertionError)
    assert exchange.windows.counter == 1 and exchange.acquire(blocking=False)
    exchange.release()
    with pytest.raises(AssertionError):
        exchange.release()


def test_a_trainer_s_parts_refuse_a_thread_that_does_not_own_them(tmp_path):
    world = World.make(tmp_path)
    trainer = loaded(world)
    assert isinstance(error_in_a_thread(lambda: trainer.steps.may_train), AssertionError)
    ask = Apply(accepted_round(0), (), 0, 0)
    assert isinstance(error_in_a_thread(lambda: trainer.base.advance(ask)), AssertionError)
    assert isinstance(error_in_a_thread(trainer.base.manifest), AssertionError)


def test_a_state_that_is_saved_while_an_update_is_made_waits_for_it(tmp_path, monkeypatch):
    trainer = loaded(World.make(tmp_path, codec=CodecSpec(kind="none", beta=1.0)))
    train(trainer, 2)
    outer, entered, copied = trainer.backend.outer, threading.Event(), threading.Event()
    announce, copy_state = outer.announce, trainer.backend.copy_state

    def slow() -> bytes:
        entered.set()
        assert not copied.wait(0.1)
        return announce()

    def copy() -> None:
        copied.set()
        copy_state()

    monkeypatch.setattr(outer, "announce", slow)
    monkeypatch.setattr(trainer.backend, "copy_state", copy)
    trainer.base.hand_over()

    def make() -> None:
        with trainer.base.owned():
            update(trainer, tmp_path / "u")

    making = threading.Thread(target=make)
    making.start()
    assert entered.wait(LIMIT)
    trainer.checkpointer.start()
    making.join(30)
    trainer.checkpointer.start()  # the first one copied nothing if the update was not on the disk yet
    finish(trainer)
    saved = load_file(trainer.folder.folder / "trainer-1.safetensors")
    # All progress is in the update: the copy is of after it.
    assert not any(bool(t.any()) for name, t in saved.items() if name.startswith(("progress/", "feedback/")))

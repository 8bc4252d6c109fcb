"""The registry of deadlines, and a machine that does not come to rest."""

from __future__ import annotations

import pytest

from protocol.rounds import events as ev
from protocol.rounds.deadlines import Deadlines
from protocol.rounds.phase import InvariantError
from protocol.rounds.state_sync import StateSync
from tests.support.rounds_bench import Bench


def test_a_comparison_registers_the_deadline():
    d = Deadlines(10.0)
    assert d.due("past", 10.0) and not d.due("late", 12.0) and not d.due("soon", 11.0)
    assert d.pending == {"late": 12.0, "soon": 11.0} and d.next_tick == 11.0
    assert not d.due("late", 13.0) and d.pending["late"] == 12.0


def test_a_step_starts_without_deadlines_and_never_earlier_than_the_one_before():
    d = Deadlines(10.0)
    assert not d.due("late", 12.0)
    d.begin(9.0)
    assert d.now == 10.0 and d.next_tick == float("inf")


def test_a_tick_before_the_next_deadline_changes_nothing():
    b = Bench()
    b.step(ev.TrainingProgress(3, 1.0, 1.0))
    for _ in range(90):
        until = b.machine.next_tick
        assert until > b.now
        assert b.step(ev.Tick(), (b.now + until) / 2) == [] and b.machine.next_tick == until
        b.step(ev.Tick(), until)


def test_a_machine_that_does_not_come_to_rest_says_so(monkeypatch: pytest.MonkeyPatch):
    b = Bench()
    monkeypatch.setattr(StateSync, "advance", lambda *_: True)
    with pytest.raises(InvariantError, match="does not come to rest: phase training, head .* round 0"):
        b.step(ev.Tick(), 0.5)

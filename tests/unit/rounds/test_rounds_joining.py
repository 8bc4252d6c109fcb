"""A newcomer learns what the others have before it loads a state.

It waits as long as something comes of it, not for ever.
"""

from __future__ import annotations

import pytest

from protocol.rounds.chain_sync import MAX_PATIENCES, Bootstrap
from protocol.rounds.deadlines import Deadlines

HEAR, PATIENCE = 4.0, 20.0


@pytest.fixture
def joining() -> Bootstrap:
    j = Bootstrap(0.0, PATIENCE)
    j.begin(100.0, HEAR)
    return j


def over(joining: Bootstrap, now: float, *, ahead: bool = True, heard_equal: bool = False) -> bool:
    return joining.is_over(Deadlines(now), ahead=ahead, equal=heard_equal)


def test_who_is_told_that_it_has_all_goes_on_at_once(joining: Bootstrap):
    assert over(joining, 100.1, ahead=False, heard_equal=True)


def test_who_hears_of_nobody_waits_a_little(joining: Bootstrap):
    assert not over(joining, 103.9, ahead=False) and over(joining, 104.1, ahead=False)


def test_those_who_claim_more_and_give_nothing_are_waited_for_no_longer_than_patience(joining: Bootstrap):
    assert not over(joining, 123.9) and over(joining, 124.1)


def test_while_records_come_it_waits_for_more(joining: Bootstrap):
    for at in range(100, 300, 10):
        joining.grew(float(at))
        assert not over(joining, at + 0.9 * PATIENCE)
    assert over(joining, 290 + 1.1 * PATIENCE)


def test_records_without_an_end_are_not_waited_for_without_an_end(joining: Bootstrap):
    end = 100 + HEAR + (MAX_PATIENCES + 1) * PATIENCE
    for at in range(100, 1000, 10):
        joining.grew(float(at))
        assert over(joining, float(at)) == (at >= end)


def test_it_registers_when_to_look_again(joining: Bootstrap):
    joining.grew(110.0)
    deadlines = Deadlines(101.0)
    assert not joining.is_over(deadlines, ahead=True, equal=False)
    assert sorted(deadlines.pending.values()) == [104.0, 130.0] and deadlines.next_tick == 104.0

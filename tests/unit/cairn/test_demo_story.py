"""How long the demo waits."""

from __future__ import annotations

from cairn.demo.story import Patience


def test_a_slow_run_may_take_hours_and_one_without_new_rounds_is_given_up():
    patience = Patience(600.0, since=0.0)
    for round_ in range(30):  # five hours
        assert not patience.is_over(round_, 599.0 * (round_ + 1))
    newest = 599.0 * 30
    assert not patience.is_over(29, newest + 600.0)
    assert patience.is_over(29, newest + 601.0)

"""Failures that go on get few lines, and each is counted in one."""

from __future__ import annotations

from peer.node.failure_log import MAX_PAUSE, QUIET_SECONDS, FailureLog


def test_the_first_failure_is_logged_at_once_and_a_night_of_them_in_a_few_lines():
    log, counts = FailureLog(), []
    night = range(0, 8 * 3600, 2)
    for second in night:
        if count := log.failed(float(second)):
            counts.append((second, count))
    assert counts[0] == (0, 1) and counts[1] == (30, 15)
    assert len(counts) <= 7 + 8 * 3600 / MAX_PAUSE
    assert sum(count for _, count in counts) > len(night) - MAX_PAUSE / 2 - 1  # the rest waits for the next line
    assert log.failed(night[-1] + QUIET_SECONDS - 1) in (0, len(night) - sum(c for _, c in counts) + 1)


def test_after_some_quiet_a_failure_is_a_first_one_again():
    log = FailureLog()
    assert [log.failed(at) for at in (0.0, 1.0, 2.0)] == [1, 0, 0]
    assert log.failed(2.0 + QUIET_SECONDS) == 3  # with those that had no line
    assert log.failed(3.0 + QUIET_SECONDS) == 0

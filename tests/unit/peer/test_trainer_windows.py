"""Window accounting, the schedule, throughput: the trainer's plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.training.schedule import factor, replayable_factor, step_factor
from peer.training.throughput import RATE_SECONDS, MeanLoss, ThroughputMeter
from peer.training.windows import UndecidedUpdate, WindowAccounting
from protocol.ids import Digest, sha256
from protocol.spec import Schedule

MOST = 40


def announced(windows: WindowAccounting) -> WindowAccounting:
    """Return the count after an update was made, if there is something to claim."""
    if (claim := windows.claim(MOST)) is None:
        return windows
    first, end, steps = claim
    made = UndecidedUpdate(Digest(sha256(b"parent")), Digest(sha256(b"blob")), 1, first, first, end, steps, 1.0)
    return replace(windows, announced=made)


def claim_of(windows: WindowAccounting) -> tuple[int, int, int]:
    """Return the claim of the announced update."""
    assert windows.announced is not None
    return windows.announced.first, windows.announced.end, windows.announced.steps


def test_an_update_claims_what_was_trained_and_the_next_goes_on_from_there():
    windows = WindowAccounting()
    assert windows.claim(MOST) is None
    windows = windows.trained(4)
    windows = windows.trained(4)
    assert windows.uncovered == 8
    windows = announced(windows)
    assert claim_of(windows) == (0, 8, 2)
    windows = windows.trained(4)
    assert windows.uncovered == 4
    windows = windows.decided(8, kept=False)
    assert (windows.claimed_from, windows.counter, windows.steps, windows.announced) == (8, 12, 1, None)
    assert windows.claim(MOST) == (8, 12, 1)


def test_a_missed_update_is_claimed_again_by_the_next():
    windows = WindowAccounting()
    windows = windows.trained(4)
    windows = announced(windows)
    windows = windows.trained(4)
    windows = windows.decided(0, kept=True)
    assert windows.claim(MOST) == (0, 8, 2)


def test_training_stops_at_what_an_update_may_claim_and_the_surplus_of_a_miss_is_claimed_later():
    windows = WindowAccounting()
    while windows.room(MOST) >= 4:
        windows = windows.trained(4)
    assert windows.counter == MOST
    windows = announced(windows)
    assert claim_of(windows) == (0, MOST, 10)
    while windows.room(MOST) >= 4:
        windows = windows.trained(4)
    assert windows.counter == 2 * MOST
    windows = windows.decided(0, kept=True)
    assert windows.room(MOST) == 0
    windows = announced(windows)
    assert claim_of(windows) == (0, MOST, 20)
    windows = windows.decided(MOST, kept=False)
    windows = announced(windows)
    assert claim_of(windows) == (MOST, 2 * MOST, 1)


def test_windows_whose_work_is_gone_are_not_claimed_again():
    windows = WindowAccounting(counter=50, claimed_from=40, steps=2)
    windows = windows.decided(20, kept=False)
    assert windows.claimed_from == 40
    windows = windows.decided(20, kept=True)
    assert windows.claimed_from == 20


def test_windows_that_the_chain_has_are_never_trained_again():
    windows = WindowAccounting(counter=5, claimed_from=0, steps=1)
    windows = windows.decided(90, kept=False)
    assert (windows.counter, windows.claimed_from, windows.steps) == (90, 90, 0)


@given(st.lists(st.sampled_from(["train", "announce", "accept", "miss"]), max_size=60))
def test_the_chain_gets_every_window_once_in_order_whatever_happens(story):
    windows, chain = WindowAccounting(), 0
    for event in story:
        if event == "train" and windows.room(MOST) >= 4:
            windows = windows.trained(4)
        elif event == "announce" and windows.announced is None:
            windows = announced(windows)
        elif event == "accept" and windows.announced:
            assert windows.announced.first == chain
            assert 0 < windows.announced.end - windows.announced.first <= MOST and windows.announced.steps >= 1
            chain = windows.announced.end
            windows = windows.decided(chain, kept=False)
        elif event == "miss":
            windows = windows.decided(chain, kept=True)
        assert chain == windows.claimed_from <= windows.counter <= chain + 2 * MOST
        assert windows.uncovered >= 0


# -- replayable runs -------------------------------------------------------------------------------------------


def announced_whole(windows: WindowAccounting) -> WindowAccounting:
    """Return the count after an update was made in a replayable run, and training began again from it."""
    first, end, steps = windows.claim(MOST) or (0, 0, 0)
    made = UndecidedUpdate(
        Digest(sha256(b"parent")), Digest(sha256(b"blob")), 1, first, windows.rebase_window, end, steps, 1.0
    )
    return replace(windows, announced=made).begun_again()


def test_what_was_trained_before_the_state_came_is_marked_in_the_next_update():
    windows = WindowAccounting().trained(4).trained(4)
    windows = announced_whole(windows)
    assert (windows.counter, windows.uncovered, windows.steps) == (8, 0, 2)
    windows = windows.trained(4).rebased()
    assert windows == WindowAccounting(12, 8, 1, None, 12)
    windows = windows.trained(4)
    assert windows.claim(MOST) == (8, 16, 2) and windows.rebase_window == 12


def test_what_was_trained_since_an_announcement_is_dropped_when_training_begins_again():
    windows = announced_whole(WindowAccounting().trained(4)).trained(4).trained(4)
    assert windows.begun_again().counter == 4 and windows.begun_again().steps == 1
    with pytest.raises(ValueError, match="no update is announced"):
        WindowAccounting(20, 8, 3, None, 12).begun_again()


@pytest.mark.parametrize("next_window", [0, 4, 40])
def test_to_start_over_leaves_nothing_to_claim_and_skips_what_was_announced(next_window):
    windows, start = announced_whole(WindowAccounting().trained(4)).trained(4), max(4, next_window)
    windows = windows.started_over(next_window)
    assert windows.claim(MOST) is None and windows.announced is None
    assert windows.trained(4).claim(MOST) == (start, start + 4, 1)
    assert windows.rebase_window == start
    assert windows.trained(4).started_over(0) == windows


def test_the_skipped_steps_are_those_of_the_next_update_alone():
    windows = announced_whole(WindowAccounting().trained(4, skipped=True)).trained(4, skipped=True).trained(4)
    assert windows.skipped == windows.rebased().skipped == 1
    assert windows.begun_again().skipped == windows.started_over(0).skipped == 0


def test_only_an_announced_update_can_be_rebased():
    with pytest.raises(ValueError, match="no update"):
        WindowAccounting().trained(4).rebased()


@given(st.lists(st.sampled_from(["train", "announce", "accept", "miss", "load"]), max_size=60))
def test_in_a_replayable_run_each_update_claims_all_that_was_trained_after_every_earlier_one(story):
    windows, chain, newest, has_own = WindowAccounting(), 0, 0, False
    for event in story:
        if event == "train" and windows.room(MOST) >= 4:
            windows = windows.trained(4)
        elif event == "announce" and windows.announced is None and windows.claim(MOST):
            claim, rebase = windows.claim(MOST), windows.rebase_window
            assert claim is not None and claim[:2] == (newest, windows.counter) and newest >= chain
            assert newest <= rebase <= windows.counter and (rebase == newest or has_own)
            assert claim[2] == (windows.counter - newest) // 4
            windows, newest = announced_whole(windows), windows.counter
        elif event == "accept" and windows.announced:
            chain, has_own = windows.announced.end, True
            windows = windows.rebased()
        elif event == "miss":
            windows, has_own = windows.started_over(chain), False
        elif event == "load":
            chain = max(0, chain - 8)
            windows, has_own = windows.started_over(chain), False
        covered = windows.announced.first if windows.announced else newest
        assert covered == windows.claimed_from <= windows.rebase_window <= windows.counter <= newest + MOST


# -- schedule --------------------------------------------------------------------------------------------------

COSINE = Schedule(kind="cosine", warmup_tokens=100, total_tokens=1100, min_ratio=0.1)
WSD = Schedule(kind="wsd", warmup_tokens=100, total_tokens=1000, decay_fraction=0.2, min_ratio=0.1)


@pytest.mark.parametrize(
    ("schedule", "tokens", "expected"),
    [
        (COSINE, 0, 0.0),
        (COSINE, 50, 0.5),
        (COSINE, 100, 1.0),
        (COSINE, 600, 0.55),
        (COSINE, 1100, 0.1),
        (COSINE, 10**12, 0.1),
        (WSD, 50, 0.5),
        (WSD, 100, 1.0),
        (WSD, 800, 1.0),
        (WSD, 900, 0.55),
        (WSD, 1000, 0.1),
        (WSD, 2000, 0.1),
        (Schedule(kind="constant"), 0, 1.0),
        (Schedule(kind="constant", warmup_tokens=10), 5, 0.5),
        (Schedule(kind="constant", warmup_tokens=10), 10**9, 1.0),
        (Schedule(kind="wsd", total_tokens=1000, decay_fraction=0.0), 999, 1.0),
        (Schedule(kind="wsd", total_tokens=1000, decay_fraction=0.0, min_ratio=0.0), 1000, 0.0),
        (Schedule(kind="cosine", warmup_tokens=500, total_tokens=500), 499, 0.998),
    ],
)
def test_the_schedule_has_these_values(schedule, tokens, expected):
    assert factor(schedule, tokens) == pytest.approx(expected)


@given(
    st.builds(
        Schedule,
        kind=st.sampled_from(["constant", "cosine", "wsd"]),
        warmup_tokens=st.integers(0, 2000),
        total_tokens=st.integers(1, 2000),
        decay_fraction=st.floats(0, 1),
        min_ratio=st.floats(0, 1),
    ),
    st.integers(0, 4000),
)
def test_the_factor_is_always_between_0_and_1(schedule, tokens):
    assert 0.0 <= factor(schedule, tokens) <= 1.0


WARMING = Schedule(kind="constant", warmup_tokens=1000)


@pytest.mark.parametrize("accepted", [0, 500, 5000])
def test_in_a_replayable_run_the_rate_is_that_in_the_middle_of_the_round(accepted):
    assert replayable_factor(WARMING, accepted, 100) == factor(WARMING, accepted + 50)


def test_the_first_round_of_a_warmup_learns():
    assert step_factor(WARMING, 0, 100, windows=0.5, usual_windows=0) == pytest.approx(0.05)


@pytest.mark.parametrize(("windows", "tokens"), [(0, 300), (5, 350), (10, 400), (17, 470), (99, 500)])
def test_within_a_round_the_rate_goes_on_with_the_peers_own_windows(windows, tokens):
    found = step_factor(WARMING, 300, 100, windows, usual_windows=10)
    assert found == pytest.approx(factor(WARMING, tokens))


# -- throughput --------------------------------------------------------------------------------------------------


def test_the_rate_is_of_late_and_falls_to_nothing_in_a_stall():
    meter = ThroughputMeter(0.0)
    assert meter.recent_loss == 0.0 and meter.tokens_per_second(0.0) == 0.0
    for second in range(1, 101):
        meter.step(float(second), 1000, 5.0 if second <= 50 else 3.0)
    assert meter.tokens_per_second(100.0) == pytest.approx(1000, rel=0.11)
    assert meter.recent_loss == 3.0
    assert meter.tokens_per_second(102.0 + RATE_SECONDS) == 0.0


def test_a_mean_that_restarts_keeps_its_value_until_the_next_step():
    mean = MeanLoss().add(5.0).add(3.0)
    assert mean.mean == 4.0 and mean.restarted().mean == 4.0
    assert mean.restarted().add(2.0).mean == 2.0

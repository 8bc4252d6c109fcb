"""Claims on windows, the schedule, the pace: the trainer's plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.training.claims import Announced, Claims
from peer.training.pace import SPAN, Pace
from peer.training.schedule import factor, step_factor
from protocol.ids import Digest, sha256
from protocol.spec import Schedule

MOST = 40


def announce(claims: Claims) -> tuple[int, int, int] | None:
    claim = claims.claim(MOST)
    if claim:
        first, end, steps = claim
        claims.announced = Announced(Digest(sha256(b"parent")), Digest(sha256(b"blob")), 1, first, end, steps, 1.0)
    return claim


def test_an_update_claims_what_was_trained_and_the_next_goes_on_from_there():
    claims = Claims()
    assert claims.claim(MOST) is None
    claims.trained(4)
    claims.trained(4)
    assert claims.uncovered == 8 and announce(claims) == (0, 8, 2)
    claims.trained(4)
    assert claims.uncovered == 4
    claims.decided(8, kept=False)
    assert (claims.claimed_from, claims.counter, claims.steps, claims.announced) == (8, 12, 1, None)
    assert claims.claim(MOST) == (8, 12, 1)


def test_a_missed_update_is_claimed_again_by_the_next():
    claims = Claims()
    claims.trained(4)
    announce(claims)
    claims.trained(4)
    claims.decided(0, kept=True)
    assert claims.claim(MOST) == (0, 8, 2)


def test_training_stops_at_what_an_update_may_claim_and_the_surplus_of_a_miss_is_claimed_later():
    claims = Claims()
    while claims.room(MOST) >= 4:
        claims.trained(4)
    assert claims.counter == MOST and announce(claims) == (0, MOST, 10)
    while claims.room(MOST) >= 4:
        claims.trained(4)
    assert claims.counter == 2 * MOST
    claims.decided(0, kept=True)
    assert claims.room(MOST) == 0
    assert announce(claims) == (0, MOST, 20)
    claims.decided(MOST, kept=False)
    assert announce(claims) == (MOST, 2 * MOST, 1)


def test_windows_whose_work_is_gone_are_not_claimed_again():
    claims = Claims(counter=50, claimed_from=40, steps=2)
    claims.decided(20, kept=False)
    assert claims.claimed_from == 40
    claims.decided(20, kept=True)
    assert claims.claimed_from == 20


def test_windows_that_the_chain_has_are_never_trained_again():
    claims = Claims(counter=5, claimed_from=0, steps=1)
    claims.decided(90, kept=False)
    assert (claims.counter, claims.claimed_from, claims.steps) == (90, 90, 0)


@given(st.lists(st.sampled_from(["train", "announce", "accept", "miss"]), max_size=60))
def test_the_chain_gets_every_window_once_in_order_whatever_happens(story):
    claims, chain = Claims(), 0
    for event in story:
        if event == "train" and claims.room(MOST) >= 4:
            claims.trained(4)
        elif event == "announce" and claims.announced is None:
            announce(claims)
        elif event == "accept" and claims.announced:
            assert claims.announced.first == chain
            assert 0 < claims.announced.end - claims.announced.first <= MOST and claims.announced.steps >= 1
            chain = claims.announced.end
            claims.decided(chain, kept=False)
        elif event == "miss":
            claims.decided(chain, kept=True)
        assert chain == claims.claimed_from <= claims.counter <= chain + 2 * MOST
        assert claims.uncovered >= 0


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


def test_the_first_round_of_a_warmup_learns():
    assert step_factor(WARMING, 0, 100, windows=0.5, usual_windows=0) == pytest.approx(0.05)


@pytest.mark.parametrize(("windows", "tokens"), [(0, 300), (5, 350), (10, 400), (17, 470), (99, 500)])
def test_within_a_round_the_rate_goes_on_with_the_peers_own_windows(windows, tokens):
    found = step_factor(WARMING, 300, 100, windows, usual_windows=10)
    assert found == pytest.approx(factor(WARMING, tokens))


# -- pace ------------------------------------------------------------------------------------------------------


def test_the_pace_is_of_late_and_falls_to_nothing_in_a_stall():
    pace = Pace(0.0)
    assert pace.late_loss == 0.0 and pace.tokens_per_second(0.0) == 0.0
    for second in range(1, 101):
        pace.step(float(second), 1000, 5.0 if second <= 50 else 3.0)
    assert pace.tokens_per_second(100.0) == pytest.approx(1000, rel=0.11)
    assert pace.late_loss == 3.0 and pace.span_loss == 4.0
    pace.new_span()
    assert pace.span_loss == 4.0
    pace.step(101.0, 1000, 2.0)
    assert pace.span_loss == 2.0
    assert pace.tokens_per_second(102.0 + SPAN) == 0.0

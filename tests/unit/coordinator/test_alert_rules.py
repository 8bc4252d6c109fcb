"""Alerts as pure rules: each fires, fires once, lasts, resolves; and a restart neither repeats nor loses one."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.alerts.rules import RULES, STARTUP_SECONDS, AlertInput
from coordinator.alerts.tracker import KEEP_SECONDS, MAX_WAITING, REPEAT_SECONDS, AlertTracker, back_off

LOSSES = tuple(3.0 + 0.01 * i for i in range(20))  # newest first: it falls
GOOD = AlertInput(
    time=1e9, up=1e6, health="healthy", message="all is well", problem="", caught_up=True, round=50, round_limit=100.0,
    losses=LOSSES, training=10, diverged=(), disk_free=10**12, disk_size=2 * 10**12,
    validation_losses=(3.0, 3.1),
)  # fmt: skip


class World:
    """Looks at sights, ten seconds apart, and remembers what happened."""

    def __init__(self, hooks=("a",), up=GOOD.up):
        self.hooks = hooks
        self.up = up
        self.dropped = 0
        self.journal = AlertTracker(hooks, on_dropped=self.drop)
        self.time = GOOD.time
        self.round = 50

    def look(self, count: int = 1, seconds: float = 10.0, **changes) -> list[tuple[str, str]]:
        seen = []
        for _ in range(count):
            self.time += seconds
            self.up += seconds
            sight = replace(GOOD, time=self.time, up=self.up, round=self.round, **changes)
            seen += [(e.name, e.kind) for e in self.journal.update(sight)]
        return seen

    def good_rounds(self, count: int = 3, **changes) -> list[tuple[str, str]]:
        seen = []
        for _ in range(count):
            self.round += 1
            seen += self.look(3, **changes)
        return seen

    def drop(self) -> None:
        self.dropped += 1

    def restart(self, **changes) -> None:
        self.up = changes.get("up", self.up)
        self.journal = AlertTracker(self.hooks, json.loads(json.dumps(self.journal.to_json())))


BAD = {
    "loss": {"losses": (5.0, 4.6, *LOSSES[2:])},
    "digests": {"diverged": ("eve",)},
    "peers": {"training": 6},
    "disk": {"disk_free": 15 * 10**9},
    "validation": {"validation_losses": (math.nan, 3.0, 3.1)},
    "chain": {"problem": "waiting for the chain after round 3"},
}


@pytest.mark.parametrize("name", BAD)
def test_each_alert_fires_once_and_resolves_once(name):
    world = World()
    assert world.good_rounds(8) == []
    fired = world.look(24, seconds=3, **BAD[name])
    assert fired == [(name, "fired")]
    (alert,) = world.journal.active
    assert alert.name == name and alert.message and world.time - 100 < alert.since <= world.time
    assert world.good_rounds(5) == [(name, "resolved")]
    assert world.journal.active == ()


def test_a_state_that_is_worse_than_the_best_is_told_until_one_is_as_good():
    world = World()
    assert world.good_rounds(8) == []
    assert world.good_rounds(2, validation_losses=(3.2, 3.0)) == []  # some noise is no news
    assert world.good_rounds(2, validation_losses=(3.4, 3.0)) == [("validation", "fired")]
    assert "3.40" in world.journal.active[0].message and "3.00" in world.journal.active[0].message
    assert world.good_rounds(2, validation_losses=(2.9, 3.4, 3.0)) == [("validation", "resolved")]


def test_an_archive_that_fails_for_ten_minutes_is_told_with_the_reason():
    world = World()
    assert world.good_rounds(8) == []
    assert world.good_rounds(19, archive_problem="the disk is full") == []
    assert world.good_rounds(2, archive_problem="the disk is full") == [("archive", "fired")]
    assert world.journal.active[0].message == "the disk is full"
    assert world.good_rounds(3) == [("archive", "resolved")]


def test_a_round_that_does_not_end_is_told_and_is_over_with_the_round():
    world = World()
    assert world.good_rounds() == []
    assert world.look(30) == [("stalled", "fired")]
    assert "30 peers" not in world.journal.active[0].message and "10 peers train" in world.journal.active[0].message
    world.round += 1
    assert world.look() == [("stalled", "resolved")]
    assert world.look(100, seconds=10, training=0, health="idle")[:1] == [("peers", "fired")]  # not: stalled
    assert [a.name for a in world.journal.active] == ["peers"]


def test_peers_that_their_users_have_paused_are_not_gone():
    world = World()
    assert world.good_rounds(8) == []
    assert world.good_rounds(8, training=4, resting=6) == []
    assert world.good_rounds(8, training=4, resting=1) == [("peers", "fired")]
    assert world.journal.active[0].message == "4 peers train and 1 rest, of 10"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_fires_at_once(bad):
    world = World()
    assert world.look(losses=(bad, *LOSSES)) == [("loss", "fired")]
    assert "roll back" in world.journal.active[0].message
    assert world.look() == [("loss", "resolved")]


def test_a_spike_does_not_become_normal_by_lasting():
    world = World()
    spike = {"losses": (5.0, 5.0, *LOSSES[2:])}
    assert world.look(**spike) == [("loss", "fired")]
    for _ in range(20):
        world.round += 1
        assert world.look(losses=(5.0,) * 20) == []
    assert "was 3.1" in world.journal.active[0].message
    assert world.look(losses=(3.1, 3.2, *(5.0,) * 18)) == [("loss", "resolved")]


def test_one_bad_round_and_an_ordinary_spread_are_no_spike():
    world = World()
    assert world.look(losses=(4.5, *LOSSES[1:])) == []
    wide = tuple(4.0 + (0.4 if i % 2 else -0.4) for i in range(20))
    assert world.look(losses=(4.9, 4.8, *wide[2:])) == []
    assert world.look(losses=(9.0, 9.0, 3.0, 3.0)) == []  # too few rounds to say what is normal


def test_a_few_who_leave_are_no_drop_and_the_finished_run_is_left_in_peace():
    world = World()
    assert world.look(5) + world.look(4, training=8) + world.good_rounds() == []
    assert world.look(10, training=0, health="finished") == []
    world = World()
    assert world.look(2, training=2) + world.look(2, training=1) == []  # one is not a swarm that drops


def test_after_an_hour_what_is_left_is_normal():
    world = World()
    world.look(5)
    assert world.look(3, training=4) == [("peers", "fired")]
    told = []
    for _ in range(130):
        world.round += 1
        told += world.look(training=4, seconds=30)
    assert told == [("peers", "resolved")]


def test_what_lasts_is_told_again_after_hours_and_not_before():
    world = World()
    assert world.look(**BAD["disk"]) == [("disk", "fired")]
    told = []
    for _ in range(50):
        world.round += 1
        told += world.look(seconds=REPEAT_SECONDS / 10, **BAD["disk"])
    assert told == [("disk", "ongoing")] * 5


@pytest.mark.parametrize("name", [*BAD, "stalled"])
def test_a_restart_neither_repeats_nor_loses_nor_ends_an_alert(name):
    world = World()
    world.good_rounds()
    bad = BAD[name] | {"round_limit": 1e4} if name in BAD else {}
    fired = world.look(30, seconds=7, **bad)
    assert (name, "fired") in fired
    since = world.journal.active[0].since
    world.restart(up=0)
    # Just after the start no message has arrived, and the chain is not read.
    nothing = {"training": 0, "caught_up": False, "health": "idle"} | bad
    assert world.look(2, **nothing) == []
    assert (world.journal.active[0].name, world.journal.active[0].since) == (name, since)
    assert world.look(2, seconds=STARTUP_SECONDS, **bad) + world.look(5, seconds=7, **bad) == []
    assert (name, "resolved") in world.good_rounds(5)


@pytest.mark.parametrize(
    ("name", "bad"), [("digests", BAD["digests"]), ("chain", {"health": "split", "message": "there are two chains"})]
)
def test_what_peers_say_just_after_a_start_is_no_alert(name, bad):
    world, bad = World(up=0), bad | {"round_limit": 1e4}
    assert world.look(119, seconds=STARTUP_SECONDS / 120, **bad) == []
    assert world.look(30, **bad) == [(name, "fired")]


def test_a_chain_that_is_not_followed_is_told_just_after_a_start_too():
    assert World(up=0).look(10, **BAD["chain"]) == [("chain", "fired")]


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_is_set_neither_delays_nor_fires_an_alert(days):
    usual, world = World(), World()
    for each in (usual, world):
        assert each.good_rounds() + each.look(5) == []
    world.time += days * 86_400
    for _ in range(20):
        assert world.look() == usual.look()
    (alert,), (same,) = world.journal.active, usual.journal.active
    assert alert.name == "stalled" and world.time - alert.since == usual.time - same.since


def test_a_clock_that_is_set_drops_no_event_and_makes_no_other_of_it():
    world = World()
    world.look(**BAD["disk"])
    event = world.journal.next_for("a")
    world.time += 2 * KEEP_SECONDS
    world.look(**BAD["disk"])
    assert world.journal.next_for("a") == replace(event, since=world.time - 10, time=world.time - 10)
    world.journal.done("a", event)
    assert world.journal.next_for("a") is None and not world.dropped


def test_a_clock_that_is_set_back_while_the_coordinator_restarts_delays_no_alert():
    world = World()
    assert world.good_rounds() + world.look(5) == []
    world.time -= 86_400
    world.restart()
    assert world.look(12) == [("stalled", "fired")]


@pytest.mark.parametrize("bad", [{"diverged": ("eve",)}, {"training": 6}])
def test_a_cause_that_comes_and_goes_is_sent_at_once_and_a_few_times_a_day(bad):
    """One admitted key can say and deny a wrong state, or train and rest, for ever: here whenever it has an effect."""
    world = World()

    def day(attacked: bool) -> list[str]:
        kinds = []
        for step in range(2880):
            world.round += 1
            changes = bad if attacked and not world.journal.active and step % 4 > 1 else {}
            kinds += [kind for _, kind in world.look(seconds=30, **changes)]
        world.restart()
        return kinds

    assert day(False) == []
    assert day(True) == ["fired", "resolved"] * 4 + ["fired"]
    assert len(day(True) + day(True)) <= 4
    day(False), day(False)
    assert world.look(2, **bad)[0][1] == "fired" and world.good_rounds(3)[-1][1] == "resolved", "it is forgiven"


def test_a_cause_that_returns_before_its_alert_is_resolved_is_sent_again():
    """It may be a worse one."""
    world = World()
    for _ in range(2):  # from the second time on the cause must be gone for an hour
        assert world.look(1, **BAD["disk"]) == [("disk", "fired")]
        gone = world.look(5, seconds=60)
    assert gone == []
    assert world.look(20, seconds=60, **BAD["disk"]) == []
    assert world.look(100, seconds=60, **BAD["disk"]) == [("disk", "fired")]


def test_a_faulty_rule_silences_no_other_and_is_logged_once(monkeypatch, caplog):
    def faulty(*_) -> str:
        raise ZeroDivisionError

    rules = [replace(rule, judge=faulty) if rule.name == "loss" else rule for rule in RULES]
    monkeypatch.setattr("coordinator.alerts.tracker.RULES", rules)
    world = World()
    assert world.look(5, **BAD["disk"]) == [("disk", "fired")]
    assert [r.args for r in caplog.records] == [("loss",)]


def test_what_was_not_told_before_a_restart_is_told_after_it():
    world = World(("a", "b"))
    world.look(**BAD["disk"])
    event = world.journal.next_for("a")
    world.journal.done("a", event)
    world.restart()
    assert world.journal.next_for("a") is None and world.journal.next_for("b") == event


def test_a_webhook_that_takes_nothing_costs_a_bounded_amount_and_hears_no_old_news():
    world = World(("a",))
    world.look()
    for n in range(100):
        world.round += 1
        world.look(convictions=((f"case-{n}", f"peer {n} is convicted"),))
    waiting = world.journal.to_json()["waiting"]["a"]
    assert len(waiting) == MAX_WAITING and world.dropped == 100 - MAX_WAITING
    world.look(seconds=KEEP_SECONDS + 2000)
    assert all(e["time"] > world.time - KEEP_SECONDS for e in world.journal.to_json()["waiting"]["a"])
    assert [back_off(n) for n in (1, 2, 5, 50)] == [1, 2, 16, 300]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, *BAD]), st.integers(0, 2), st.booleans()), max_size=60))
def test_fired_and_resolved_alternate_whatever_happens_and_restarts_change_nothing(steps):
    plain, restarted = World(), World()
    log = []
    for name, rounds, again in steps:
        change = {} if name is None else BAD[name]
        for world in (plain, restarted):
            world.round += rounds
        if again:
            restarted.restart()
        seen = plain.look(**change)
        assert restarted.look(**change) == seen
        log += seen
    for rule in RULES:
        what = [w for n, w in log if n == rule.name and w != "ongoing"]
        assert what == ["fired", "resolved"] * (len(what) // 2) + ["fired"] * (len(what) % 2)


EVE, MALLORY = ("case-1", "peer eve is convicted in round 41"), ("case-2", "peer mallory is convicted in round 44")


def test_each_conviction_is_sent_once_and_is_over_after_an_hour():
    world = World()
    assert world.look(2, convictions=(EVE,)) == [], "what is there at the first look is no news"
    world.restart()
    assert world.look(convictions=(MALLORY, EVE)) == [("audits", "fired")]
    assert [a.message for a in world.journal.active] == [MALLORY[1]]
    world.restart()
    assert world.look(5, convictions=(MALLORY, EVE)) == []
    third = ("case-3", "peer trudy is convicted in round 45")
    assert world.look(convictions=(third, MALLORY, EVE)) == [("audits", "fired")]
    assert world.look(5, seconds=600, health="paused", convictions=(third, MALLORY, EVE)) == []
    assert world.look(2, seconds=600, health="paused", convictions=(third, MALLORY, EVE)) == [("audits", "resolved")]
    assert world.look(5, seconds=9000, health="paused", convictions=(third, MALLORY, EVE)) == []


def test_several_convictions_of_one_record_are_one_alert_and_none_is_judged_while_the_chain_is_read():
    world = World()
    assert world.look(caught_up=False, convictions=(EVE,)) == []
    assert world.look(convictions=()) == [] and world.look(convictions=(MALLORY, EVE)) == [("audits", "fired")]
    assert world.journal.active[0].message == f"{MALLORY[1]}; and 1 more: see the run page"

"""The volunteer's view at three widths: nothing is cut, and all of it is there without a terminal too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cairn.milestones import ACCEPTED, SETTLED, milestones
from cairn.peer_view import DownloadLines, PeerEarnings, PeerView, lines, one_line
from peer.node.downloads import Download
from protocol.ids import Round
from protocol.rounds.update_fate import UpdateFate
from tests.support.shown_peer import NODE, PAGE, VIEW

REASON = "too few had fetched it when the record was proposed, 3.2 s after it was announced"
ORDERS = "paused by the run's owner since 2026-01-02 03:04 UTC (moving house, back on Monday)"
MISSED = replace(
    VIEW, node=replace(NODE, phase="paused", last_update=UpdateFate(Round(11), False, REASON), orders=ORDERS)
)
DATA = Download("the run's data shard", "x", 4_000_000, 8_900_000, 2.1e6)
STARTING = PeerView(
    replace(
        NODE,
        phase="joining",
        device="",
        state="",
        last_update=None,
        own_updates=0,
        downloads=[DATA, Download("the checkpoint", "y", 0, 8_900_000_000, 0.0)],
    )  # fmt: skip
)

GOLDEN = {
    (80, "training"): """\
run       sotu, as ada   ━━╌╌╌╌╌╌╌╌╌╌  15%   about 11.8 h left   4 peers
now       training round 12   ━━━━━━━╌╌╌╌╌  58%   about 26 s left
speed     1.3k tokens/s   loss 5.123   MFU 41%   up 1.2 MB/s   down 3.4 MB/s
update    accepted in round 11   9 made, 1 missed
credits   20.00 settled   10.50 pending   for 8 rounds
page      https://run.example.org/#peer/abababababababababababababababababababab
          abababababababababababab""",
    (110, "missed"): """\
run       sotu, as ada   ━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  15%   about 11.8 h left   4 peers
now       paused round 12
orders    paused by the run's owner since 2026-01-02 03:04 UTC (moving house, back on Monday)
speed     1.3k tokens/s   loss 5.123   MFU 41%   up 1.2 MB/s   down 3.4 MB/s
update    not in round 11: too few had fetched it when the record was proposed, 3.2 s after it was announced
          9 made, 1 missed
credits   20.00 settled   10.50 pending   for 8 rounds
page      https://run.example.org/#peer/abababababababababababababababababababababababababababababababab""",
    (80, "missed"): """\
run       sotu, as ada   ━━╌╌╌╌╌╌╌╌╌╌  15%   about 11.8 h left   4 peers
now       paused round 12
orders    paused by the run's owner since 2026-01-02 03:04 UTC (moving house,
          back on Monday)
speed     1.3k tokens/s   loss 5.123   MFU 41%   up 1.2 MB/s   down 3.4 MB/s
update    not in round 11: too few had fetched it when the record was proposed,
          3.2 s after it was announced   9 made, 1 missed
credits   20.00 settled   10.50 pending   for 8 rounds
page      https://run.example.org/#peer/abababababababababababababababababababab
          abababababababababababab""",
    (160, "starting"): """\
run       sotu, as ada   ━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  15%   4 peers
now       joining: fetches what training needs   the trainer is starting
fetching  the run's data shard   ━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌  45%   4.0 MB of 8.9 MB   2.1 MB/s   about 2 s left
fetching  the checkpoint   ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌   0%   0 B of 8.9 GB
link      up 1.2 MB/s   down 3.4 MB/s
update    none announced yet
credits   the coordinator has not said yet""",
}
VIEWS = {"training": VIEW, "missed": MISSED, "starting": STARTING}


@pytest.fixture(autouse=True)
def credits_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the unit of credits: only their place is of interest here."""
    monkeypatch.setattr("cairn.peer_view.credit_text", lambda micro: f"{micro / 1e6:.2f}")


@pytest.mark.parametrize(("width", "name"), GOLDEN)
def test_the_live_lines(width: int, name: str):
    assert "\n".join(line.plain for line in lines(VIEWS[name], width)) == GOLDEN[width, name]


@pytest.mark.parametrize("width", [20, 40, 79, 80, 110, 160, 300])
@pytest.mark.parametrize("name", VIEWS)
def test_nothing_is_cut_at_any_width(width: int, name: str):
    shown = lines(VIEWS[name], width)
    assert all(line.cell_len <= width for line in shown)
    whole = "".join(line.plain[10:].replace(" ", "") for line in shown)
    for word in (PAGE, REASON, ORDERS) if name == "missed" else ("4.0MBof8.9MB",) if name == "starting" else (PAGE,):
        assert word.replace(" ", "") in whole


def test_without_a_terminal_one_line_has_the_same_facts():
    assert one_line(VIEW) == (
        "run sotu, as ada, 15%, about 11.8 h left, 4 peers; now training round 12, 58%, about 26 s left; "
        "speed 1.3k tokens/s, loss 5.123, MFU 41%, up 1.2 MB/s, down 3.4 MB/s; "
        "update accepted in round 11, 9 made, 1 missed; credits 20.00 settled, 10.50 pending, for 8 rounds"
    )
    assert ORDERS in one_line(MISSED) and REASON in one_line(MISSED) and "\n" not in one_line(MISSED)


def test_a_round_ends_at_its_time_limit_when_its_tokens_come_slowly():
    assert "58%, about 10 s left" in one_line(replace(VIEW, node=replace(NODE, round_seconds_left=10.0)))
    assert "58%, ends now" in one_line(replace(VIEW, node=replace(NODE, round_seconds_left=0.0)))
    still = one_line(replace(VIEW, node=replace(NODE, round_seconds_left=None, swarm_tokens_per_second=0.0)))
    assert "58%; speed" in still and "left" not in still


def test_a_round_without_a_speed_names_its_limit_and_one_that_is_trained_says_that_it_waits():
    first = replace(NODE, round_seconds_left=600.0, swarm_tokens_per_second=0.0, loss=0.0, own_updates=0)
    assert "at most 10 min left" in one_line(replace(VIEW, node=first)) and "no loss yet" in one_line(PeerView(first))
    said = one_line(replace(VIEW, node=replace(NODE, is_waiting=True)))
    assert "now waiting in round 12: nothing to train for now, 58%, about 26 s left" in said


def test_a_peer_that_starts_again_does_not_deny_what_it_did_before():
    again = replace(NODE, last_update=None, own_updates=0, loss=0.0)
    assert "update none announced since this start" in one_line(replace(VIEW, node=again))
    assert "update none announced yet" in one_line(PeerView(again, PeerEarnings(0, 0, 0)))
    assert "loss" not in one_line(replace(VIEW, node=replace(NODE, loss=0.0)))  # it rests, after nine updates


def test_an_update_that_is_not_decided_a_silent_coordinator_and_no_credit_yet():
    waiting = replace(NODE, phase="exchanging", last_update=UpdateFate(Round(12)), mfu=None)
    said = one_line(PeerView(waiting, PeerEarnings(0, 0, 0, fresh=False)))
    assert "now exchanging updates of round 12" in said and "MFU" not in said
    assert "announced in round 12, not decided yet" in said
    assert said.endswith("credits none yet, the coordinator is silent")


def test_an_auditor_without_training_shows_its_checks():
    watching = replace(NODE, phase="observing", device="", audits={"made": 5, "failed": 1, "not_made": 2, "waiting": 3})
    assert one_line(PeerView(watching)) == (
        "run sotu, as ada, 15%, about 11.8 h left, 4 peers; now observing round 12; "
        "checks 5 made, 1 failed, 3 wait; link up 1.2 MB/s, down 3.4 MB/s"
    )


def test_without_a_terminal_a_download_has_few_lines():
    said = DownloadLines()
    slow = [(t, Download("the checkpoint", "y", t * 1_000_000, 100_000_000, 1e6)) for t in range(0, 101)]
    told = [(t, line) for t, d in slow for line, _ in said.due([d], float(t))]
    assert [t for t, _ in told] == list(range(10, 100, 10))
    assert told[0][1] == "the checkpoint, 10%, 10.0 MB of 100 MB, 1.0 MB/s, about 2 min left"
    fast = [(t / 10, Download("the checkpoint", "z", t * 1_000_000, 100_000_000, 1e7)) for t in range(0, 101)]
    assert [t for t, d in fast for _ in said.due([d], t)] == [5.0], "not more often than every few seconds"
    stuck = Download("the checkpoint", "w", 0, 100, 0.0)
    assert [t for t in range(100) if said.due([stuck], float(t))] == [30, 60, 90]


def test_each_joy_is_told_once():
    assert [name for name, _ in milestones(VIEW, set())] == [ACCEPTED, SETTLED]
    assert not list(milestones(VIEW, {ACCEPTED, SETTLED}))
    ((name, line),) = milestones(replace(VIEW, earnings=PeerEarnings(0, 5, 1)), set())
    assert name == ACCEPTED and "round 11" in line
    missed = replace(VIEW, node=replace(NODE, last_update=UpdateFate(Round(3), False, "late")))
    assert [name for name, _ in milestones(missed, {SETTLED})] == []

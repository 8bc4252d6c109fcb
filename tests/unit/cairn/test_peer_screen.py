"""The volunteer's terminal: it logs the peer's address on the run's page once, if there is a valid address."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn.commands import join
from cairn.peer_screen import PeerScreen, own_page, progress_line
from protocol.errors import CairnError
from tests.support.specs import identity
from tests.support.waiting import ended

KEY = identity("volunteer").key


@pytest.mark.parametrize(
    "page, start",
    [
        ("http://192.0.2.1:7180/", "http://192.0.2.1:7180/#peer/"),
        ("https://run.example.org", "https://run.example.org/#peer/"),
        ("https://example.org/cairn/run-1", "https://example.org/cairn/run-1/#peer/"),
        ("http://[2001:db8::1]:7180/", "http://[2001:db8::1]:7180/#peer/"),
    ],
)
def test_a_peer_finds_its_own_row_by_its_key(page, start):
    assert own_page(page, KEY) == f"{start}{KEY}"


@pytest.mark.parametrize(
    "page", ["", "javascript:alert(1)", "http://x/\x1b[2J", "file:///etc", "http://x/ y", "http://x/#a"]
)
def test_what_is_no_address_of_a_page_is_not_shown(page):
    assert own_page(page, KEY) == ""


async def test_the_link_is_told_once_when_the_coordinator_answers(caplog, monkeypatch):
    monkeypatch.setattr(join, "CREDIT_SECONDS", 0.01)
    asked, thrice = {"status": 0, "account": 0}, asyncio.Event()

    class Client:
        async def status(self):
            asked["status"] += 1
            if asked["status"] == 1:
                raise CairnError("away")
            return SimpleNamespace(page="http://192.0.2.1:7180/")

        async def account(self, key):
            asked["account"] += 1
            if asked["account"] == 3:
                thrice.set()
            return SimpleNamespace(micro_credits_settled=5, micro_credits_pending=1, rounds=2)

    view = PeerScreen(live=False)
    membership = SimpleNamespace(client=Client(), identity=SimpleNamespace(key=KEY))
    with caplog.at_level(logging.INFO, logger="cairn.peer"):
        task = asyncio.create_task(join._ask_for_credits(cast(Any, membership), view, lambda: 3))
        await ended(thrice.wait())
        task.cancel()
    assert [r.message for r in caplog.records] == [f"this peer on the run's page: http://192.0.2.1:7180/#peer/{KEY}"]
    assert asked["status"] == 2 and view.earnings is not None and view.earnings.rounds == 2


def test_an_auditor_without_training_shows_its_checks():
    shown = dict(phase="observing", round=7, target_tokens=0, device="", members=2, total_tokens=0, orders="", rest="")
    audits = {"made": 5, "failed": 1, "not_made": 2, "waiting": 3}
    line = progress_line(SimpleNamespace(**shown, audits=audits)).plain
    assert line == "observing  round 7  5 checks made, 1 failed, 3 wait  3 peers"


def test_what_the_owner_has_ordered_is_in_the_line_that_is_always_seen():
    shown = dict(phase="paused", round=7, target_tokens=0, device="", members=2, total_tokens=0, orders="", rest="")
    assert "owner" not in progress_line(SimpleNamespace(**shown)).plain
    orders = "paused by the run's owner since 2026-01-02 03:04 UTC (moving house)"
    assert progress_line(SimpleNamespace(**shown | {"orders": orders})).plain.endswith(f"3 peers  {orders}")


def test_a_rest_is_shown_with_its_reason_and_whether_the_devices_are_free():
    shown = dict(phase="resting", round=7, target_tokens=0, device="H100", members=2, total_tokens=0, orders="")
    shown |= {"rest": "paused by its user", "devices_free": False}
    line = progress_line(SimpleNamespace(**shown)).plain
    assert line == "resting    round 7  paused by its user; its devices are being freed  3 peers"
    line = progress_line(SimpleNamespace(**shown | {"devices_free": True})).plain
    assert line == "resting    round 7  paused by its user  3 peers"


class RunningNode:
    """A node that ends as soon as it is to leave."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self.left = 0
        self.membership = SimpleNamespace(client=None, identity=SimpleNamespace(key=KEY))
        self.reporter = SimpleNamespace(latest=SimpleNamespace(members=1))
        self.end_of_run = SimpleNamespace(info=None, is_awaited=False)

    async def run(self) -> None:
        await self._over.wait()

    def leave(self) -> None:
        self.left += 1
        self._over.set()

    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(own_updates=3, finished="left the swarm", round=7, state="ab" * 32)


@pytest.mark.parametrize("why", ["its user", "the day's volume"])
async def test_it_leaves_in_order_at_its_users_word_and_when_the_days_volume_is_used_up(why, capsys):
    node, stop, away = RunningNode(), asyncio.Event(), asyncio.Event()
    stopping = asyncio.ensure_future(stop.wait())
    ending = asyncio.ensure_future(
        join.run_node(cast(Any, node), PeerScreen(live=False), stopping, away, auditor=False)
    )
    await asyncio.sleep(0.05)
    assert not node.left and not ending.done()
    (stop if why == "its user" else away).set()
    await ended(ending)
    assert node.left == 1 and "left the swarm: round 7" in capsys.readouterr().out
    stopping.cancel()

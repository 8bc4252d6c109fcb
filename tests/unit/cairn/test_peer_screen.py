"""The volunteer's terminal: it logs the peer's address on the run's page once, if there is a valid address."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn import milestones, peer_screen
from cairn.commands import join
from cairn.logs import set_up_logging
from cairn.peer_screen import PeerScreen, own_page
from protocol.errors import CairnError
from tests.support.command_line import (
    logging_as_it_was,  # noqa: F401 - a fixture
    stdout_without_reader,
)
from tests.support.shown_peer import VIEW
from tests.support.specs import identity
from tests.support.waiting import ended, until

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
    asked, thrice = {"status": 0, "totals": 0}, asyncio.Event()

    class Client:
        async def status(self):
            asked["status"] += 1
            if asked["status"] == 1:
                raise CairnError("away")
            return SimpleNamespace(page="http://192.0.2.1:7180/")

        async def totals(self, key):
            asked["totals"] += 1
            if asked["totals"] == 3:
                thrice.set()
            return SimpleNamespace(micro_credits_settled=5, micro_credits_pending=1, rounds=2)

    view = PeerScreen(plain=True)
    membership = SimpleNamespace(client=Client(), identity=SimpleNamespace(key=KEY))
    with caplog.at_level(logging.INFO, logger="cairn.peer"):
        task = asyncio.create_task(join.ask_for_credits(cast(Any, membership), view, lambda: 3))
        await ended(thrice.wait())
        task.cancel()
    assert [r.message for r in caplog.records] == [f"this peer on the run's page: http://192.0.2.1:7180/#peer/{KEY}"]
    assert asked["status"] == 2 and view.page.endswith(f"#peer/{KEY}")
    assert view.earnings is not None and view.earnings.rounds == 2


class Values:
    """A store of values."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def read_value(self, name: str) -> bytes | None:
        return self.values.get(name)

    def write_value(self, name: str, data: bytes) -> None:
        self.values[name] = data


async def test_a_milestone_is_told_when_it_comes_and_not_again_after_a_restart(caplog, monkeypatch):
    monkeypatch.setattr(milestones, "LOOK_SECONDS", 0.01)
    store, shown = cast(Any, Values()), replace(VIEW, earnings=None)
    with caplog.at_level(logging.INFO, logger="cairn.peer"):
        first = asyncio.create_task(milestones.log_milestones(lambda: shown, store))
        await until(lambda: len(caplog.records) == 1, "the first milestone")
        shown = VIEW
        await ended(first)
        await ended(milestones.log_milestones(lambda: shown, store))
    assert ["first update" in r.message for r in caplog.records] == [True, False]
    assert "first credit" in caplog.records[1].message


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_as_json_every_line_is_an_object(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_screen, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(peer_screen, "LINE_SECONDS", 0.02)
    screen = PeerScreen(as_json=True)
    screen.earnings, screen.page = VIEW.earnings, VIEW.page
    set_up_logging(tmp_path / "peer.log", terminal=screen.handler)
    logging.getLogger("peer.x").warning("a line\nwith a break")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("peer.x").exception("failed")
    said: list[dict[str, Any]] = []
    with screen.showing(lambda: replace(VIEW.node, loss=math.nan)):
        for _ in range(1000):
            time.sleep(0.01)
            said += json_lines(capsys.readouterr().out)
            if any("status" in line for line in said):
                break
    screen.say("stopped: round 3")
    said += json_lines(capsys.readouterr().out)
    first, second, *_, last = said
    assert first["level"] == "warning" and first["logger"] == "peer.x" and first["message"] == "a line\nwith a break"
    assert "ValueError: broken" in second["traceback"] and last["message"] == "stopped: round 3"
    status = next(line for line in said if "status" in line)
    assert status["status"]["last_update"] == {"round": 11, "accepted": True, "reason": ""}
    assert (
        status["status"]["loss"] is None and status["credits"]["pending"] == 10_500_000 and status["page"] == VIEW.page
    )
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in said)


def test_a_download_that_is_not_the_nodes_is_logged(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_screen, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr("cairn.peer_view.MIN_STEP_SECONDS", 0.0)
    screen = PeerScreen(as_json=True)
    set_up_logging(tmp_path / "peer.log", terminal=screen.handler)
    said: list[dict[str, Any]] = []
    with screen.downloading("the last state", 100) as note:
        for step in range(1000):
            note(1 if step < 50 else 0)
            time.sleep(0.01)
            said += json_lines(capsys.readouterr().out)
            if said:
                break
    assert said[0]["download"]["size"] == 100 and said[0]["message"].startswith("the last state, ")


class RunningNode:
    """A node that ends as soon as it is to leave."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self.left = 0
        self.work = SimpleNamespace(trainer=object())
        self.membership = SimpleNamespace(client=None, identity=SimpleNamespace(key=KEY))
        self.reporter, self.store = SimpleNamespace(latest=VIEW.node), Values()
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
    ending = asyncio.ensure_future(join.run_node(cast(Any, node), PeerScreen(plain=True), stopping, away))
    await asyncio.sleep(0.05)
    assert not node.left and not ending.done()
    (stop if why == "its user" else away).set()
    await ended(ending)
    assert node.left == 1 and "left the swarm: round 7" in capsys.readouterr().out
    stopping.cancel()


@pytest.mark.parametrize("as_json", [False, True])
async def test_it_leaves_in_order_when_nobody_reads_its_output_any_more(tmp_path, as_json):
    """Ctrl-C of `cairn peer join ... | tee log` ends tee, too."""
    screen, node = PeerScreen(as_json=as_json), RunningNode()
    set_up_logging(tmp_path / "peer.log", terminal=screen.handler)
    stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stopping.set_result(None)
    with stdout_without_reader():
        await ended(join.run_node(cast(Any, node), screen, stopping, asyncio.Event()))
    assert node.left == 1 and "leaving: announcing" in (tmp_path / "peer.log").read_text()

"""`cairn watch` and `cairn status`: what fits, what is said while nobody answers, and how it ends."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cairn.commands.watch import poll
from cairn.status_view import whole
from cairn.watch_screen import WatchScreen
from coordinator.alerts.tracker import Alert
from coordinator.alerts.watcher import AlertWatcher
from peer.coordinator_client import AlertStatus, PeerStatus, RoundStatus, SwarmStatus
from protocol.ids import Digest, PeerKey, sha256
from protocol.invite import HostPort, Invite
from tests.support.coordinator_fakes import FakeSwarm, make_spec
from tests.support.coordinator_service import running, settled
from tests.support.waiting import LIMIT, until

ROOT = Path(__file__).resolve().parents[2]
SPEC = make_spec()


def key(n: int) -> PeerKey:
    return PeerKey(sha256(b"key", n.to_bytes(4, "big")))


def status(peers: int = 3, rounds: int = 8, alerts: int = 0, words: str = "3 peers training", **changes) -> SwarmStatus:
    phases = ("training", "exchanging", "silent", "gone")
    fields = dict(
        name="tiny", health="healthy", message=words, round=rounds, head=Digest(bytes(32)), state=Digest(bytes(32)),
        state_round=rounds, tokens=10**6, total_tokens=10**7, tokens_per_second=5e4, loss=3.21,
        peers=tuple(
            PeerStatus(
                key(n), "日本のピア" * 4 if n % 2 else f"[red]n{n}[/red]", phases[n % 4], 7, 3.2, 1e4, 10**9, 10**9, 5,
                10**8, None, 100.0, "NVIDIA GeForce RTX 4090",
            ) for n in range(peers)
        ),
        page="http://run.example.org/", checkpoint=None, checkpoint_round=0, final_round=3,
        rounds=tuple(RoundStatus(r, 10**5, 3.3, 9, ("somebody with a long name",) * 8, 20, r < 3)
                     for r in reversed(range(rounds))),
        losses=tuple(5 - n / 50 for n in range(min(120, 10 * rounds))),
        alerts=tuple(AlertStatus(f"a{n}", 100, "something is wrong " * 9) for n in range(alerts)),
    )  # fmt: skip
    return SwarmStatus(**(fields | changes))  # type: ignore[arg-type]


def console(width: int, height: int, *, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, highlight=False)


def lines_of(what, made: Console) -> list[str]:
    made.print(what)
    return made.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width, height", [(80, 24), (80, 50), (100, 30), (200, 60), (60, 24)])
@pytest.mark.parametrize("what", [(0, 0, 0), (3, 8, 0), (500, 20, 0), (500, 20, 3), (2, 1, 1)])
def test_the_live_view_fits_the_screen_whatever_there_is_to_show(width, height, what):
    made = console(width, height, terminal=False)
    screen = WatchScreen(made, live=True, now=lambda: 1000.0)
    screen.show(status(*what, words="a long sentence about what is wrong " * 4))
    screen.show_silence("nobody")
    lines = lines_of(screen.draw(), made)
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "healthy" in text and "trying again" in text and text.count("ALERT") == what[2]
    if what[0] > 20 and height == 24:
        assert "more: " in text and "training" in text
    if what == (3, 8, 0) and width >= 80:
        assert "trained, but not in it" in text and "[red]n0[/red]" in text  # a name is no markup


def test_numbers_are_never_cut_and_names_give_way():
    made = console(80, 24, terminal=False)
    text = "\n".join(lines_of(whole(status(), 80, 1000.0), made))
    assert "10.0k" in text and key(0).hex()[:8] in text and "…" in text
    assert any(line.rstrip().endswith(" 100") for line in text.splitlines()), "credits"
    assert "50.0k/s  about 3 min left  final 3" in text and "page  http://run.example.org/" in text
    assert "not final" in text and f"head {Digest(bytes(32)).short}" not in text  # the head is for wide terminals


def test_a_speed_that_is_not_known_is_no_zero():
    text = "\n".join(lines_of(whole(status(tokens_per_second=0.0), 160, 1000.0), console(160, 60, terminal=False)))
    assert "tokens  final 3  head" in text and "left" not in text


def test_a_peer_that_left_at_an_unknown_time_is_gone_without_a_time():
    made = console(160, 60, terminal=False)
    s = status(peers=4)
    known = s.peers[-1]
    s = replace(s, peers=(known, replace(known, seconds_since_heartbeat=0.0)))
    text = "\n".join(lines_of(whole(s, 160, 1000.0), made))
    assert text.count("gone") == 2 and text.count("gone 2 min") == 1


def test_those_who_are_barred_are_named_with_the_reason_and_the_end():
    made = console(160, 60, terminal=False)
    said = "peer eve (3f2a8c1e) is convicted in round 41: the replays of 5 peers found signs 0.71. Until round 106"
    text = "\n".join(lines_of(whole(status(convictions=(said,)), 160, 1000.0), made))
    assert f"BARRED {said}" in text


def test_without_a_terminal_lines_come_when_something_changes():
    clock = [1e9]
    made = console(80, 24, terminal=False)
    screen = WatchScreen(made, live=False, now=lambda: clock[0])
    for s in (status(), status(), status(round=9), status(round=9, alerts=1), status(round=9, alerts=1)):
        clock[0] += 2
        screen.show(s)
    screen.show_silence("the coordinator at x does not answer")
    screen.show_silence("the coordinator at x does not answer")
    clock[0] += 100
    screen.show(status(round=9, alerts=1))
    said = [line[10:].rstrip() for line in made.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert said[:3] == ["healthy: 3 peers training"] * 2 + ["ALERT a0: " + ("something is wrong " * 9).strip()]
    assert said[4] == "the coordinator does not answer: the coordinator at x does not answer"
    assert said[5] == "the coordinator answers again, after 2 min" and len(said) == 7


def test_an_alert_that_is_called_as_the_state_is_told_and_its_end_too():
    made = console(80, 24, terminal=False)
    screen = WatchScreen(made, live=False, now=lambda: 1e9)
    for alerts in ((), (AlertStatus("stalled", 100, "nothing moves"),), ()):
        screen.show(replace(status(), health="stalled", alerts=alerts))
    said = [line[10:].rstrip() for line in made.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "ALERT stalled: nothing moves" in said and "over: stalled" in said


def test_before_the_first_answer_it_says_why_there_is_none():
    screen = WatchScreen(made := console(80, 24), live=True)
    assert "asking the coordinator" in "".join(lines_of(screen.draw(), made))
    screen.show_silence("the name x.example does not resolve")
    assert "does not resolve" in "".join(lines_of(screen.draw(), made))


async def test_it_sees_rounds_losses_and_alerts_and_outlives_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr("cairn.commands.watch.POLL_SECONDS", 0.1)
    swarm = FakeSwarm(SPEC)
    for n in range(3):
        swarm.beat(n)
    for _ in range(5):
        swarm.round({0: 600, 1: 700}, loss=3.5)
    shown: list[SwarmStatus] = []

    class Screen(WatchScreen):
        def show(self, status: SwarmStatus) -> None:
            shown.append(status)
            super().show(status)

    screen = Screen(console(80, 24, terminal=False), live=True)
    async with running(tmp_path, SPEC, swarm) as (c, _):
        await settled(c, 5)
        port, invite = c.grpc_port, c.invite()
        task = asyncio.create_task(poll(invite, (), screen))
        s = await until(lambda: shown and shown[-1].round == 5 and shown[-1])
        assert [(r.round, r.contributors, r.loss) for r in s.rounds] == [(n, 2, 3.5) for n in (4, 3, 2, 1, 0)]
        assert s.losses == (3.5,) * 5 and s.alerts == ()
        monkeypatch.setattr(AlertWatcher, "active", (Alert("disk", 5.5, "full"),))
        await until(lambda: shown[-1].alerts == (AlertStatus("disk", 5, "full"),))
    await until(lambda: screen.silent_seconds > 0)
    async with running(tmp_path, SPEC, swarm, listen_port=port):
        await until(lambda: screen.silent_seconds == 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("terminal, sent", [(True, signal.SIGINT), (True, signal.SIGTERM), (False, signal.SIGINT)])
def test_ctrl_c_ends_it_cleanly(terminal: bool, sent: signal.Signals):
    """Nobody answers at this invite: it waits, and ends at once on Ctrl-C."""
    invite = str(Invite(SPEC.run_id, Digest(bytes(32)), (HostPort("127.0.0.1", 1),), "", ()))
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cairn", "watch", invite], stdin=side, stdout=side, stderr=side, cwd=ROOT,
        env=os.environ | {"TERM": "xterm" if terminal else "dumb", "COLUMNS": "80", "LINES": "24"},
        preexec_fn=os.setsid,
    )  # fmt: skip
    os.close(side)
    seen, end = b"", time.monotonic() + LIMIT
    while b"answer" not in seen and time.monotonic() < end:
        if select.select([main], [], [], 1)[0]:
            seen += os.read(main, 65536)
    process.send_signal(sent)
    while True:
        try:
            seen += os.read(main, 65536)
        except OSError:
            break  # the other side is closed
    assert process.wait(LIMIT) == 0 and b"Traceback" not in seen and b"127.0.0.1:1" in seen
    if terminal:
        assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1  # the screen is given back
    os.close(main)

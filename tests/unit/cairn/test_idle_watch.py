"""Signs that somebody else uses the machine, by programs of the system, which are fakes here."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from cairn import idle_watch
from cairn.day_traffic import DayTraffic
from cairn.idle_watch import IdleFacts, drawing_programs, idle_facts, others_program
from cairn.peer_schedule import QUIET_SECONDS, PeerSchedule
from cairn.peer_settings import FILE, PeerSettings, SettingsFile
from peer.node.rest import RestWish
from peer.swarm.pace import Paces

# Three drivers have printed these: an old one, a server's and a laptop's. (The last was asked for more, with -s um.)
DESKTOP = """\
# gpu     pid  type    sm   mem   enc   dec   command
# Idx       #   C/G     %     %     %     %   name
    0    4810     G     0     0     0     0   Xorg
    0    7187     G     0     0     0     0   compiz
    0   16250     C    83    99     0     0   python
    1       -     -     -     -     -     -   -
"""
SERVER = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0     883875     G      -      -      -      -      -      -    Xorg
    1          -     -      -      -      -      -      -      -    -
"""
LAPTOP = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa     fb   ccpm    command
# Idx           #    C/G      %      %      %      %      %      %     MB     MB    name
    0       1312     G      4      3      -      -      -      -     97      0    Hyprland
    0       1941   C+G      -      -      -      -      -      -      5      0    voxtype-osd-gtk
"""
REFUSED = """\
The feature is not supported in this configuration
Not supported on the device(s)
Failed to process command line
"""
# The rows of games are made up, in the forms of these tables.
GAMES = [
    (DESKTOP, "    0   31337     G    92    40     0     0   hl2_linux\n", "hl2_linux"),
    (SERVER, "    0      31337     G     92     40      -      -      -      -    Some game\n", "Some game"),
    (LAPTOP, "    0      31337   C+G     10     40      -      -      -      -   2048      0    Cyberpunk2077.e\n",
     "Cyberpunk2077.e"),
]  # fmt: skip


def nvidia_smi(folder: Path, computing: str, monitored: str, *, code: int = 0) -> None:
    """Write a fake that lists `computing`; its monitor prints `monitored` and ends with this code."""
    (folder / "monitored").write_text(monitored.replace("\n", "      \n"))  # the last column is filled up
    script = f"if [ $1 = pmon ]; then cat {folder}/monitored; exit {code}; fi\n{computing}"
    program(folder, "nvidia-smi", script)


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("hint", "people"), [("yes", False), ("no", True), ("maybe", None)])
async def test_logind_tells_of_people(tmp_path, monkeypatch, hint, people):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program(tmp_path, "loginctl", f"echo IdleHint={hint}")
    program(tmp_path, "nvidia-smi", "exit 9")
    assert await idle_facts() == IdleFacts(None, people)


@pytest.fixture
def child() -> Iterator[int]:
    """Run a program that this process started."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


async def test_a_program_of_somebody_else_is_told_from_our_own(tmp_path, monkeypatch, child):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    ours = f"echo '{os.getpid()}, python'; echo '{child}, /usr/bin/python3'"
    drawing = LAPTOP + LAPTOP.splitlines(keepends=True)[2].replace("1312", str(child)).replace(" 4 ", "99 ")
    nvidia_smi(tmp_path, ours, drawing)
    assert await idle_facts() == IdleFacts("", None, sees_games=True)
    nvidia_smi(tmp_path, f"{ours}; echo '1, /opt/bin/blender'", drawing)
    facts = await idle_facts()
    assert facts.program == "blender" and facts.reason == "blender uses the GPU"


@pytest.mark.parametrize(("table", "row", "name"), GAMES, ids=["old", "server", "laptop"])
async def test_a_game_is_seen_though_it_computes_nothing_and_a_desktop_is_none(tmp_path, monkeypatch, table, row, name):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    nvidia_smi(tmp_path, "true", table)
    assert (await idle_facts()).reason == ""
    nvidia_smi(tmp_path, "true", table + row)
    assert (await idle_facts()).reason == f"{name} uses the GPU"


@pytest.mark.parametrize(("monitored", "code"), [(REFUSED, 255), (REFUSED, 0), ("", 0), (DESKTOP, 9)])
async def test_where_the_monitor_is_not_supported_programs_that_compute_count(tmp_path, monkeypatch, monitored, code):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    nvidia_smi(tmp_path, "true", monitored, code=code)
    facts = await idle_facts()
    assert facts == IdleFacts("", None) and "programs that draw, as games do" in facts.unknown
    nvidia_smi(tmp_path, "echo '1, /opt/bin/blender'", monitored, code=code)
    assert (await idle_facts()).program == "blender"


def test_a_program_draws_from_a_tenth_of_the_gpus_time_on():
    row = SERVER.splitlines(keepends=True)[2]
    shares = ["9", "10", "100", "-", "[N/A]", "1000"]
    assert [bool(drawing_programs(SERVER + row.replace("  - ", f" {share} ", 1))) for share in shares] == [
        False, True, True, False, False, False,
    ]  # fmt: skip
    assert drawing_programs("    0   31337   G   92\n") is None
    assert drawing_programs("# gpu pid type sm command\n0 31337 G 92\n") == "31337, a game\n"


async def test_programs_that_hang_fail_or_flood_tell_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(idle_watch, "ANSWER_SECONDS", 2.0)
    program(tmp_path, "nvidia-smi", "exec sleep 1000")
    program(tmp_path, "loginctl", "exec yes IdleHint=no")
    facts = await idle_facts()
    assert facts == IdleFacts() and not facts.reason
    assert "nvidia-smi" in facts.unknown and "loginctl" in facts.unknown
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert await idle_facts() == IdleFacts()


@pytest.mark.parametrize("listed", ["No devices were found", "1 python", "x, python", "99999999999, python", "1,"])
def test_another_text_than_a_list_of_programs_is_none(listed):
    assert others_program(listed, os.getpid()) is None


@pytest.mark.parametrize(
    ("listed", "sees_all", "found"),
    [
        ("70, python", True, ""),
        ("30001, python", True, "python"),  # hidden from us, so another user's
        ("30001, [Not Found]", False, None),  # the host's number of our own trainer, or of a stranger
        ("70, python\n30001, python", False, None),
        ("30001, python\n80, doom", False, "doom"),
        ("70, python", False, ""),
        ("", False, ""),
    ],
)
def test_in_a_container_a_process_id_of_the_host_accuses_nobody(listed: str, sees_all: bool, found: str | None):
    """Our process is 7; 70 is its trainer, and 80 somebody else's program."""
    parents = {70: 7, 7: 1, 80: 1, 1: 0}
    assert others_program(listed, 7, sees_all=sees_all, parent=parents.get) == found
    assert IdleFacts(None).reason == "" and "outside of a container" in IdleFacts(None).unknown


def test_no_program_is_a_list_too():
    assert others_program("\n", os.getpid()) == ""


def test_facts_count_where_they_are_asked_for():
    now, busy = datetime(2026, 11, 25, 12), IdleFacts("doom", people=True)
    assert PeerSettings().reason_to_rest(now, busy) == ""
    idle = PeerSettings(only_when_idle=True)
    assert idle.reason_to_rest(now, busy) == "doom uses the GPU"
    assert idle.reason_to_rest(now, IdleFacts("", people=True)) == "somebody uses this machine"
    assert idle.reason_to_rest(now, IdleFacts("", people=False)) == idle.reason_to_rest(now) == ""


async def test_it_trains_again_when_nobody_has_used_the_machine_for_a_while(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("cairn.peer_schedule.FACTS_SECONDS", 0.0)
    (tmp_path / FILE).write_text("only_when_idle = true\n")
    seconds, facts = 1000.0, IdleFacts("doom", people=None, sees_games=True)

    async def ask() -> IdleFacts:
        return facts

    rest = RestWish()
    schedule = PeerSchedule(
        SettingsFile(tmp_path / FILE, {}), rest, Paces(), DayTraffic(tmp_path), lambda: None, facts=ask,
        timer=lambda: seconds,
    )  # fmt: skip

    async def look(after: float) -> str:
        nonlocal seconds
        seconds += after
        await schedule.learn()
        schedule.look()
        return rest.reason

    with caplog.at_level(logging.WARNING):
        assert await look(0) == "doom uses the GPU" == await look(1000)
    assert caplog.text.count("does not tell of people at the keyboard") == 1
    facts = IdleFacts("", people=False)
    assert await look(1) == "the machine was in use a moment ago" == await look(QUIET_SECONDS - 2)
    assert await look(1) == ""
    facts = IdleFacts("", people=True)
    assert await look(1) == "somebody uses this machine"
    (tmp_path / FILE).write_text("")
    assert await look(1) == ""

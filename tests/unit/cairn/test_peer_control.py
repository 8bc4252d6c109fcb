"""The socket by which commands reach a peer that runs on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cairn.commands.pause import ask_running
from cairn.peer_control import FREE_SECONDS, MAX_LINE, SOCKET, PeerControl, ask_peer, listening
from peer.node.rest import RestWish
from protocol.errors import CairnError


@asynccontextmanager
async def peer(folder: Path) -> AsyncIterator[tuple[RestWish, asyncio.Event]]:
    """Run the socket of a peer whose devices are free as soon as it is to rest."""
    rest, stop = RestWish(), asyncio.Event()
    os.makedirs(folder, exist_ok=True)
    async with listening(folder, PeerControl(rest, stop).answer):
        yield rest, stop


async def test_a_pause_is_told_with_its_effect_and_ends_by_resume(tmp_path):
    async with peer(tmp_path) as (rest, stop):
        rest.note_devices(free=False)
        asked = asyncio.ensure_future(asyncio.to_thread(ask_peer, tmp_path, "pause"))
        while not rest.reason:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not asked.done()
        rest.note_devices(free=True)
        assert (await asked or "").startswith("paused: its devices are free after ")
        assert rest.reason == "paused by its user"
        rest.want("schedule", "outside the hours 22-7")
        said = await asyncio.to_thread(ask_peer, tmp_path, "resume")
        assert said == "not paused any more, and still resting: outside the hours 22-7"
        rest.want("schedule", "")
        assert await asyncio.to_thread(ask_peer, tmp_path, "resume") == "working again"
        assert not stop.is_set()


async def test_devices_that_are_not_free_in_time_are_no_reason_to_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("cairn.peer_control.FREE_SECONDS", FREE_SECONDS / 1000)
    async with peer(tmp_path) as (rest, _):
        rest.note_devices(free=False)
        said = await asyncio.to_thread(ask_peer, tmp_path, "pause")
        assert said is not None and "free soon" in said and rest.reason


async def test_leave_sets_the_end_and_waits_for_it(tmp_path):
    async with peer(tmp_path) as (_, stop):
        asked = asyncio.ensure_future(asyncio.to_thread(ask_peer, tmp_path, "leave"))
        await stop.wait()
        await asyncio.sleep(0.05)
        assert not asked.done()
        for task in asyncio.all_tasks():  # as at the end of the process
            if task.get_coro().__qualname__.startswith("listening"):  # type: ignore[union-attr]
                task.cancel()
        assert await asked == "leaving"


async def test_only_its_user_may_open_it_and_it_goes_with_the_peer(tmp_path):
    async with peer(tmp_path):
        mode = (tmp_path / SOCKET).stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    assert not (tmp_path / SOCKET).exists()
    assert ask_peer(tmp_path, "pause") is None


async def test_what_a_killed_process_left_is_no_peer_and_does_not_stop_the_next(tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / SOCKET))
    assert ask_peer(tmp_path, "pause") is None
    async with peer(tmp_path):
        assert await asyncio.to_thread(ask_peer, tmp_path, "resume") == "working again"


async def test_a_home_with_a_long_name_works_too(tmp_path):
    deep = tmp_path.joinpath(*(["a-folder-with-a-long-name"] * 6))
    assert ask_peer(deep, "resume") is None
    async with peer(deep):
        assert await asyncio.to_thread(ask_peer, deep, "resume") == "working again"


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b'{"ask": 1}\n', b"[1]\n", b"\xff\n", b"x" * 2 * MAX_LINE])
async def test_other_lines_change_nothing(tmp_path, line):
    async with peer(tmp_path) as (rest, stop):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
        writer.write(line)
        writer.write_eof()
        answer = await reader.read(MAX_LINE)
        assert b"said" not in answer and not rest.reason and not stop.is_set()
        writer.close()


async def test_the_command_asks_all_runs_or_the_one_that_is_named(tmp_path):
    said: list[str] = []

    async def ask(run: str | None) -> None:
        await asyncio.to_thread(ask_running, "resume", tmp_path, run, said.append)

    with pytest.raises(CairnError, match="no peer is running under .*cairn peer join INVITE.*still loading"):
        await ask(None)
    async with peer(tmp_path / "runs" / "0123456789ab"), peer(tmp_path / "runs" / "ffff56789abc"):
        (tmp_path / "runs" / "00").mkdir()  # of a run that is over
        await ask(None)
        assert said == ["0123456789ab: working again", "ffff56789abc: working again"]
        await ask("ffff")
        assert said[2:] == ["ffff56789abc: working again"]
        with pytest.raises(CairnError, match="no peer of this run"):
            await ask("aaaa")
        with pytest.raises(CairnError, match="invite"):
            await ask("nonsense")


async def test_one_peer_that_refuses_keeps_the_command_from_no_other(tmp_path):
    said: list[str] = []
    older = tmp_path / "runs" / "0123456789ab"
    older.mkdir(parents=True)

    async def refuse(ask: str) -> str:
        raise CairnError(f"{ask!r} is not known here")

    async with listening(older, refuse), peer(tmp_path / "runs" / "ffff56789abc"):
        with pytest.raises(CairnError, match="^0123456789ab: 'resume' is not known here"):
            await asyncio.to_thread(ask_running, "resume", tmp_path, None, said.append)
    assert said == ["ffff56789abc: working again"]


async def test_all_peers_are_asked_at_the_same_time(tmp_path):
    said: list[str] = []
    asked, all_asked = 0, asyncio.Event()

    async def answer(ask: str) -> str:
        nonlocal asked
        asked += 1
        if asked == 2:
            all_asked.set()
        await all_asked.wait()
        return ask

    folders = [tmp_path / "runs" / name for name in ("0123456789ab", "ffff56789abc")]
    for folder in folders:
        folder.mkdir(parents=True)
    async with listening(folders[0], answer), listening(folders[1], answer):
        await asyncio.to_thread(ask_running, "pause", tmp_path, None, said.append)
    assert said == ["0123456789ab: pause", "ffff56789abc: pause"]


def test_a_folder_that_cannot_be_opened_is_told_in_one_line(tmp_path):
    beside = tmp_path / ("deep" * 25)
    beside.write_text("a file where the run's folder should be")
    with pytest.raises(CairnError, match="not a directory: is it another user's"):
        ask_peer(beside, "pause")

"""When a peer trains by its settings: the rules of time, the file, and the watch over both."""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.day_traffic import FILE as TRAFFIC
from cairn.day_traffic import DayTraffic
from cairn.peer_schedule import PeerSchedule
from cairn.peer_settings import (
    FILE,
    Hours,
    PeerOptionError,
    PeerSettings,
    PeerSettingsError,
    SettingsFile,
    parse_until,
    read_settings,
)
from peer.node.rest import RestWish
from peer.swarm.pace import Paces

MINUTES = st.integers(0, 24 * 60 - 1)
TIMES = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1))


def clock_of(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02}"


@given(MINUTES, MINUTES, TIMES)
def test_each_minute_is_in_these_hours_or_in_those_between_them(first: int, end: int, at: datetime):
    if first == end:
        return
    hours, rest = (Hours.parse(f"{clock_of(a)}-{clock_of(b)}") for a, b in ((first, end), (end, first)))
    assert hours.contains(at) is not rest.contains(at)
    assert hours.contains(at + timedelta(days=1)) is hours.contains(at)
    begin = at.replace(hour=first // 60, minute=first % 60)
    assert hours.contains(begin) and not hours.contains(begin - timedelta(minutes=1))
    assert sum(hours.contains(datetime(2026, 1, 1) + timedelta(minutes=m)) for m in range(1440)) == (end - first) % 1440


def test_hours_over_midnight():
    hours = Hours.parse("22-7")
    told = {hour: hours.contains(datetime(2026, 3, 29, hour)) for hour in range(24)}
    assert [hour for hour, inside in told.items() if inside] == [*range(7), 22, 23]
    assert Hours.parse("7-24") == Hours.parse("7:00-0:00")


@pytest.mark.parametrize("text", ["", "7", "7-", "22-22", "0-24", "25-7", "7-8:60", "-1-7", "7-8-9", "7.5-8", "٣-٤"])
def test_what_is_no_part_of_a_day_is_refused(text):
    with pytest.raises(ValueError, match="day"):
        Hours.parse(text)


@given(MINUTES, TIMES)
def test_the_end_is_the_next_such_time_within_a_day(minutes: int, now: datetime):
    end = parse_until(clock_of(minutes), now)
    assert now < end <= now + timedelta(days=1) and (end.hour, end.minute) == divmod(minutes, 60)


def test_an_end_may_have_a_date_and_may_be_over():
    assert parse_until("2026-11-30 7:30", datetime(2026, 12, 24)) == datetime(2026, 11, 30, 7, 30)
    assert parse_until("2026-11-30 24:00", datetime(2026, 11, 30, 9)) == datetime(2026, 12, 1)
    assert parse_until("24:00", datetime(2026, 11, 30, 9)) == datetime(2026, 12, 1)
    for text in ("tomorrow", "7:77", "2026-13-01 7:00", "9999-12-31 24:00", "2026-11-30", "24:01"):
        with pytest.raises(ValueError, match=" is no "):
            parse_until(text, datetime(2026, 1, 1))


def test_a_file_gives_the_settings_and_options_come_before_it(tmp_path: Path):
    path = tmp_path / FILE
    assert read_settings(path, {"hours": None}) == PeerSettings()
    path.write_text('hours = "22-7"\nuntil = "7:30"\n')
    assert read_settings(path, {"hours": None}) == PeerSettings(hours="22-7", until="7:30")
    assert read_settings(path, {"hours": "9-17", "until": ""}) == PeerSettings(hours="9-17")
    assert PeerSettings(max_upload="2M").rates == (2_000_000, 0) and PeerSettings().rates == (0, 0)
    path.write_text("gpu_memory = 6\n")
    assert read_settings(path, {"gpu_memory": None}).gpu_bytes == 6 * 10**9
    assert read_settings(path, {"gpu_memory": 7.5}).gpu_bytes == 7_500_000_000
    assert read_settings(path, {"gpu_memory": 0.0}).gpu_bytes == PeerSettings().gpu_bytes == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('hours = "22-7"\nuntil = "late"\n', r"peer\.toml:2: until: 'late' is no time: write for example"),
        ("\nhours = 22\n", r"peer\.toml:2: hours: .*\(found '22'\)"),
        ('hour = "22-7"\n', r"peer\.toml:1: hour: is not a field; did you mean hours\?"),
        ('max_upload = "9K"\n', r"peer\.toml:1: max_upload: '9K' is not a rate of at least 100K bytes a second"),
        ("gpu_memory = 6e9\n", r"peer\.toml:1: gpu_memory: 6e\+09 is not a number of GB, at least 0\.1: write for"),
        ("gpu_memory = nan\n", r"peer\.toml:1: gpu_memory: nan is not a number of GB"),
        ('gpu_memory = "6G"\n', r"peer\.toml:1: gpu_memory: .*\(found '6G'\)"),
        ("hours = \n", r"peer\.toml: not TOML: "),
        ("\xff", r"peer\.toml: not UTF-8 text: correct it"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_line(tmp_path: Path, text: str, said: str):
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(PeerSettingsError, match=said):
        read_settings(tmp_path / FILE, {})


def test_a_mistake_in_an_option_is_told_with_its_name(tmp_path: Path):
    with pytest.raises(PeerOptionError, match="^--hours: 'always' is no part of a day"):
        read_settings(tmp_path / FILE, {"hours": "always"})


class Watched:
    """A schedule, its clock, and what it did."""

    def __init__(self, folder: Path, text: str, now: datetime):
        self.path = folder / FILE
        self.path.write_text(text)
        self.now = now
        self.rest = RestWish()
        self.left = 0
        self.paces = Paces()
        self.schedule = PeerSchedule(
            SettingsFile(self.path, {}), self.rest, self.paces, DayTraffic(folder), self._leave, lambda: self.now
        )

    def _leave(self) -> None:
        self.left += 1

    def look(self, now: datetime | None = None) -> str:
        self.now = now or self.now
        self.schedule.look()
        return self.rest.reason


def test_it_rests_outside_its_hours_and_leaves_once_at_its_end(tmp_path):
    w = Watched(tmp_path, 'hours = "22-7"\nuntil = "23:30"\n', datetime(2026, 11, 25, 21, 59))
    assert w.look() == "outside the hours 22-7"
    assert w.look(datetime(2026, 11, 25, 22, 0)) == "" and not w.left
    w.look(datetime(2026, 11, 25, 23, 30))
    w.look(datetime(2026, 11, 25, 23, 31))
    assert w.left == 1


def test_an_end_that_passed_while_the_machine_slept_is_an_end(tmp_path):
    w = Watched(tmp_path, 'until = "7:30"\n', datetime(2026, 11, 25, 22, 0))
    w.look(datetime(2026, 11, 27, 9, 0))
    assert w.left == 1


def test_a_changed_file_counts_at_once_and_a_wrong_one_not_at_all(tmp_path, caplog):
    w = Watched(tmp_path, "", datetime(2026, 11, 25, 12, 0))
    assert w.look() == ""
    w.path.write_text('hours = "22-7"\n')
    assert w.look() == "outside the hours 22-7"
    w.path.write_text('hours = "whenever"\n')
    with caplog.at_level(logging.WARNING):
        assert w.look() == "outside the hours 22-7" == w.look()
    assert caplog.text.count("the settings stay as they were") == 1 and f"{FILE}:1: hours" in caplog.text
    w.path.unlink()
    assert w.look() == ""


def test_a_new_limit_of_a_gpu_has_the_trainer_start_again(tmp_path):
    w = Watched(tmp_path, "gpu_memory = 6\n", datetime(2026, 11, 25, 12, 0))
    w.rest.note_devices(free=False)
    assert w.look() == ""
    w.path.write_text("gpu_memory = 5.5\n")
    assert w.look() == "a new gpu_memory is set" == w.look()
    w.rest.note_devices(free=True)  # the trainer has ended
    assert w.look() == ""
    w.path.write_text("gpu_memory = 7\n")
    assert w.look() == ""  # none runs: the next one has the limit
    w.rest.note_devices(free=False)
    assert w.look() == ""


async def test_a_day_has_its_volume_also_after_a_restart_and_the_next_day_another(tmp_path):
    w = Watched(tmp_path, 'max_upload_day = "2M"\nmax_download_day = "3M"\n', datetime(2026, 11, 25, 22, 0))
    stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    w.look()
    await w.paces.up.take(1_900_000)
    await w.paces.down.take(5_000_000)
    w.paces.down.give_back(4_000_000)  # it did not come
    w.look()
    assert not w.schedule.away.is_set() and await w.schedule.until_back(stopping)

    again = Watched(tmp_path, w.path.read_text(), datetime(2026, 11, 25, 23, 0))
    await again.paces.up.take(100_000)
    again.look()
    assert again.schedule.away.is_set() and not again.rest.reason
    waiting = asyncio.ensure_future(again.schedule.until_back(stopping))
    await asyncio.sleep(0)
    assert not waiting.done()
    again.look(datetime(2026, 11, 26, 0, 0))
    assert await waiting and not again.schedule.away.is_set()
    await again.paces.down.take(3_000_000)
    again.look()
    assert again.schedule.away.is_set()
    again.path.write_text("")
    again.look()
    assert not again.schedule.away.is_set()
    again.path.write_text('max_download_day = "3M"')
    again.look()
    stopping.set_result(None)
    assert not await again.schedule.until_back(stopping)


def test_a_peer_that_is_out_of_the_swarm_writes_its_traffic_at_each_look(tmp_path):
    at, file = datetime(2026, 11, 25, 22, 0), tmp_path / TRAFFIC
    DayTraffic(tmp_path).add(at.date(), 5_000_000, 0)
    for settings, writes in (('max_upload_day = "2M"\n', True), ("", False)):
        w = Watched(tmp_path, settings, at)
        w.look()
        os.utime(file, (0, 0))
        w.look()
        assert w.schedule.away.is_set() is writes and (file.stat().st_mtime > 0) is writes


@pytest.mark.parametrize("text", ["", "{", "[]", '{"day": 1, "up": 2, "down": 3}', '{"day": "2026-11-25", "up": -1}'])
def test_a_damaged_count_counts_nothing(tmp_path, text):
    (tmp_path / TRAFFIC).write_text(text)
    traffic = DayTraffic(tmp_path)
    traffic.add(datetime(2026, 11, 25).date(), 5, 7)
    assert (traffic.up, traffic.down) == (5, 7)
    assert (DayTraffic(tmp_path).up, DayTraffic(tmp_path).down) == (5, 7)

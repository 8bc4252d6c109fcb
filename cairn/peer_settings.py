"""peer.toml: when, and with how much of this machine, its peers train. Options of `cairn peer join` override it.

    hours = "22-7"              # by this machine's clock; the peer rests at other times
    until = "07:30"             # the peer leaves then; or "2026-11-30 07:30"
    max_upload = "2M"           # bytes a second, of blobs: nearly all that a peer sends
    max_download = "5M"
    max_upload_day = "20G"      # bytes a day; the peer is out of the swarm for the rest of it
    max_download_day = "20G"
    gpu_memory = 6              # GB that tensors may take on each GPU; for a new limit the trainer starts again
    only_when_idle = true       # rest while others use the GPU or the keyboard (see `idle_watch`)

It is read again when it changes. The rules of time are pure functions of a wall clock, so they need no care for
daylight saving time: an hour that occurs twice counts twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from cairn.idle_watch import NOT_KNOWN, IdleFacts
from cairn.number_format import parse_size, parse_volume
from coordinator.authoring.toml_file import problems, read_tables
from protocol.errors import CairnError

FILE = "peer.toml"
MIN_RATE = 100_000
"""Least bytes a second: with less, every reply to others comes too late to be of use."""

MIN_GPU_MEMORY = 0.1
"""GB. Less is a mistake in the unit."""


_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?")
_HOURS = re.compile(rf"{_TIME.pattern}-{_TIME.pattern}")
_UNTIL = re.compile(rf"(?:([0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}})[ T])?{_TIME.pattern}")

DAY_MINUTES = 24 * 60


class PeerSettingsError(CairnError):
    """A peer.toml that cannot be used."""


class PeerOptionError(PeerSettingsError):
    """An option in place of a field of peer.toml that cannot be used."""


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of each day, in minutes since midnight by the wall clock. It may go over midnight."""

    first: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Return the hours in "22-7" or "22:30-7:15". Raises ValueError."""
        found = _HOURS.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text[:40]!r} is no part of a day: write for example 22-7 or 22:30-7:15")
        first, end = _minutes(found[1], found[2]), _minutes(found[3], found[4])
        if first % DAY_MINUTES == end % DAY_MINUTES:
            raise ValueError(f"{text[:40]!r} is no part of a day, but all of it, or nothing: leave it out")
        return cls(first % DAY_MINUTES, end % DAY_MINUTES)

    def contains(self, at: datetime) -> bool:
        """Return whether a time of the wall clock is in these hours. The end is not."""
        minute = at.hour * 60 + at.minute
        inside = self.first <= minute < self.end
        return inside if self.first < self.end else not self.end <= minute < self.first


def _minutes(hour: str, minute: str | None) -> int:
    minutes = int(hour) * 60 + int(minute or 0)
    if int(minute or 0) > 59 or minutes > DAY_MINUTES:
        raise ValueError(f"{hour}:{minute or '00'} is no time of a day: from 0:00 to 24:00")
    return minutes


def parse_until(text: str, now: datetime) -> datetime:
    """Return the time of the wall clock in "7:30", the next one after `now`, or in "2026-11-30 7:30".

    Raises ValueError.
    """
    found = _UNTIL.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is no time: write for example 7:30, or 2026-11-30 7:30")
    minutes = timedelta(minutes=_minutes(found[2], found[3]))
    if found[1]:
        try:
            return datetime.strptime(found[1], "%Y-%m-%d") + minutes
        except (ValueError, OverflowError):
            raise ValueError(f"{found[1]} is no day of the calendar: write for example 2026-11-30 7:30") from None
    today = now.replace(hour=0, minute=0, second=0, microsecond=0) + minutes
    return today if today > now else today + timedelta(days=1)


def _checked_hours(text: str) -> str:
    if text:
        Hours.parse(text)
    return text


def _checked_until(text: str) -> str:
    if text:
        parse_until(text, datetime(2000, 1, 1))
    return text


def _rate(text: str) -> int:
    """Return the bytes a second in "2M"; 0 for "". Raises ValueError."""
    if not text:
        return 0
    found = parse_size(text)
    if found is None or found < MIN_RATE:
        raise ValueError(f"{text[:40]!r} is not a rate of at least 100K bytes a second: write for example 800K or 2M")
    return found


def _checked_rate(text: str) -> str:
    _rate(text)
    return text


def _checked_volume(text: str) -> str:
    if text:
        parse_volume(text)
    return text


def _checked_gpu_memory(size: float) -> float:
    if size and not MIN_GPU_MEMORY <= size < 10**6:
        raise ValueError(f"{size:g} is not a number of GB, at least {MIN_GPU_MEMORY}: write for example 6 or 7.5")
    return size


class PeerSettings(BaseModel):
    """The checked fields of a peer.toml, with the options that override it. An empty text, or 0: no such rule."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    hours: Annotated[str, AfterValidator(_checked_hours)] = ""
    until: Annotated[str, AfterValidator(_checked_until)] = ""
    max_upload: Annotated[str, AfterValidator(_checked_rate)] = ""
    max_download: Annotated[str, AfterValidator(_checked_rate)] = ""
    max_upload_day: Annotated[str, AfterValidator(_checked_volume)] = ""
    max_download_day: Annotated[str, AfterValidator(_checked_volume)] = ""
    gpu_memory: Annotated[float, AfterValidator(_checked_gpu_memory)] = 0.0
    only_when_idle: bool = False

    @property
    def rates(self) -> tuple[int, int]:
        """The bytes a second that may be sent and received; 0: any number."""
        return _rate(self.max_upload), _rate(self.max_download)

    @property
    def gpu_bytes(self) -> int:
        """The most bytes that tensors of a peer may take on each GPU; 0: all."""
        return round(10**9 * self.gpu_memory)

    def reason_to_be_away(self, up: int, down: int) -> str:
        """Return why the peer is out of the swarm after these bytes of today; "" when it may be in."""
        for text, used, what in ((self.max_upload_day, up, "upload"), (self.max_download_day, down, "download")):
            if text and used >= parse_volume(text):
                return f"today's {what} of {text} is used up"
        return ""

    def reason_to_rest(self, now: datetime, facts: IdleFacts = NOT_KNOWN) -> str:
        """Return why the peer rests at a time of the wall clock; "" when it may train."""
        if self.hours and not Hours.parse(self.hours).contains(now):
            return f"outside the hours {self.hours}"
        return facts.reason if self.only_when_idle else ""


def read_settings(path: Path, options: Mapping[str, Any]) -> PeerSettings:
    """Return the settings in a file, which need not exist; `options` that are not None override its fields.

    Raises PeerSettingsError, with a line for each mistake: file, line and field; PeerOptionError for an option.
    """
    tables, text = read_tables(path, PeerSettingsError, "correct it, or remove it") if path.exists() else ({}, "")
    try:
        PeerSettings.model_validate(tables)
    except ValidationError as e:
        raise PeerSettingsError("\n".join(problems(e, path, text, PeerSettings))) from None
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return PeerSettings.model_validate(tables | given)
    except ValidationError as e:
        wrong = ((str(p["loc"][0]).replace("_", "-"), p["msg"].removeprefix("Value error, ")) for p in e.errors())
        raise PeerOptionError("\n".join(f"--{option}: {message}" for option, message in wrong)) from None


class SettingsFile:
    """The settings of one machine, read again when the file has changed."""

    def __init__(self, path: Path, options: Mapping[str, Any]):
        """Read the file. `options` and errors as in `read_settings`."""
        self._path = path
        self._options = options
        self._seen = self._mark()
        self.settings = read_settings(path, options)

    def refresh(self) -> bool:
        """Return whether there are new settings. Raises PeerSettingsError once for a wrong file: the old ones stay."""
        mark = self._mark()
        if mark == self._seen:
            return False
        self._seen = mark
        before, self.settings = self.settings, read_settings(self._path, self._options)
        return self.settings != before

    def _mark(self) -> tuple[int, ...] | None:
        """Return what changes with the file; None while there is none."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

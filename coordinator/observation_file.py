"""Keeps sightings across restarts: JSON, one round a line, in two files of bounded size. Losing them loses no credit.

Both are read at the start; when the newer is full it takes the place of the older. A torn or foreign line is left out.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

from coordinator.non_participation import REASONS, NonParticipation
from coordinator.round_observations import MAX_LISTED, RoundObservation
from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024 * 1024
_MAX_WORDS = 200


class ObservationFile:
    """`sightings.jsonl` in a run's folder. Blocking: for a thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        self.path = path
        self._older = path.with_suffix(".old.jsonl")
        self._max_bytes = max_bytes
        self._complained = False

    def read(self) -> list[RoundObservation]:
        """Oldest first; what cannot be read is left out."""
        found = []
        for path in (self._older, self.path):
            try:
                with open(path, "rb") as file:
                    lines = file.read(2 * self._max_bytes).splitlines()
            except OSError:
                continue
            found += [s for line in lines if (s := _parse(line)) is not None]
        return found

    def append(self, seen: Iterable[RoundObservation]) -> None:
        """Add these. A disk that refuses is said once in the log, and costs these lines only."""
        data = b"".join(json.dumps(_line(s), separators=(",", ":")).encode() + b"\n" for s in seen)
        try:
            with open(self.path, "ab") as file:
                if file.tell() and not self._ends_in_newline():
                    file.write(b"\n")  # a line was torn
                file.write(data)
                full = file.tell() >= self._max_bytes
            if full:
                os.replace(self.path, self._older)
            self._complained = False
        except OSError as e:
            if not self._complained:
                log.warning("%s is not written (%s): the page forgets round times at a restart", self.path, e.strerror)
            self._complained = True

    def _ends_in_newline(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def _line(s: RoundObservation) -> list:
    absent = None if s.absent is None else [[str(a.peer), a.reason, a.words] for a in s.absent]
    times = [None if t is None else round(t, 3) for t in (s.began, s.announced, s.proposed, s.certified)]
    return [s.round, str(s.record), *times, s.working, s.sent, s.received, absent, s.absent_in_all]


def _parse(line: bytes) -> RoundObservation | None:
    try:
        round_, record, began, announced, proposed, certified, working, sent, received, absent, many = json.loads(line)
        began, announced, proposed = (_time(t) for t in (began, announced, proposed))
        if absent is not None:
            absent = tuple(_absence(*a) for a in absent[:MAX_LISTED])
        return RoundObservation(
            int(round_), Digest.parse(record), began, announced, proposed, float(certified), int(working),
            None if sent is None else int(sent), None if received is None else int(received), absent, int(many),
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, MalformedError, RecursionError):
        return None


def _absence(peer: str, reason: str, words: str) -> NonParticipation:
    if reason not in REASONS:
        raise ValueError(reason)
    return NonParticipation(PeerKey.parse(peer), reason, str(words)[:_MAX_WORDS])


def _time(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no time")
    return float(value)

"""Stores round observations across restarts: JSON, one round a line. No credit depends on them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path

from coordinator.durable import LineFile
from coordinator.non_participation import REASONS, NonParticipation
from coordinator.round_observations import MAX_LISTED, RoundObservation
from protocol.errors import MalformedError, os_reason
from protocol.ids import Digest, PeerKey

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024 * 1024
_MAX_MESSAGE = 200


class ObservationFile:
    """`observations.jsonl` in a run's folder, and the older file before it, both of bounded size. Blocking."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        self.path = path
        self._file = LineFile(path, max_bytes=max_bytes)
        self._max_bytes = max_bytes
        self._warned = False

    def read(self) -> list[RoundObservation]:
        """Return the observations, oldest first; torn and foreign lines are skipped."""
        try:
            lines = self._file.read(2 * self._max_bytes)
        except OSError as e:
            log.warning("%s cannot be read (%s): the page has no earlier round times", self.path, os_reason(e))
            return []
        return [o for line in lines if (o := _parse(line)) is not None]

    def append(self, observations: Iterable[RoundObservation]) -> None:
        """Add observations. A disk that refuses is reported once in the log, and costs only these lines."""
        try:
            self._file.append(json.dumps(_row(o), separators=(",", ":")).encode() for o in observations)
            self._warned = False
        except OSError as e:
            if not self._warned:
                log.warning(
                    "%s is not written (%s): the page forgets round times at a restart", self.path, os_reason(e)
                )
            self._warned = True


def _row(o: RoundObservation) -> list:
    absent = None if o.absent is None else [[str(a.peer), a.reason, a.message] for a in o.absent]
    times = [None if t is None else round(t, 3) for t in (o.began, o.announced, o.proposed, o.certified)]
    return [o.round, str(o.record), *times, o.training, o.sent, o.received, absent, o.absent_total]


def _parse(line: bytes) -> RoundObservation | None:
    try:
        round_, record, began, announced, proposed, certified, training, sent, received, absent, total = json.loads(
            line
        )
        began, announced, proposed = (_time(t) for t in (began, announced, proposed))
        if absent is not None:
            absent = tuple(_absent(*a) for a in absent[:MAX_LISTED])
        return RoundObservation(
            int(round_), Digest.parse(record), began, announced, proposed, float(certified), int(training),
            None if sent is None else int(sent), None if received is None else int(received), absent, int(total),
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, MalformedError, RecursionError):
        return None


def _absent(peer: str, reason: str, message: str) -> NonParticipation:
    if reason not in REASONS:
        raise ValueError(reason)
    return NonParticipation(PeerKey.parse(peer), reason, str(message)[:_MAX_MESSAGE])


def _time(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no time")
    return float(value)

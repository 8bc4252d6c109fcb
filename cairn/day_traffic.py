"""The bytes of blobs and training data that a peer has sent and received today, kept in its run's folder."""

from __future__ import annotations

import json
import logging
import os
from datetime import date
from pathlib import Path

from protocol.errors import MalformedError, os_reason
from protocol.strict_json import integer_field, read_json

log = logging.getLogger("cairn.peer")

FILE = "traffic.json"
MAX_FILE = 4096
MOST = 2**53


class DayTraffic:
    """Counts of one day. A file that is missing, damaged or of another day counts nothing."""

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._day = ""
        self.up = self.down = 0
        try:
            found = read_json(self._path.read_bytes(), FILE, MAX_FILE)
            if isinstance(found, dict) and isinstance(day := found.get("day"), str):
                up, down = (integer_field(found, way, MOST) for way in ("up", "down"))
                self._day, self.up, self.down = day, up, down
        except (OSError, MalformedError):
            pass

    def add(self, day: date, up: int, down: int, *, always: bool = False) -> None:
        """Count bytes on a day, and write the counts if they have changed, or `always`."""
        name = day.isoformat()
        if name != self._day:
            self._day, self.up, self.down = name, 0, 0
        elif not up and not down and not always:
            return
        self.up, self.down = min(MOST, self.up + up), min(MOST, self.down + down)
        draft = self._path.with_name(f".{FILE}.part")
        try:
            draft.write_text(json.dumps({"day": self._day, "up": self.up, "down": self.down}))
            os.replace(draft, self._path)
        except OSError as e:
            log.warning("today's traffic is not noted: %s", os_reason(e))

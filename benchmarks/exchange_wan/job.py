"""Messages between the harness and the peers' processes, as files in one folder.

job.json        the job
ready-P-R       peer P is prepared for round R
dead-P          peer P was killed
go-R            the monotonic time at which round R begins (one clock for all hosts: they are one machine)
diary-P.jsonl   what happened at peer P, and when
stop            everybody leaves

hivemind's peers have besides: filled-P-R (ready to search), search-R-K (when the K-th search of a round begins),
matched-P-R-K, verdict-R-K.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Job:
    """`ips` of all peers, by number; `codec` and `options` are the system's; `exchange_seconds` the run's."""

    folder: str
    ips: list[str]
    parameters: int
    codec: dict[str, Any] | None
    options: dict[str, Any]
    exchange_seconds: float
    seed: int = 0

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @classmethod
    def read(cls, file: Path) -> Job:
        return cls(**json.loads(file.read_text()))

    def write(self) -> Path:
        publish(self.path / "job.json", json.dumps(asdict(self)))
        return self.path / "job.json"


class Diary:
    """A peer's side of the folder."""

    def __init__(self, job: Job, number: int):
        self._folder, self._number = job.path, number
        self._file = open(self._folder / f"diary-{number}.jsonl", "a", buffering=1)

    def say(self, what: str, round: int, **more: Any) -> None:
        """Write down that this happened now."""
        self._file.write(json.dumps({"what": what, "round": round, "at": time.monotonic(), **more}) + "\n")

    def ready(self, round: int) -> None:
        publish(self._folder / f"ready-{self._number}-{round}", "")

    def begins(self, round: int) -> float | None:
        """Return the start of the round; None as long as it is not set."""
        try:
            return float((self._folder / f"go-{round}").read_text())
        except FileNotFoundError:
            return None

    @property
    def over(self) -> bool:
        return (self._folder / "stop").exists()

    def wait(self, round: int, *, look: Callable[[], object] = lambda: None) -> bool:
        """Until the round begins; False when there is none any more."""
        while (at := self.begins(round)) is None:
            if self.over:
                return False
            look()
            time.sleep(LOOK_SECONDS)
        time.sleep(max(0.0, at - time.monotonic()))
        return True


def publish(file: Path, text: str) -> None:
    """Whole or not at all."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, file)


def first_peer(folder: Path) -> list[str]:
    """Wait for the first peer, and return its addresses."""
    end = time.monotonic() + 120
    while not (folder / "first-peer.json").exists():
        if time.monotonic() > end:
            raise TimeoutError("the first peer did not come up within 120 s")
        time.sleep(0.1)
    return json.loads((folder / "first-peer.json").read_text())


def read_diary(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return the diary of a peer so far."""
    file = folder / f"diary-{number}.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

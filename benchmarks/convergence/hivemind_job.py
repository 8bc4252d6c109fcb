"""The job that `rival_hivemind` sends its peers; it is a separate file, since only the peers load hivemind."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """The parameters of all peers of one run.

    `options`: of hivemind.Optimizer. `free`: train on while others are waited for, as a plain loop does; else each peer
    gives its share of the global batch and waits. `micro`: how many times the profile's batch is a peer's share.
    """

    profile: dict[str, Any]
    seed: int
    lr: float
    steps: int
    folder: str
    prepared: str
    addresses: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    compression: str = "none"
    power_rank: int = 0
    free: bool = False
    micro: int = 1
    save_every: int = 0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))

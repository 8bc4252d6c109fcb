"""The status of a node: for its terminal, and as `status.json` in its folder for scripts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from peer.node.downloads import Download
from protocol.errors import MalformedError
from protocol.rounds.update_fate import UpdateFate
from protocol.strict_json import read_json

FILE = "status.json"
MAX_SNAPSHOT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The status of a node at one moment: the one shape in which it leaves the process, apart from heartbeats.

    Tokens are of the run, `swarm_tokens_per_second` of all members. `head` and `state` are hex digests; `state` is
    empty while none is held. `round_seconds_left` is the time to the round's limit while it is trained. `last_update`
    is the fate of our newest update; None before the first. `bytes_up` and `bytes_down` count from the start of this
    node, `up_per_second` and `down_per_second` are recent rates.
    `exchange_seconds` are the medians of the last rounds since our announcement (`round_timings.ExchangeTimes`), and
    `exchange_rounds` those rounds one by one, oldest first.
    `mfu` is None when unknown. `memory_used` and `memory_whole` are bytes, of the rank that uses most; 0 when unknown.
    `time_shares` are shares of the trainer's last minute; empty when unknown.
    `trained_windows` counts from the start of this node; windows that were trained again count again. `open_windows`
    are not covered by an update yet. With `is_waiting` the trainer has nothing to train for now. `next_window` is the
    absolute number of the window to train next; 0 without a trainer. `orders` are the reasons why this peer may not
    train, for people: a directive of the owner, or a conviction. It is empty when there are none. `rest` is why its
    user wants it to rest, empty while it may train. With `devices_free` no process of it uses a device.
    `audits` counts this node's checks of others' updates (`audit_runner.AuditCounts`), and those that wait. It is
    empty when it makes none.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    run: str
    name: str
    peer: str
    phase: str
    round: int
    head: str
    state: str
    state_round: int
    accepted_tokens: int
    total_tokens: int
    round_tokens: int
    target_tokens: int
    loss: float
    tokens_per_second: float
    members: int
    bytes_up: int
    bytes_down: int
    device: str
    own_updates: int
    missed_updates: int
    exchange_seconds: dict[str, float]
    exchange_rounds: list[dict[str, float]]
    trainer_restarts: int
    finished: str
    mfu: float | None = None
    memory_used: int = 0
    memory_whole: int = 0
    time_shares: dict[str, float] = field(default_factory=dict)
    trained_windows: int = 0
    open_windows: int = 0
    is_waiting: bool = False
    next_window: int = 0
    orders: str = ""
    rest: str = ""
    devices_free: bool = False
    audits: dict[str, int] = field(default_factory=dict)
    swarm_tokens_per_second: float = 0.0
    round_seconds_left: float | None = None
    up_per_second: float = 0.0
    down_per_second: float = 0.0
    last_update: UpdateFate | None = None
    downloads: list[Download] = field(default_factory=list)


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Replace the status file atomically. Raises OSError."""
    draft = folder / f".{FILE}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(asdict(snapshot), indent=1) + "\n")
        os.replace(draft, folder / FILE)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_snapshot(folder: Path) -> Snapshot | None:
    """Return the last snapshot in a folder; None when there is none that can be read."""
    try:
        return parse_snapshot((folder / FILE).read_bytes())
    except OSError:
        return None


def parse_snapshot(data: bytes) -> Snapshot | None:
    """Return the snapshot in a status file's bytes; None for anything else."""
    try:
        read_json(data, FILE, MAX_SNAPSHOT)
        return TypeAdapter(Snapshot).validate_json(data)
    except (MalformedError, ValidationError):
        return None

"""What a node shows of itself: to its terminal, and as `status.json` in its folder for scripts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "status.json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a node. Tokens are of the run; `state` is the digest of the state that is held ("" for none).

    `exchange_seconds`: medians of the last rounds since our announcement (see `exchange.ExchangeTimes`);
    `exchange_rounds`: those rounds one by one, the oldest first. `mfu`, `memory_used`, `memory_whole` (bytes; of many
    ranks, what the one that uses most uses) and `time_shares` (of the trainer's last minute, see
    `peer.training.time_breakdown`): None, 0 and empty when not known. Windows: `trained_windows` since this node
    started (those that were trained again count again), `open_windows` of them covered by no update yet, and
    `next_window`, the one to train next, as they are counted for ever (0 while no trainer says). `orders`: what the
    run's owner has ordered that concerns this peer, in words; "" while the run goes on as ever.
    """

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
    next_window: int = 0
    orders: str = ""


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Replace the file, so that a reader never sees half of it."""
    draft = folder / f".{FILE}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(asdict(snapshot), indent=1) + "\n")
        os.replace(draft, folder / FILE)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_snapshot(folder: Path) -> Snapshot | None:
    """The last snapshot in a folder; None when there is none that can be read."""
    try:
        return Snapshot(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None

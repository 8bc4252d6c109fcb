"""How a node runs on this machine: what is its own, and not its run's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peer.channel import Choice


@dataclass(frozen=True)
class NodeOptions:
    """How this node runs: where it listens, what it trains on (`observer`: nothing)."""

    folder: Path
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    device: str = "auto"
    parallel: str = "auto"
    recompute: Choice = "auto"
    compile: Choice = "auto"
    threads: int = 1
    observer: bool = False
    overlap: bool = True
    trainer_command: tuple[str, ...] = ()
    """Instead of the trainer's own: for measuring the node by itself."""

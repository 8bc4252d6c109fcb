"""How many bytes went up and came down: payload of packets, chains and blobs; the transport's own are not counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    up: int = 0
    down: int = 0

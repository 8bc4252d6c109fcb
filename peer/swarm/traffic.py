"""Counts of the payload bytes of packets, certificates and blobs. The transport's own bytes are not counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ByteCount:
    """Bytes sent (`up`) and received (`down`)."""

    up: int = 0
    down: int = 0

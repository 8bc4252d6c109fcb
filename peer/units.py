"""Numbers with a unit, as text for people."""

from __future__ import annotations

from collections.abc import Sequence


def count(n: float) -> str:
    """Return a number with a unit: 1234567 as 1.2M."""
    return _scaled(n, ("", "k", "M", "G", "T"))


def byte_size(n: float) -> str:
    """Return bytes in decimal units: 1234567 as 1.2 MB."""
    return _scaled(n, (" B", " kB", " MB", " GB", " TB"))


def _scaled(n: float, units: Sequence[str]) -> str:
    step = 0
    while abs(n) >= 999.5 and step < len(units) - 1:
        n, step = n / 1000, step + 1
    return f"{n:.0f}{units[step]}" if step == 0 or abs(n) >= 99.95 else f"{n:.1f}{units[step]}"

"""Numbers with a unit, as text for people. Peer and coordinator share this package alone."""

from __future__ import annotations

from collections.abc import Sequence


def count(n: float) -> str:
    """Return a number with a unit: 1234567 as 1.2M."""
    return _scaled(n, ("", "k", "M", "B", "T"))


def byte_size(n: float) -> str:
    """Return bytes in decimal units: 1234567 as 1.2 MB."""
    return _scaled(n, (" B", " kB", " MB", " GB", " TB"))


def duration(seconds: float) -> str:
    """Return a duration: 75 as "75 s", 300 as "5 min"."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def _scaled(n: float, units: Sequence[str]) -> str:
    step = 0
    while abs(n) >= 999.5 and step < len(units) - 1:
        n, step = n / 1000, step + 1
    return f"{n:.0f}{units[step]}" if step == 0 or abs(n) >= 99.95 else f"{n:.1f}{units[step]}"

"""Numbers as text for people, and from people."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"([0-9][0-9_]{0,18}(?:\.[0-9]{1,12})?(?:[eE][+]?[0-9]{1,2})?)([KMBGT]?)", re.I)

SPARKS = "▁▂▃▄▅▆▇█"
MOST = 1e300
"""Values beyond it are drawn as it: the difference of two must be a number."""


def parse_size(text: str) -> int | None:
    """Return 130M, 1B, 7e9 or 1_000_000 as an integer; None for a text that is no number from 1 to 2^53."""
    found = _SIZE.fullmatch(text.strip())
    value = float(found[1].replace("_", "")) * UNITS[found[2].upper()] if found else 0.0
    return round(value) if 1 <= value <= 2**53 else None


MIN_VOLUME = 10**6


def parse_volume(text: str) -> int:
    """Return the bytes in "50G" or "800M". Raises ValueError."""
    found = parse_size(text)
    if found is None or found < MIN_VOLUME:
        raise ValueError(f"{text[:40]!r} is not a size of at least 1M: write for example 800M or 50G")
    return found


def bar(share: float, width: int = 12) -> str:
    """Return a bar of `width` characters."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full + "╌" * (width - full)


def percent(share: float) -> str:
    """Return what is done of a whole: 0.0123 as 1.2%, 0.123 as 12%, and 100% only when nothing is missing."""
    share = max(0.0, min(1.0, share))
    return f"{share:.1%}" if 0.001 <= share < 0.1 else f"{share if share == 1 else min(share, 0.99):.0%}"


def sparkline(values: list[float], width: int = 40) -> str:
    """Return the values as at most `width` bars; each bar is the mean of a group of values."""
    if not values:
        return ""
    if len(values) > width:
        step = len(values) / width
        values = [
            sum(g) / len(g)
            for g in (values[int(i * step) : max(int(i * step) + 1, int((i + 1) * step))] for i in range(width))
        ]
    values = [max(-MOST, min(MOST, v)) for v in values]
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(SPARKS[round((v - low) / span * (len(SPARKS) - 1))] for v in values)

"""Credits as people read them; `credits` in format.js writes the same on the run page."""

from __future__ import annotations


def credit_text(micro: int) -> str:
    """Return micro-credits as credits with three significant digits, as far as a micro-credit has them.

    The run page counts in whole numbers too, so both round alike.
    """
    unit = 10 ** max(0, len(str(micro)) - 3)
    kept = (micro + unit // 2) // unit * unit
    if not kept:
        return "0"
    prefix, size = next((p for p in (("T", 18), ("B", 15), ("M", 12), ("k", 9)) if kept >= 10 ** p[1]), ("", 6))
    digits = min(6, max(0, size + 3 - len(str(kept))))
    return f"{kept / 10**size:.{digits}f}{prefix}"

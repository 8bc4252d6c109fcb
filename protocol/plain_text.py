"""Text of strangers, as a terminal, a log or a page may show it. Control characters could write anything there."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    """Return the first `most` characters, with a question mark for each that is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def one_line(text: str, most: int | None = None) -> str:
    """Return text as one line of at most `most` printable characters; one that was no UTF-8 becomes a space, too."""
    return " ".join("".join(c if c.isprintable() and c != "\ufffd" else " " for c in text).split())[:most]

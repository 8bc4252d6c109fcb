"""Text of strangers, as a terminal, a log or a page may show it. Control characters could write anything there."""

from __future__ import annotations

import re

_NOT_PLAIN = re.compile(
    "[\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000"
    "\ud800-\uf8ff\ufeff\ufff0-\uffff\U000e0000-\U0010ffff]"
)
"""Controls, marks that reorder or hide text, blanks other than the space, and characters without a meaning."""


def is_plain(text: str) -> bool:
    """Return whether text has only characters that a message or a spec may have.

    `str.isprintable` follows the Unicode version of each Python: what one version accepts another one would refuse, and
    with it a record of the run. This rule never changes.
    """
    return _NOT_PLAIN.search(text) is None


def printable(text: str, most: int | None = None) -> str:
    """Return the first `most` characters, with a question mark for each that is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def one_line(text: str, most: int | None = None) -> str:
    """Return text as one line of at most `most` printable characters; one that was no UTF-8 becomes a space, too."""
    return " ".join("".join(c if c.isprintable() and c != "\ufffd" else " " for c in text).split())[:most]

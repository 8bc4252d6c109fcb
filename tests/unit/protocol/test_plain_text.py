"""No text of a stranger moves a cursor, begins a line, or colours a terminal."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import protocol
from protocol.plain_text import is_plain, one_line, printable


@given(st.text(max_size=200), st.none() | st.integers(0, 50))
def test_all_that_is_shown_is_printable_and_bounded(text: str, most: int | None):
    for shown in (printable(text, most), one_line(text, most)):
        assert shown.isprintable() and len(shown) <= (len(text) if most is None else most)


def test_words_stay_and_the_rest_is_marked_or_a_space():
    assert printable("a\x1b[31mb\u202e\n") == "a?[31mb??" and printable("abc", 2) == "ab"
    assert one_line(" two\n\n lines\x07 \ufffd!") == "two lines !" and one_line("a b", 2) == "a "


def test_plain_text_has_no_controls_and_no_blanks_but_spaces():
    refused = {chr(c) for c in range(sys.maxunicode + 1) if not is_plain(chr(c))}
    for c in map(chr, range(sys.maxunicode + 1)):
        kind = unicodedata.category(c)
        assert c in refused or kind not in ("Cc", "Cs", "Co", "Zl", "Zp") and (kind != "Zs" or c == " "), ascii(c)
        assert c not in refused or kind[0] in "CZ" or c in "\ufffc\ufffd" or ord(c) >= 0xE0000, ascii(c)
    assert {"\u202e", "\u200b", "\u2066", "\ufeff", "\u061c"} <= refused


def test_what_is_accepted_does_not_depend_on_the_unicode_version_of_this_python():
    for newer in ("\U0001fae0", "\U0001fae8", "\u2ffc", "\U0003ffff"):  # of Unicode 14, 15, 15.1, and none so far
        assert is_plain(newer)
    allowed = {"plain_text.py": 2, "spec.py": 1}  # these only show text
    folder = Path(protocol.__file__).parent
    for path in [*folder.rglob("*.py"), *(folder.parent / "cairn" / "commands").rglob("*.py")]:
        found = [line for line in path.read_text().splitlines() if "isprintable()" in line and "isascii()" not in line]
        assert len(found) == allowed.get(path.name, 0), (path, found)

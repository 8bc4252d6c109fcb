"""No text of a stranger moves a cursor, begins a line, or colours a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.plain_text import one_line, printable


@given(st.text(max_size=200), st.none() | st.integers(0, 50))
def test_all_that_is_shown_is_printable_and_bounded(text: str, most: int | None):
    for shown in (printable(text, most), one_line(text, most)):
        assert shown.isprintable() and len(shown) <= (len(text) if most is None else most)


def test_words_stay_and_the_rest_is_marked_or_a_space():
    assert printable("a\x1b[31mb\u202e\n") == "a?[31mb??" and printable("abc", 2) == "ab"
    assert one_line(" two\n\n lines\x07 \ufffd!") == "two lines !" and one_line("a b", 2) == "a "

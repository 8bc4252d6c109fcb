"""Numbers as people read them."""

from __future__ import annotations

import pytest

from cairn.number_format import SPARKS, percent, sparkline
from protocol.ledger.credit_text import credit_text
from tests.support.credit_texts import CREDIT_TEXTS


@pytest.mark.parametrize(
    "share, text", [(-1, "0%"), (0.004, "0.4%"), (0.099, "9.9%"), (0.5, "50%"), (0.9999, "99%"), (1, "100%")]
)
def test_all_is_done_only_when_nothing_is_missing(share: float, text: str):
    assert percent(share) == text


@pytest.mark.parametrize("micro, text", CREDIT_TEXTS.items())
def test_credits_have_three_digits_and_one_unit(micro, text):
    assert credit_text(micro) == text


def test_a_sparkline_shows_every_value_as_a_bar_between_the_lowest_and_the_highest():
    assert len(sparkline([1.7e308, -1.7e308, 0.0])) == 3, "a coordinator may name any number"
    assert sparkline([0.0, 5e-324]) == SPARKS[0] + SPARKS[-1]
    assert sparkline([]) == "" and sparkline([5.0, 5.0]) == SPARKS[0] * 2
    assert sparkline([1.0, 2.0, 3.0]) == SPARKS[0] + sparkline([1.0, 2.0, 3.0])[1] + SPARKS[-1]
    long = sparkline([float(i) for i in range(1000)], 40)
    assert len(long) == 40 and long[0] == SPARKS[0] and long[-1] == SPARKS[-1] and list(long) == sorted(long)

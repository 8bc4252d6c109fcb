"""Numbers with a unit, as people read them."""

from __future__ import annotations

import pytest

from protocol.units import byte_size, count, duration


@pytest.mark.parametrize(
    "n, text",
    [(0, "0"), (7, "7"), (999, "999"), (999.6, "1.0k"), (1000, "1.0k"), (99_949, "99.9k"), (99_960, "100k"),
     (999_499, "999k"), (999_950, "1.0M"), (1_234_567, "1.2M"), (2.5e9, "2.5B"), (5e15, "5000T"), (-1500, "-1.5k")],
)  # fmt: skip
def test_counts(n, text):
    assert count(n) == text


@pytest.mark.parametrize(
    "n, text", [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_999, "1.0 MB"), (2e9, "2.0 GB")]
)
def test_sizes(n, text):
    assert byte_size(n) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(-1, "0 s"), (75, "75 s"), (90, "2 min"), (600, "10 min"), (7200, "2.0 h"), (260_000, "3 days")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text

"""A bounded mapping evicts its oldest entry, and a token bucket bounds a rate with bursts."""

from __future__ import annotations

import pytest

from protocol.bounded import BoundedDict
from protocol.token_bucket import TokenBucket


def test_the_entry_set_first_is_evicted():
    d: BoundedDict[str, int] = BoundedDict(2)
    d["a"], d["b"] = 1, 2
    d["a"] = 3  # keeps its place
    d["c"] = 4
    assert dict(d) == {"b": 2, "c": 4}


def test_an_entry_that_is_renewed_is_the_newest():
    d: BoundedDict[str, int] = BoundedDict(2)
    d["a"], d["b"] = 1, 2
    d.renew("a", 3)
    d["c"] = 4
    assert dict(d) == {"a": 3, "c": 4}
    d.move_to_end("a")
    assert next(iter(d)) == "c"


def test_every_way_to_set_an_entry_is_bounded_and_the_limit_may_change():
    d: BoundedDict[int, int] = BoundedDict(3)
    d.update({i: i for i in range(10)})
    assert list(d) == [7, 8, 9]
    assert d.setdefault(1, 5) == 5 and list(d) == [8, 9, 1]
    d.limit = 1
    d[2] = 2
    assert list(d) == [2]
    d.limit = 0
    d.renew(3, 3)
    assert not d


def test_a_bucket_is_full_at_first_and_fills_at_its_rate():
    bucket = TokenBucket(10, 20, 100.0)
    assert bucket.tokens == 20
    bucket.charge(25)
    bucket.refill(100.2)
    assert bucket.tokens == pytest.approx(-3)
    bucket.refill(99.0)  # a clock that was set back adds nothing
    bucket.refill(100.0)
    assert bucket.tokens == pytest.approx(7)
    bucket.refill(1e9)
    assert bucket.tokens == 20

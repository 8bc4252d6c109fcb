"""How updates reach everybody: which rounds are reduced, into how many parts, who makes them, and what they weigh."""

from __future__ import annotations

from collections import Counter

import pytest

from protocol.codec import make_codec
from protocol.ids import Digest, PeerKey, sha256
from protocol.layout import Layout
from protocol.merkle import CHUNK
from protocol.reduce import Reduction
from protocol.reduce_plan import ReducePlan, blob_size, committees, mean_size, shard_count
from protocol.rounds.policy import RoundPolicy
from protocol.spec import CodecSpec
from tests.support.specs import tiny_spec

PARENT = Digest(sha256(b"parent"))
KEYS = [PeerKey(sha256(b"key", bytes([i]))) for i in range(40)]


@pytest.mark.parametrize(
    "contributors, size, parts",
    [(1, 100 * CHUNK, 1), (7, 100 * CHUNK, 7), (7, 3 * CHUNK, 3), (7, 3 * CHUNK + 1, 4), (7, 9, 1),
     (4096, 5000 * CHUNK, 1024)],
)  # fmt: skip
def test_there_are_as_many_parts_as_contributors_but_none_below_a_chunk(contributors, size, parts):
    assert shard_count(contributors, size) == parts


@pytest.mark.parametrize("people, parts, size", [(40, 40, 3), (40, 13, 3), (7, 7, 5), (5, 4, 3), (2, 2, 3), (1, 1, 3)])
def test_work_is_dealt_evenly_and_no_committee_has_anybody_twice(people, parts, size):
    dealt = committees(PARENT, 0, KEYS[:people], parts, size)
    assert len(dealt) == parts
    assert all(list(c) == sorted(set(c)) and len(c) == min(size, people) for c in dealt)
    seats = Counter(key for c in dealt for key in c)
    assert set(seats) <= set(KEYS[:people]) and max(seats.values()) <= size
    assert max(seats.values()) - min(seats.get(k, 0) for k in KEYS[:people]) <= 1


def test_committees_depend_on_parent_and_attempt_and_not_on_the_order_of_names():
    dealt = committees(PARENT, 0, KEYS, 40, 3)
    assert dealt == committees(PARENT, 0, reversed(KEYS), 40, 3)
    assert dealt != committees(PARENT, 1, KEYS, 40, 3)
    assert dealt != committees(Digest(sha256(b"other")), 0, KEYS, 40, 3)


def test_the_spec_or_the_bytes_choose():
    assert not ReducePlan("gather").is_reduced(1000)
    assert ReducePlan("reduce", 3, 10, 10).is_reduced(0)
    auto = ReducePlan("auto", 3, 1000, 2000)
    # Updates to fetch, (n - 1) * 1000, against 2 * (3 * 1000 + 2000).
    assert [auto.is_reduced(n) for n in (0, 1, 11, 12)] == [False, False, False, True]


def test_a_spec_says_how_its_rounds_are_exchanged():
    spec = tiny_spec()
    assert ReducePlan.of(spec).kind == "gather" and not ReducePlan.of(spec).is_reduced(10**6)
    changed = spec.model_copy(update={"round": spec.round.model_copy(update={"exchange": "auto", "committee": 5})})
    exchange = ReducePlan.of(changed)
    assert (exchange.kind, exchange.committee) == ("auto", 5)
    assert exchange.update_size == make_codec(spec.codec, spec.model.layout).size
    assert exchange.mean_size == mean_size(spec.codec, spec.model.layout)
    assert RoundPolicy.of(changed).exchange == RoundPolicy.of(changed).chain_limits.reduce_plan == exchange


@pytest.mark.parametrize(
    "kind, k", [("sign", 64), ("int8", 64), ("none", 64), *(("sparse", k) for k in (64, 100, 256, 1000, 2048, 4096))]
)
def test_sizes_are_those_of_the_codecs(kind, k):
    layout = Layout.of({"a": (3, 5000), "b": (7,), "c": (4096,), "d": (2, 4097), "e": (1,), "f": (130, 33)})
    spec = CodecSpec(kind=kind, k=k)
    assert blob_size(spec, layout) == make_codec(spec, layout).size
    assert mean_size(spec, layout) == Reduction(make_codec(spec, layout)).size(1, 0)

"""Assignment of windows: deterministic, uniform, different for every peer, and exactly once in a pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from protocol.assignment import WindowTable, windows_of
from protocol.errors import MalformedError
from protocol.ids import PeerKey, sha256
from protocol.spec import DataShard
from tests.support.long_cases import long_cases


def peer(i: int) -> PeerKey:
    return PeerKey(sha256(b"peer", str(i).encode()))


def test_the_assignment_never_changes():
    """Written down once: any change of it breaks every run that is under way."""
    assert windows_of(7, peer(0), 0, 8, 1000).tolist() == VECTOR_1000
    assert windows_of(7, peer(0), 2**40, 4, 123_456_789_012).tolist() == VECTOR_BIG


VECTOR_1000 = [168, 529, 50, 6, 642, 649, 237, 175]
VECTOR_BIG = [31326364709, 60860079293, 120229045935, 35434691868]


@given(st.integers(1, 5000), st.integers(0, 2**53), st.integers(0, 3))
def test_a_pass_holds_every_window_exactly_once(total, seed, turn):
    got = windows_of(seed, peer(1), turn * total, total, total)
    assert np.array_equal(np.sort(got), np.arange(total))


@given(st.integers(1, 2**53), st.integers(0, 2**53 - 300), st.integers(0, 300), st.integers(0, 300))
def test_a_batch_is_the_same_as_one_by_one_however_it_is_cut(total, first, count, cut):
    cut = min(cut, count)
    whole = windows_of(5, peer(2), first, count, total)
    parts = [windows_of(5, peer(2), first, cut, total), windows_of(5, peer(2), first + cut, count - cut, total)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert ((whole >= 0) & (whole < total)).all()
    for i in range(0, count, 97):
        assert windows_of(5, peer(2), first + i, 1, total)[0] == whole[i]


@pytest.mark.parametrize("total", [3, 16, 100, *long_cases(1000)])
def test_over_peers_a_counter_is_uniform(total):
    """Chi-square over many peers at one counter, where the permutation gives nothing for free."""
    draws = np.array([windows_of(9, peer(i), 1, 1, total)[0] for i in range(20 * total if total > 100 else 4000)])
    assert stats.chisquare(np.bincount(draws, minlength=total)).pvalue > 1e-4


def test_over_a_large_range_a_peers_windows_are_uniform():
    draws = windows_of(3, peer(3), 0, 200_000, 2**53 - 111)
    buckets = np.bincount((draws * 64.0 / (2**53 - 111)).astype(int), minlength=64)
    assert stats.chisquare(buckets).pvalue > 1e-4
    assert len(np.unique(draws)) == len(draws)


def test_neighbouring_counters_are_not_correlated():
    draws = windows_of(3, peer(4), 0, 100_000, 100_000).astype(float)
    assert abs(stats.spearmanr(draws[:-1], draws[1:]).statistic) < 0.02
    assert abs(stats.spearmanr(np.arange(len(draws)), draws).statistic) < 0.02


def test_peers_seeds_and_passes_differ():
    n = 10_000
    base = windows_of(1, peer(5), 0, n, n)
    for other in (windows_of(1, peer(6), 0, n, n), windows_of(2, peer(5), 0, n, n), windows_of(1, peer(5), n, n, n)):
        assert (base == other).sum() < 20  # about one coincidence is expected


@pytest.mark.parametrize(
    ("seed", "first", "count", "total"),
    [(0, 0, 1, 0), (-1, 0, 1, 5), (0, -1, 1, 5), (0, 0, 2**40, 5), (0, 2**60, 1, 5)],
)
def test_what_is_out_of_range_is_refused(seed, first, count, total):
    with pytest.raises(MalformedError):
        windows_of(seed, peer(0), first, count, total)


def test_locate_finds_every_window_in_its_shard_and_leaves_none_out():
    window = 10
    shards = [DataShard(digest="0" * 64, size=2 * n, tokens=n) for n in (31, 10, 30, 1, 21)]
    table = WindowTable.of(shards, window)
    assert table.total == 3 + 0 + 2 + 0 + 2
    found = [table.locate(i) for i in range(table.total)]
    assert found == [(0, 0), (0, 10), (0, 20), (2, 0), (2, 10), (4, 0), (4, 10)]
    assert all(first + window + 1 <= shards[s].tokens for s, first in found)
    for outside in (-1, table.total):
        with pytest.raises(MalformedError):
            table.locate(outside)

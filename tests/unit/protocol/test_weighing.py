"""An update weighs what its author's record allows, whatever it claims, and no claim is counted twice."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from protocol.update_weights import (
    BACKLOG_UPDATES,
    COUNTED,
    KNOWN_ROUNDS,
    MEAN_UPDATES,
    AuthorHistory,
    countable,
    weigh,
)

MOST = 1000

rounds = st.lists(st.dictionaries(st.integers(0, 7), st.integers(1, MOST), min_size=1), min_size=1, max_size=30)
"""The claims of each round's authors."""


class Branch:
    """The histories that a branch of records leads to."""

    def __init__(self, most: int = MOST):
        self.histories: dict[int, AuthorHistory] = {}
        self.round = 0
        self._most = most

    def add(self, claims: Mapping[int, int]) -> dict[int, int]:
        """Accept a round; return the weighed windows of each author."""
        before = {author: self.histories.get(author, AuthorHistory()) for author in claims}
        weighed = dict(zip(claims, weigh([(claims[a], before[a]) for a in claims], self.round, MOST), strict=True))
        for author, claimed in claims.items():
            old = before[author]
            end = old.end_window + claimed
            self.histories[author] = old.after(self.round, end, claimed, weighed[author], self._most)
        self.round += 1
        return weighed


def test_a_claim_ends_a_round_no_sooner_than_by_some_times_what_its_author_may_weigh():
    known, newcomer = AuthorHistory(height=5, weighed=(10,)), AuthorHistory()
    assert countable(known, 5, [4, 6, 8, 50], MOST) == COUNTED * 20
    assert countable(newcomer, 5, [4, 6, 8, 50], MOST) == COUNTED * 4
    assert countable(AuthorHistory(height=5, weighed=(1,)), 5, [40, 60], MOST) == COUNTED * 40, "as a newcomer's"
    assert countable(newcomer, 0, [], MOST) == MOST, "before the first record nobody knows better"
    assert countable(known, 5, [4], 30) == 30


@given(rounds)
def test_no_claim_counts_twice_and_none_is_lost_below_the_bound(rounds):
    branch = Branch(most=10**9)
    claimed, weighed = dict.fromkeys(range(8), 0), dict.fromkeys(range(8), 0)
    for claims in rounds:
        for author, windows in branch.add(claims).items():
            assert windows >= 1
            weighed[author] += windows
            claimed[author] += claims[author]
            assert weighed[author] + branch.histories[author].backlog == claimed[author] and windows <= MOST


@given(rounds)
def test_a_backlog_is_bounded(rounds):
    branch = Branch(most=50)
    claimed, weighed = dict.fromkeys(range(8), 0), dict.fromkeys(range(8), 0)
    for claims in rounds:
        for author, windows in branch.add(claims).items():
            weighed[author] += windows
            claimed[author] += claims[author]
            assert 0 <= branch.histories[author].backlog <= BACKLOG_UPDATES * 50
            assert weighed[author] + branch.histories[author].backlog <= claimed[author]


@given(rounds)
def test_nobody_weighs_more_than_twice_what_it_did_lately_and_no_newcomer_more_than_a_low_quartile(rounds):
    branch = Branch()
    for claims in rounds:
        before = dict(branch.histories)
        weighed = branch.add(claims)
        base = sorted(w for author, w in weighed.items() if author in before) or sorted(claims.values())
        for author, windows in weighed.items():
            last = before[author].weighed if author in before else ()
            own = 2 * last[-1] if 0 < len(last) < 5 else max(last[-1], (sum(last) + 3) // 4) if last else 0
            assert windows <= max(own, base[(len(base) - 1) // 4])


@given(rounds, st.integers(0, 7), st.integers(1, MOST))
def test_a_larger_claim_never_weighs_less_and_takes_nothing_from_others(rounds, author, more):
    *past, last = rounds
    one, two = Branch(), Branch()
    for claims in past:
        one.add(claims)
        two.add(claims)
    a, b = one.add(last | {author: more}), two.add(last | {author: more + 1})
    assert b[author] >= a[author]
    for other in a.keys() - {author}:
        assert b[other] >= a[other]


def test_equal_peers_weigh_what_they_claim_from_the_first_round_on():
    branch = Branch()
    for _ in range(5):
        assert branch.add({0: 10, 1: 10, 2: 10}) == {0: 10, 1: 10, 2: 10}


def test_a_young_author_doubles_with_each_update_and_then_grows_slowly():
    branch = Branch()
    branch.add({0: 8, 1: 8, 2: 8})
    got = [branch.add({0: 8, 1: 8, 2: 8, 3: MOST})[3] for _ in range(11)]
    assert got == [8, 16, 32, 64, 128, 128, 128, 128, 144, 164, 173]


def test_an_author_that_turns_hostile_gains_little_before_audits_could_convict_it():
    branch = Branch()
    for _ in range(40):
        branch.add({0: 80, 1: 80, 2: 80})
    got = [branch.add({0: 80, 1: 80, 2: MOST})[2] for _ in range(MEAN_UPDATES)]
    assert got == [100, 105, 112, 120, 130]
    doubled = next(n for n in range(100) if branch.add({0: 80, 1: 80, 2: MOST})[2] >= 160)
    assert MEAN_UPDATES + doubled + 1 == 8


def test_a_known_author_s_limit_is_that_of_a_new_key_at_least():
    branch = Branch()
    others = dict.fromkeys(range(8), 80)
    for n in range(20):
        weighed = branch.add(others | {8: 10 if n < 15 else 80})
        assert weighed[8] == (10 if n < 15 else 80)
    assert branch.add(others | {9: 200})[9] == 80


def test_the_least_weight_grows_too():
    branch = Branch()
    for _ in range(10):
        branch.add({0: 1, 1: 1})
    assert [branch.add({0: 1, 1: 9})[1] for _ in range(5)] == [2, 2, 2, 2, 3]


def test_a_short_update_costs_its_author_nothing_later():
    branch = Branch()
    got = [branch.add({0: 80, 1: 10 if n == 10 else 80})[1] for n in range(20)]
    assert got == [80] * 10 + [10] + [80] * 9


def test_a_newcomer_soon_has_its_full_weight_and_gets_the_rest_of_its_work_then():
    branch = Branch()
    branch.add({0: 8, 1: 8})
    got = [branch.add({0: 8, 1: 8, 2: 80})[2] for _ in range(12)]
    assert got[:5] == [8, 16, 32, 64, 128]
    assert sum(got) + branch.histories[2].backlog == 12 * 80
    assert branch.histories[2].backlog == 0


def test_newcomers_weigh_little_however_many_they_are():
    branch = Branch()
    branch.add({0: 10, 1: 20, 2: 30, 3: 40, 4: 50})
    assert [branch.histories[i].weighed for i in range(5)] == [(10,), (20,), (20,), (20,), (20,)]
    weighed = branch.add({0: 10, 1: 20, 2: 30, 3: 40, 4: 50} | dict.fromkeys(range(5, 200), MOST))
    assert all(weighed[sybil] == 20 for sybil in range(5, 200))


def test_who_was_away_for_long_is_a_newcomer_again():
    branch = Branch()
    branch.add({0: 8, 1: 512})
    branch.histories[1] = AuthorHistory(512, 1, (512,), 0)
    for _ in range(KNOWN_ROUNDS - 1):
        branch.add({0: 8})
    assert branch.round - branch.histories[1].height == KNOWN_ROUNDS - 1
    assert weigh([(8, branch.histories[0]), (512, branch.histories[1])], branch.round, MOST) == (8, 512)
    assert weigh([(8, branch.histories[0]), (512, branch.histories[1])], branch.round + 1, MOST) == (8, 8)

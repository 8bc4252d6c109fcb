"""The draw of audits: the same for all, by stake, and unknown before the next record is proposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from protocol.assignment import windows_of
from protocol.audit_windows import QUARTERS, compared_windows
from protocol.audits import (
    WINDOWS_COMPARED,
    AuditRule,
    AuditSeeds,
    audit_seed,
    draw_auditors,
    draw_by_stake,
    draw_jury,
    due_audits,
)
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import AuditCheck
from protocol.stake import STAKE_ROUNDS
from tests.support.audited import certificate, key
from tests.vectors import plain

RULE = AuditRule()
EIGHT = [key(n) for n in range(8)]
STAKES = st.dictionaries(st.sampled_from(EIGHT), st.integers(0, 10**12))
DIGESTS = st.binary(min_size=32, max_size=32).map(Digest)


def seed(name: object) -> bytes:
    return sha256(f"seed {name}".encode())


def seeds(name: object) -> AuditSeeds:
    return AuditSeeds(seed(name), seed(name))


def share_due(windows: Mapping[PeerKey, int], stakes: Mapping[PeerKey, int], of: PeerKey, *checks: AuditCheck) -> float:
    """Return in how many of 1,000 records one of these checks, or any, of a key's update is due."""
    found = (due_audits(certificate(n, windows).record.body, seeds(n), stakes, RULE) for n in range(1000))
    return sum(a.author == of and (not checks or a.check in checks) for audits in found for a in audits) / 1000


def test_the_rate_falls_with_a_clean_record_and_rises_with_weight():
    everybody = dict.fromkeys(EIGHT, 100)
    full = dict.fromkeys(EIGHT, 100 * STAKE_ROUNDS)
    assert 0.12 < share_due(everybody, full, EIGHT[0]) < 0.18
    assert 0.015 < share_due(everybody, full, EIGHT[0], "replay") < 0.045
    assert 0.26 < share_due(everybody, full | {EIGHT[0]: 50 * STAKE_ROUNDS}, EIGHT[0]) < 0.34
    assert share_due(everybody | {EIGHT[0]: 400}, full, EIGHT[0]) == 1
    assert 0.03 < share_due(everybody, full | {EIGHT[0]: 10**9}, EIGHT[0]) < 0.07  # never less than a third


def test_convictions_raise_the_rates_by_the_stake_of_the_convicted_and_no_further_than_fourfold():
    assert RULE.raised(0, 100) is RULE
    for convicted, total, times in ((1, 159, 1.3), (1, 31, 2.5), (1, 15, 4), (9, 7, 4), (1, 0, 4)):
        raised = RULE.raised(convicted, total)
        assert raised.replay_rate == 30_000 * times and raised.rate("loss", 640) == 150_000 * times
        assert raised.rate("loss", 1_280) == min(1_000_000, 300_000 * times)
    assert RULE.raised(1, 2**70).replay_rate == 30_000 and AuditRule(replay_rate=0).raised(1, 1).replay_rate == 0
    assert AuditRule(loss_rate=0).raised(1, 1).rate("loss", 10**9) == 0


def test_large_updates_are_checked_more_often_for_the_same_share_of_the_work():
    rates = {windows: RULE.rate("loss", windows) for windows in (1, 640, 1_280, 4_266, 4_267, 10**9)}
    assert rates == {1: 150_000, 640: 150_000, 1_280: 300_000, 4_266: 999_843, 4_267: 1_000_000, 10**9: 1_000_000}
    assert {RULE.rate("replay", windows) for windows in rates} == {30_000}
    everybody = dict.fromkeys(EIGHT, 1_280)
    full = dict.fromkeys(EIGHT, 1_280 * STAKE_ROUNDS)
    assert 0.26 < share_due(everybody, full, EIGHT[0]) < 0.34
    assert 0.015 < share_due(everybody, full, EIGHT[0], "replay") < 0.045


@given(st.dictionaries(st.sampled_from(EIGHT), st.integers(1, 10**9), min_size=1), STAKES, st.integers())
def test_who_has_no_stake_is_always_audited(windows, stakes, name):
    record = certificate(name, windows)
    due = {audit.author: audit for audit in due_audits(record.record.body, seeds(name), stakes, RULE)}
    assert {author for author in windows if not stakes.get(author)} <= due.keys()
    for author, audit in due.items():
        assert stakes.get(author) or audit.check == "replay"
        assert audit.auditors == draw_auditors(seed(name), author, stakes, RULE)
    assert not due_audits(record.record.body, seeds(name), stakes, AuditRule(loss_rate=0, replay_rate=0))


def test_what_is_always_audited_is_drawn_by_its_own_record_and_the_rest_by_the_next():
    authors, stakes = EIGHT[:4], dict.fromkeys(EIGHT[:3], 64 * 100)
    record = certificate(0, dict.fromkeys(authors, 100) | {authors[0]: 6400}).record.body
    own, both = AuditSeeds(seed("own"), None), AuditSeeds(seed("own"), seed("next"))
    by = {u.author: audit_seed(u, record, both, stakes, RULE) for u in record.updates}
    assert by == dict.fromkeys(authors[1:3], seed("next")) | {authors[0]: seed("own"), authors[3]: seed("own")}
    at_once = {a.author: a for a in due_audits(record, own, stakes, RULE)}
    assert at_once.keys() == {authors[0], authors[3]}
    assert all(a.auditors == draw_auditors(seed("own"), k, stakes, RULE) for k, a in at_once.items())
    later = {a.author: a for a in due_audits(record, both, stakes, RULE, convicted=10**9)}
    assert at_once.items() <= later.items()


@given(DIGESTS, STAKES, st.integers(0, 9), st.sets(st.sampled_from(EIGHT)))
def test_keys_are_drawn_as_a_plain_walk_along_the_stakes_draws_them(drawn, stakes, count, without):
    others = {bytes(k): stake for k, stake in stakes.items() if k not in without}
    assert list(draw_by_stake(drawn, stakes, count, without)) == plain.draw_by_stake(drawn, others, count)


def test_the_audits_of_a_record_order_the_stakes_once():
    class Counted(dict[PeerKey, int]):
        walks = 0

        def __iter__(self):
            self.walks += 1
            return super().__iter__()

    records = [certificate(0, dict.fromkeys(authors, 100)).record.body for authors in (EIGHT[:1], EIGHT)]
    walks = []
    for record in records:
        stakes = Counted({key("other"): 1})
        assert len(due_audits(record, seeds(0), stakes, RULE)) == len(record.updates)
        walks.append(stakes.walks)
    assert walks[0] == walks[1]


@given(DIGESTS, st.sampled_from(EIGHT), STAKES)
def test_auditors_and_jury_have_stake(drawn, author, stakes):
    auditors = draw_auditors(drawn, author, stakes, RULE)
    able = {k for k, stake in stakes.items() if stake}
    assert len(set(auditors)) == len(auditors) == min(RULE.auditors, len(able - {author}))
    assert set(auditors) <= able - {author}
    total = sum(stakes.values())
    whole = draw_jury(drawn, author, stakes, RULE)
    assert whole.votes == {k: stakes[k] for k in able} and whole.needed == total // 2 + 1, "of so few keys, all"
    some = draw_jury(drawn, author, stakes, AuditRule(jury=3))
    assert set(some.votes) <= able
    if 8 * sum(sorted(stakes.values())[-3:]) < 7 * total:
        assert sum(some.votes.values()) == some.needed == 3, "more than two thirds of the seats"
    else:
        assert some.needed == whole.needed and some.votes.items() <= whole.votes.items() and len(some.votes) <= 3


def test_many_keys_with_little_stake_make_no_jury_a_sample():
    few = {key(n): 1000 for n in range(12)}
    dust = {key(f"dust {n}"): 1 for n in range(1000)}
    jury = draw_jury(seed("next"), key(0), few | dust, RULE)
    assert few.items() <= jury.votes.items() and jury.needed == 13_000 // 2 + 1
    assert len(jury.votes) == RULE.jury
    assert sum(draw_jury(seed("next"), key(0), dust, RULE).votes.values()) == RULE.jury


def test_few_keys_have_no_more_of_a_jury_than_their_share_of_the_stake():
    """Without replacement both would sit in each jury of 64, and have half of its stake."""
    rich = {key("rich 0"): 31_875, key("rich 1"): 31_875}
    stakes = rich | {key(n): 1000 for n in range(255)}
    shares = []
    for n in range(300):
        jury = draw_jury(seed(n), key(0), stakes, RULE).votes
        assert sum(jury.values()) == 64
        shares.append(sum(jury.get(k, 0) for k in rich) / 64)
    assert 0.18 < sum(shares) / len(shares) < 0.22 and max(shares) < 0.5


def test_an_update_is_audited_by_what_it_claims_though_it_weighs_less():
    """The rest is paid as the backlog of updates to come."""
    authors, stakes = EIGHT[:4], dict.fromkeys(EIGHT[:4], 64 * 100)
    for n in range(300):
        made = certificate(n, dict.fromkeys(authors, 100) | {authors[0]: 6400})
        weighed = tuple(200 if u.author == authors[0] else 100 for u in made.record.body.updates)
        body = replace(made.record.body, weights=weighed)
        due = due_audits(body, seeds(n), stakes, RULE)
        assert any(a.author == authors[0] and a.check == "replay" for a in due)


def test_the_claims_of_others_lower_no_rate():
    authors, stakes = EIGHT[:4], dict.fromkeys(EIGHT[:3], 64 * 100)
    for n in range(100):
        made = certificate(n, dict.fromkeys(authors, 100))
        claims = certificate(n, dict.fromkeys(authors, 100) | {authors[3]: 6400})
        body = replace(claims.record.body, weights=(100, 100, 100, 100))
        claims = replace(claims, record=replace(claims.record, body=body))
        usual, beside = (
            {a.author: a.check for a in due_audits(c.record.body, seeds(n), stakes, RULE)} for c in (made, claims)
        )
        assert usual == beside and authors[3] in usual


def test_a_draw_follows_stake_however_many_keys_it_is_divided_over():
    rich, split = key("rich"), [key(f"split {n}") for n in range(30)]
    stakes = {rich: 300} | dict.fromkeys(split, 10)
    first = Counter(draw_by_stake(sha256(str(n).encode()), stakes, 1)[0] for n in range(2000))
    assert 0.45 < first[rich] / 2000 < 0.55
    assert set(first) > set(split)


@given(DIGESTS, st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 500))
def test_compared_windows_are_claimed_ones_of_each_quarter_and_others(record, first, windows, total):
    drawn = compared_windows(record, EIGHT[0], first, windows, seed=7, total=total)
    assigned = windows_of(7, EIGHT[0], first, windows, total).tolist()
    for quarter, found in enumerate(drawn.claimed):
        part = assigned[windows * quarter // QUARTERS : windows * (quarter + 1) // QUARTERS]
        assert not Counter(found) - Counter(part) and len(found) == min(WINDOWS_COMPARED // QUARTERS, len(part))
    free = set(range(total)) - set(assigned)
    assert set(drawn.unclaimed) <= free and len(set(drawn.unclaimed)) == len(drawn.unclaimed)
    assert len(drawn.unclaimed) == min(WINDOWS_COMPARED, len(free))


def test_another_seed_draws_other_windows():
    one, two = (compared_windows(seed(n), EIGHT[0], 0, 4000, 7, 10**6) for n in "ab")
    assert one.claimed != two.claimed and one.unclaimed != two.unclaimed

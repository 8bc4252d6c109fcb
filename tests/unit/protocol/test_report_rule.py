"""Two auditors and most of a jury's stake convict; a report that the jury refutes costs the stake."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.audit_penalties import MAX_DOUBLINGS, AuditPenalties
from protocol.audits import AuditRule, draw_auditors, draw_jury
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import AuditCheck, AuditDecision, Score, Signed, WorkReport
from protocol.report_rule import NARROW, decide, may_refute
from tests.support.audited import RUN, certificate, key

OWNER, LIAR = key("owner"), key("liar")
RULE = AuditRule(jury=5, owner=OWNER)
STAKES = {LIAR: 100} | {key(n): 100 + n for n in range(12)}
RECORD = certificate(0, {LIAR: 10, key(0): 10})
UPDATE = next(u for u in RECORD.record.body.updates if u.author == LIAR)
# A seed whose draw of five jurors has neither the author nor one of the auditors.
SEED = next(
    seed
    for seed in (sha256(b"seed %d" % n) for n in range(1000))
    if not {LIAR, *draw_auditors(seed, LIAR, STAKES, RULE)} & {*(seats := draw_jury(seed, LIAR, STAKES, RULE).votes)}
    and len(seats) == RULE.jury
)
AUDITORS = draw_auditors(SEED, LIAR, STAKES, RULE)
JURY = tuple(draw_jury(SEED, LIAR, STAKES, RULE).votes)
OUTSIDER = next(k for k in STAKES if k not in (*AUDITORS, *JURY, LIAR))


def report(
    by: PeerKey, *, passed: bool, check: AuditCheck = "replay", update: Digest = UPDATE.digest, margin: float = 0.5
) -> Signed[WorkReport]:
    value = 0.5 + (margin if passed else -margin)
    body = WorkReport(
        RUN, Round(3), RECORD.digest, update, check, (Score("scale", 1.0, 0.5), Score("signs", value, 0.5))
    )
    return Signed(body, by, Digest(sha256(by, check.encode(), bytes([passed]))), b"")


def failed(by: Iterable[PeerKey], check: AuditCheck = "replay") -> list[Signed[WorkReport]]:
    return [report(k, passed=False, check=check) for k in by]


def fine(by: Iterable[PeerKey], check: AuditCheck = "replay") -> list[Signed[WorkReport]]:
    return [report(k, passed=True, check=check) for k in by]


def decided(*reports: Iterable[Signed[WorkReport]], is_decided: bool = False) -> AuditDecision | None:
    told = [r for some in reports for r in some]
    return decide(RECORD, SEED, UPDATE, told, STAKES, RULE, is_decided=is_decided)


def convicted(*refuted: PeerKey) -> AuditDecision:
    return AuditDecision(RECORD.digest, LIAR, True, tuple(sorted(refuted)))


def acquitted(*refuted: PeerKey) -> AuditDecision:
    return AuditDecision(RECORD.digest, LIAR, False, tuple(sorted(refuted)))


def test_two_auditors_and_most_of_the_jury_convict():
    assert (len(AUDITORS), len(JURY)) == (3, 5)
    assert decided(failed(AUDITORS[:2]), failed(JURY[:4])) == convicted()
    assert decided(failed([AUDITORS[0], OWNER]), failed(JURY[:4])) == convicted()
    assert decided(failed(AUDITORS[:1]), failed(JURY)) is None
    assert decided(failed(AUDITORS), failed(JURY[:3])) is None  # a sample decides with more than two thirds
    assert decided(failed(AUDITORS[:1] * 2), failed(JURY)) is None  # one auditor twice is one


def test_nobody_else_and_no_other_update_counts():
    assert decided(failed([AUDITORS[0], OUTSIDER, LIAR]), failed(JURY)) is None
    other = [report(k, passed=False, update=RECORD.digest) for k in (*AUDITORS, *JURY)]
    assert decided(other) is None
    assert decided(failed(AUDITORS, "loss"), failed(JURY, "loss")) is None


def test_a_report_that_the_jury_refutes_costs_the_stake():
    assert decided(failed(AUDITORS[:2]), fine(JURY[:4]), failed(JURY[4:])) == acquitted(*AUDITORS[:2], JURY[4])
    assert decided(failed(AUDITORS[:2]), fine(AUDITORS[2:]), failed(JURY[:4]), fine(JURY[4:])) == convicted(
        AUDITORS[2], JURY[4]
    )


@pytest.mark.parametrize("passed", [True, False])
def test_where_the_jurys_own_numbers_were_close_to_a_threshold_nobody_is_refuted(passed):
    """An author who flips signs until its update is at the threshold would set devices against each other."""

    def outcome(close: int, margin: float) -> AuditDecision | None:
        some = [report(k, passed=passed, margin=margin if n < close else 0.5) for n, k in enumerate(JURY[:4])]
        opposite = report(JURY[4], passed=not passed, margin=0.0011)
        return decided(failed(AUDITORS[:2]), some, [opposite])

    spared = AuditDecision(RECORD.digest, LIAR, not passed)
    refuted = acquitted(*AUDITORS[:2], JURY[4]) if passed else convicted(JURY[4])
    assert outcome(4, 0.001) == outcome(1, NARROW - 1e-9) == spared
    assert outcome(0, 0.001) == outcome(4, NARROW + 1e-9) == refuted


@pytest.mark.parametrize("passed", [True, False])
def test_a_fifth_of_the_votes_takes_nobodys_stake_by_its_numbers_and_saves_nobodys(passed):
    liars, honest = JURY[:1], JURY[1:]
    accused, opposite = failed(AUDITORS[:2]), [report(AUDITORS[2], passed=not passed)]
    # Clear numbers of one juror and narrow ones of the others refute nobody, now or later.
    clear = [report(k, passed=passed) for k in liars]
    narrow = [report(k, passed=passed, margin=0.001) for k in honest]
    assert decided(accused, opposite, clear, narrow[:3]) == AuditDecision(RECORD.digest, LIAR, not passed)
    assert decided(accused, opposite, clear, narrow, is_decided=True) is None
    # Narrow numbers of one juror spare nobody, once the others have reported.
    narrow = [report(k, passed=passed, margin=0.001) for k in liars]
    clear = [report(k, passed=passed) for k in honest]
    assert decided(accused, opposite, narrow, clear[:3]) == AuditDecision(RECORD.digest, LIAR, not passed)
    assert decided(accused, opposite, narrow, clear[:3], is_decided=True) is None
    refuted = tuple(sorted(AUDITORS if passed else AUDITORS[2:]))
    late = decided(accused, opposite, narrow, clear, is_decided=True)
    assert late == AuditDecision(RECORD.digest, LIAR, False, refuted), "it convicts nobody a second time"


def test_a_decision_leaves_open_who_loses_stake_while_votes_that_are_clear_or_missing_are_most():
    accused, jury = failed(AUDITORS[:2]), draw_jury(SEED, LIAR, STAKES, RULE)

    def is_open(outcome: AuditDecision, *reports: Iterable[Signed[WorkReport]]) -> bool:
        return may_refute(outcome, [*accused, *(r for some in reports for r in some)], jury, STAKES)

    narrow = [report(k, passed=True, margin=0.001) for k in JURY]
    assert is_open(acquitted(), narrow[:1], fine(JURY[1:2])) and not is_open(acquitted(), narrow[:2])
    assert not is_open(acquitted(), narrow[:1], failed(JURY[1:2]))
    assert not is_open(convicted(), failed(JURY[:2])), "nobody says the opposite"
    assert is_open(convicted(), failed(JURY[:2]), fine(AUDITORS[2:]))
    assert not is_open(convicted(), failed(JURY[:2]), fine([OWNER])), "it has no stake to lose"


def test_the_first_report_of_a_key_counts():
    reports = failed(AUDITORS[:2]), failed(JURY[:4]), fine(JURY)
    assert decided(*reports) == convicted(*JURY[4:])
    assert decided(*reversed(reports)) == acquitted(*AUDITORS[:2])


def test_in_a_small_swarm_all_with_stake_are_the_jury_and_the_author_has_no_say():
    rule, few = replace(RULE, jury=64), {LIAR: 100, key(0): 100, key(1): 101}
    both = [key(0), key(1)]
    assert decide(RECORD, SEED, UPDATE, failed(both), few, rule) == convicted()
    assert decide(RECORD, SEED, UPDATE, [*failed(both), *fine([LIAR])], few, rule) == convicted()
    assert (
        decide(RECORD, SEED, UPDATE, failed(both), few | {LIAR: 201}, rule) is None
    )  # half of all stake is no majority


REPORTS = st.lists(
    st.builds(
        report, st.sampled_from([*STAKES, OWNER]), passed=st.booleans(), check=st.sampled_from(["replay", "loss"])
    )
)


@given(REPORTS)
def test_no_two_thirds_of_a_sample_decide(reports):
    outcome = decided(reports)
    told = {r.author: r.body.passed for r in reversed(reports) if r.body.check == "replay"}
    if outcome is None:
        return
    agreeing = sum(told.get(k) is not outcome.convicted and k in told for k in JURY)
    assert 3 * agreeing > 2 * RULE.jury
    assert sum(told.get(k) is False for k in (*AUDITORS, OWNER)) >= 2
    assert all(told[k] is outcome.convicted for k in outcome.refuted) and LIAR not in outcome.refuted


@given(REPORTS, st.sets(st.sampled_from([k for k in STAKES if k != LIAR]), max_size=5), st.booleans())
def test_less_than_half_of_the_stake_decides_nothing_of_a_small_swarm(reports, coalition, lie):
    # All others say the opposite: five of thirteen keys with about as much stake each.
    rule = replace(RULE, jury=64)
    theirs = [r for r in reports if r.author in coalition] + [report(k, passed=lie) for k in sorted(coalition)]
    honest = [report(k, passed=not lie) for k in STAKES if k not in coalition and k != LIAR]
    outcome = decide(RECORD, SEED, UPDATE, [*theirs, *honest], STAKES, rule)
    assert outcome is None or outcome.convicted is lie


@given(REPORTS, st.sets(st.sampled_from([k for k in STAKES if k != LIAR]), max_size=5), st.booleans())
def test_less_than_half_of_the_stake_takes_no_honest_stake_and_loses_its_own(reports, coalition, lie):
    # All others say the opposite and clearly, however close the numbers are that the coalition invents.
    rule = replace(RULE, jury=64)
    theirs = [r for r in reports if r.author in coalition]
    theirs += [report(k, passed=lie, margin=m) for k in sorted(coalition) for m in (0.001, 0.5)]
    honest = [report(k, passed=not lie) for k in STAKES if k not in coalition and k != LIAR]
    outcome = decide(RECORD, SEED, UPDATE, [*theirs, *honest], STAKES, rule, is_decided=True)
    wrong = {r.author for r in reversed(theirs) if r.body.check == "replay" and r.body.passed is lie}
    first = {r.author: r.body.passed for r in reversed(theirs) if r.body.check == "replay"}
    accused = sum(passed is False for key, passed in (*first.items(), *((r.author, not lie) for r in honest))
                  if key in draw_auditors(SEED, LIAR, STAKES, rule)) >= 2  # fmt: skip
    liars = {key for key in wrong if first[key] is lie}
    assert (set() if outcome is None else set(outcome.refuted)) == (liars if accused else set())


def verdict(name: object, *refuted: PeerKey, convicted: bool = True) -> AuditDecision:
    return AuditDecision(Digest(sha256(str(name).encode())), LIAR, convicted, refuted)


BAR = RULE.bar_rounds


def test_each_conviction_bars_twice_as_long_as_the_one_before():
    penalties, round_ = AuditPenalties(), Round(5)
    for count in range(MAX_DOUBLINGS + 3):
        penalties = penalties.after(verdict(count), round_, BAR)
        until = penalties.of(LIAR).barred_until
        assert until == round_ + 1 + BAR * 2 ** min(count, MAX_DOUBLINGS)
        assert penalties.is_barred(LIAR, Round(until - 1)) and not penalties.is_barred(LIAR, until)
        assert not penalties.is_stake(LIAR, round_) and penalties.is_stake(LIAR, Round(round_ + 1))
        assert penalties.of(LIAR).convictions == count + 1
        round_ = until


def test_work_of_before_a_bar_is_part_of_the_same_conviction():
    once = AuditPenalties().after(verdict("a"), Round(5), BAR)
    again = once.after(verdict("b"), Round(6), BAR)
    assert again.of(LIAR).convictions == 1 and again.of(LIAR).barred_until == once.of(LIAR).barred_until


def test_a_refuted_auditor_loses_its_stake_and_is_not_barred():
    after = AuditPenalties().after(verdict("a", key(1), convicted=False), Round(5), BAR)
    assert not after.is_stake(key(1), Round(5)) and after.is_stake(key(1), Round(6))
    assert not after.is_barred(key(1), Round(6))
    assert after.is_stake(LIAR, Round(0)) and not after.is_barred(LIAR, Round(6))


def test_a_refuted_liar_stays_barred():
    once = AuditPenalties().after(verdict("a"), Round(5), BAR)
    other = AuditDecision(Digest(sha256(b"other")), key(1), False, (LIAR,))
    assert once.after(other, Round(9), BAR).of(LIAR).barred_until == once.of(LIAR).barred_until

"""Two auditors and most of a jury's stake convict; a report that the jury refutes costs the stake."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from protocol.audits import AuditRule, draw_auditors, draw_jury
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import AuditCheck, Score, Signed, WorkReport
from protocol.report_rule import MAX_DOUBLINGS, AuditDecision, AuditPenalties, decide
from tests.support.audited import RUN, certificate, key

RULE, OWNER, LIAR = AuditRule(), key("owner"), key("liar")
STAKES = {LIAR: 100} | {key(n): 100 + n for n in range(12)}
RECORD = certificate("a", {LIAR: 10, key(0): 10})
UPDATE = next(u for u in RECORD.record.body.updates if u.author == LIAR)
DRAWN = (RECORD.digest, UPDATE.digest, LIAR, STAKES, RULE)
AUDITORS, JURY = draw_auditors(*DRAWN), draw_jury(*DRAWN)
OUTSIDER = next(k for k in STAKES if k not in (*AUDITORS, *JURY, LIAR))


def report(
    by: PeerKey, *, passed: bool, check: AuditCheck = "replay", update: Digest = UPDATE.digest
) -> Signed[WorkReport]:
    body = WorkReport(RUN, Round(3), RECORD.digest, update, check, (Score("warm", float(passed), 0.5),))
    return Signed(body, by, Digest(sha256(by, check.encode(), bytes([passed]))), b"")


def failed(by: Iterable[PeerKey], check: AuditCheck = "replay") -> list[Signed[WorkReport]]:
    return [report(k, passed=False, check=check) for k in by]


def fine(by: Iterable[PeerKey], check: AuditCheck = "replay") -> list[Signed[WorkReport]]:
    return [report(k, passed=True, check=check) for k in by]


def decided(*reports: Iterable[Signed[WorkReport]]) -> AuditDecision | None:
    return decide(RECORD, UPDATE, [r for some in reports for r in some], STAKES, RULE, OWNER)


def convicted(*refuted: PeerKey) -> AuditDecision:
    return AuditDecision(RECORD.digest, LIAR, True, tuple(sorted(refuted)))


def acquitted(*refuted: PeerKey) -> AuditDecision:
    return AuditDecision(RECORD.digest, LIAR, False, tuple(sorted(refuted)))


def test_two_auditors_and_most_of_the_jury_convict():
    assert (len(AUDITORS), len(JURY)) == (3, 5)
    assert decided(failed(AUDITORS[:2]), failed(JURY[:3])) == convicted()
    assert decided(failed([AUDITORS[0], OWNER]), failed(JURY[:3])) == convicted()
    assert decided(failed(AUDITORS[:1]), failed(JURY)) is None
    assert decided(failed(AUDITORS), failed(JURY[:2])) is None
    assert decided(failed(AUDITORS[:1] * 2), failed(JURY)) is None  # one auditor twice is one


def test_nobody_else_and_no_other_update_counts():
    assert decided(failed([AUDITORS[0], OUTSIDER, LIAR]), failed(JURY)) is None
    other = [report(k, passed=False, update=RECORD.digest) for k in (*AUDITORS, *JURY)]
    assert decided(other) is None
    assert decided(failed(AUDITORS, "loss"), failed(JURY, "loss")) is None


def test_a_report_that_the_jury_refutes_costs_the_stake():
    assert decided(failed(AUDITORS[:2]), fine(JURY[:3]), failed(JURY[3:])) == acquitted(*AUDITORS[:2], *JURY[3:])
    assert decided(failed(AUDITORS[:2]), fine(AUDITORS[2:]), failed(JURY[:4]), fine(JURY[4:])) == convicted(
        AUDITORS[2], JURY[4]
    )


def test_the_first_report_of_a_key_counts():
    reports = failed(AUDITORS[:2]), failed(JURY[:3]), fine(JURY)
    assert decided(*reports) == convicted(*JURY[3:])
    assert decided(*reversed(reports)) == acquitted(*AUDITORS[:2])


def test_an_appeal_decides_before_a_replay_and_costs_who_replayed_nothing():
    assert decided(failed(AUDITORS), failed(JURY), fine(JURY[:3], "appeal")) == acquitted()


def test_a_swarm_without_a_jury_convicts_nobody():
    few = dict(list(STAKES.items())[:4])
    drawn = draw_auditors(RECORD.digest, UPDATE.digest, LIAR, few, RULE)
    assert len(drawn) == 3
    assert decide(RECORD, UPDATE, failed([*drawn, OWNER]), few, RULE, OWNER) is None


REPORTS = st.lists(
    st.builds(
        report, st.sampled_from([*STAKES, OWNER]), passed=st.booleans(), check=st.sampled_from(["replay", "loss"])
    )
)


@given(REPORTS)
def test_no_half_of_the_jury_decides(reports):
    outcome = decided(reports)
    told = {r.author: r.body.passed for r in reversed(reports) if r.body.check == "replay"}
    if outcome is None:
        return
    agreeing = sum(STAKES[k] for k in JURY if told.get(k) is not outcome.convicted and k in told)
    assert 2 * agreeing > sum(STAKES[k] for k in JURY)
    assert sum(told.get(k) is False for k in (*AUDITORS, OWNER)) >= 2
    assert all(told[k] is outcome.convicted for k in outcome.refuted) and LIAR not in outcome.refuted


def verdict(name: object, *refuted: PeerKey, convicted: bool = True) -> AuditDecision:
    return AuditDecision(Digest(sha256(str(name).encode())), LIAR, convicted, refuted)


def test_each_conviction_bars_twice_as_long_as_the_one_before():
    penalties, round_ = AuditPenalties(), Round(5)
    for count in range(MAX_DOUBLINGS + 3):
        penalties = penalties.after(verdict(count), round_, RULE)
        until = penalties.of(LIAR).barred_until
        assert until == round_ + 1 + RULE.bar_rounds * 2 ** min(count, MAX_DOUBLINGS)
        assert penalties.is_barred(LIAR, Round(until - 1)) and not penalties.is_barred(LIAR, until)
        assert penalties.is_void(LIAR, round_) and not penalties.is_stake(LIAR, round_)
        assert penalties.is_stake(LIAR, Round(round_ + 1)) and not penalties.is_void(LIAR, Round(round_ + 1))
        assert penalties.of(LIAR).convictions == count + 1
        round_ = until


def test_work_of_before_a_bar_is_part_of_the_same_conviction_and_a_decision_stands():
    once = AuditPenalties().after(verdict("a"), Round(5), RULE)
    again = once.after(verdict("b"), Round(6), RULE)
    assert again.of(LIAR).convictions == 1 and again.of(LIAR).barred_until == once.of(LIAR).barred_until
    assert once.after(verdict("a", key(1), convicted=False), Round(6), RULE) == once


def test_a_refuted_auditor_loses_its_stake_and_keeps_its_credit():
    after = AuditPenalties().after(verdict("a", key(1), convicted=False), Round(5), RULE)
    assert not after.is_stake(key(1), Round(5)) and after.is_stake(key(1), Round(6))
    assert not after.is_void(key(1), Round(0)) and not after.is_barred(key(1), Round(6))
    assert after.is_stake(LIAR, Round(0)) and not after.is_barred(LIAR, Round(6))


def test_a_refuted_liar_stays_barred():
    once = AuditPenalties().after(verdict("a"), Round(5), RULE)
    other = AuditDecision(Digest(sha256(b"other")), key(1), False, (LIAR,))
    assert once.after(other, Round(9), RULE).of(LIAR).barred_until == once.of(LIAR).barred_until

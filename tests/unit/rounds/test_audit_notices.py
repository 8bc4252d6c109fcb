"""Notices of audits: who is accused, convicted or refuted reads the numbers, what it loses, and what to do."""

from __future__ import annotations

import pytest

from protocol.audit_findings import describe_failures, failed_reports, failed_scores, reports_behind
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import AuditCheck, Score, WorkReport
from protocol.rounds.actions import Notice
from protocol.rounds.audit_notices import notify_audits
from protocol.rounds.context import Context
from protocol.rounds.policy import RoundPolicy
from protocol.stake import StakeRule
from tests.simulation.signer import FakeSigner
from tests.support.audited_branch import HOLD, LIAR, OTHERS, Branch, accused, decided_narrowly, pardon, report
from tests.support.empty_chain import OWNER, RUN, STATE

ONE, TWO = (PeerKey(sha256(name)) for name in (b"one", b"two"))


def notices(branch: Branch, me: PeerKey) -> list[Notice]:
    policy = RoundPolicy(100, 100, stake=StakeRule(HOLD))
    context = Context(policy, RUN, FakeSigner(me), branch.chain, False, True, lambda size: True, 0.0, me)
    notify_audits(context, branch.chain.certificate(branch.chain.head))
    return [a for a in context.actions if isinstance(a, Notice)]


@pytest.fixture
def convicted() -> Branch:
    branch = Branch()
    record, _, jurors = accused(branch)
    branch.add(*(report(record, key) for key in jurors))
    return branch


def test_the_convicted_reads_the_numbers_how_long_it_rests_and_what_it_can_do(convicted):
    (notice,) = notices(convicted, LIAR)
    until = convicted.chain.barred_until(LIAR, convicted.chain.head)
    assert (notice.level, notice.kind, notice.about) == ("error", "convicted", LIAR)
    for said in (
        "THIS PEER IS CONVICTED: its update of round 6 was not trained as it claims: the replays of 5 peers",
        "found warm 0 where 0.5 is needed", f"barred until round {until}, and then trains again", "leave it running",
        f"repeat the check (cairn audit update INVITE --round 6 --peer {LIAR})", "write to the run's owner",
    ):  # fmt: skip
        assert said in notice.text, said


def test_the_accused_reads_who_found_what_and_how_to_repeat_it_and_nobody_else_does():
    branch = Branch()
    _, accusers, _ = accused(branch)
    (notice,) = notices(branch, LIAR)
    assert (notice.level, notice.kind, notice.about) == ("warning", "accused", LIAR)
    for said in (
        "this peer's update of round 6 is accused, and nothing is decided: the replays of 2 peers", accusers[0].short,
        "found warm 0 where 0.5 is needed", f"cairn audit update INVITE --round 6 --peer {LIAR}",
    ):  # fmt: skip
        assert said in notice.text, said
    assert notices(branch, OTHERS[0]) == []


def test_the_pardoned_reads_that_it_trains_again_and_what_stays_lost(convicted):
    convicted.add(directive=pardon(LIAR, convicted.chain.height(convicted.chain.head) - 1))
    (notice,) = notices(convicted, LIAR)
    assert (notice.level, notice.kind, notice.about) == ("info", "pardoned", LIAR)
    for said in ("the run's owner has pardoned this peer: it trains again, as a newcomer", "stay lost"):
        assert said in notice.text, said
    assert notices(convicted, OTHERS[0]) == []
    convicted.add(directive=pardon(LIAR, 0, sequence=2))
    assert notices(convicted, LIAR) == [], "it is barred no more"


def test_others_read_who_was_convicted_and_a_record_without_decisions_is_no_news(convicted):
    (notice,) = notices(convicted, OTHERS[0])
    assert notice.level == "warning" and f"peer {LIAR.short} is convicted" in notice.text and "warm 0" in notice.text
    assert notices(Branch(), LIAR) == []


def test_an_auditor_whose_accusation_is_refuted_reads_both_measurements_what_it_loses_and_what_to_check():
    branch = Branch()
    record = branch.audited
    accuser, *jurors = [*branch.auditors(record), *(k for k in OTHERS if k not in branch.auditors(record))]
    branch.add(report(record, accuser), report(record, OWNER.key))
    made = branch.add(*(report(record, key, passed=True) for key in jurors))
    (notice,) = notices(branch, accuser)
    assert (notice.level, notice.kind, notice.about) == ("error", "refuted", accuser)
    for said in (
        "THIS PEER'S REPORT IS REFUTED", f"its replay of the update of round 6 by {LIAR.short}",
        "this peer found warm 0 where 0.5 is needed, and the replays of 4 peers", "found warm 1 where 0.5 is needed",
        f"Its stake up to round {made.record.body.round} is lost", "its credit remains", "not barred", "its memory",
        "its GPU's driver", "its version of Cairn", "--audit-device cpu, or off",
    ):  # fmt: skip
        assert said in notice.text, said
    assert notices(branch, jurors[0]) == []

    (notice,) = notices(branch, LIAR)
    assert (notice.level, notice.kind, notice.about) == ("info", "acquitted", LIAR)
    assert notice.text.startswith(
        "this peer was accused and acquitted: its update of round 6 was trained as it claims: the replays of 4 peers"
    )


def test_a_juror_that_spared_a_liar_reads_of_both_decisions():
    branch = Branch()
    record, _, jurors = accused(branch)
    branch.add(report(record, jurors[0], passed=True))
    branch.add(*(report(record, key) for key in jurors[1:]))
    convicted, refuted = notices(branch, jurors[0])
    assert (convicted.level, convicted.kind, refuted.level, refuted.kind) == (
        "warning",
        "convicted",
        "error",
        "refuted",
    )
    assert "this peer found warm 1 where 0.5 is needed, and the replays of 4 peers" in refuted.text
    assert "found warm 0 where" in refuted.text


@pytest.mark.parametrize("passed", [True, False])
def test_whoever_late_votes_refute_reads_so_and_others_read_nothing_a_second_time(passed):
    case = decided_narrowly(passed=passed)
    wrong = next(k for k in case.wrong if k != OWNER.key)
    assert [n.kind for n in notices(case.branch, wrong)] == ([] if passed else ["convicted"])
    assert [n.kind for n in notices(case.branch, LIAR)] == (["acquitted"] if passed else ["convicted"])
    case.branch.add(report(case.record, case.late, passed=passed))
    (notice,) = notices(case.branch, wrong)
    assert notice.kind == "refuted"
    own, jury = ("warm 0", "warm 0.501 to 1") if passed else ("warm 1", "warm 0 to 0.499")
    assert f"this peer found {own} where 0.5 is needed" in notice.text and f"found {jury} where" in notice.text
    assert notices(case.branch, LIAR) == []


def test_the_convicted_does_not_read_of_late_votes_that_nothing_is_decided():
    case = decided_narrowly(passed=False)
    case.branch.add(report(case.record, case.late, margin=0.001))
    assert not case.branch.chain.certificate(case.branch.chain.head).record.body.decisions
    assert notices(case.branch, LIAR) == []


def test_a_notice_without_the_audited_record_in_memory_still_says_what_it_costs(convicted):
    decision = convicted.chain.certificate(convicted.chain.head).record.body.decisions[0]
    assert reports_behind(decision, ()) == () and describe_failures(()) == ""
    found = reports_behind(
        decision, (convicted.chain.certificate(r) for r in convicted.chain.ancestors(convicted.chain.head) if r)
    )
    assert len(found) == 5 and not any(r.passed for _, r in found)


def made(by: PeerKey, check: AuditCheck, *scores: Score) -> tuple[PeerKey, WorkReport]:
    return by, WorkReport(RUN, Round(3), STATE, Digest(sha256(b"update")), check, scores)


def test_the_strongest_check_that_failed_is_described_by_its_range_and_its_strictest_threshold():
    reports = (
        made(ONE, "loss", Score("gain", 0.1, 3.0)),
        made(ONE, "replay", Score("scale", 0.9, 0.8), Score("signs", 0.71, 0.96)),
        made(TWO, "replay", Score("scale", 0.9, 0.8), Score("signs", 0.745, 0.97)),
    )
    assert [r.check for _, r in failed_reports(reports)] == ["replay", "replay"]
    (signs,) = failed_scores(r for _, r in failed_reports(reports))
    assert str(signs) == "signs 0.71 to 0.745 where 0.97 is needed"
    assert describe_failures(reports[:1]) == f"the loss checks of 1 peer ({ONE.short}) found gain 0.1 where 3 is needed"

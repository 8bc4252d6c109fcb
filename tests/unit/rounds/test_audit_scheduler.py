"""A peer requests the checks that are its own, and again those that could not be made, and follows honest accusers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protocol.audits import AuditRule, AuditSeeds, UpdateCheck, audit_seed, draw_auditors, due_audits, first_auditors
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Certificate, Score, Signed, WorkReport
from protocol.report_rule import NARROW
from protocol.rounds.actions import AuditUpdate
from protocol.rounds.audit_scheduler import MAX_ATTEMPTS, AuditScheduler
from protocol.rounds.events import AuditNotMade, UpdateAudited
from protocol.rounds.report_pool import ReportPool
from tests.simulation.signer import FakeSigner
from tests.support.audited_branch import HOLD, LIAR, OTHERS, Branch, accused, decided_narrowly, report, update_of
from tests.support.empty_chain import KEYS, OWNER, RUN


class Auditor:
    """A work auditor that reports by one key, and what it asks its driver for."""

    def __init__(self, branch: Branch, me: PeerKey, *, trains: bool = True):
        self.asked: list[Any] = []
        self.reports = ReportPool(me, branch.chain)
        context = self.context = SimpleNamespace(
            run=RUN, is_resting=False, chain=branch.chain, reports=self.reports, observer=not trains,
            emit=lambda action: self.asked.append(action) if isinstance(action, AuditUpdate) else None,
        )  # fmt: skip
        self.work = AuditScheduler(cast(Any, context), cast(Any, FakeSigner(me)))

    def pass_all(self, margin: float = 0.03) -> None:
        """Answer that each update passed, by this margin."""
        for action in self.asked:
            self.work.answered(
                UpdateAudited(
                    action.certificate.digest,
                    action.update,
                    action.check,
                    action.seed,
                    (Score("signs", 0.97 + margin, 0.97),),
                )
            )
        self.asked.clear()

    def requested(self) -> list[AuditUpdate]:
        """Return what it has asked for since the last call."""
        asked, self.asked = self.asked, []
        return asked

    def fail(self, action: AuditUpdate) -> None:
        self.work.answered(AuditNotMade(action.certificate.digest, action.update, action.check, action.seed))


def drawn(branch: Branch, record: Certificate, author: PeerKey) -> tuple[PeerKey, ...]:
    return branch.auditors(record, author)


def follows(branch: Branch, auditor: Auditor, me: PeerKey, accuser: PeerKey) -> bool:
    """Return whether an accusation by a key, of an update that both audit, has this peer replay it."""
    auditor.asked.clear()
    for _ in range(50):
        branch.add()
        record = branch.audited
        for author in OTHERS:
            if {me, accuser} <= set(drawn(branch, record, author)):
                auditor.work.receive(report(record, accuser, author=author))
                return bool(auditor.asked)
    raise AssertionError("no update has both auditors")


def asked_after(branch: Branch, me: PeerKey) -> set[tuple[Digest, str]]:
    """Return what a key is to check of the newest record that is audited, by update; screens are left out."""
    return {(a.update, a.check) for a in requested_after(branch, me) if a.check != "screen"}


def screened_after(branch: Branch, me: PeerKey) -> set[PeerKey]:
    """Return the authors whose updates of the newest record that is audited a key is to screen."""
    return {author_of(a) for a in requested_after(branch, me) if a.check == "screen"}


def requested_after(branch: Branch, me: PeerKey) -> list[AuditUpdate]:
    """Return the checks of the newest record that is audited that a peer requests which starts now."""
    auditor = Auditor(branch, me)
    auditor.work.round_begun(branch.chain.head)
    return [a for a in auditor.asked if a.certificate.digest == branch.audited.digest]


def due(branch: Branch, *, drawn_first: PeerKey | None = None, convicted: int = 0) -> set[tuple[Digest, str]]:
    """Return the due checks of the newest record that is audited; with a key those of which it is the first auditor.

    `convicted`: the stake of those convicted lately.
    """
    record = branch.audited
    stakes = branch.chain.audit_stakes(record.digest)
    audits = due_audits(
        record.record.body, branch.chain.audit_seeds(record.digest), stakes, branch.chain.limits.audit, convicted
    )
    chosen = [a for a in audits if drawn_first is None or a.auditors[:1] == (drawn_first,)]
    return {(a.update, a.check) for a in chosen}


def test_the_owner_makes_all_checks_that_are_due_and_others_those_that_they_are_drawn_for():
    branch, found = Branch(), 0
    for _ in range(20):
        branch.add()
        assert asked_after(branch, OWNER.key) == due(branch)
        assert asked_after(branch, OTHERS[0]) == due(branch, drawn_first=OTHERS[0])
        found += len(due(branch))
    assert found > 10 and not asked_after(branch, PeerKey(sha256(b"without stake")))


def test_each_update_is_screened_by_its_first_auditor_and_by_the_owner_unless_they_replay_it():
    branch, replayed_any = Branch(), False
    for _ in range(20):
        branch.add()
        record = branch.audited
        by = {key: screened_after(branch, key) for key in KEYS}
        for author in KEYS:
            update = update_of(record, author).digest
            first = drawn(branch, record, author)[0]
            replays = (update, "replay") in due(branch)
            replayed_any |= replays
            assert [key for key in KEYS if author in by[key]] == ([] if replays else [first])
            assert (author in screened_after(branch, OWNER.key)) is not replays
    assert replayed_any


def test_a_screen_is_not_reported_and_a_failed_one_has_its_update_replayed():
    branch = Branch(20)
    auditor = Auditor(branch, OWNER.key)
    auditor.work.round_begun(branch.chain.head)
    screens = [a for a in auditor.requested() if a.check == "screen"]
    assert len(screens) > 2
    for action, value in zip(screens, [0.4] + [0.6] * len(screens), strict=False):
        scores = (Score("agreement", value, 0.5),)
        auditor.work.answered(UpdateAudited(action.certificate.digest, action.update, "screen", action.seed, scores))
    assert [(a.update, a.check) for a in auditor.requested()] == [(screens[0].update, "replay")]
    assert not auditor.reports.by(OWNER.key)


def test_an_auditor_that_does_not_train_holds_no_updates_and_screens_none():
    branch = Branch(20)
    for trains in (True, False):
        auditor = Auditor(branch, OWNER.key, trains=trains)
        auditor.work.round_begun(branch.chain.head)
        assert any(a.check == "screen" for a in auditor.requested()) is trains


def test_the_first_auditors_of_all_updates_are_those_that_are_drawn_one_by_one():
    branch = Branch()
    for _ in range(20):
        branch.add()
        record, seeds = branch.audited, branch.chain.audit_seeds(branch.audited.digest)
        stakes = branch.chain.audit_stakes(record.digest)
        for some in (stakes, {k: 1 for k in KEYS[:1]}, {KEYS[0]: 5, KEYS[3]: 1, OWNER.key: 7, OTHERS[1]: 0}, {}):
            first = first_auditors(record.record.body, seeds, some, AuditRule())
            for u in record.record.body.updates:
                seed = audit_seed(u, record.record.body, seeds, some, AuditRule()) or b""
                expected = draw_auditors(seed, u.author, some, AuditRule())[:1]
                assert expected == ((first[u.digest],) if first[u.digest] else ())


def test_the_owner_screens_what_has_no_other_auditor():
    branch = Branch(20)
    record = branch.audited
    first = first_auditors(record.record.body, branch.chain.audit_seeds(record.digest), {LIAR: 5}, AuditRule())
    assert first[update_of(record).digest] is None and first[update_of(record, OTHERS[0]).digest] == LIAR


def test_a_check_is_not_repeated_when_the_chain_leaves_its_record_and_returns():
    branch = Branch(20)
    auditor = Auditor(branch, OWNER.key)
    auditor.work.round_begun(branch.chain.head)
    assert auditor.requested()
    auditor.work.round_begun(branch.chain.certificate(branch.chain.head).record.body.parent)
    auditor.requested()  # of one record more, which is no longer too old
    auditor.work.round_begun(branch.chain.head)
    assert not auditor.requested()


def test_another_child_draws_the_audits_of_a_record_anew():
    found = 0
    for rounds in range(20, 30):
        branch = Branch(rounds)
        record, auditor = branch.chain.certificate(branch.chain.head), Auditor(branch, OWNER.key)
        one, other = branch.record(), branch.record(without={KEYS[0]})
        assert one.record.author != other.record.author
        for child in (one, other):
            branch.chain.add(child)
            auditor.requested()
            auditor.work.round_begun(child.digest)
        asked = {(a.update, a.check) for a in auditor.requested() if a.certificate is record and a.check == "loss"}
        stakes = branch.chain.audit_stakes(record.digest)
        due = due_audits(
            record.record.body,
            AuditSeeds(branch.chain.seed(record.digest), branch.chain.seed(other.digest)),
            stakes,
            branch.chain.limits.audit,
        )
        assert {(a.update, a.check) for a in due if a.check == "loss"} == asked
        found += len(asked)
    assert found > 5


def test_what_a_loss_check_measured_on_windows_of_another_branch_is_not_reported():
    wanted = None
    for rounds in range(20, 40):
        branch = Branch(rounds)
        auditor, chain = Auditor(branch, OWNER.key), branch.chain
        one, other = branch.record(), branch.record(without={KEYS[0]})
        chain.add(one)
        auditor.work.round_begun(chain.head)
        asked = (a for a in auditor.requested() if a.certificate.digest == one.record.body.parent)
        if (wanted := next((a for a in asked if a.check == "loss"), None)) is not None:
            break
    assert wanted is not None and chain.add(other)
    answer = UpdateAudited(
        wanted.certificate.digest,
        wanted.update,
        "loss",
        wanted.seed,
        (Score("gain", 9.0, 3.0), Score("quarter", 9.0, 1.0)),
    )
    chain.quarantine(one.digest)
    assert chain.head == other.digest
    auditor.work.answered(answer)
    assert not auditor.reports.by(OWNER.key)
    chain.release(one.digest)
    chain.quarantine(other.digest)
    assert chain.head == one.digest
    auditor.work.answered(answer)
    assert len(auditor.reports.by(OWNER.key)) == 1


def test_a_record_of_few_updates_is_not_screened(monkeypatch):
    branch = Branch(20)
    assert screened_after(branch, OWNER.key)
    monkeypatch.setattr("protocol.rounds.audit_scheduler.SCREENED_UPDATES", len(KEYS) + 1)
    assert not screened_after(branch, OWNER.key)


def test_before_anybody_has_stake_the_owner_checks_all_and_nobody_else_anything():
    branch = Branch(2)
    assert len(asked_after(branch, OWNER.key)) == len(KEYS) and not asked_after(branch, OTHERS[0])


def test_the_owner_does_not_check_its_own_updates():
    branch = Branch(2)
    branch.chain.limits = replace(branch.chain.limits, audit=AuditRule(owner=OTHERS[0]))
    assert len(asked_after(branch, OTHERS[0])) == len(KEYS) - 1


def test_the_owner_replays_what_one_auditor_accuses():
    branch = Branch()
    record = branch.audited
    auditor = Auditor(branch, OWNER.key)
    auditor.work.receive(report(record, drawn(branch, record, LIAR)[0]))
    assert [(a.update, a.check) for a in auditor.asked] == [(update_of(record).digest, "replay")]


@pytest.mark.parametrize("margin", [0.03, 0.001])
def test_an_accuser_who_was_wrong_is_not_followed_again_unless_the_update_passed_by_little(margin):
    """An author can aim between two kinds of devices. Their owners would ignore each other for good."""
    branch = Branch()
    record = branch.audited
    accuser, me, _ = drawn(branch, record, update_of(record).author)
    auditor = Auditor(branch, me)
    auditor.work.receive(report(record, accuser))
    assert [a.update for a in auditor.asked] == [update_of(record).digest]
    auditor.pass_all(margin)
    assert follows(branch, auditor, me, accuser) == (margin < NARROW)
    assert follows(branch, auditor, me, next(k for k in OTHERS if k not in (me, accuser)))


def test_a_reporter_who_said_that_an_update_passes_is_still_followed_when_it_does():
    branch = Branch()
    record, accusers, others = accused(branch)
    honest = next(k for k in drawn(branch, record, update_of(record).author) if k not in accusers)
    me = next(k for k in others if k != honest)
    auditor = Auditor(branch, me)
    auditor.work.receive(report(record, honest, passed=True))  # its report has this juror begin
    assert len(auditor.asked) == 1
    auditor.pass_all()
    assert follows(branch, auditor, me, honest)


def test_nobody_checks_an_update_of_an_author_who_is_convicted_already():
    branch = Branch()
    earlier = branch.audited
    first, me, _ = drawn(branch, earlier, LIAR)
    for is_convicted in (False, True):
        auditor = Auditor(branch, me)
        auditor.work.receive(report(earlier, first))
        assert bool(auditor.asked) != is_convicted
        if not is_convicted:
            branch.add()
            record, accusers, _ = accused(branch)
            branch.add(*(report(record, key) for key in OTHERS if key not in accusers))
            assert branch.chain.is_barred(LIAR, branch.chain.head)


def test_after_a_conviction_all_make_more_checks_until_it_is_as_old_as_credit_settles():
    branch = Branch(80)  # so that a usual rate is far from 1
    record, accusers, jurors = accused(branch)
    branch.add(*(report(record, key) for key in jurors))
    counts = list[int]()
    for n in range(2 * HOLD):
        branch.add()
        stakes = branch.chain.audit_stakes(branch.audited.digest)
        following = branch.chain.reports_after(branch.audited.digest)
        raised = branch.chain.limits.audit.raised(following.convicted_stake, sum(stakes.values()))
        assert (raised.replay_rate == 4 * 30_000) is (n < HOLD)
        assert asked_after(branch, OWNER.key) == due(branch, convicted=following.convicted_stake)
        counts.append(len(due(branch, convicted=following.convicted_stake)))
    assert sum(counts[:HOLD]) > sum(counts[HOLD:])


def first_auditor(branch: Branch, record: Certificate) -> PeerKey:
    return drawn(branch, record, update_of(record).author)[0]


def attempts(branch: Branch, auditor: Auditor, wanted: AuditUpdate, rounds: int) -> list[int]:
    """Return the rounds, counted from here, in which a check is requested that fails each time."""
    found = []
    for after in range(1, rounds + 1):
        branch.add()
        auditor.work.round_begun(branch.chain.head)
        if wanted in auditor.requested():
            found.append(after)
            auditor.fail(wanted)
    return found


def test_an_accusation_requests_a_check_at_once_that_could_not_be_made():
    branch = Branch()
    auditor = Auditor(branch, OWNER.key)
    wanted, record = None, branch.audited
    while wanted is None:
        branch.add()
        record = branch.audited
        auditor.work.round_begun(branch.chain.head)
        due_now = (a for a in auditor.requested() if a.certificate.digest == record.digest)
        wanted = next((a for a in due_now if a.check == "replay"), None)
    auditor.fail(wanted)
    author = next(u.author for u in record.record.body.updates if u.digest == wanted.update)
    accusers = drawn(branch, record, author)
    for accuser in accusers[:2]:  # the second changes nothing any more
        auditor.work.receive(report(record, accuser, author=author))
    assert [(a.update, a.check, a.is_accused) for a in auditor.requested()] == [(wanted.update, "replay", True)]


def test_a_check_that_could_not_be_made_is_requested_again_more_and_more_rarely():
    branch = Branch(hold=64)
    record = branch.audited
    auditor = Auditor(branch, first_auditor(branch, record))
    auditor.work.round_begun(branch.chain.head)
    wanted = next(a for a in auditor.requested() if a.certificate is record and a.check == "replay")
    auditor.fail(wanted)
    again = attempts(branch, auditor, wanted, 40)
    assert again == [1, 3, 7, 15] and len(again) + 1 == MAX_ATTEMPTS


def test_a_check_is_not_requested_again_when_no_record_would_carry_its_report():
    branch = Branch()
    record = branch.audited
    auditor = Auditor(branch, first_auditor(branch, record))
    auditor.work.round_begun(branch.chain.head)
    wanted = next(a for a in auditor.requested() if a.certificate is record and a.check == "replay")
    auditor.fail(wanted)
    assert attempts(branch, auditor, wanted, 12) == [1]  # three rounds after, no jury would have the time to answer


def test_what_two_accuse_is_requested_again_as_accused_and_not_after_a_decision():
    branch = Branch()
    record, accusers, others = accused(branch)
    auditor = Auditor(branch, others[0])
    auditor.work.round_begun(branch.chain.head)
    (wanted,) = [a for a in auditor.requested() if a.certificate is record and a.is_accused]
    auditor.fail(wanted)
    branch.add()
    auditor.work.round_begun(branch.chain.head)
    assert wanted in auditor.requested()
    auditor.fail(wanted)
    branch.add(*(report(record, key) for key in others[1:]))
    assert branch.chain.certificate(branch.chain.head).record.body.decisions
    assert attempts(branch, auditor, wanted, 3) == []


@pytest.mark.parametrize("passed", [True, False])
def test_a_juror_replays_what_is_decided_while_its_vote_may_refute(passed):
    case = decided_narrowly(passed=passed)
    auditor = Auditor(case.branch, case.late)
    auditor.work.round_begun(case.branch.chain.head)
    (wanted,) = [a for a in auditor.requested() if a.update == update_of(case.record).digest and a.is_accused]
    auditor.fail(wanted)
    case.branch.add()
    auditor.work.round_begun(case.branch.chain.head)
    assert wanted in auditor.requested()
    for other in (case.voted[0], OWNER.key):
        auditor = Auditor(case.branch, other)
        auditor.work.round_begun(case.branch.chain.head)
        assert not [a for a in auditor.requested() if a.update == wanted.update and a.check != "screen"]


def checks_by(branch: Branch, me: PeerKey) -> set[tuple[int, PeerKey, UpdateCheck]]:
    """Return the checks but screens, by round and author, that a peer requests which starts now."""
    auditor = Auditor(branch, me)
    auditor.work.round_begun(branch.chain.head)
    return {(a.certificate.record.body.round, author_of(a), a.check)
            for a in auditor.requested() if a.check != "screen"}  # fmt: skip


def author_of(action: AuditUpdate) -> PeerKey:
    return next(u.author for u in action.certificate.record.body.updates if u.digest == action.update)


def test_who_starts_again_requests_the_checks_of_all_records_whose_reports_may_still_be_carried():
    branch = Branch()
    records = [branch.add() for _ in range(HOLD + 2)][:-1]  # nothing has drawn the newest's audits yet
    due: dict[PeerKey, set[tuple[int, PeerKey, UpdateCheck]]] = {key: set() for key in KEYS}
    for record in records[1 - HOLD :]:
        stakes = branch.chain.audit_stakes(record.digest)
        for audit in due_audits(
            record.record.body, branch.chain.audit_seeds(record.digest), stakes, branch.chain.limits.audit
        ):
            if audit.check != "replay" or record is not records[1 - HOLD]:  # too late for a jury
                due[audit.auditors[0]].add((record.record.body.round, audit.author, audit.check))
    assert any(len({round_ for round_, _, _ in each}) > 1 for each in due.values())
    assert {key: checks_by(branch, key) for key in KEYS} == due


def test_who_starts_again_does_not_repeat_what_records_carry_of_it():
    branch = Branch()
    record = branch.audited
    me, author = first_auditor(branch, record), update_of(record).author
    number = record.record.body.round

    def mine(*reports: Signed[WorkReport]) -> set[UpdateCheck]:
        if reports:
            branch.add(*reports)
        return {check for round_, by, check in checks_by(branch, me) if (round_, by) == (number, author)}

    assert mine() == {"replay"}
    assert mine(report(record, me, check="replay", passed=True)) == set()


def test_a_failed_loss_check_that_a_record_carries_has_its_author_replay_the_update_after_a_start():
    branch = Branch()
    record = branch.audited
    _, second, _ = drawn(branch, record, update_of(record).author)  # no check of it is due for this one
    branch.add(report(record, second, check="loss"))
    auditor = Auditor(branch, second)
    auditor.work.round_begun(branch.chain.head)
    wanted = [a for a in auditor.requested() if a.certificate is record and a.update == update_of(record).digest]
    assert [(a.check, a.is_accused) for a in wanted] == [("replay", False)]


def test_nothing_is_requested_twice_by_who_was_there():
    branch = Branch()
    auditor = Auditor(branch, OTHERS[0])
    seen: set[tuple[Any, Any, Any]] = set()
    for _ in range(2 * HOLD):
        branch.add()
        auditor.work.round_begun(branch.chain.head)
        for action in auditor.requested():
            name = action.certificate.digest, action.update, action.check
            assert name not in seen
            seen.add(name)
    assert seen

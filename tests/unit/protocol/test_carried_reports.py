"""Records carry the reports that were drawn for, and state the decisions that follow: a chain takes nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.audits import AuditRule
from protocol.carried_reports import MAX_ACCUSATIONS
from protocol.errors import ChainError
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.ledger.credits import CreditRule, credits_of
from protocol.ledger.fold import CreditFold
from protocol.messages import (
    AuditDecision,
    Certificate,
    Directive,
    RoundRecord,
    Signed,
    UpdateHeader,
    WorkReport,
)
from protocol.report_rule import drawn_reporters
from protocol.rounds import report_pool
from protocol.rounds.report_pool import ReportPool
from protocol.stake import UNSEEN_ROUNDS
from tests.simulation.signer import FakeSigner, certificate
from tests.support.audited_branch import (
    HOLD,
    LIAR,
    OTHERS,
    WINDOWS,
    Branch,
    accused,
    decided_narrowly,
    pardon,
    report,
    update_of,
)
from tests.support.empty_chain import KEYS, OWNER, RUN, STATE
from tests.support.specs import tiny_spec


@pytest.fixture
def branch() -> Branch:
    return Branch()


def refusal(branch: Branch, made: Certificate) -> str:
    with pytest.raises(ChainError) as found:
        branch.chain.add(made)
    return str(found.value)


def test_an_update_has_no_auditors_before_the_record_that_draws_them():
    branch = Branch(40)  # so that no update of these is always audited
    chain, newest = branch.chain, branch.chain.certificate(branch.chain.head)
    assert chain.audit_seed(newest.digest, update_of(newest)) is None
    assert "no update that is audited" in refusal(branch, branch.record(report(newest, OWNER.key), decisions=()))
    branch.add()
    assert chain.audit_seed(newest.digest, update_of(newest)) == chain.seed(chain.head)
    assert branch.add(report(newest, OWNER.key)).record.body.reports


def test_auditors_of_what_is_always_audited_are_drawn_at_once():
    branch = Branch(1 + HOLD)  # the first record is all stake
    chain, newest = branch.chain, branch.chain.certificate(branch.chain.head)
    assert chain.audit_seed(newest.digest, update_of(newest)) == chain.seed(chain.head)
    assert branch.add(report(newest, OWNER.key)).record.body.reports


def test_reports_by_most_of_the_stake_convict_and_the_convicted_lose_everything(branch):
    chain = branch.chain
    record, _, jurors = accused(branch)
    stake = chain.stakes(chain.head)[LIAR]
    assert stake and not chain.reports_after(chain.head).convicted_stake
    made = branch.add(*(report(record, key) for key in jurors))
    assert made.record.body.decisions == (AuditDecision(record.digest, LIAR, True),)
    assert LIAR not in made.record.body.contributors and chain.is_barred(LIAR, chain.head)
    for n in range(HOLD + 1):
        assert LIAR not in chain.stakes(chain.head)
        assert chain.reports_after(chain.head).convicted_stake == stake * (n < HOLD)
        branch.add()
    fold = CreditFold(RUN, rule := CreditRule(6, 10**9, 16, HOLD))
    for made in chain.path(chain.root, chain.head):
        fold.add(credits_of(made, rule))
    balance = fold.balances[LIAR]
    assert (balance.pending.rounds, balance.voided.rounds) == (0, HOLD) and balance.settled.rounds > 0
    assert fold.balances[OTHERS[0]].voided.rounds == 0
    assert fold.tokens == 16 * chain.weight(chain.head)


def test_stake_of_keys_that_left_neither_audits_nor_judges():
    branch = Branch(40)
    chain, left = branch.chain, set(OTHERS[:3])  # half of the stake
    for _ in range(HOLD):
        branch.add(without=left)
        assert left < chain.audit_stakes(chain.head).keys()
    branch.add(without=left)
    assert left < chain.stakes(chain.head).keys() and not left & chain.audit_stakes(chain.head).keys()
    branch.add(without=left)
    record, present = branch.audited, [key for key in OTHERS if key not in left]
    assert "was not drawn" in str(chain.reports_after(chain.head).report_refusal(report(record, OTHERS[0])))
    made = branch.add(*(report(record, key) for key in present), without=left)
    assert made.record.body.decisions == (AuditDecision(record.digest, LIAR, True),)
    back = branch.add()  # its author chooses whom it lists, and knows its seed
    assert not left & chain.audit_stakes(back.digest).keys()
    for _ in range(min(UNSEEN_ROUNDS, HOLD // 2)):  # nor do its allies, who may have the next turns
        assert not left & chain.audit_stakes(branch.add().digest).keys()
    assert left < chain.audit_stakes(branch.add().digest).keys()


def test_half_of_the_stake_decides_nothing_and_more_acquits_and_takes_the_accusers_stake(branch):
    chain = branch.chain
    record, accusers, jurors = accused(branch)
    made = branch.add(*(report(record, key, passed=True) for key in jurors))
    assert made.record.body.decisions == ()  # three of six: the author has no say in its own case
    branch = Branch()
    chain = branch.chain
    first = accusers[0]
    branch.add(report(record, first), report(record, OWNER.key))
    made = branch.add(*(report(record, key, passed=True) for key in OTHERS if key != first))
    refuted = tuple(sorted((first, OWNER.key)))
    assert made.record.body.decisions == (AuditDecision(record.digest, LIAR, False, refuted),)
    assert first not in chain.stakes(chain.head) and LIAR in chain.stakes(chain.head)
    assert not chain.is_barred(first, chain.head) and chain.barred_until(LIAR, chain.head) == 0


@pytest.mark.parametrize("passed", [True, False])
def test_jurors_report_after_a_decision_until_their_votes_refute_and_no_longer(passed):
    case = decided_narrowly(passed=passed)
    chain, record, update = case.branch.chain, case.record, update_of(case.record).digest
    decided = chain.certificate(chain.head).record.body.decisions
    assert decided == (AuditDecision(record.digest, LIAR, not passed),)
    following, last = chain.reports_after(chain.head), report(record, case.late, passed=passed)
    assert following.is_decided(record.digest, update)
    assert case.late in following.jury_of(last) and not following.auditors_of(last)
    again = report(record, case.voted[0], passed=passed)
    loss, opposite = report(record, case.late, check="loss"), report(record, case.late, passed=not passed)
    for told, why in ((loss, "has decided"), (opposite, "has decided"), (again, "carries the report")):
        assert why in str(following.report_refusal(told))
    pool = ReportPool(case.voted[0], chain)
    assert pool.add(last) and pool.to_include(chain.head)[0] == (last,)
    bar = chain.barred_until(LIAR, chain.head)
    made = case.branch.add(last)
    assert made.record.body.decisions == (AuditDecision(record.digest, LIAR, False, case.wrong),)
    assert not chain.stakes(chain.head).keys() & set(case.wrong) and case.voted[0] in chain.stakes(chain.head)
    assert chain.barred_until(LIAR, chain.head) == bar, "nobody is convicted twice"
    assert not chain.reports_after(chain.head).jury_of(last), "it has no more to say"


def refute(branch: Branch) -> PeerKey:
    """Add records in which a jury refutes an auditor of an update by LIAR. Return that auditor."""
    record = branch.audited
    wrong = branch.auditors(record)[0]
    branch.add(report(record, wrong), report(record, OWNER.key))
    made = branch.add(*(report(record, key, passed=True) for key in OTHERS if key != wrong))
    assert wrong in made.record.body.decisions[0].refuted
    return wrong


def told_by(branch: Branch, record: Certificate, key: PeerKey) -> Signed[WorkReport]:
    """Return the accusation by a key of an update of a record, among those that it audits."""
    authors = [author for author in KEYS if author != key]
    return next(report(record, key, author=a) for a in authors if key in branch.auditors(record, a))


def test_who_was_refuted_accuses_nothing_of_the_rounds_in_which_it_had_the_stake_that_it_lost():
    branch = Branch(hold=12)
    chain, earlier = branch.chain, branch.audited
    branch.add()
    wrong = refute(branch)
    decided, pool = chain.certificate(chain.head), ReportPool(OTHERS[4], chain)
    before = chain.reports_after(decided.record.body.parent)
    assert before.report_refusal(told_by(branch, earlier, wrong)) is None
    branch.add()
    following = chain.reports_after(chain.head)
    for record in (earlier, decided):  # its stake counts for the last time in the round that refutes it
        told = told_by(branch, record, wrong)
        assert "has lost the stake" in refusal(branch, branch.record(told, decisions=()))
        assert not pool.add(told) and following.refusal(record.digest, told.body.update, wrong, "loss")
        by = next(key for key in branch.auditors(record) if key != wrong)
        assert following.report_refusal(report(record, by)) is None
    assert following.report_refusal(report(earlier, OWNER.key)) is None, "no stake draws the owner"


def test_a_pool_drops_the_reports_of_who_is_refuted():
    branch = Branch(hold=12)
    chain, earlier = branch.chain, branch.audited
    branch.add()
    first, pool = branch.auditors(branch.audited)[0], ReportPool(OTHERS[4], chain)
    told = told_by(branch, earlier, first)
    assert pool.add(told) and pool.to_include(chain.head)[0] == (told,)
    assert refute(branch) == first
    assert pool.to_include(chain.head) == ((), ())
    pool.prune()
    assert not pool.by(first)


def test_what_records_carry_by_who_is_refuted_later_counts_as_before():
    branch = Branch(hold=12)
    chain, earlier = branch.chain, branch.audited
    branch.add()
    wrong = branch.auditors(branch.audited)[0]
    author = next(a for a in OTHERS if a != wrong and wrong in branch.auditors(earlier, a))
    second = next(key for key in branch.auditors(earlier, author) if key != wrong)
    told = [report(earlier, key, author=author) for key in (wrong, second)]
    pair = branch.audited
    branch.add(*told, report(pair, wrong), report(pair, OWNER.key))
    branch.add(*(report(pair, key, passed=True) for key in OTHERS if key != wrong))
    assert wrong not in chain.stakes(chain.head)
    replayed = chain.reports_after(chain.head).replayed_stake(earlier.digest, told[0].body.update)
    assert replayed == chain.audit_stakes(earlier.digest)[second], "the case comes later in the queues of jurors"
    others = [key for key in KEYS if key not in (author, wrong, second)]
    made = branch.add(*(report(earlier, key, author=author) for key in others[:2]))
    assert made.record.body.decisions == (AuditDecision(earlier.digest, author, True),), "by four of six, one refuted"


def test_the_convicted_and_the_banned_judge_nobody_and_a_pardon_gives_no_vote_back():
    branch = Branch(hold=12)
    chain, earlier = branch.chain, branch.audited
    branch.add()
    record, accusers, jurors = accused(branch)
    at = branch.add(*(report(record, key) for key in jurors)).record.body.round
    case = next(a for a in OTHERS if LIAR in branch.auditors(earlier, a))
    told = report(earlier, LIAR, author=case)
    assert "has lost the stake" in refusal(branch, branch.record(told, decisions=()))
    branch.add(directive=pardon(LIAR, at, sequence=1))
    assert not chain.is_barred(LIAR, chain.head)
    assert "has lost the stake" in refusal(branch, branch.record(told, decisions=()))
    banned = next(k for k in branch.auditors(earlier, case) if k != LIAR)
    told = report(earlier, banned, author=case)
    assert chain.reports_after(chain.head).report_refusal(told) is None
    for sequence, keys in ((2, (banned,)), (3, ())):
        branch.add(directive=OWNER.sign(Directive(RUN, sequence, banned=keys)), without={banned})
        assert (chain.reports_after(chain.head).report_refusal(told) is None) is not bool(keys)


def test_where_no_votes_can_refute_any_more_jurors_report_no_more():
    case = decided_narrowly(passed=True)
    made = case.branch.add(report(case.record, case.late, passed=True, margin=0.001))
    assert made.record.body.decisions == (), "two of five votes are narrow, and one says the opposite"
    following = case.branch.chain.reports_after(made.digest)
    assert following.is_decided(case.record.digest, update_of(case.record).digest)
    assert not following.jury_of(report(case.record, OTHERS[0], passed=True))


def test_reports_that_may_refute_go_before_lone_accusations(monkeypatch):
    case = decided_narrowly(passed=True)
    chain = case.branch.chain
    monkeypatch.setattr(report_pool, "MAX_REPORTS", 1)
    accused = case.branch.audited
    accuser = case.branch.auditors(accused, OTHERS[0])[0]
    told = report(accused, accuser, author=OTHERS[0])
    pool = ReportPool(OTHERS[0], chain)
    assert pool.add(refutes := report(case.record, case.late, passed=True)) and pool.add(told)
    assert pool.to_include(chain.head)[0] == (refutes,)


def test_a_conviction_that_nobody_contradicts_leaves_nothing_to_report(branch):
    record, _, jurors = accused(branch)
    branch.add(*(report(record, key, margin=0.001) for key in jurors[:2]))
    following = branch.chain.reports_after(branch.chain.head)
    assert not following.jury_of(report(record, jurors[2]))
    assert "has decided" in str(following.report_refusal(report(record, jurors[2])))


def test_reports_that_are_late_foreign_repeated_or_by_others_are_refused(branch):
    chain = branch.chain
    record = branch.audited
    assert "two accusations" in refusal(branch, branch.record(*(report(record, key) for key in OTHERS), decisions=()))
    record, accusers, jurors = accused(branch)
    cases = {
        "an earlier record carries": report(record, accusers[0], passed=True),
        "was not drawn": report(record, PeerKey(sha256(b"a stranger"))),
        "its author is the update's": report(record, LIAR, passed=True),
        "no update that is audited": report(chain.certificate(chain.main_chain_at(2)), OTHERS[0]),
    }
    for reason, told in cases.items():
        assert reason in refusal(branch, branch.record(told, decisions=()))
    right = report(record, jurors[0]).body
    for changed in (
        replace(right, round=Round(right.round - 1)),
        replace(right, update=Digest(sha256(b"other"))),
        replace(right, record=Digest(sha256(b"other"))),
    ):
        made = branch.record(FakeSigner(jurors[0]).sign(changed), decisions=())
        assert "no update that is audited" in refusal(branch, made)
    branch.add(*(report(record, key) for key in jurors))
    late = report(record, accusers[0], check="loss")
    assert "has decided" in refusal(branch, branch.record(late, decisions=()))


def test_a_conviction_settles_all_earlier_updates_of_its_author_and_none_of_others():
    branch = Branch(hold=12)
    chain, earlier = branch.chain, branch.audited
    branch.add()
    record, _, jurors = accused(branch)
    first = branch.auditors(earlier)[0]
    assert chain.reports_after(chain.head).report_refusal(report(earlier, first)) is None
    convicted = branch.add(*(report(record, key) for key in jurors)).record.body.round
    following = chain.reports_after(chain.head)
    assert "has convicted its author" in str(following.report_refusal(report(earlier, first)))
    other = OTHERS[0]
    by = next(key for key in branch.auditors(earlier, other) if key != LIAR)
    assert following.report_refusal(report(earlier, by, author=other)) is None
    branch.add(directive=pardon(LIAR, convicted))
    assert "has convicted its author" in refusal(branch, branch.record(report(earlier, first), decisions=()))
    later = branch.add()
    branch.add()
    by = branch.auditors(later)[0]
    assert chain.reports_after(chain.head).report_refusal(report(later, by)) is None, "its new work is audited"


def test_a_report_is_carried_until_its_update_settles(branch):
    record = branch.audited
    for _ in range(HOLD - 2):
        branch.add()
    late = report(record, OWNER.key)
    assert "too late for a jury" in refusal(branch, branch.record(late, decisions=()))
    branch.add(report(record, OWNER.key, check="loss"))
    assert "no update that is audited" in refusal(branch, branch.record(late, decisions=()))


def test_a_jury_may_answer_to_the_end(branch):
    record, _, jurors = accused(branch)
    for _ in range(HOLD - 3):
        branch.add()
    assert branch.add(*(report(record, key) for key in jurors)).record.body.decisions


def test_the_reports_of_keys_without_stake_cost_no_draw(branch, monkeypatch):
    draws: list[object] = []

    def drawn(*arguments):
        draws.append(arguments)
        return drawn_reporters(*arguments)

    monkeypatch.setattr("protocol.carried_reports.drawn_reporters", drawn)
    pool = ReportPool(OTHERS[4], branch.chain)
    record = branch.audited
    for n in range(20):
        assert not pool.add(report(record, PeerKey(sha256(b"a stranger", bytes([n])))))
    assert not draws
    assert pool.add(report(record, OWNER.key)) and pool.add(report(record, OWNER.key, check="loss"))
    assert len(draws) == 1


def test_reports_that_decide_go_before_others(branch, monkeypatch):
    monkeypatch.setattr(report_pool, "MAX_REPORTS", 2)
    chain, pool = branch.chain, ReportPool(OTHERS[4], branch.chain)
    record = branch.audited
    drawn = branch.auditors(record)
    others = [report(record, key, check="loss") for key in drawn]
    accusations = [report(record, key) for key in (drawn[2], OWNER.key)]
    for told in (*others, report(record, drawn[0], passed=True), *accusations):
        assert pool.add(told)
    assert set(pool.to_include(chain.head)[0]) == set(accusations)


def test_answers_go_before_second_accusations_and_these_before_lone_ones(monkeypatch):
    monkeypatch.setattr(report_pool, "MAX_REPORTS", 1)
    branch = Branch(18, hold=12)
    chain, record, pool = branch.chain, branch.audited, ReportPool(OTHERS[4], branch.chain)
    first, second, _ = drawn = branch.auditors(record)
    lone = [report(r, key, author=a) for key in OTHERS if key not in drawn
            for r, a in audited_by(branch, key) if (r, a) != (record, LIAR)]  # fmt: skip
    assert len(lone) > 4 and all(pool.add(told) for told in lone)
    branch.add(report(record, first))
    assert pool.add(report(record, second))
    assert pool.to_include(chain.head)[0] == (report(record, second),)
    branch.add(report(record, second))
    juror = next(key for key in OTHERS if key not in drawn)
    assert pool.add(answer := report(record, juror, passed=True))
    assert pool.to_include(chain.head)[0] == (answer,)
    monkeypatch.setattr(report_pool, "MAX_ANSWERS", 0)  # of those that come before others
    assert pool.to_include(chain.head)[0] != (answer,)


def test_chance_decides_which_of_many_lone_accusations_a_record_carries(monkeypatch):
    monkeypatch.setattr(report_pool, "MAX_REPORTS", 1)
    branch = Branch(18, hold=12)
    pool = ReportPool(OTHERS[4], branch.chain)
    for key in OTHERS:
        for r, a in audited_by(branch, key):
            pool.add(report(r, key, author=a))
    first = []
    for _ in range(4):
        first += pool.to_include(branch.chain.head)[0]
        branch.add()
    assert len({told.digest for told in first}) > 1


def test_a_run_without_replays_checks_newcomers_by_their_loss_and_carries_no_replay():
    rule = AuditRule.of(tiny_spec())
    assert not rule.replay_rate and rule.rate("loss", 1)
    chain = Branch(40, rule=replace(rule, owner=OWNER.key))
    told = report(chain.audited, OWNER.key)
    assert "has no replays" in str(chain.chain.reports_after(chain.chain.head).report_refusal(told))


def test_a_full_pool_is_searched_once_at_each_head(branch, monkeypatch):
    monkeypatch.setattr(report_pool, "MAX_POOLED", 4)
    chain, pool = branch.chain, ReportPool(OTHERS[4], branch.chain)
    newest = chain.height(branch.audited.digest)
    records = [chain.certificate(chain.main_chain_at(newest - n)) for n in range(HOLD - 1)]
    for record in records:
        for check in ("loss", "replay"):
            pool.add(report(record, OWNER.key, check=check))
    asked, rules = [], chain.reports_after
    monkeypatch.setattr(chain, "reports_after", lambda head: asked.append(head) or rules(head))
    last = [report(r, OWNER.key, author=a, check="loss") for r in records for a in OTHERS]
    assert not any(pool.add(told) for told in last) and len(asked) <= len(last) + 4


def audited_by(branch: Branch, key: PeerKey) -> list[tuple[Certificate, PeerKey]]:
    """Return records with the authors of the updates that a key may accuse there."""
    chain, newest = branch.chain, branch.chain.height(branch.audited.digest)
    records = [chain.certificate(chain.main_chain_at(newest - n)) for n in range(3)]
    found = [(r, a) for r in records for a in KEYS if a != key and key in branch.auditors(r, a)]
    assert len(found) > 2 * MAX_ACCUSATIONS
    return found


def test_a_record_carries_few_accusations_of_a_key_and_the_others_wait_for_later_ones():
    branch = Branch(18, hold=12)
    chain, accuser = branch.chain, OTHERS[0]
    told = [report(r, accuser, author=author) for r, author in audited_by(branch, accuser)]
    pool = ReportPool(OTHERS[4], chain)
    assert all(pool.add(each) for each in told)
    assert "more than 2 accusations" in refusal(branch, branch.record(*told, decisions=()))
    for _ in range(2):
        included, decisions = pool.to_include(chain.head)
        assert len(included) == MAX_ACCUSATIONS and decisions == ()
        branch.add(*included)
        pool.prune()
    assert len(pool.by(accuser)) == len(told) - 2 * MAX_ACCUSATIONS


def test_the_owners_accusations_passed_replays_and_answers_to_accusations_are_not_limited():
    branch = Branch(18, hold=12)
    chain, key = branch.chain, OTHERS[0]
    cases = audited_by(branch, key)
    spared = [report(r, key, author=author, passed=True) for r, author in cases]
    assert chain.reports_after(chain.head).within_limit(spared) == spared
    assert len(branch.add(*(report(r, OWNER.key, author=a) for r, a in cases)).record.body.reports) == len(cases)
    seconds = [report(r, next(k for k in branch.auditors(r, a) if k != key), author=a) for r, a in cases]
    while seconds:
        told = chain.reports_after(chain.head).within_limit(seconds)
        branch.add(*told)
        seconds = [each for each in seconds if each not in told]
    answers = [report(r, key, author=author) for r, author in cases]
    assert len(branch.add(*answers).record.body.reports) == len(cases)


def test_a_record_states_exactly_the_decisions_that_follow(branch):
    record, _, jurors = accused(branch)
    told = [report(record, key) for key in jurors]
    for wrong in (
        (), (AuditDecision(record.digest, LIAR, False),), (AuditDecision(record.digest, LIAR, True, (OTHERS[0],)),),
        (AuditDecision(record.digest, LIAR, True), AuditDecision(record.digest, OTHERS[0], True)),
    ):  # fmt: skip
        assert "other decisions" in refusal(branch, branch.record(*told, decisions=wrong))
    invented = (AuditDecision(record.digest, LIAR, True),)
    assert "other decisions" in refusal(branch, branch.record(decisions=invented))


def test_a_conviction_gives_back_what_its_author_had_pending_and_a_record_says_how_much(branch):
    chain = branch.chain
    record, _, jurors = accused(branch)
    before, made = chain.weight(chain.head), branch.record(*(report(record, key) for key in jurors))
    pending = HOLD * WINDOWS
    assert made.record.body.voided == pending
    for wrong in (0, pending - 1, pending + 1):
        body = replace(made.record.body, voided=wrong)
        told = certificate(FakeSigner(made.record.author).sign(body), body.contributors)
        assert "does not void" in refusal(branch, told)
    assert chain.add(made) and chain.weight(chain.head) == before + len(OTHERS) * WINDOWS - pending
    with_more = replace(branch.record().record.body, voided=1)
    told = certificate(FakeSigner(OTHERS[0]).sign(with_more), with_more.contributors)
    assert "does not void" in refusal(branch, told)


def test_the_convicted_are_in_no_record_while_they_are_barred(branch):
    record, _, jurors = accused(branch)
    chain, parent = branch.chain, branch.chain.head
    made = branch.record(*(report(record, key) for key in jurors))
    with_liar = branch.record()
    listed = tuple(sorted((*made.record.body.updates, update_of(with_liar)), key=lambda u: u.author))
    both = replace(made.record.body, updates=listed, weights=chain.weights(parent, listed))
    assert "whom it convicts" in refusal(branch, certificate(FakeSigner(LIAR).sign(both), [u.author for u in listed]))
    assert chain.add(made)
    first, number = chain.next_window(LIAR, chain.head), chain.height(chain.head)
    body = UpdateHeader(RUN, number, chain.head, STATE, first, first, first + 1, 1, STATE, 9, 1.0, b"")
    lone = RoundRecord(RUN, number, chain.head, STATE, 0, (FakeSigner(LIAR).sign(body),))
    assert "is barred" in refusal(branch, certificate(FakeSigner(LIAR).sign(lone), [LIAR]))


def test_the_pardoned_are_listed_from_the_round_after_the_record_that_carries_the_pardon(branch):
    record, _, jurors = accused(branch)
    chain = branch.chain
    convicted = branch.add(*(report(record, key) for key in jurors)).record.body.round
    branch.add(directive=pardon(LIAR, convicted - 1, sequence=1))
    assert chain.is_barred(LIAR, chain.head), "that is no conviction"
    carries = branch.add(directive=pardon(LIAR, convicted, sequence=2))
    assert LIAR not in carries.record.body.contributors and not chain.is_barred(LIAR, chain.head)
    assert LIAR not in chain.stakes(chain.head)
    assert LIAR in branch.add().record.body.contributors
    branch.add(directive=pardon(LIAR, convicted, sequence=3))
    assert not chain.is_barred(LIAR, chain.head), "a pardon that is repeated changes nothing"


def test_a_full_pool_makes_room_for_who_has_few_reports_and_they_go_first(branch, monkeypatch):
    monkeypatch.setattr(report_pool, "MAX_POOLED", 6)
    monkeypatch.setattr(report_pool, "MAX_REPORTS", 2)
    chain, pool = branch.chain, ReportPool(OTHERS[4], branch.chain)
    records = [chain.certificate(chain.main_chain_at(chain.height(chain.head) - n)) for n in range(1, HOLD)]
    by_owner = [report(r, OWNER.key, check=check) for r in records for check in ("replay", "loss")]
    assert [pool.add(told) for told in by_owner] == 6 * [True] + 2 * [False]
    assert not pool.add(by_owner[0]) and not pool.add(report(records[0], PeerKey(sha256(b"a stranger"))))
    drawn = branch.auditors(records[0])
    assert pool.add(report(records[0], drawn[0])) and len(pool.by(OWNER.key)) == 5
    included, decisions = pool.to_include(chain.head)
    assert {r.author for r in included} == {OWNER.key, drawn[0]} and decisions == ()
    branch.add(*included)
    pool.prune()
    assert len(pool.by(OWNER.key)) == 3 and not pool.by(drawn[0])  # one more is too late for a jury now

"""Credit as a fold over the chain: what pends, settles and is void follows from the certificates alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chain import genesis_digest
from protocol.errors import LedgerRuleError
from protocol.ids import Digest, PeerKey, Round
from protocol.ledger.credits import Balance, CreditRule, PeerBalances, RoundCredits, credits_of
from protocol.ledger.fold import CreditFold
from protocol.ledger.verdicts import VerdictWalk
from protocol.message_codec import KeySigner
from protocol.messages import Directive, Rollback, Verdict
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER

SPEC = make_spec(credit={"hold_rounds": 2, "flops_per_parameter_token": 1000})
RULE = CreditRule.of(SPEC)


def fold_of(rounds: list[RoundCredits], rule: CreditRule = RULE) -> CreditFold:
    fold = CreditFold(SPEC.run_id, rule)
    for credits in rounds:
        fold.add(credits)
    return fold


def rounds_of(maker: ChainMaker) -> list[RoundCredits]:
    return [credits_of(c, CreditRule.of(maker.spec)) for c in maker.certificates]


class Story:
    """A chain with the owner's verdicts and rollbacks, as its certificates carry them."""

    def __init__(self, spec=SPEC):
        self.maker = ChainMaker(spec)
        self.posted: list[RoundCredits] = []
        self.sequence = self.epoch = 0
        self.back: Rollback | None = None

    def round(self, work: dict[int, int], *verdicts: tuple[Digest, PeerKey]) -> RoundCredits:
        if verdicts:
            self.carry(tuple(Verdict(r, p, "checked") for r, p in sorted(set(verdicts))))
        credits = credits_of(self.maker.add(work), CreditRule.of(self.maker.spec))
        self.posted.append(credits)
        return credits

    def roll_back(self, rounds: int) -> None:
        """Keep the first `rounds` rounds, at least one."""
        self.maker = self.maker.fork(rounds)
        self.epoch += 1
        self.back = Rollback(self.epoch, self.maker.head, Round(rounds), state(rounds))
        self.carry(())

    def carry(self, verdicts: tuple[Verdict, ...]) -> None:
        self.sequence += 1
        body = Directive(self.maker.run, self.sequence, rollback=self.back, verdicts=verdicts)
        self.maker.carry(KeySigner(OWNER).sign(body))


def test_credit_pends_for_the_hold_and_then_settles():
    story = Story()
    for r in range(4):
        story.round({0: 40 + r, 1: 30})
    fold = fold_of(story.posted)
    first, second = (c.lines[[line.peer for line in c.lines].index(peer(0).key)] for c in story.posted[:2])
    has = fold.balances[peer(0).key]
    assert has.settled == Balance().plus(first).plus(second) and has.pending.rounds == 2 and has.voided == Balance()
    assert (fold.settled_count, fold.count, fold.rounds) == (2, 4, 4)
    assert fold.tip == story.maker.head and fold.tokens == sum(c.tokens for c in story.posted)


def test_everything_settles_when_the_run_has_its_tokens():
    spec = make_spec(credit={"hold_rounds": 9}, total_tokens=3 * 70 * SPEC.data.window)
    story = Story(spec)
    for _ in range(2):
        story.round({0: 40, 1: 30})
    fold = CreditFold(spec.run_id, CreditRule.of(spec))
    assert not [s for c in story.posted for s in fold.add(c).settled]
    assert fold.add(story.round({0: 40, 1: 30})).settled == (0, 1, 2) and fold.is_complete


def test_a_verdict_voids_what_is_pending_and_never_what_has_settled():
    story = Story()
    first = story.round({0: 40, 1: 30})
    story.round({0: 41, 1: 30}, (first.record, peer(0).key))
    fold = fold_of(story.posted)
    assert fold.balances[peer(0).key].voided.rounds == 1 and fold.balances[peer(1).key].voided.rounds == 0
    for _ in range(3):
        story.round({1: 30})
    late = story.round(
        {1: 30}, (first.record, peer(1).key), (first.record, peer(0).key), (Digest(bytes(32)), peer(7).key)
    )
    fold = fold_of(story.posted)
    assert fold.balances[peer(1).key].voided.rounds == 0 and fold.balances[peer(0).key].voided.rounds == 1
    assert late.verdicts and fold.balances[peer(0).key].settled.rounds == 1


def test_a_verdict_in_the_last_record_of_the_hold_still_counts():
    story = Story()
    first = story.round({0: 40})
    story.round({1: 30})
    story.round({1: 31}, (first.record, peer(0).key))  # the second after it: the hold ends with this one
    assert fold_of(story.posted).balances[peer(0).key].voided.rounds == 1


def test_after_a_rollback_what_was_issued_stays_and_settles_by_the_same_count():
    story = Story()
    for r in range(4):
        story.round({0: 40 + r})
    story.roll_back(2)
    fold = fold_of([*story.posted, story.round({1: 50})])
    assert (fold.rounds, fold.count, fold.epoch) == (3, 5, 1) and fold.tip == story.maker.head
    assert fold.balances[peer(0).key].settled.rounds == 3 and fold.balances[peer(0).key].pending.rounds == 1
    assert fold.tokens == sum(c.tokens for c in [*story.posted[:2], story.posted[4]])
    with pytest.raises(LedgerRuleError, match="was rolled back"):
        fold.roll_back(Rollback(2, story.posted[1].record, Round(2), state(2)))
        fold.add(story.posted[2])


def test_a_rollback_is_done_once_and_only_to_a_round_of_the_branch():
    story = Story()
    for _ in range(3):
        story.round({0: 40})
    fold = fold_of(story.posted)
    back = Rollback(1, story.posted[0].record, Round(1), state(1))
    with pytest.raises(LedgerRuleError, match="no such record"):
        fold.roll_back(Rollback(1, story.posted[1].record, Round(1), state(1)))
    with pytest.raises(LedgerRuleError, match="no such record"):
        fold.roll_back(Rollback(1, Digest(bytes(32)), Round(0), state(0)))
    assert fold.roll_back(back) and not fold.roll_back(back)
    assert fold.rounds == 1
    assert fold.roll_back(Rollback(2, genesis_digest(SPEC.run_id), Round(0), state(0))) and fold.rounds == 0


def test_what_does_not_follow_is_refused_and_changes_nothing():
    story = Story()
    rounds = [story.round({0: 40, 1: 30}) for _ in range(3)]
    a = rounds[1]
    swapped = replace(a, lines=a.lines[::-1])
    more = replace(a, lines=tuple(replace(x, windows=x.windows + 1) for x in a.lines))
    empty = replace(a, lines=())
    fold = fold_of(rounds[:1])
    before = dict(fold.balances)
    for wrong in (rounds[0], rounds[2], swapped, more, empty):
        with pytest.raises(LedgerRuleError):
            fold.add(wrong)
    assert fold.balances == before and fold.count == 1
    fold.add(rounds[1])


def test_a_record_that_voids_more_than_its_branch_has_is_refused_also_behind_a_rollback():
    story = Story()
    for _ in range(3):
        story.round({0: 40})
    fold = fold_of(story.posted)
    story.roll_back(1)
    branch = SPEC.data.window_tokens * 40
    wrong = replace(story.round({0: 40}), voided_tokens=2 * branch + 1)
    with pytest.raises(LedgerRuleError, match="voids more tokens"):
        fold.add(wrong)
    assert (fold.rounds, fold.epoch) == (3, 0)
    fold.add(replace(wrong, voided_tokens=2 * branch))
    assert (fold.rounds, fold.epoch, fold.tokens) == (2, 1, 0)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_walk_down_the_branch_finds_the_verdicts_that_the_fold_counts(after: int):
    story = Story()
    first = story.round({0: 40, 1: 30})
    for _ in range(after - 1):
        story.round({1: 30})
    story.round({1: 31}, (first.record, peer(0).key))
    story.round({1: 31}, (first.record, peer(0).key))  # said again, later
    walk, found = VerdictWalk(RULE.hold_rounds), False
    for certificate in reversed(story.maker.certificates):
        found = walk.is_voided(first.record, Round(0), peer(0).key)
        walk.pass_record(certificate.record.body)
    voided = bool(fold_of(story.posted).balances[peer(0).key].voided.rounds)
    assert found == voided == (after <= 2) and not walk.is_voided(first.record, Round(0), peer(1).key)


work = st.dictionaries(st.integers(0, 4), st.integers(1, 900), min_size=1, max_size=4)
acts = st.lists(st.tuples(work, st.booleans(), st.integers(0, 9), st.integers(0, 5)), max_size=12)


@given(acts, st.integers(0, 4))
def test_a_fold_is_what_a_model_of_a_few_lines_says_and_goes_on_from_any_state(script, hold):
    spec = make_spec(credit={"hold_rounds": hold, "flops_per_parameter_token": 1000})
    rule, story = CreditRule.of(spec), Story(spec)
    fold = CreditFold(spec.run_id, rule)
    void: set[tuple[int, PeerKey]] = set()
    for windows, rolls_back, back, target in script:
        if rolls_back and len(story.maker.certificates) > 1:
            story.roll_back(1 + back % (len(story.maker.certificates) - 1))
        named = []
        if story.posted and target < 4:
            line = story.posted[-1 - back % len(story.posted)]
            named = [(line.record, line.lines[0].peer)]
        credits = story.round(windows, *named)
        number = len(story.posted) - 1
        for n, c in enumerate(story.posted[:-1]):
            if named and c.record == named[0][0] and number - 1 - n < hold:
                void.add((n, named[0][1]))
        fold.add(credits)
        expected: dict[PeerKey, PeerBalances] = {}
        for n, c in enumerate(story.posted):
            for x in c.lines:
                status = "voided" if (n, x.peer) in void else "settled" if number - n >= hold else "pending"
                expected[x.peer] = expected.get(x.peer, PeerBalances()).plus(x, status)
        assert fold.balances == expected
        fold = CreditFold.restored(
            spec.run_id, rule, count=fold.count, epoch=fold.epoch, pending=fold.pending, balances=fold.balances,
            branch=((c.digest, credits_of(c, rule).progress) for c in story.maker.certificates),
            reverted={c.record for c in story.posted} - {c.digest for c in story.maker.certificates},
        )  # fmt: skip

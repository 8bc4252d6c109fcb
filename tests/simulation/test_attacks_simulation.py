"""Promises against attackers, each with a control that fails without its rule. `make simulate` draws more of them.

The attackers behave for 40 s, so they have their part of the stake when the attack begins, unless they are `late`.
"""

from __future__ import annotations

from functools import cache, partial

import pytest

from protocol import update_weights
from protocol.audits import AuditRule, due_audits
from protocol.ids import Digest, PeerKey
from protocol.messages import AuditDecision, WorkReport
from protocol.record_node import RecordNode
from protocol.rounds import actions as do
from protocol.rounds import audit_scheduler
from protocol.rounds.consensus import Consensus
from protocol.rounds.phase import Phase
from protocol.stake import StakeRule
from tests.simulation.attackers import (
    Censor,
    Deserter,
    Drifter,
    EarlyCertifier,
    FrontRunner,
    Hurrier,
    LiesOnce,
    LyingAuditor,
    NeverVotes,
    Omitter,
    OverClaimer,
    SiblingMaker,
    SoloCertifier,
    Staller,
    SybilLister,
    Withholding,
)
from tests.simulation.checkers import (
    Broken,
    Damage,
    check_history,
    check_listed,
    check_not_ended,
    check_pace,
    check_share,
)
from tests.simulation.node import Node, key_of
from tests.simulation.siege import Siege
from tests.simulation.world import OWNER
from tests.support.long_cases import long_cases

SLOWEST = 1.5
"""A round under an attack by less than a third of the stake takes at most this times its usual seconds."""


@cache
def usual(peers: int) -> float:
    """Return the seconds of a round of a swarm without attackers."""
    return Siege([], honest=peers).run().seconds_a_round


def check_all(damage: Damage, honest: int, attackers: int) -> None:
    check_history(damage)
    check_not_ended(damage)
    check_share(damage, attackers / (honest + attackers))
    check_pace(damage, usual(honest + attackers), SLOWEST)
    check_listed(damage, 0.9)


# -- history: who is not most of the stake moves nobody --------------------------------------------------------


@pytest.mark.parametrize("finals", [None, 3, 8], ids=["coordinator away", "after finals", "before finals"])
@pytest.mark.parametrize("length, back", [(1, 1), (100, 0), *long_cases((15, 5), (100, 100))])
@pytest.mark.parametrize("honest, attackers", [(4, 1), *long_cases((3, 2))])
def test_a_private_branch_moves_nobody(honest, attackers, length, back, finals):
    """However long it is, from wherever, and whatever it claims."""
    make = partial(SoloCertifier, length=length, back=back)
    check_all(Siege([make] * attackers, honest=honest, finals=finals).run(), honest, attackers)


@pytest.mark.parametrize(
    "count, fresh, spare",
    [(1, True, False), *long_cases((100, True, False), (200, False, False), (40, True, True))],
)
def test_records_on_the_head_whose_updates_nobody_has_delay_nobody(count, fresh, spare):
    """Also new ones in each round, and each by another key."""
    check_all(Siege([partial(SiblingMaker, count=count, fresh=fresh, spare=spare)]).run(), 4, 1)


@pytest.mark.parametrize("honest, attackers, late", [(4, 1, False), (3, 2, False), *long_cases((4, 4, True))])
def test_who_certifies_each_round_alone_at_once_is_not_followed(honest, attackers, late):
    check_all(Siege([partial(FrontRunner, late=late)] * attackers, honest=honest).run(), honest, attackers)


@pytest.mark.parametrize("speeds", [(3.8, 1.0, 1.0, 1.0, 3.3), *long_cases(((3.2, 3.3, 3.5),), ((4.5, 2.0, 3.5),))])
def test_a_third_of_the_stake_takes_no_round_though_an_honest_peer_has_more(speeds):
    """That peer counts itself: else it follows the third, and with it all others do."""
    damage = Siege([FrontRunner], honest=len(speeds) - 1, speeds=speeds).run()
    check_history(damage)
    check_share(damage, speeds[-1] / sum(speeds))
    check_listed(damage, 0.9)


@pytest.mark.parametrize("speeds, away", [((2.0, 2.0), 40.0), ((6.0, 2.0, 2.0), 60.0), *long_cases(((3.0, 2.0), 40.0))])
def test_a_peer_with_most_of_the_stake_that_was_away_follows_what_the_others_certified(speeds, away):
    """Its old stake says nothing about records of its absence: it would take the others' rounds from them."""
    siege = Siege([], honest=len(speeds), speeds=speeds, stake=StakeRule(hold_rounds=3))
    world, first = siege.world, siege.world.nodes[0]
    world.clock.at(40.0, first.crash)
    world.clock.at(40.0 + away, first.boot)
    siege.end = 40.0 + away + 40.0
    damage = siege.run()
    assert world.deepest == 0 and damage.rounds > 3


@pytest.mark.parametrize("spare", [2, *long_cases(8)])
def test_headers_that_invent_a_state_have_nobody_load_one(spare):
    check_all(Siege([partial(Drifter, spare=spare)]).run(), 4, 1)


@pytest.mark.parametrize("late", [True, *long_cases(False)])
@pytest.mark.parametrize("strategy", [FrontRunner, partial(SoloCertifier, length=40, back=0)])
def test_an_observer_is_not_moved_either_also_one_that_starts_in_the_attack(strategy, late):
    """Nor, at its first sight of the chain, by a branch that is longer than the hold."""
    siege = Siege([strategy] * 2)
    world = siege.world
    observer, seen = world.add(observer=True), set[Digest]()
    for node in world.nodes:
        world.clock.at(siege.begins + 20.0 if late and node is observer else 0.01 * node.index, node.boot)
    while world.clock.now < 120.0:
        world.clock.run_until(world.clock.now + 0.05)
        if observer.alive:
            seen.add(observer.machine.chain.head)
    followed = set(world.way_to(world.honest[0].machine.chain.head)) | {world.genesis}
    assert len(seen) > 5 and seen <= followed


LONG = dict(target_windows=160, max_update_windows=120, max_seconds=40.0, patience_seconds=5.0)
"""Rounds of 20 seconds of four peers: training takes four times the patience."""


def test_who_certifies_one_window_alone_while_others_train_for_longer_than_the_patience_is_not_followed():
    damage = Siege([EarlyCertifier], begins=120.0, seconds=100.0, **LONG).run()
    check_history(damage)
    check_share(damage, 0.0)
    check_listed(damage, 0.9)
    assert damage.rounds <= 10  # a header is a reason to announce once half of the target is done


def test_a_minority_goes_on_by_itself_though_training_takes_longer_than_the_patience():
    siege = Siege([], honest=5, **LONG)
    world, few = siege.world, siege.world.nodes[:2]
    for node in world.nodes:
        world.clock.at(0.0, node.boot)
    world.clock.run_until(120.0)
    world.network.cut |= {(a.index, b.index) for a in world.nodes for b in world.nodes if (a in few) != (b in few)}
    before = [node.machine.chain.height(node.machine.chain.head) for node in few]
    world.clock.run_until(240.0)
    after = [node.machine.chain.height(node.machine.chain.head) for node in few]
    assert min(after) >= max(before) + 2 and max(after) - min(after) <= 1


def test_founders_hold_a_run_that_is_too_young_for_stake():
    founders = tuple(key_of(i) for i in range(3))
    rule = StakeRule(12, founders, 13)
    check_all(Siege([FrontRunner] * 2, honest=3, begins=10.0, stake=rule).run(), 3, 2)
    young = Siege([FrontRunner] * 2, honest=3, begins=10.0, stake=StakeRule(12)).run()
    with pytest.raises(Broken, match="of the windows"):
        check_share(young, 2 / 5)


@pytest.mark.parametrize("finals", [None, 3])
def test_who_has_left_moves_nobody_with_a_branch_from_before(finals):
    make = partial(Deserter, length=30, back=6)
    damage = Siege([make] * 2, finals=finals).run()
    check_history(damage)
    check_share(damage, 0.0)


def test_private_claims_do_not_end_a_run():
    make = partial(SoloCertifier, length=40, back=3)
    damage = Siege([make], total_windows=2000).run()
    check_history(damage)
    check_not_ended(damage)


# -- pace: less than a third of the stake stops no round ---------------------------------------------------------


def test_proposers_cannot_leave_out_much_of_the_stake_in_each_of_their_turns():
    damage = Siege([partial(Omitter, victims=4)] * 3, honest=6, seconds=240.0).run()
    check_listed(damage, 0.85)  # 66 to 75% if first attempts may
    check_pace(damage, usual(9), 1.1)


@pytest.mark.parametrize("strategy", [NeverVotes, Withholding, Censor])
@pytest.mark.parametrize("honest, attackers", [(4, 1), *long_cases((5, 2))])
def test_less_than_a_third_does_not_slow_rounds_and_keeps_nobody_out(strategy, honest, attackers):
    damage = Siege([strategy] * attackers, honest=honest).run()
    check_history(damage)
    check_pace(damage, usual(honest + attackers), SLOWEST)
    check_listed(damage, 0.9)


@pytest.mark.parametrize("period", [2, *long_cases(3, 8)])
def test_a_key_that_keeps_every_second_round_waiting_is_soon_awaited_no_more(period):
    """Two take turns, so that every round waited three times as long as usual."""
    damage = Siege([partial(Staller, period=period)] * 2, honest=5, seconds=400.0, exchange_seconds=12.0).run()
    check_history(damage)
    check_pace(damage, usual(7), SLOWEST)
    check_listed(damage, 0.9)


@pytest.mark.parametrize("strategy", [Censor, *long_cases(NeverVotes, Withholding)])
def test_half_of_the_keys_moves_nobody_and_does_not_stop_rounds(strategy):
    damage = Siege([strategy] * 3, honest=3, seed=3).run()
    check_history(damage)
    check_pace(damage, usual(6), 2.5)


def test_a_list_of_keys_that_nobody_knows_slows_no_round():
    check_pace(Siege([partial(SybilLister, count=40)]).run(), usual(5), SLOWEST)


# -- share: claims are believed up to a limit --------------------------------------------------------------------


def decisions_of(siege: Siege) -> list[AuditDecision]:
    """Return the decisions of audits that the chain of the first honest peer carries."""
    chain = siege.world.honest[0].machine.chain
    return [d for c in chain.path(chain.root, chain.head) for d in c.record.body.decisions]


def reports_of(siege: Siege, key: PeerKey) -> list[WorkReport]:
    """Return the reports of a key that the chain of the first honest peer carries."""
    chain = siege.world.honest[0].machine.chain
    return [r.body for c in chain.path(chain.root, chain.head) for r in c.record.body.reports if r.author == key]


def keys(siege: Siege, *, honest: bool) -> set[PeerKey]:
    return {node.key for node in siege.world.nodes if node.honest is honest}


@pytest.mark.parametrize("honest, attackers, late", [(4, 1, False), *long_cases((8, 2, False)), (4, 1, True)])
def test_claims_in_heartbeats_make_rounds_half_as_long_at_most(honest, attackers, late):
    damage = Siege([partial(Hurrier, late=late)] * attackers, honest=honest).run()
    assert damage.seconds_a_round > 0.5 * usual(honest + attackers)


@pytest.mark.parametrize("honest, attackers, late", [(4, 1, False), (5, 2, False), (4, 2, True)])
def test_the_largest_claims_get_no_more_than_their_share(honest, attackers, late):
    siege = Siege([partial(OverClaimer, late=late)] * attackers, honest=honest, audits=True)
    check_share(siege.run(), attackers / (honest + attackers))
    assert {d.author for d in decisions_of(siege) if d.convicted} == keys(siege, honest=False)
    told = {(by, r.about) for _, by, r in siege.world.reports if r.kind == "convicted"}
    assert {(node.index, key) for node in siege.world.honest for key in keys(siege, honest=False)} <= told


@pytest.mark.parametrize("accuses", [True, False])
@pytest.mark.parametrize("honest, attackers", [(4, 1), (4, 3), *long_cases((4, 2))])
def test_auditors_that_lie_convict_nobody_and_save_no_ally(honest, attackers, accuses):
    siege = Siege([partial(LyingAuditor, accuses=accuses)] * attackers, honest=honest, audits=True)
    check_share(siege.run(), attackers / (honest + attackers))
    decisions = decisions_of(siege)
    assert {d.author for d in decisions if d.convicted} == keys(siege, honest=False)
    assert not [d for d in decisions if set(d.refuted) & keys(siege, honest=True)]


def liar_of_one_update(seed: int) -> Siege:
    """Return a siege in which a newcomer lies once, and half of the checks cannot be made at the first attempt."""
    liar, stake = partial(LiesOnce, late=True), StakeRule(hold_rounds=10)
    return Siege([liar], seed=seed, begins=70.0, audits=True, share_of_lost_checks=0.5, stake=stake)


@pytest.mark.parametrize("seed", [1, 2, *long_cases(3, 4)])
def test_who_lies_once_is_convicted_though_half_of_the_checks_fail_at_first(seed):
    siege = liar_of_one_update(seed)
    siege.run()
    assert {d.author for d in decisions_of(siege) if d.convicted} == keys(siege, honest=False)


def test_without_attackers_audits_decide_nothing_and_slow_no_round():
    siege = Siege([], honest=5, audits=True)
    check_pace(siege.run(), usual(5), 1.05)
    chain = siege.world.honest[0].machine.chain
    reports = [r.body for c in chain.path(chain.root, chain.head) for r in c.record.body.reports]
    assert reports and all(r.passed for r in reports) and not decisions_of(siege)
    made = [(r.record, r.update, r.check) for r in reports]
    assert len(made) == len(set(made)), "two auditors checked one update that nobody accused"


# -- an auditor that trains nothing, and reports by the owner's key ------------------------------------------------


def with_owners_auditor(siege: Siege, *, is_honest: bool = True) -> Node:
    """Add an auditor without training that reports by the owner's key. If not honest, it accuses all that it checks."""
    auditor = siege.world.add(Node if is_honest else Accuser, observer=True)
    auditor.reporter = OWNER
    return auditor


class Accuser(Node):
    """Accuses everybody."""

    def audit_update(self, action: do.AuditUpdate) -> None:
        self.answer_audit(action, passed=False)


FEW = AuditRule(auditors=1, owner=OWNER.key)
"""One drawn auditor, so that nobody is convicted unless the owner reports, too."""


def test_the_owners_auditor_convicts_with_one_other_auditor_and_the_jury():
    siege = Siege([OverClaimer], audits=True, audit=FEW)
    auditor = with_owners_auditor(siege)
    siege.run()
    assert {d.author for d in decisions_of(siege) if d.convicted} == keys(siege, honest=False)
    assert not any(d.refuted for d in decisions_of(siege))
    assert auditor.machine.phase is Phase.OBSERVING
    without = Siege([OverClaimer], audits=True, audit=FEW)
    without.run()
    assert not decisions_of(without)


def test_the_owners_auditor_alone_convicts_nobody():
    siege = Siege([OverClaimer], audits=True, audit=FEW)
    with_owners_auditor(siege)
    for node in siege.world.nodes:
        node.reporter = node.reporter if node.observer else None
    siege.run()
    failed = [r for r in reports_of(siege, OWNER.key) if not r.passed]
    assert {r.check for r in failed} == {"loss", "replay"} and not decisions_of(siege)


def test_an_owner_that_accuses_everybody_convicts_nobody():
    siege = Siege([], honest=5, audits=True, audit=AuditRule(owner=OWNER.key))
    with_owners_auditor(siege, is_honest=False)
    siege.run()
    assert any(not r.passed for r in reports_of(siege, OWNER.key)) and not decisions_of(siege)


def test_the_owners_auditor_checks_all_that_is_due_and_no_round_waits_for_it():
    siege = Siege([], honest=5, audits=True, audit=AuditRule(owner=OWNER.key))
    auditor = with_owners_auditor(siege)
    check_pace(siege.run(), usual(5), 1.05)
    chain, rule = siege.world.honest[0].machine.chain, siege.world.policy.audit
    path = chain.path(chain.root, chain.head)
    due = {
        (c.digest, audit.update, audit.check)
        for c in path[2 : -siege.world.policy.stake.hold_rounds]
        for audit in due_audits(c.record.body, chain.audit_seeds(c.digest), chain.audit_stakes(c.digest), rule)
    }
    told = {(r.record, r.update, r.check) for r in reports_of(siege, OWNER.key)}
    assert len(due) > 20 and due <= told
    # It is a member that announces nothing, and no record lists it.
    assert auditor.key not in {u.author for c in path for u in c.record.body.updates}
    members = siege.world.honest[0].machine.summary(siege.world.clock.now).members
    assert [m.heartbeat.phase for m in members if m.key == auditor.key] == ["observing"]


# -- controls: without the rule the checker says so, and the threshold is where it should be -------------------


def test_a_branch_of_most_stake_is_followed():
    with pytest.raises(Broken, match="left 3 rounds"):
        check_history(Siege([partial(SoloCertifier, length=15, back=3)] * 3, honest=2).run())


@pytest.mark.parametrize("strategy", [partial(SoloCertifier, length=15, back=3), partial(Deserter, length=30, back=6)])
def test_without_the_fork_choice_by_stake_a_private_branch_is_followed(monkeypatch, strategy):
    monkeypatch.setattr(RecordNode, "latest_messages", lambda node: {})  # then windows decide
    with pytest.raises(Broken, match="left . rounds"):
        check_history(Siege([strategy]).run())


def test_without_the_fork_choice_by_stake_private_claims_end_a_run(monkeypatch):
    monkeypatch.setattr(RecordNode, "latest_messages", lambda node: {})  # then windows decide
    damage = Siege([partial(SoloCertifier, length=40, back=1)], total_windows=2000).run()
    with pytest.raises(Broken, match="ended the run"):
        check_not_ended(damage)


def test_without_support_a_lone_certifier_takes_all_rounds(monkeypatch):
    monkeypatch.setattr(Consensus, "is_supported", lambda *_, **__: True)
    with pytest.raises(Broken, match="100% of the windows"):
        check_share(Siege([FrontRunner]).run(), 1 / 5)


@pytest.mark.long
def test_without_a_bound_claims_in_heartbeats_end_each_round_at_once(monkeypatch):
    monkeypatch.setattr(update_weights, "COUNTED", 10**6)
    assert Siege([Hurrier]).run().seconds_a_round < 0.2 * usual(5)


@pytest.mark.long
def test_without_support_lone_records_keep_others_out(monkeypatch):
    monkeypatch.setattr(Consensus, "is_supported", lambda *_, **__: True)
    damage = Siege([partial(SiblingMaker, count=100)]).run()
    with pytest.raises(Broken, match="is listed in"):
        check_listed(damage, 0.9)


@pytest.mark.parametrize(
    "honest, attackers, late",
    [(4, 1, False), *long_cases((5, 2, False), (4, 2, True))],
)
def test_without_audits_the_largest_claims_get_most_of_the_windows(honest, attackers, late):
    with pytest.raises(Broken, match=r"got (8|9)\d% of the windows"):
        check_share(
            Siege([partial(OverClaimer, late=late)] * attackers, honest=honest).run(), attackers / (honest + attackers)
        )


def test_without_other_attempts_who_lies_once_gets_away_when_half_of_the_checks_fail(monkeypatch):
    monkeypatch.setattr(audit_scheduler, "MAX_ATTEMPTS", 1)
    sieges = [liar_of_one_update(seed) for seed in range(1, 5)]
    for siege in sieges:
        siege.run()
    assert [len(siege.world.fakes) for siege in sieges] == [1] * 4
    assert not all(decisions_of(siege) for siege in sieges)


def test_where_the_jury_is_one_key_two_auditors_that_lie_convict_the_honest():
    siege = Siege([LyingAuditor] * 3, honest=4, audits=True, audit=AuditRule(jury=1))
    siege.run()
    assert {d.author for d in decisions_of(siege) if d.convicted} & keys(siege, honest=True)

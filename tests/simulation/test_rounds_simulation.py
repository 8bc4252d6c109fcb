"""The simulator in the ordinary test run: a few hundred rounds of faults, and controls that show the checkers bite."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.chain import Chain
from protocol.directives import ActiveDirectives
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.merkle import CHUNK
from protocol.messages import Certificate, Directive, Heartbeat, Vote
from protocol.reduce_plan import GATHER
from protocol.rounds import header_repair, machine, members
from protocol.rounds.events import ChainReceived, ChainUnanswered, Leave, SyncFailed
from protocol.rounds.phase import TRANSITIONS, Phase, check_transition
from tests.simulation.checkers import (
    Broken,
    check_every_window,
    check_one_state,
    check_shown,
    check_sizes,
    check_words,
    check_words_reached,
    disagreement,
)
from tests.simulation.hostile import HOSTILE_REDUCERS, Copier, TwoMinded, Withholder
from tests.simulation.network import Weather
from tests.simulation.node import RETRY, Node
from tests.simulation.scenario import Scenario
from tests.simulation.signer import FakeSigner
from tests.simulation.world import REDUCE, World, policy_for
from tests.support.long_cases import long_cases
from tests.support.rounds_bench import RUN


@pytest.mark.parametrize("seed", [0, 1, 2, 4, *long_cases(3, 5, 6, 7)])
def test_all_promises_hold_under_faults(seed):
    """Agreement after the faults, nothing counted twice, nothing lost, progress, bounds (see `simulation.checkers`)."""
    Scenario(seed).run()


@pytest.mark.parametrize("seed", [402, 404, 407, *long_cases(403, 406, 409)])
def test_all_promises_hold_under_attack_and_faults(seed):
    """The hostile peers are a coalition with one strategy (see `simulation.attackers`)."""
    Scenario(seed, attackers=True, peers=6).run()


@pytest.mark.parametrize("exchange", [GATHER, REDUCE])
def test_all_promises_hold_under_attack_while_the_owner_meddles(exchange):
    """An order may forbid what the strategy would make: the coalition keeps to the owner's limits, or waits."""
    Scenario(3027, attackers=True, orders=True, exchange=exchange).run()


@pytest.mark.parametrize("seed", [0, 1, 4, *long_cases(2, 3)])
def test_all_promises_hold_when_rounds_are_reduced(seed):
    """And each part of a certified mean is what the updates give, unless most of its committee lies."""
    Scenario(seed, exchange=REDUCE).run()


@pytest.mark.parametrize("exchange", [GATHER, REDUCE])
@pytest.mark.parametrize("seed", [2002, *long_cases(2000, 2001)])
def test_all_promises_hold_while_the_owner_meddles(seed, exchange):
    """Pauses, bans, other policies, rollbacks, replays of old directives: in the end all follow the newest."""
    Scenario(seed, orders=True, exchange=exchange).run()


@pytest.mark.parametrize("exchange", [GATHER, REDUCE])
@pytest.mark.parametrize("seed", [3001, *long_cases(3000, 3002)])
def test_all_promises_hold_while_users_take_their_devices_back(seed, exchange):
    """Nothing that was trained before a rest is lost, and nobody waits for who rests."""
    Scenario(seed, exchange=exchange, rests=True, orders=seed % 3 == 0).run()


def test_every_transition_that_is_seen_is_in_the_table(monkeypatch):
    """A machine raises at any other; here it is seen that the simulator makes nearly all of the table's."""
    seen: set[tuple[Phase, Phase]] = set()

    def note(before: Phase, after: Phase) -> None:
        check_transition(before, after)
        if before is not after:
            seen.add((before, after))

    monkeypatch.setattr(machine, "check_transition", note)
    for seed in (2000, 2001, 2002, 2003):
        scenario = Scenario(seed, orders=True, peers=5, fault_seconds=60.0, rests=True)
        scenario.run()
        world = scenario.world
        for node in world.honest:
            node.step(SyncFailed(node.machine.chain.head, "the trainer died"))
        world.clock.run_until(world.clock.now + 10.0)
        for node in world.nodes:
            if node.alive:
                node.step(Leave())
        world.clock.run_until(world.clock.now + 10.0)
        assert all(n.machine.phase is Phase.LEFT for n in world.nodes if n.alive)
    table = {(before, after) for before, to in TRANSITIONS.items() for after in to}
    rare = {
        (Phase.EXCHANGING, Phase.SYNCING),
        (Phase.JOINING, Phase.LEAVING), (Phase.SYNCING, Phase.LEAVING), (Phase.PAUSED, Phase.LEAVING),
        (Phase.PAUSED, Phase.EXCHANGING), (Phase.SYNCING, Phase.EXCHANGING), (Phase.PAUSED, Phase.SYNCING),
    }  # fmt: skip
    common = {(Phase.TRAINING, Phase.RESTING), (Phase.EXCHANGING, Phase.RESTING), (Phase.RESTING, Phase.SYNCING)}
    rare |= {step for step in table if Phase.RESTING in step} - common  # see tests/unit/rounds/test_rest.py
    assert table - rare <= seen <= table, sorted(map(str, table - rare - seen))


class Deaf(Node):
    """Follows no rollback: it takes the owner's directive for one that it has."""

    def hear(self, message):
        if not (isinstance(message.body, Directive) and message.body.rollback is not None):
            super().hear(message)

    def later(self, incarnation, event):
        if not (isinstance(event, ChainReceived) and event.directive is not None):
            super().later(incarnation, event)


def calm_world(node_type: type[Node], peers: int = 4) -> World:
    world = World(11, peers, Weather(delay=0.02, jitter=0.001), policy=policy_for(peers))
    for i in range(peers):
        world.clock.at(0.0, world.add(node_type if i == 0 else Node, speed=2.0).boot)
    world.clock.run_until(45.0)
    return world


def test_a_rollback_is_followed_within_seconds_by_all_and_by_who_was_away():
    world = calm_world(Node)
    away = world.nodes[3]
    away.crash()
    before = world.height()
    assert world.owner.roll_back() and world.owner.body.rollback is not None
    to = world.owner.body.rollback
    world.clock.run_until(60.0)
    away.boot()
    world.clock.run_until(80.0)
    check_words(world)
    check_words_reached(world)
    assert disagreement(world.honest) is None and before > to.round
    for node in world.honest:
        chain = node.machine.chain
        assert chain.height(chain.head) > to.round and chain.directives(chain.head).epoch == 1
        assert not node.trainer.rests


def test_a_pause_stops_all_within_seconds_and_loses_nothing():
    world = calm_world(Node)
    world.owner.say(run_status="paused")
    world.clock.run_until(60.0)
    height, trained = world.height(), [len(n.trainer.trained) for n in world.nodes]
    world.clock.run_until(100.0)
    assert world.height() == height and [len(n.trainer.trained) for n in world.nodes] == trained
    assert {n.machine.phase for n in world.nodes} == {"paused"}
    world.owner.say(run_status="running")
    world.clock.run_until(115.0)
    assert world.height() >= height + 2
    for node in world.nodes:
        check_every_window(world, node)


def test_an_ended_run_is_left_by_all_once_the_open_round_is_decided():
    world = calm_world(Node)
    world.owner.say(run_status="ended")
    world.clock.run_until(65.0)
    assert all(n.done for n in world.nodes) and disagreement(world.honest) is None


def test_a_peer_that_shows_another_record_than_its_states_is_caught(monkeypatch):
    world = calm_world(Node)
    check_shown(world)
    node = world.nodes[0]
    view = node.machine.summary(world.clock.now)
    assert view.head == world.nodes[1].machine.summary(world.clock.now).head
    monkeypatch.setattr(node.machine, "summary", lambda now: replace(view, state=Digest(bytes(32))))
    with pytest.raises(Broken, match="show different states"):
        check_shown(world)


def test_a_peer_that_follows_no_rollback_is_caught():
    world = calm_world(Deaf)
    world.owner.roll_back()
    world.clock.run_until(46.0)
    for deaf in [world.nodes[0]]:
        deaf.machine.chain.add_directive = lambda directive: False  # type: ignore[method-assign]
    world.clock.run_until(60.0)
    with pytest.raises(Broken, match="rolled back|last directive"):
        check_words_reached(world)


def test_updates_of_banned_peers_are_caught(monkeypatch):
    after = ActiveDirectives.after
    monkeypatch.setattr(ActiveDirectives, "after", lambda s, record: replace(after(s, record), banned=frozenset()))
    monkeypatch.setattr(Chain, "is_banned", lambda self, key: False)
    world = calm_world(Node, 3)
    world.owner.say(banned=(world.nodes[2].key,))
    world.clock.run_until(70.0)
    with pytest.raises(Broken, match="banned before"):
        check_words(world)


@pytest.mark.parametrize("liar", HOSTILE_REDUCERS)
def test_rounds_are_reduced_though_one_of_five_is_hostile(liar):
    """Without any other fault: the run goes on, and no part of any certified mean is wrong."""
    scenario = Scenario(4, peers=5, calm=True, exchange=REDUCE)
    hostile = liar(scenario.world, 4, 2.0)
    scenario.world.nodes[4] = scenario.world.by_key[hostile.key] = hostile
    outcome = scenario.run()
    honest = [n.key for n in scenario.world.nodes[:4] if n.speed >= 1.0]  # a slower one has nothing in short rounds
    assert outcome.rounds >= 4 and len(honest) == 3
    listed = [key for c in scenario.world.records.values() for key in c.record.body.contributors]
    assert all(listed.count(key) >= outcome.rounds * 2 / 3 for key in honest)


@pytest.mark.parametrize("exchange", [GATHER, REDUCE], ids=["gathered", "reduced"])
def test_as_many_copiers_as_honest_peers_keep_no_update_out(exchange):
    """Each copies the update of another. In a reduced round an honest peer knows of the copy of its own alone."""
    world = World(1, 12, policy=policy_for(6, exchange=exchange))
    for i in range(12):
        node = world.add(Node if i < 6 else Copier, speed=2.0)
        world.clock.at(0.01 * i, node.boot)
    world.clock.run_until(80.0)
    records = [world.records[d].record.body for d in world.way_to(world.honest[0].machine.chain.head)]
    assert len(records) >= 15, "as many as without copiers"
    assert all(set(body.contributors) == {n.key for n in world.honest} for body in records)
    assert all(world.nodes[6].copied and node.copied for node in world.nodes[6:])


@pytest.mark.parametrize("honest, speed, liars", [(4, 0.0, 1), (2, 2.0, 2)], ids=["sole contributor", "double votes"])
def test_one_record_that_is_certified_with_two_means_sets_nobody_apart(honest, speed, liars):
    """A liar works alone, before the eyes of others; or two of four vote twice.

    All peers at one head hold one state, and in the end all are at one head.
    """
    world = World(5, honest + liars, Weather(delay=0.02, jitter=0.001), policy=policy_for(4, exchange=REDUCE))
    for i in range(honest + liars):
        node = world.add(speed=speed) if i < honest else world.add(TwoMinded, speed=2.0)
        world.clock.at(0.0, node.boot)
    for second in range(120):
        world.clock.run_until(second)
        check_one_state(world)
    for node in world.nodes[honest:]:
        node.crash()
    world.clock.run_until(150)
    check_one_state(world)
    assert disagreement(world.honest) is None
    records = [c.record.digest for c in world.records.values()]
    assert len(records) - len(set(records)) >= 3  # else nobody was put to the test
    assert world.height() >= 5


@pytest.mark.parametrize("exchange", [GATHER, REDUCE])
@pytest.mark.parametrize("peers", [1, 2, 3, 5, 8])
def test_a_healthy_swarm_decides_a_round_without_waiting_for_a_timer(peers, exchange):
    """From the first announcement to everyone having applied: network delays only, no timer of the policy."""
    scenario = Scenario(1, peers=peers, calm=True, exchange=exchange)
    world = scenario.world
    scenario.calm = world.network.weather = Weather(delay=0.01, jitter=0.002)
    outcome = scenario.run()
    took = [
        world.applied_at[r] - world.announced_at[c.record.body.parent]
        for r, c in world.records.items()
        if world.announced_at[c.record.body.parent] > 10.0  # the first rounds, while peers still join, may wait
    ]
    # Six one-way delays (header, blob there and back, record, vote), a refused fetch, and two answers of the trainer,
    # with room for jitter. When reduced: header, record, slices, attestations, shards there and back, vote.
    delays = 6 if exchange == GATHER else 9
    assert took and max(took) < 1.5 * (delays * 0.01 + RETRY + 2 * world.trainer_seconds) < world.policy.propose_seconds
    assert outcome.forks == 0 and outcome.rounds >= 8
    assert {c.record.body.attempt for c in world.records.values()} == {0}


@pytest.mark.parametrize("exchange", [GATHER, *long_cases(replace(REDUCE, update_size=100 * CHUNK))])
def test_fifty_peers_agree_round_after_round(exchange):
    scenario = Scenario(3, peers=50, calm=True, exchange=exchange)
    world = scenario.world
    for node in world.nodes:
        world.clock.at(0.0, node.boot)
    world.clock.run_until(16.0)
    check_sizes(world)
    assert world.height() >= 2
    assert all(len(c.record.body.updates) >= 45 for c in world.records.values())
    assert all(len(c.shards) in (0, len(c.record.body.updates)) for c in world.records.values())


# -- negative controls: a rule is broken, and the checker for it says so ------------------------------------------


class Forgetful(Node):
    """A node that does not put missed updates back into the error feedback."""

    def reached(self, action, record, state):
        super().reached(replace(action, missed=()), record, state)


class Doubling(Node):
    """Puts every update back into the feedback, accepted or not."""

    def make_update(self, action):
        before = set(self.trainer.feedback | self.trainer.fresh)
        super().make_update(action)
        self.trainer.feedback |= before


class Stubborn(Node):
    """Never asks for the chain of others."""

    def request_chain(self, action):
        pass


class Mute(Node):
    """Never votes, nor tells what was decided. (Without votes alone a swarm goes on, by rounds of one contributor.)"""

    def broadcast(self, message):
        if not isinstance(message.body, Vote):
            super().broadcast(message)

    def answer_chain(self, asker, incarnation, have):
        self.world.clock.after(1.0, asker.later, incarnation, ChainUnanswered(self.key))


@pytest.mark.parametrize(
    "control, words",
    [
        (Forgetful, "windows are lost"),
        (Doubling, "in two places|has already"),
        (Stubborn, "do not agree|decided no round|no round was decided"),
        (Mute, "do not agree|decided no round|no round was decided"),
    ],
)
def test_the_checkers_catch_a_peer_that_breaks_a_rule(control, words):
    found = []
    for seed in range(20):
        try:
            Scenario(seed, peers=4, node_type=control, hostile=False).run()
        except Broken as e:
            found.append(str(e))
            break
    assert found, f"{control.__name__} was not caught in 20 seeds"
    assert any(part in found[0] for part in words.split("|")), found[0]


def test_the_checkers_catch_names_of_records_that_do_not_bind_what_is_applied(monkeypatch):
    monkeypatch.setattr(Certificate, "digest", property(lambda c: c.record.digest))
    with pytest.raises(Broken, match="different states after the same record"):
        test_one_record_that_is_certified_with_two_means_sets_nobody_apart(4, 0.0, 1)


# -- what many members say less often: the same promises hold ----------------------------------------------------


@pytest.mark.parametrize("seed", [1, 4, 8])
def test_swarms_agree_though_few_repeat_others_messages_and_known_headers_are_told_now_and_then(monkeypatch, seed):
    monkeypatch.setattr(members, "REPEATERS", 1)
    monkeypatch.setattr(header_repair, "LIST_ALWAYS", 0)
    assert Scenario(seed, peers=6, fault_seconds=60.0).run().rounds > 5


def test_who_has_announced_and_does_not_say_which_headers_it_knows_is_not_sent_them_all(monkeypatch):
    monkeypatch.setattr(header_repair, "LIST_ALWAYS", 0)
    world = World(3, 5, Weather(delay=0.02, jitter=0.001))
    beats, helped = [], []

    class Listening(Node):
        def broadcast(self, message):
            if isinstance(message.body, Heartbeat) and message.body.phase == "exchanging":
                beats.append(len(message.body.known_headers))
            super().broadcast(message)

        def send(self, action):
            helped.extend(action.messages)
            super().send(action)

    for i in range(5):
        world.add(Listening if i else Withholder, speed=2.0)
        world.clock.at(0.0, world.nodes[i].boot)
    world.clock.run_until(30.0)  # rounds take their time: an update is not to be had
    assert world.height() >= 2 and beats.count(0) > len(beats) / 2 and max(beats) > 0
    assert not helped


@pytest.mark.parametrize("count, few", [(3, 3), (15, 15), (160, 8)])
def test_of_many_members_a_few_repeat_what_others_said_and_others_each_time(count, few):
    keys = [PeerKey(sha256(b"m", bytes([i]))) for i in range(count)]
    beat = Heartbeat(RUN, 1, Round(0), RUN, 0, 0, "training", 1.0, 1.0, 0, 0, (), (), b"a", "")
    beats = [FakeSigner(key).sign(beat) for key in keys]
    views = {key: members.Members(policy_for(count, max_members=count), key, lambda peer: (0, False)) for key in keys}
    for view in views.values():
        for message in beats:
            view.add_heartbeat(message, 0.0)
    of = Digest(sha256(b"record"))
    turns = [{key for key, view in views.items() if view.is_my_turn(of, turn)} for turn in range(40)]
    assert few / 2 <= sum(map(len, turns)) / len(turns) <= 2 * few
    assert set().union(*turns) == set(keys)

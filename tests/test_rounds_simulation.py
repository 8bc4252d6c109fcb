"""The simulator in the ordinary test run: a few hundred rounds of faults, and controls that show the checkers bite."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.exchange import GATHER
from protocol.merkle import CHUNK
from protocol.messages import Vote
from tests.simulation.checkers import Broken, check_sizes
from tests.simulation.hostile import HOSTILE_REDUCERS
from tests.simulation.network import Weather
from tests.simulation.node import RETRY, Node
from tests.simulation.scenario import Scenario
from tests.simulation.world import REDUCE


@pytest.mark.parametrize("seed", range(12))
def test_all_promises_hold_under_faults(seed):
    """Agreement after the faults, nothing counted twice, nothing lost, progress, bounds (see `simulation.checkers`)."""
    Scenario(seed).run()


@pytest.mark.parametrize("seed", range(8))
def test_all_promises_hold_when_rounds_are_reduced(seed):
    """And each part of a certified mean is what the updates give, unless most of its committee lies."""
    Scenario(seed, exchange=REDUCE).run()


@pytest.mark.parametrize("liar", HOSTILE_REDUCERS)
def test_rounds_are_reduced_though_one_of_five_is_hostile(liar):
    """Without any other fault: the run goes on, and no part of any certified mean is wrong."""
    scenario = Scenario(4, peers=5, calm=True, exchange=REDUCE)
    hostile = liar(scenario.world, 4, 2.0)
    scenario.world.nodes[4] = scenario.world.by_key[hostile.key] = hostile
    outcome = scenario.run()
    honest = [n.key for n in scenario.world.nodes[:4]]
    assert outcome.rounds >= 4
    listed = [key for c in scenario.world.records.values() for key in c.record.body.contributors]
    assert all(listed.count(key) >= outcome.rounds * 2 / 3 for key in honest)


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
    # with room for jitter. When reduced: header, record, slices, words, parts there and back, vote.
    delays = 6 if exchange == GATHER else 9
    assert took and max(took) < 1.5 * (delays * 0.01 + RETRY + 2 * world.trainer_seconds) < world.policy.propose_seconds
    assert outcome.forks == 0 and outcome.rounds >= 8
    assert {c.record.body.attempt for c in world.records.values()} == {0}


@pytest.mark.parametrize("exchange", [GATHER, replace(REDUCE, update_size=100 * CHUNK)])
def test_fifty_peers_agree_round_after_round(exchange):
    scenario = Scenario(3, peers=50, calm=True, exchange=exchange)
    world = scenario.world
    for node in world.nodes:
        world.clock.at(0.0, node.boot)
    world.clock.run_until(16.0)
    check_sizes(world)
    assert world.height() >= 2
    assert all(len(c.record.body.updates) >= 45 for c in world.records.values())
    assert all(len(c.parts) in (0, len(c.record.body.updates)) for c in world.records.values())


# -- negative controls: a rule is broken, and the checker for it says so ------------------------------------------


class Forgetful(Node):
    """Does not put missed updates back into the error feedback."""

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

    def request_chain(self, to, have):
        pass


class Mute(Node):
    """Never votes."""

    def broadcast(self, message):
        if not isinstance(message.body, Vote):
            super().broadcast(message)


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

"""A newcomer, or a peer that was away for long, joins a swarm whose trees have dropped the old records.

The coordinator is away: the members alone serve them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.rounds.policy import RoundPolicy
from tests.simulation.network import Weather
from tests.simulation.node import Node
from tests.simulation.world import World, policy_for

AWAY = 60.0
"""Seconds after which all trees have dropped the records that the one who was away knows."""


@pytest.fixture
def world(monkeypatch) -> World:
    """Return four members, who remember ten records each."""
    limits = RoundPolicy.chain_limits.fget
    assert limits is not None
    few = property(lambda self: replace(limits(self), max_records=10, min_main_records=8, max_side_records=4))
    monkeypatch.setattr(RoundPolicy, "chain_limits", few)
    world = World(1, 5, Weather(delay=0.02, jitter=0.005), policy=policy_for(2))
    for i in range(4):
        world.clock.at(0.01 * i, world.add(Node, speed=2.0).boot)
    return world


def agrees(world: World, late: Node) -> bool:
    return late.machine.chain.head == world.nodes[0].machine.chain.head


def test_a_newcomer_joins_from_members_alone(world: World):
    late = world.add(speed=2.0)
    world.clock.run_until(AWAY)
    assert world.nodes[0].machine.chain.root != world.genesis
    late.boot()
    world.clock.run_until(AWAY + 25.0)
    assert agrees(world, late) and late.key in late.machine.chain.stakes(late.machine.chain.head)


def test_a_peer_that_was_away_for_longer_than_the_trees_reach_comes_back(world: World):
    late = world.nodes[3]
    world.clock.run_until(10.0)
    late.crash()
    world.clock.run_until(AWAY)
    assert late.machine.chain.head not in world.nodes[0].machine.chain
    late.boot()
    world.clock.run_until(AWAY + 20.0)
    assert agrees(world, late)

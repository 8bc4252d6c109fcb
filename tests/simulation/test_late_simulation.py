"""A newcomer, or a peer that was away for long, joins a swarm whose trees have dropped the old records.

The coordinator is away: the members alone serve them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.rounds.events import ChainUnanswered
from protocol.rounds.phase import Phase
from protocol.rounds.policy import RoundPolicy
from tests.simulation.network import Weather
from tests.simulation.node import Node
from tests.simulation.world import World, policy_for

AWAY = 60.0
"""Seconds after which all trees have dropped the records that the one who was away knows."""


class Member(Node):
    """A member that can refuse requests for the chain, as one whose disk has lost it."""

    is_open = True

    def answer_chain(self, asker, incarnation, have) -> None:
        if self.is_open:
            super().answer_chain(asker, incarnation, have)
        else:
            self.world.clock.after(0.05, asker.later, incarnation, ChainUnanswered(self.key))


@pytest.fixture
def world(monkeypatch) -> World:
    """Return four members, who remember ten records each."""
    limits = RoundPolicy.chain_limits.fget
    assert limits is not None
    few = property(lambda self: replace(limits(self), max_records=10, min_main_records=8, max_side_records=4))
    monkeypatch.setattr(RoundPolicy, "chain_limits", few)
    world = World(1, 5, Weather(delay=0.02, jitter=0.005), policy=policy_for(2))
    for i in range(4):
        world.clock.at(0.01 * i, world.add(Member, speed=2.0).boot)
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


@pytest.mark.parametrize("late_ones", [1, 3])
def test_who_gets_no_old_records_trains_nothing_says_so_and_joins_once_members_give_them(
    world: World, late_ones, monkeypatch
):
    monkeypatch.setattr(Member, "is_open", False)
    world.clock.run_until(AWAY)
    late = [world.add(speed=2.0) for _ in range(late_ones)]
    for i, node in enumerate(late):
        world.clock.at(AWAY + i, node.boot)
    world.clock.run_until(AWAY + 60.0)
    assert [n.machine.phase for n in late] == [Phase.JOINING] * late_ones
    assert not any(n.machine.chain.head in world.records for n in late)
    said = [i for _, i, notice in world.reports if notice.kind == "left-behind"]
    assert sorted(said) == [n.index for n in late], "each says it once, not with each attempt"
    monkeypatch.setattr(Member, "is_open", True)
    world.clock.run_until(AWAY + 160.0)
    assert all(agrees(world, n) and n.machine.phase != Phase.JOINING for n in late)

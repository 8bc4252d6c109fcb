"""A split that only some see: an observer hears both sides, and hands each the other's records, but not their blobs."""

from __future__ import annotations

import pytest

from tests.simulation.checkers import check_counted_once, disagreement
from tests.simulation.network import Weather
from tests.simulation.world import World, policy_for

PEERS, SPLIT_SECONDS = 8, 94.0


def split(seed: int) -> World:
    """Four peers against four for a while, an observer between them; then, from now on, the network is whole."""
    policy = policy_for(
        PEERS, target_windows=12 * PEERS, max_update_windows=24 * PEERS, max_seconds=20.0, exchange_seconds=5.0,
        propose_seconds=1.0, patience_seconds=5.0, heartbeat_seconds=0.3, member_seconds=3.0,
    )  # fmt: skip
    world = World(seed, PEERS, Weather(delay=0.04, jitter=0.01), policy=policy)
    for i in range(PEERS):
        world.add(speed=2.0 + 0.02 * i)
    world.add(observer=True)
    for node in world.nodes:
        world.clock.at(world.rng.uniform(0, 1), node.boot)
    world.clock.run_until(20.0)
    for a in range(PEERS // 2):
        for b in range(PEERS // 2, PEERS):
            world.network.cut |= {(a, b), (b, a)}
    world.clock.run_until(20.0 + SPLIT_SECONDS)
    world.network.cut.clear()
    return world


@pytest.mark.parametrize("seed", range(4))
def test_after_a_split_the_heavier_branch_is_followed_at_once_though_it_was_set_aside_again_and_again(seed: int):
    world = split(seed)
    assert any(r.kind == "withheld" for _, _, r in world.reports)
    whole, height = world.clock.now, world.height()
    while disagreement(world.honest) is not None and world.clock.now < whole + 60.0:
        world.clock.run_until(world.clock.now + 0.25)
    assert world.clock.now - whole <= 3.0 and world.height() - height <= 2
    check_counted_once(world)

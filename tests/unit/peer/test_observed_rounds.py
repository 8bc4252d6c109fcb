"""Real nodes, a real observer, and the coordinator over it: what it says of how their rounds went."""

from __future__ import annotations

from tests.support.coordinated_world import CoordinatedWorld
from tests.support.node_world import TIMERS
from tests.support.trainer_world import BATCH, WINDOW

ROUND = {"target_tokens": 10 * BATCH * WINDOW, "max_update_tokens": 40 * BATCH * WINDOW, **TIMERS}


async def test_the_observer_sees_how_each_rounds_time_splits_and_who_announced(tmp_path):
    world = CoordinatedWorld(tmp_path, round=ROUND)
    try:
        await world.serve()
        for name in ("ada", "grace"):
            world.start(name)
        node = world.nodes["observer"]
        made = world.coordinator

        def whole():
            return [s for s in made.observations if None not in (s.train, s.exchange, s.commit, s.whole)]

        await world.until("two rounds seen whole", lambda: len(whole()) >= 2)
        for seen in whole():
            inside = {u.author for u in node.chain.certificate(seen.record).record.body.updates}
            assert inside <= set(made.observations.announcements(seen.record))
            # An announcement may arrive before the record that begins its round.
            early = max(0.0, seen.began - seen.announced)
            assert abs(seen.train + seen.exchange + seen.commit - early - seen.whole) < 1e-6
            assert seen.training >= len(inside)
        await world.kill("grace")
        await world.until(
            "it is said that one is missing",
            lambda: any(a.peer == world.key("grace") for s in made.observations for a in s.absent or ()),
        )
    finally:
        world.running.pop("grace", None)
        await world.close()

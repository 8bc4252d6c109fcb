"""A scenario drawn from a seed: a swarm, faults for a while, then quiet; all promises checked on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

from protocol.reduce_plan import GATHER, ReducePlan
from protocol.stake import StakeRule
from tests.simulation.attackers import ATTACKERS
from tests.simulation.checkers import (
    Broken,
    check_counted_once,
    check_every_window,
    check_one_state,
    check_parts,
    check_shown,
    check_sizes,
    check_words,
    check_words_reached,
    disagreement,
)
from tests.simulation.hostile import HOSTILE, HOSTILE_REDUCERS
from tests.simulation.network import Weather
from tests.simulation.node import Node, key_of
from tests.simulation.world import World, policy_for

GROUPS = (3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 8)
LARGE = (12, 20, 50)
FOUNDED = 10_000
"""Stake of each honest founder under attack. Claims are weights, so a liar would soon have most of the earned stake."""


@dataclass(frozen=True)
class Outcome:
    """The result of one seed."""

    seed: int
    peers: int
    rounds: int
    steps: int
    rounds_to_agree: int
    """Rounds decided from the end of the faults until all honest peers agreed within one round."""
    seconds_to_agree: float
    forks: int
    """Records that were certified and are not on the final chain."""


class Scenario:
    """Runs one seed. `node_type` is replaced by the negative controls.

    `attackers`: the hostile peers are a coalition. `rests`: users take their devices back for a while.
    """

    def __init__(
        self, seed: int, *, peers: int | None = None, calm: bool = False, verbose: bool = False, node_type=Node,
        fault_seconds: float = 120.0, hostile: bool = True, exchange: ReducePlan = GATHER, orders: bool = False,
        attackers: bool = False, rests: bool = False,
    ):  # fmt: skip
        rng = self.rng = random.Random(seed)
        if peers is None:
            peers = rng.choice(GROUPS) if rng.random() < 0.97 else rng.choice(LARGE)
        weather = Weather(
            loss=rng.choice((0.0, 0.02, 0.1, 0.25)), duplicate=rng.choice((0.0, 0.05, 0.2)),
            delay=rng.uniform(0.005, 0.15), jitter=rng.choice((0.005, 0.05, 0.3)),
        )  # fmt: skip
        self.calm = Weather(delay=weather.delay, jitter=0.02)
        policy = policy_for(peers, exchange=exchange)
        self.world = World(seed, peers, self.calm if calm else weather, policy=policy, verbose=verbose)
        self.fault_seconds = 0.0 if calm else fault_seconds if peers <= 12 else fault_seconds / 4
        hostiles = 0 if calm or not hostile else rng.randint(0, (peers - 1) // 3)
        if attackers and peers > 3:
            hostiles = max(1, hostiles)
            founders = tuple(key_of(i) for i in range(peers - hostiles))
            self.world.policy = replace(policy, stake=StakeRule(3, founders, FOUNDED))
        strategies = random.Random(seed * 17 + 3)
        attack = partial(strategies.choice(ATTACKERS), begins=strategies.uniform(15.0, 80.0))
        for i in range(peers):
            if i >= peers - hostiles and attackers:
                self.world.add(attack)
            elif i >= peers - hostiles:
                self.world.add(rng.choice(HOSTILE if exchange == GATHER else HOSTILE + HOSTILE_REDUCERS))
            else:
                speed = rng.choice((0.0, 0.05, 0.3)) if rng.random() < 0.1 else rng.uniform(1.0, 3.0)
                self.world.add(node_type, speed=speed if i else 2.0)
        self.late = [] if calm else [n for n in self.world.nodes[2:] if rng.random() < 0.15]
        if rng.random() < 0.5:
            self.world.add(observer=True)
        self.orders = orders
        """True if the owner meddles."""
        self.resting = random.Random(seed * 19 + 7) if rests else None
        self.changed = 0.0
        """When the faults last changed."""
        self._watched: tuple[float, int] = (0.0, 0)

    def run(self) -> Outcome:
        """Raises Broken."""
        world, clock = self.world, self.world.clock
        for node in world.nodes:
            if node not in self.late:
                clock.at(self.rng.uniform(0, 1.0), node.boot)
        if any(n.observer for n in world.nodes):
            clock.at(5.0, world.sign_finals, 3)
        self._run_to(10.0)
        end = 10.0 + self.fault_seconds
        while clock.now < end:
            self._fault()
            self._run_to(min(end, clock.now + self.rng.choice((0.5, 2.0, 5.0, 10.0, 20.0, 60.0))))
        self._stop_faults()
        since, before = clock.now, world.height()
        p = world.policy
        longest = p.exchange_seconds + p.patience_seconds + p.max_seconds + 2 * p.member_seconds
        agreed: tuple[float, int] | None = None
        while clock.now < since + longest:
            self._run_to(clock.now + 1.0)
            if disagreement(world.honest) is None:
                if agreed is None:
                    agreed = (clock.now - since, max(0, world.height() - before))
            elif agreed is not None and clock.now > since + longest / 2:
                agreed = None
        problem = disagreement(world.honest)
        if problem is not None or agreed is None:
            raise Broken(f"{longest:.0f} s after the faults stopped, honest peers do not agree: {problem}")
        height = world.height()
        self._run_to(clock.now + 20.0)
        if world.height() < height + 1:
            raise Broken(f"no round was decided in 20 s without faults (round {height})")
        if (problem := disagreement(world.honest)) is not None:
            raise Broken(f"honest peers do not agree at the end: {problem}")
        check_counted_once(world)
        check_parts(world)
        check_words_reached(world)
        rounds = world.height()
        forks = len(world.records) - rounds
        return Outcome(world.seed, len(world.nodes), rounds, clock.steps, agreed[1], agreed[0], forks)

    # -- faults ----------------------------------------------------------------------------------------------

    def _fault(self) -> None:  # noqa: C901 (a flat choice)
        rng, world = self.rng, self.world
        for node in world.nodes:
            node.drifts = False
        if self.orders and world.owner.rng.random() < 0.7:
            world.owner.change_something()
            self.changed = world.clock.now
            if world.owner.rng.random() < 0.4:
                return
        if self.resting is not None:
            for node in world.honest:
                if self.resting.random() < 0.3:
                    node.resume() if node.rests else node.rest()
            self.changed = world.clock.now
        node = rng.choice(world.nodes)
        match rng.choice(
            ("crash", "crash", "restart", "restart", "partition", "one way", "heal", "heal", "join", "drift")
        ):
            case "crash":
                if node.alive and len(world.honest) > 1:
                    node.crash()
            case "restart":
                for down in world.nodes:
                    if not down.alive and down not in self.late and rng.random() < 0.7:
                        down.boot()
            case "partition":
                side = {n.index for n in world.nodes if rng.random() < 0.4}
                for a in world.nodes:
                    for b in world.nodes:
                        if (a.index in side) != (b.index in side):
                            world.network.cut.add((a.index, b.index))
            case "one way":
                for other in world.nodes:
                    if other is not node and rng.random() < 0.7:
                        world.network.cut.add((node.index, other.index))
            case "heal":
                world.network.cut.clear()
            case "join":
                if self.late:
                    self.late.pop().boot()
            case "drift":
                # A wrong state is noticed by comparison: not by a peer that is alone, or has half of the stake.
                node.drifts = not world.network.cut and len(world.honest) >= 3 and not has_half_of_the_stake(node)
        self.changed = world.clock.now

    def _stop_faults(self) -> None:
        world = self.world
        world.network.cut.clear()
        world.network.weather = self.calm
        self.late.clear()
        for node in world.nodes:
            node.drifts = False
            if not node.alive:
                node.boot()
            if node.rests:
                node.resume()
        if self.orders and world.owner.body.run_status != "running":
            world.owner.say(run_status="running")
        self.changed = world.clock.now

    # -- checking on the way ----------------------------------------------------------------------------------

    def _run_to(self, when: float) -> None:
        world = self.world
        while world.clock.now < when:
            world.clock.run_until(min(when, world.clock.now + 5.0))
            check_sizes(world)
            check_one_state(world)
            check_shown(world)
            check_words(world)
            for node in world.honest:
                check_every_window(world, node)
            self._check_progress()

    def _check_progress(self) -> None:
        """Check that a group of honest peers that can talk goes on, whatever the others do.

        It goes on once it has seen that the others are gone.
        """
        world, p = self.world, self.world.policy
        group = max(self._groups(), key=len, default=[])
        now, height = world.clock.now, max((n.machine.chain.height(n.machine.chain.head) for n in group), default=0)
        # A branch may be left for a shorter one: a heavier one, or one whose updates can be had.
        self._watched = (self._watched[0], min(height, self._watched[1]))
        longest = 2 * p.max_seconds + p.exchange_seconds + p.patience_seconds + 2 * p.member_seconds
        newest = world.owner.newest
        knows = newest is None or any(n.machine.chain.newest_directive is newest for n in group)
        paused = world.owner.body.run_status != "running" or not knows
        if not any(n.speed >= 1.0 for n in group) or self._watched[0] < self.changed or paused:
            self._watched = (now, height)
        elif height > self._watched[1]:
            self._watched = (now, height)
        elif now - self._watched[0] > longest:
            indices = [n.index for n in group]
            raise Broken(f"peers {indices} can talk, and decided no round in {longest:.0f} s (round {height})")

    def _groups(self) -> list[list[Node]]:
        """Honest live peers by who can talk to whom, both ways, each with each."""
        left = {n for n in self.world.honest if not n.rests}
        found = []
        for node in self.world.honest:
            if node in left:
                group = [n for n in left if n is node or self.world.network.connected(node.index, n.index)]
                left -= set(group)
                whole = all(self.world.network.connected(a.index, b.index) for a in group for b in group if a is not b)
                if whole:
                    found.append(group)
        return found


def has_half_of_the_stake(node: Node) -> bool:
    """Return whether the others cannot outweigh a live node on its chain's head."""
    if not node.alive:
        return False
    stakes = node.machine.chain.stakes(node.machine.chain.head)
    return 0 < sum(stakes.values()) <= 2 * stakes.get(node.key, 0)

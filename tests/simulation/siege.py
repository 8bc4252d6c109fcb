"""One attack on one swarm without other faults, and the damage that it does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from protocol.ids import PeerKey
from protocol.stake import StakeRule
from tests.simulation.attackers import Attacker, Deserter, FrontRunner, Make, SiblingMaker, SoloCertifier
from tests.simulation.checkers import (
    Broken,
    Damage,
    check_history,
    check_not_ended,
    check_one_state,
    check_share,
    check_sizes,
)
from tests.simulation.network import Weather
from tests.simulation.node import Node
from tests.simulation.world import World, policy_for


class Siege:
    """A calm swarm of honest peers and attackers; the attack begins once all keys have had the time to earn."""

    def __init__(
        self, attackers: Sequence[Make], *, honest: int = 4, seed: int = 1, begins: float = 40.0,
        seconds: float = 80.0, finals: int | None = None, audits: bool = False,
        share_of_lost_checks: float = 0.0, speeds: Sequence[float] = (), **policy,
    ):  # fmt: skip
        """Make it. `speeds`: of all peers in order, the attackers last; 2.0 for each by default."""
        peers = honest + len(attackers)
        if audits:
            policy = {"stake": StakeRule(hold_rounds=5)} | policy  # the draw of auditors takes one of them
        self.world = World(
            seed, peers, Weather(delay=0.03, jitter=0.01), policy=policy_for(peers, **policy), audits=audits,
            share_of_lost_checks=share_of_lost_checks,
        )  # fmt: skip
        makes = [*[Node] * honest, *(partial(make, begins=begins) for make in attackers)]
        for make, speed in zip(makes, speeds or [2.0] * peers, strict=True):
            self.world.add(make, speed=speed)
        if finals is not None:
            self.world.add(observer=True)
            self.world.clock.at(5.0, self.world.sign_finals, finals)
        self.begins, self.end = begins, begins + seconds

    def run(self) -> Damage:
        """Return the damage. Raise `Broken` for a promise that holds whatever attackers do."""
        world, clock = self.world, self.world.clock
        for node in world.nodes:
            late = isinstance(node, Attacker) and node.late
            clock.at(self.begins if late else 0.01 * node.index, node.boot)
        clock.run_until(self.begins)
        before, world.deepest = self.height(), 0
        while clock.now < self.end:
            clock.run_until(min(self.end, clock.now + 5.0))
            check_sizes(world)
            check_one_state(world)
        rounds = self.height() - before
        lists = self.listed(before)
        windows = sum(sum(listed.values()) for listed in lists)
        theirs = sum(n for listed in lists for key, n in listed.items() if not world.by_key[key].honest)
        return Damage(
            rounds, (self.end - self.begins) / max(1, rounds), world.deepest, theirs / max(1, windows),
            world.completed, sum(world.nodes[0].key in listed for listed in lists) / max(1, len(lists)),
            windows - theirs,
        )  # fmt: skip

    def height(self) -> int:
        """Return the rounds that the most advanced honest peer has applied."""
        return max(len(self.world.way_to(n.trainer_record or self.world.genesis)) for n in self.world.honest)

    def listed(self, since: int) -> list[dict[PeerKey, int]]:
        """Return the weighed windows of each round from one on, by author, on the chain of the first honest peer."""
        node = self.world.honest[0]
        way = self.world.way_to(node.trainer_record or self.world.genesis)
        return [windows_of(node, record) for record in way if self.world.records[record].record.body.round >= since]


def windows_of(node: Node, record) -> dict[PeerKey, int]:
    body = node.world.records[record].record.body
    return dict(zip(body.contributors, body.weighed, strict=True))


def drawn(seed: int) -> tuple[str, Siege, float]:
    """Return an attack drawn from a seed, its description, and the attackers' part of the keys: less than half."""
    rng = random.Random(seed)
    honest = rng.choice((3, 4, 5, 6))
    count = rng.randint(1, honest - 1)
    make = rng.choice(
        (
            partial(SiblingMaker, count=rng.choice((1, 8, 70, 100, 200)), fresh=rng.random() < 0.5),
            partial(SiblingMaker, count=rng.choice((1, 8, 100)), spare=True),
            partial(SoloCertifier, length=rng.choice((1, 3, 15, 100)), back=rng.choice((0, 1, 2, 5, 20, 100))),
            partial(Deserter, length=rng.choice((15, 100)), back=rng.choice((1, 5, 20))),
            partial(FrontRunner, late=rng.random() < 0.5),
        )
    )
    finals, begins = rng.choice((None, None, 3, 8)), rng.choice((40.0, 60.0))
    text = f"{count} of {honest + count}: {make.func.__name__} {make.keywords}, finals {finals}, from {begins} s on"
    siege = Siege([make] * count, honest=honest, seed=seed, begins=begins, finals=finals, seconds=60.0)
    return text, siege, count / (honest + count)


def storm(seed: int) -> str | None:
    """Run the attack of a seed. Return the broken promise, if any."""
    text, siege, part = drawn(seed)
    try:
        damage = siege.run()
        check_history(damage)
        check_not_ended(damage)
        check_share(damage, part)
    except Broken as e:
        return f"siege {seed}, {text}: {e}"
    return None

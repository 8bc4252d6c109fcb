"""The run's owner in the simulator: changes its mind about the run now and then, and says so to one peer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Directive, Rollback, RoundChanges, Signed
from tests.simulation.signer import FakeSigner
from tests.simulation.trainer import state_after

if TYPE_CHECKING:
    from tests.simulation.world import World

KEY = FakeSigner(PeerKey(sha256(b"owner")))


class Owner:
    """`newest` is the last directive; `said` are all of them."""

    def __init__(self, world: World):
        self.world = world
        self.rng = random.Random(world.seed * 13 + 5)
        self.said: list[Signed[Directive]] = []

    @property
    def newest(self) -> Signed[Directive] | None:
        return self.said[-1] if self.said else None

    @property
    def body(self) -> Directive:
        return Directive(self.world.run, 0) if self.newest is None else self.newest.body

    def say(self, **changes) -> Signed[Directive]:
        """Issue one more directive; the observers receive it, or else one peer."""
        world = self.world
        body = replace(self.body, sequence=self.body.sequence + 1, **changes)
        self.said.append(KEY.sign(body))
        if world.verbose:
            print(f"{world.clock.now:8.2f} the owner: {body}")
        up = [n for n in world.nodes if n.alive]
        for node in [n for n in up if n.observer] or self.rng.sample(up, min(1, len(up))):
            node.hear(self.said[-1])
        return self.said[-1]

    def change_something(self) -> None:
        """Cause a fault of a random kind: all promises hold, whatever it is."""
        rng, world = self.rng, self.world
        height = max((n.machine.chain.height(n.machine.chain.head) for n in world.honest), default=0)
        match rng.choice(("pause", "resume", "resume", "ban", "unban", "policy", "rollback", "rollback", "replay")):
            case "pause":
                self.say(run_status="paused")
            case "resume":
                self.say(run_status="running")
            case "ban":
                others = [n.key for n in world.nodes[3:] if not n.observer]
                if others and len(self.body.banned) < len(world.nodes) // 4:
                    self.say(banned=tuple(sorted({*self.body.banned, rng.choice(others)})))
            case "unban":
                if self.body.banned:
                    self.say(banned=())
            case "policy":
                policy = world.policy
                changes = RoundChanges(
                    target_tokens=max(1, int(policy.target_windows * rng.uniform(0.5, 1.5))),
                    max_update_tokens=rng.choice((None, 20, 40, 80)), exchange_seconds=rng.choice((None, 4.0, 8.0)),
                    patience_seconds=rng.choice((None, 8.0)), max_members=rng.choice((None, 63)),
                )  # fmt: skip
                self.say(changes=changes, from_round=max(0, height + rng.choice((-2, 0, 3))))
            case "rollback":
                self.roll_back()
            case "replay":
                for node in world.nodes:
                    if node.alive and self.said:
                        node.hear(rng.choice(self.said))

    def roll_back(self) -> bool:
        """Roll back to a checkpoint that somebody has, on the chain of the observers or else of a peer."""
        world, every = self.world, self.world.policy.checkpoint_every
        up = [n for n in world.nodes if n.alive and (n.observer or (n.honest and n.key not in self.body.banned))]
        up = [n for n in up if n.observer] or up
        # The owner rolls back what it sees, and it knows its own directives.
        up = [n for n in up if self.newest is None or n.machine.chain.newest_directive is self.newest]
        if not up:
            return False
        chain = self.rng.choice(up).machine.chain
        height, root = chain.height(chain.head), chain.height(chain.root)
        found = []
        for at in range(max(root, height - 4 * every) // every * every, height + 1, every):
            record = chain.main_chain_at(at)
            if record is not None and record != chain.root:
                state = self.state_of(record)
                if any(state in n.checkpoints for n in world.nodes if n.honest):
                    found.append(Rollback(self.body.epoch + 1, record, chain.height(record), state))
        if not found:
            return False
        self.say(rollback=self.rng.choice(found))
        world.rolled_back(height)
        return True

    def state_of(self, record: Digest) -> Digest:
        """Return the state after a record, by replaying its path from the genesis."""
        way = []
        while record in self.world.records:
            way.append(self.world.records[record])
            record = way[-1].record.body.parent
        state = self.world.genesis_state
        for certificate in reversed(way):
            state = state_after(state, certificate)
        return state

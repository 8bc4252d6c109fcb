"""The simulated swarm: nodes, network, clock, and what the checkers need to know of everything that happened."""

from __future__ import annotations

import random
from collections.abc import Callable

from protocol.chain import Chain, genesis_digest
from protocol.ids import Digest, PeerKey, RunId, sha256
from protocol.merkle import CHUNK
from protocol.messages import Certificate, Finalization
from protocol.record_node import first_seed, next_seed
from protocol.reduce_plan import ReducePlan
from protocol.rounds.actions import Notice
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.policy import RoundPolicy
from protocol.stake import StakeRule
from tests.simulation.network import Clock, Network, Weather
from tests.simulation.node import Node
from tests.simulation.owner import KEY, Owner

OWNER = KEY


REDUCE = ReducePlan("reduce", committee=3, update_size=8 * CHUNK, mean_size=CHUNK)


def policy_for(peers: int, **changes) -> RoundPolicy:
    """Rounds of about four seconds when every peer does one to three windows a second; stake after three of them."""
    values = dict(
        target_windows=8 * peers, max_update_windows=60, max_seconds=12.0, exchange_seconds=6.0, propose_seconds=2.0,
        patience_seconds=10.0, heartbeat_seconds=1.0, member_seconds=6.0, max_members=64, checkpoint_every=5,
        checkpoint_keep=2, stake=StakeRule(hold_rounds=3),
    )  # fmt: skip
    return RoundPolicy(**{**values, **changes})


class World:
    """Everything of one run of the simulator."""

    trainer_seconds = 0.05
    progress_every = 0.5

    def __init__(
        self,
        seed: int,
        peers: int,
        weather: Weather | None = None,
        *,
        policy: RoundPolicy | None = None,
        verbose: bool = False,
        audits: bool = False,
        share_of_lost_checks: float = 0.0,
    ):
        self.seed = seed
        self.rng = random.Random(seed)
        self.verbose = verbose
        self.audits = audits
        """Peers make the checks that they are drawn for."""

        self.share_of_lost_checks = share_of_lost_checks
        """Share of the checks whose first attempt fails, drawn by `lost_checks`."""

        self.lost_checks = random.Random(seed * 13 + 5)
        self.clock = Clock()
        self.network = Network(self.clock, random.Random(seed * 7 + 1), weather or Weather())
        self.run = RunId(sha256(b"run", bytes(str(seed), "ascii")))
        self.genesis = genesis_digest(self.run)
        self.genesis_state = Digest(sha256(b"genesis", self.run))
        self.policy = policy or policy_for(peers)
        self.nodes: list[Node] = []
        self.by_key: dict[PeerKey, Node] = {}
        self.contents: dict[Digest, frozenset[int]] = {}
        """The windows that each blob carries."""
        self.bad_blobs: set[Digest] = set()
        self.made_by: dict[Digest, PeerKey] = {}
        """The author that each update names."""

        self.fakes: set[Digest] = set()
        """Updates that were not trained as they claim: a check of them finds it out."""
        self.records: dict[Digest, Certificate] = {}
        """Every record that anybody certified, by the name that the chain gives it."""
        self._seeds = {self.genesis: first_seed(self.genesis)}
        self.wrong_states: set[Digest] = set()
        """States that drifted devices computed, and the states that came of them."""
        self.announced_at: dict[Digest, float] = {}
        """When the first honest peer's update after each parent was ready."""
        self.applied_at: dict[Digest, float] = {}
        """When the last peer reached each record."""
        self.reports: list[tuple[float, int, Notice]] = []
        self._finals = 0
        self.owner = Owner(self)
        self._blobs = 0
        self.rounds_rolled_back = 0
        self.deepest = 0
        """Most rounds that an honest peer has left at once for another branch."""
        self.completed = False
        """An honest peer believes that the run has reached its total."""

    def add(self, node_type: Callable[..., Node] = Node, *, speed: float | None = None, observer: bool = False) -> Node:
        speed = speed if speed is not None else self.rng.uniform(1.0, 3.0)
        node = node_type(self, len(self.nodes), speed, observer)
        self.nodes.append(node)
        self.by_key[node.key] = node
        return node

    @property
    def honest(self) -> list[Node]:
        """Live honest nodes that train."""
        banned = self.owner.body.banned
        return [n for n in self.nodes if n.honest and n.alive and not n.observer and n.key not in banned]

    def seed_after(self, record: Digest) -> bytes:
        """Return the seed of the draws after a record, or after the genesis."""
        path = []
        while record not in self._seeds:
            path.append(record)
            record = self.records[record].record.body.parent
        for name in reversed(path):
            body = self.records[name].record.body
            self._seeds[name] = next_seed(self._seeds[body.parent], body)
        return self._seeds[path[0] if path else record]

    def rolled_back(self, height: int) -> None:
        """Record that the owner has rolled the run back from this height."""
        back = self.owner.body.rollback
        assert back is not None
        self._finals = back.round
        self.rounds_rolled_back += max(0, height - back.round)

    def height(self) -> int:
        """Rounds decided by the most advanced live honest node."""
        return max(
            (n.machine.chain.height(n.machine.chain.head) for n in self.nodes if n.alive and n.honest), default=0
        )

    def way_to(self, record: Digest) -> list[Digest]:
        """Return all records from the genesis to this one, newest first."""
        found = []
        while record in self.records:
            found.append(record)
            record = self.records[record].record.body.parent
        return found

    def describe(self) -> list[str]:
        """Return a line for each node: its position and what it waits for."""
        names = {key: n.index for key, n in self.by_key.items()}
        lines = []
        for node in self.nodes:
            if not node.alive:
                lines.append(f"{node.index}: down")
                continue
            s, b = node.machine.summary(self.clock.now), node.machine.open_round
            awaited = [names[k] for k in s.awaited]
            lines.append(
                f"{node.index} ({type(node).__name__}): {s.phase}, round {s.round} at {s.head.short}, windows "
                f"{s.windows}, chain {s.chain_head.short}, awaits {awaited}"
            )
            if b is None:
                continue
            lines.append(f"    headers {[(names[k], h.digest.short) for k, h in b.headers.items()]}")
            for p in b.proposals.values():
                who = [names[u.author] for u in p.record.body.updates]
                votes = [names[v.author] for v in b.votes_for(p.record)]
                by, attempt = names[p.record.author], p.record.body.attempt
                lines.append(
                    f"    record {p.record.digest.short} by {by}, attempt {attempt}, lists {who}, votes {votes}, "
                    f"missing {len(p.missing)}, bad {p.bad}, equivocated {p.equivocated}"
                )
        return lines

    # -- called by nodes -------------------------------------------------------------------------------------

    def new_blob(self, node: Node, parent: Digest, content: frozenset[int]) -> Digest:
        self._blobs += 1
        if node.honest:
            self.announced_at.setdefault(parent, self.clock.now)
        blob = Digest(sha256(b"blob", node.key, parent, str(self._blobs).encode()))
        self.contents[blob] = content
        self.made_by[blob] = node.key
        return blob

    def certified(self, node: Node, certificate: Certificate) -> None:
        self.records.setdefault(certificate.digest, certificate)

    def moved(self, node: Node, before: Digest | None, record: Digest) -> None:
        self.applied_at[record] = self.clock.now
        if node.honest and before is not None and before != self.genesis and before not in (way := self.way_to(record)):
            left = next((n for n, at in enumerate(self.way_to(before)) if at in way), len(self.way_to(before)))
            self.deepest = max(self.deepest, left)
        chain = node.machine.chain
        if self.verbose and record in chain:
            where = f"{record.short}, round {chain.height(record)}, weight {chain.weight(record)}"
            print(f"{self.clock.now:8.2f} {node.index:3d} at {where}")

    def report(self, node: Node, report: Notice) -> None:
        self.reports.append((self.clock.now, node.index, report))
        if self.verbose:
            print(f"{self.clock.now:8.2f} {node.index:3d} {report.level}: {report.kind}: {report.text}")

    def _available(self, observer: Node, record: Digest) -> bool:
        """Return whether somebody serves each blob that a member may need to replay the rounds up to a record."""
        chain = observer.machine.chain
        givers = [n for n in self.nodes if n.alive and self.network.connected(observer.index, n.index)]
        since = chain.height(record) - 2 * self.policy.checkpoint_every
        for height in range(max(chain.height(chain.root), since) + 1, chain.height(record) + 1):
            at = chain.main_chain_at(height)
            for blob in () if at is None else applied_blobs(chain.certificate(at)):
                if not any(n.gives(blob, observer.key) for n in givers):
                    return False
        return True

    def _is_backed(self, chain: Chain, record: Digest) -> bool:
        floor = chain.fork_choice_root
        path = [c.digest for c in chain.path(floor, record)] if chain.is_ancestor(floor, record) else []
        return 0 < len(path) == chain.count_backed(path)

    def sign_finals(self, depth: int) -> None:
        """Sign, as the owner and again and again, records deep enough in an observer's chain whose blobs can be had."""
        for node in self.nodes:
            if node.observer and node.alive:
                chain = node.machine.chain
                if chain.newest_directive is not self.owner.newest:
                    continue  # it has been down: the owner's coordinator knows its own directives
                height = chain.height(chain.head) - depth
                record = chain.main_chain_at(height) if height > self._finals else None
                if record is not None and self._is_backed(chain, record) and self._available(node, record):
                    self._finals = height
                    final = OWNER.sign(Finalization(self.run, height - 1, record, self.owner.body.epoch))
                    node.hear(final)
                    node.broadcast(final)
        self.clock.after(3.0, self.sign_finals, depth)

"""One row: a swarm of peers, run for some rounds, and what was counted."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.scale.fluid import Fluid
from benchmarks.scale.links import Clock, Links
from benchmarks.scale.peer import Peer
from benchmarks.scale.shadows import Shadows
from benchmarks.scale.shape import CORES, STEPS, Shape
from benchmarks.scale.sizes import Sizes, key_of
from protocol.ids import Digest, PeerKey, RunId, sha256
from protocol.messages import Certificate, Signed
from protocol.rounds import events as ev


@dataclass(frozen=True)
class Counts:
    """One row's figures, of the rounds after the first."""

    contributors: float
    round_seconds: float
    exchange_seconds: float
    """From a peer's announcement until it knows the certificate, median."""
    exchange_p90: float
    inner_steps: float
    """Of a peer in a round."""
    training: float
    """Share of the GPU's time."""
    training_without_overlap: float
    blob_bytes: float
    """Into one peer, a round; out of one likewise."""
    message_up: float
    message_down: float
    message_most: float
    """Bytes up of the peer that sent most, a round."""
    messages: float
    """Sent by one peer, a round."""
    machine_us: float
    """CPU, microseconds, of a machine's step."""
    machine_seconds: float
    """CPU, of one machine, a round."""
    steps: int
    attempts: int
    """Records that were certified after another's turn, of all rounds."""
    cpu_seconds: float
    reports: dict[str, int]
    by_event: dict[str, float]


class World:
    """Peers, lines, blobs and clock. `run` it."""

    cores = CORES

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape = shape
        self.rng = random.Random(seed)
        self.run = RunId(sha256(b"run", repr(shape).encode()))
        self.genesis = Digest(sha256(b"genesis"))
        self.clock = Clock()
        self.sizes = Sizes()
        self.steps = 0
        self._timed: dict[str, list[float]] = defaultdict(list)
        self.reports: Counter[str] = Counter()
        count = shape.peers
        self.peers = [Peer(self, i, shape.step * self.rng.uniform(0.95, 1.05)) for i in range(shape.machines)]
        self.index_of = {key_of(i): i for i in range(count)}
        self.made_by: dict[Digest, PeerKey] = {}
        """The author of each update."""

        self.shadows = Shadows(self)
        self.links = Links(
            self.clock, shape.machines, [shape.up / 8] * count, [shape.down / 8] * count, self.delay, self.size_of,
            lambda to, message, source: self.peers[to].hear(message, source),
        )  # fmt: skip
        self.fluid = Fluid(
            self.clock, self.links, lambda to, blob: self.peers[to].fetched(blob), columns=3 * count + 8,
            tick=min(1.0, max(0.01, shape.floor / 300)), efficiency=shape.efficiency,
        )  # fmt: skip
        self._certified: dict[Digest, list[float]] = defaultdict(list)
        self._applied: dict[Digest, list[float]] = defaultdict(list)
        self._order: list[Digest] = []
        self._records: dict[Digest, Certificate] = {}

    def delay(self, a: int, b: int) -> float:
        """One way, of a pair: within a fifth of the mean, always the same."""
        return self.shape.rtt / 2 * (0.8 + 0.4 * ((a * 7919 + b * 7919 + a * b * 31) % 101) / 100)

    def size_of(self, message: Any) -> int:
        if isinstance(message, Signed):
            return self.sizes.of(message, names=self.shape.names)
        if isinstance(message, Certificate):
            return self.sizes.of(message.record, names=False) + len(message.votes) * (self.sizes.vote + 3)
        if isinstance(message, ev.ChainReceived):
            return sum(self.size_of(c) for c in message.certificates)
        raise TypeError(f"a {type(message).__name__} has no size")

    def timed(self, event: ev.Event, seconds: float) -> None:
        """Record the duration of a machine's step."""
        what = event.message.body if isinstance(event, ev.MessageReceived) else event
        self._timed[type(what).__name__].append(seconds)

    def _step_seconds(self) -> tuple[float, dict[str, float]]:
        """Return the mean duration of a step: of all, and by event.

        Those in which this process lost its core are left out.
        """
        kept = {k: sorted(s)[: max(1, len(s) * 49 // 50)] for k, s in sorted(self._timed.items())}
        return sum(map(sum, kept.values())) / sum(map(len, kept.values())), {
            k: sum(s) / len(s) for k, s in kept.items()
        }

    # -- what peers tell -------------------------------------------------------------------------------------

    def certified(self, peer: Peer, certificate: Certificate) -> None:
        record = certificate.digest
        if record not in self._records:
            self._records[record] = certificate
            self._order.append(record)
        if peer.key in certificate.record.body.contributors:
            self._certified[record].append(self.clock.now - peer.announced_at)

    def applied(self, peer: Peer, record: Digest) -> None:
        self._applied[record].append(self.clock.now)

    # -- a run -----------------------------------------------------------------------------------------------

    def decided(self, rounds: int) -> bool:
        """Return whether more than nine of ten peers have applied this number of rounds."""
        return len(self._order) >= rounds and 10 * len(self._applied[self._order[rounds - 1]]) > 9 * len(self.peers)

    def play(self, rounds: int, virtual_seconds: float) -> Counts:
        """One round to warm up, then `rounds`; 0: the first alone. Raises RuntimeError when they are not decided."""
        began = time.process_time()
        policy = self.shape.policy
        for peer in self.peers:
            at = self.rng.uniform(0, min(1.0, policy.heartbeat_seconds))
            self.clock.at(at, peer.start)
            self.clock.at(at + peer.step_seconds, peer.train)
        if rounds:
            self.clock.run(lambda: self.decided(1), virtual_seconds)
        before = self._snapshot()
        self.clock.run(lambda: self.decided(1 + rounds), virtual_seconds)
        if not self.decided(1 + rounds):
            raise RuntimeError(
                f"{len(self._order)} rounds in {self.clock.now:.0f} s of virtual time; reports: {dict(self.reports)}"
            )
        return self._counts(rounds, before, time.process_time() - began)

    def _snapshot(self) -> tuple[Any, ...]:
        t = self.links.traffic
        return (
            self.clock.now, [x.up for x in t], [x.down for x in t], [x.sent for x in t], self.fluid.got.copy(),
            sum(p.steps_done for p in self.peers), sum(p.held_up for p in self.peers), self.steps,
        )  # fmt: skip

    def _counts(self, rounds: int, before: tuple[Any, ...], cpu: float) -> Counts:
        after, count, watched = self._snapshot(), self.shape.peers, len(self.peers)
        shape, records = self.shape, [self.peers[0].machine.chain.genesis, *self._order[: rounds + 1]]
        records = records[:2] if not rounds else records[1:]
        rounds = max(1, rounds)
        up, down, sent = ([b - a for a, b in zip(before[i], after[i], strict=True)] for i in (1, 2, 3))
        exchange = sorted(x for r in records[1:] for x in self._certified[r])
        ends = [median(self._applied[r]) for r in records]
        length = (ends[-1] - ends[0]) / rounds
        contributors = sum(len(self._records[r].record.body.updates) for r in records[1:]) / rounds
        held_up = shape.announce_gpu + shape.apply_gpu(round(contributors))
        steps = (after[5] - before[5]) / watched / rounds
        work = STEPS * shape.step
        mid = median(exchange)
        mean, by_event = self._step_seconds()
        return Counts(
            contributors=contributors,
            round_seconds=length,
            exchange_seconds=mid,
            exchange_p90=exchange[len(exchange) * 9 // 10],
            inner_steps=steps,
            training=1 - held_up / length,
            training_without_overlap=work / (work + shape.announce + mid + shape.apply(round(contributors))),
            blob_bytes=float((after[4] - before[4]).sum()) / watched / rounds,
            message_up=sum(up) / count / rounds,
            message_down=sum(down) / watched / rounds,
            message_most=max(up) / rounds,
            messages=sum(sent) / count / rounds,
            machine_us=1e6 * mean,
            machine_seconds=mean * (after[7] - before[7]) / watched / rounds,
            steps=self.steps,
            attempts=sum(self._records[r].record.body.attempt for r in records if r in self._records),
            cpu_seconds=cpu,
            reports=dict(self.reports),
            by_event={k: 1e6 * s for k, s in by_event.items()},
        )

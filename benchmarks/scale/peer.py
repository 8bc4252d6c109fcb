"""One peer: the product's round machine, and models of its trainer, its fetches and its checks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.scale.shadows import part_of
from benchmarks.scale.sizes import CheapSigner, key_of
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Certificate, RoundRecord, Signed
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus

if TYPE_CHECKING:
    from benchmarks.scale.world import World

ADMISSION = b"admitted"
SAMPLE = 61
"""Number of machine steps of which one is timed."""

REFUSED_AGAIN = 0.2
"""Seconds until a holder that refused is asked again (`peer.swarm.transfer.requests`)."""


class Peer:
    """`step` an event into the machine, and what it asks for is done in virtual time."""

    def __init__(self, world: World, index: int, step_seconds: float):
        self.world, self.index, self.step_seconds = world, index, step_seconds
        self.key = key_of(index)
        shape = world.shape
        self.machine = RoundMachine(
            shape.policy, world.run, CheapSigner(self.key), Chain(world.run, world.genesis, shape.policy.chain_limits),
            now=0.0, blob_size=shape.blob, status=LocalStatus(1, admission=ADMISSION),
        )  # fmt: skip
        self.tick_at = float("inf")
        self.counter = self.claimed = self.covered = 0
        self.trains = False
        self.steps_done = 0
        self.held_up = 0.0
        """Seconds of the GPU that an update or a round took, in all."""
        self.stall = 0.0
        """Of these, what the step that is under way has still to wait."""
        self.state = world.genesis
        self.queue: list[do.Action] = []
        self.working = False
        self.checked_at = [0.0] * world.cores
        self.announced_at = 0.0
        self.reducing: set[Digest] = set()
        """Records of which slices are wanted."""

    def start(self) -> None:
        self.carry_out(self.machine.start(self.world.clock.now))

    def step(self, event: ev.Event) -> None:
        world = self.world
        world.steps += 1
        if world.steps % SAMPLE:
            actions = self.machine.step(event, world.clock.now)
        else:
            began = time.perf_counter()
            actions = self.machine.step(event, world.clock.now)
            world.timed(event, time.perf_counter() - began)
        self.carry_out(actions)

    def tick(self, when: float) -> None:
        if when == self.tick_at:
            self.tick_at = float("inf")
            self.step(ev.Tick())

    # -- actions ---------------------------------------------------------------------------------------------

    def carry_out(self, actions: list[do.Action]) -> None:
        world, clock = self.world, self.world.clock
        for action in actions:
            match action:
                case do.Broadcast(message):
                    if isinstance(message.body, RoundRecord):
                        world.shadows.slate(message, self.machine.chain.seed(message.body.parent))
                    world.links.broadcast(self.index, message)
                    world.shadows.follow(self, message)
                case do.Send(to, messages, certificates):
                    if (other := world.index_of.get(to)) is not None:
                        world.links.send(self.index, other, (*messages, *certificates))
                case do.FetchBlob(blob, author, _):
                    clock.at(clock.now + world.shape.rtt * 2, self.fetch, blob, author)
                case do.FetchShard(blob, _, _, holders):
                    clock.at(clock.now + world.shape.rtt * 2, self.fetch, blob, holders[0])
                case do.CancelFetch(blob):
                    world.fluid.drop(self.index, blob)
                case do.ReduceShard(record, part, _):
                    clock.at(clock.now + world.shape.rtt * 2, self.reduce, record.digest, part)
                case do.CancelReduce(record):
                    self.reducing.discard(record)
                case do.RequestUpdate() | do.ApplyRecord() | do.SyncState():
                    if isinstance(action, do.ApplyRecord):
                        world.certified(self, action.certificate)
                    self.queue.append(action)
                    self.work()
                case do.RequestChain(to, have):
                    self.request_chain(to, have)
                case do.Notice(level, kind):
                    world.reports[f"{level}: {kind}"] += 1
                case _:
                    pass
        world.shadows.propose(self)
        if self.machine.next_tick < self.tick_at:
            self.tick_at = self.machine.next_tick
            clock.at(self.tick_at, self.tick, self.tick_at)

    def hear(self, message: Signed | Certificate | ev.ChainReceived, source: int) -> None:
        if isinstance(message, Signed):
            self.step(ev.MessageReceived(message))
        elif isinstance(message, Certificate):
            self.step(ev.CertificateReceived(message, key_of(source)))
        else:
            self.step(message)

    def request_chain(self, to: PeerKey, have: tuple[Digest, ...]) -> None:
        world, clock = self.world, self.world.clock
        other = world.peers[world.shadows.model(world.index_of[to])]
        clock.at(clock.now + world.shape.rtt / 2, other.answer_chain, self.index, have)

    def answer_chain(self, asker: int, have: tuple[Digest, ...]) -> None:
        chain = self.machine.chain
        certificates, more = chain.certificates_after(have, count=64)
        self.world.links.send(self.index, asker, [ev.ChainReceived(certificates, chain.finalization, self.key, more)])

    # -- blobs: two round trips to open a stream, get leaf hashes and a first chunk; then they flow ---------------

    def fetch(self, blob: Digest, author: PeerKey) -> None:
        world = self.world
        source = world.index_of[author]
        giver = world.peers[world.shadows.model(source)]
        if giver.machine.serve_refusal(blob, self.key) is not None:
            clock = world.clock
            clock.at(clock.now + REFUSED_AGAIN, self.fetch, blob, author)
            return
        shape = world.shape
        size = shape.blob if shape.exchange == "gather" else shape.mean // shape.parts
        world.fluid.fetch(self.index, blob, source, size)

    def reduce(self, record: Digest, part: int) -> None:
        """Slices of all updates: each author sends its own to the committee, and has sent them once at once."""
        shape = self.world.shape
        self.reducing.add(record)
        size = (shape.peers - 1) * shape.slice_bytes(part)
        self.world.fluid.fetch(self.index, (record, part), None, size)

    def fetched(self, blob: Digest | tuple[Digest, int]) -> None:
        """Accept a complete blob: one of the cores checks it, or sums it."""
        clock, cores, shape = self.world.clock, self.checked_at, self.world.shape
        core = min(range(len(cores)), key=cores.__getitem__)
        event: ev.Event
        if isinstance(blob, tuple):
            record, part = blob
            seconds, event = shape.reduce, ev.ShardReduced(record, part, part_of(record, part))
            if record not in self.reducing:
                return
        else:
            seconds = shape.check if shape.exchange == "gather" else shape.check / shape.parts
            event = ev.BlobHeld(blob, self.world.made_by.get(blob))
        cores[core] = max(clock.now, cores[core]) + seconds
        clock.at(cores[core], self.step, event)

    # -- the trainer: steps all the time, and beside them one thing after the other --------------------------------

    def train(self) -> None:
        """End a training step."""
        clock = self.world.clock
        if self.trains and self.counter < self.claimed + self.world.shape.policy.max_update_windows:
            self.counter += 1
            self.steps_done += 1
            self.progress()
        wait, self.stall = self.stall, 0.0
        clock.at(clock.now + self.step_seconds + wait, self.train)

    def progress(self) -> None:
        windows = self.counter - max(self.claimed, self.covered)
        self.step(ev.TrainingProgress(windows, 2.5, 65_536.0))

    def hold_up(self, seconds: float) -> None:
        self.stall += seconds
        self.held_up += seconds

    def work(self) -> None:
        if self.working or not self.queue:
            return
        self.working = True
        action, shape, clock = self.queue.pop(0), self.world.shape, self.world.clock
        match action:
            case do.RequestUpdate():
                self.hold_up(shape.announce_gpu)
                clock.at(clock.now + shape.announce, self.made, action)
            case do.ApplyRecord(certificate):
                updates = len(certificate.record.body.updates)
                self.hold_up(shape.apply_gpu(updates))
                clock.at(clock.now + shape.apply(updates), self.moved, action)
            case _:
                clock.at(clock.now, self.moved, action)

    def made(self, action: do.RequestUpdate) -> None:
        self.working = False
        first, self.covered = self.claimed, self.counter
        blob = Digest(sha256(b"blob", self.key, action.parent))
        self.announced_at = self.world.clock.now
        self.world.made_by[blob] = self.key
        self.step(
            ev.UpdateReady(
                action.parent, first, first, self.covered, self.covered - first, blob, self.world.shape.blob, 2.5
            )
        )
        self.work()

    def moved(self, action: do.ApplyRecord | do.SyncState) -> None:
        self.working = False
        path = action.path if isinstance(action, do.SyncState) else (action.certificate,)
        for certificate in path:
            self.state = Digest(sha256(b"state", self.state, certificate.digest))
        record = path[-1].digest if path else self.machine.chain.root
        self.trains = True
        self.claimed = action.next_window
        self.covered = max(self.claimed, self.covered) if not action.missed else self.claimed
        self.counter = max(self.counter, self.claimed)
        self.world.applied(self, record)
        self.step(ev.StateReached(record, self.state))
        self.progress()
        self.work()

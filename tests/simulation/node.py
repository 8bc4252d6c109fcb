"""One peer of the simulated swarm: the product's driver over simulated effects, and a store that survives crashes."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from peer.node.driver import RoundDriver
from peer.node.events import EventQueue, NodeEvents
from peer.node.round_timings import RoundTimings
from protocol.chain import Chain, FinalizedConflict, UnknownParent
from protocol.ids import Digest, PeerKey, sha256
from protocol.messages import Certificate, Directive, Finalization, Score, Signed, UpdateHeader
from protocol.rounds import actions as do
from protocol.rounds import events as ev
from protocol.rounds.blobs import applied_blobs
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import LocalStatus
from tests.simulation.committee import CommitteeWork
from tests.simulation.signer import FakeSigner
from tests.simulation.trainer import Trainer, state_after

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")

FETCH_DEADLINE = 3.0
RETRY = 0.1
"""Seconds until the next try after a refusal because the holder has not received our header yet."""

CHAIN_DEADLINE = 2.0
AUDIT_SECONDS = 0.5
ADMISSION = b"admitted"


def completed(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing: the simulator's effects are immediate."""
    try:
        work.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("an effect of the simulator waits for something")


def key_of(index: int) -> PeerKey:
    """Return the key of the peer with an index."""
    return PeerKey(sha256(b"peer", bytes([index % 256, index // 256])))


class Node:
    """One peer, driven by the product's `RoundDriver`, whose effects (`RoundEffects`) it is.

    `honest` nodes are the ones whose promises are checked.
    """

    honest = True
    machine_type = RoundMachine

    def __init__(self, world: World, index: int, speed: float, observer: bool = False):
        self.world = world
        self.index = index
        self.speed = speed
        self.observer = observer
        self.key = key_of(index)
        self.signer = FakeSigner(self.key)
        self.reporter: FakeSigner | None = None if observer else self.signer
        """The signer of its work reports. An observer with one audits without training."""

        self.alive = False
        self.incarnation = 0
        self.drifts = False
        """The next state is computed wrongly."""
        # The store: survives crashes.
        self.certificates: list[Certificate] = []
        self.final: Signed[Finalization] | None = None
        self.pending: Signed[Finalization] | None = None
        self.directive: Signed[Directive] | None = None
        self.header: Signed[UpdateHeader] | None = None
        self.blobs: set[Digest] = set()
        self.slices: set[tuple[Digest, int, int]] = set()
        """Of others' updates: blob, number of parts, part."""
        self.checkpoints: set[Digest] = {world.genesis_state}
        self.attempted: set[ev.AuditNotMade] = set()
        """The checks that it was asked for."""

    # -- life ------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start, or start again from the store."""
        w = self.world
        self.alive = True
        self.incarnation += 1
        chain = Chain(w.run, w.genesis_state, w.policy.chain_limits)
        if self.final is not None:
            chain.add_finalization(self.final)
        if self.directive is not None:
            chain.add_directive(self.directive)
        for certificate in self.certificates:
            try:
                chain.add(certificate)
            except (UnknownParent, FinalizedConflict):
                continue
        if self.pending is not None:
            chain.add_finalization(self.pending)
        self.trainer = Trainer(
            self.index * 1000 + self.incarnation, self.speed, w.policy.max_update_windows, w.clock.now
        )
        self.machine = self.machine_type(
            w.policy, w.run, self.signer, chain, now=w.clock.now, observer=self.observer, blob_size=1000,
            report_signer=self.reporter if w.audits else None, announced=self.header,
        )  # fmt: skip
        self.tick_at = float("inf")
        self.trainer_record: Digest | None = None
        """The record whose state the trainer holds."""
        self.made: dict[Digest, Digest] = {}
        """Updates of this incarnation's trainer, or taken over from the one before: blob -> parent."""
        self.queue: list = []
        self.working: Any = None
        """The action that the trainer carries out."""
        self.rests = False
        self.fetching: set[Digest] = set()
        self.committee_work = CommitteeWork(self)
        self.shards_asked: dict[Digest, set[Digest]] = {}
        """Shards that are fetched, by record."""

        self.done = False
        bus = NodeEvents()
        self.driver = RoundDriver(
            self.machine, self, EventQueue(bus), bus, RoundTimings(), status=self.status,
            clock=lambda: w.clock.now,
        )  # fmt: skip
        self.booting = True
        self.carried_out(completed(self.driver.start(alone=False)))
        self.booting = False
        self.progress(self.incarnation)

    def crash(self) -> None:
        """Lose all that is not in the store."""
        self.alive = False

    def status(self) -> LocalStatus:
        """Return what the machine cannot know. At a restart the sequence grows, even within a millisecond."""
        sequence = int(self.world.clock.now * 1000) + (self.incarnation if self.booting else 0)
        return LocalStatus(sequence, admission=ADMISSION)

    def step(self, event) -> None:
        if self.alive:
            self.carry_out_all(self.driver.step(event))

    def later(self, incarnation: int, event) -> None:
        """Deliver an event to the incarnation that asked for it."""
        if self.alive and incarnation == self.incarnation:
            self.step(event)

    def tick(self, incarnation: int, when: float) -> None:
        if self.alive and incarnation == self.incarnation and when == self.tick_at:
            self.tick_at = float("inf")
            self.step(ev.Tick())

    def progress(self, incarnation: int) -> None:
        if not self.alive or incarnation != self.incarnation or self.observer:
            return
        before = self.trainer.uncovered
        self.trainer.run(self.world.clock.now)
        if self.trainer.uncovered != before:
            self.step(ev.TrainingProgress(self.trainer.uncovered, 1.0, self.speed * 128))
        self.world.clock.after(self.world.progress_every, self.progress, incarnation)

    # -- actions ---------------------------------------------------------------------------------------------

    def carry_out_all(self, actions) -> None:
        """Carry out actions through the product's driver, whose effects are `carry_out`."""
        self.carried_out(completed(self.driver.carry_out(actions)))

    async def carry_out(self, action: do.Action) -> None:  # noqa: C901 (a flat choice)
        match action:
            case do.StoreCertificate(certificate):
                self.certificates.append(certificate)
                self.world.certified(self, certificate)
            case do.StoreFinalization(message, awaited):
                if awaited:
                    self.pending = message
                else:
                    self.final = message
            case do.StoreDirective(message):
                self.directive = message
            case do.StoreHeader(message):
                self.header = message
            case do.StoreEpoch() | do.AcquireTrainer():
                pass  # a restarted trainer has learnt nothing, and a move follows
            case do.Broadcast(message):
                self.broadcast(message)
            case do.Send():
                self.send(action)
            case do.RequestChain():
                self.request_chain(action)
            case do.FetchBlob():
                self.fetch_blob(action)
            case do.FetchShard():
                if action.blob not in self.fetching:
                    self.shards_asked.setdefault(action.record.digest, set()).add(action.blob)
                self.fetch_blob(action)
            case do.CancelFetch(blob):
                self.fetching.discard(blob)
            case do.ReduceShard():
                self.committee_work.begin(action)
            case do.CancelReduce(record):
                self.committee_work.drop(record)
                self.fetching -= self.shards_asked.pop(record, set())
            case do.RequestUpdate() | do.ApplyRecord() | do.SyncState() | do.KeepState():
                self.queue.append(action)
            case do.DirectivesChanged():
                self.on_directives_changed(action)
            case do.ReleaseTrainer():
                self.release_trainer()
            case do.AuditUpdate():
                self.audit_update(action)
            case do.Notice():
                self.world.report(self, action)
            case do.RunCompleted():  # the trainer goes on, so that its windows can be checked
                self.world.completed = self.world.completed or self.honest and not self.observer
            case _:
                raise AssertionError(f"the simulator does not know the action {type(action).__name__}")

    def carried_out(self, finished: do.Finished | None) -> None:
        w = self.world
        self.done = self.done or finished is not None
        self.work()
        if self.machine.next_tick < self.tick_at:
            self.tick_at = self.machine.next_tick
            w.clock.at(self.tick_at, self.tick, self.incarnation, self.tick_at)

    def broadcast(self, message) -> None:
        for node in self.world.nodes:
            if node is not self and node.alive:
                self.world.network.send(self.index, node.index, node.hear, message)

    def send(self, action: do.Send) -> None:
        node = self.world.by_key.get(action.to)
        if node is not None and node.alive:
            for message in action.messages:
                self.world.network.send(self.index, node.index, node.hear, message)
            for certificate in action.certificates:
                event = ev.CertificateReceived(certificate, self.key)
                self.world.network.send(self.index, node.index, node.step, event)

    def fetch_blob(self, action: do.FetchBlob | do.FetchShard) -> None:
        if action.blob not in self.fetching:
            self.fetching.add(action.blob)
            self.fetch(self.incarnation, action, self.world.clock.now + FETCH_DEADLINE)

    def on_directives_changed(self, action: do.DirectivesChanged) -> None:
        self.changed = action
        self.trainer.order(self.world.clock.now, action.paused or self.rests, action.policy.max_update_windows)

    def audit_update(self, action: do.AuditUpdate) -> None:
        """Make the check in half a second, and tell the truth: fakes fail it. Some first attempts cannot be made."""
        w, lost = self.world, ev.AuditNotMade(action.certificate.digest, action.update, action.check, action.seed)
        if lost not in self.attempted and w.lost_checks.random() < w.share_of_lost_checks:
            w.clock.after(AUDIT_SECONDS, self.later, self.incarnation, lost)
        else:
            self.answer_audit(action, passed=self.is_honest_work(action))
        self.attempted.add(lost)

    def is_honest_work(self, action: do.AuditUpdate) -> bool:
        """Return whether the update to audit was trained as it claims."""
        return self.audited_header(action).body.blob not in self.world.fakes

    def audited_header(self, action: do.AuditUpdate) -> Signed[UpdateHeader]:
        return next(u for u in action.certificate.record.body.updates if u.digest == action.update)

    def answer_audit(self, action: do.AuditUpdate, *, passed: bool) -> None:
        """Answer a check. Screens pass: they cost less than any other check, and none is relied on."""
        passed = passed or action.check == "screen"
        event = ev.UpdateAudited(
            action.certificate.digest, action.update, action.check, action.seed, (Score("work", float(passed), 0.5),)
        )
        self.world.clock.after(AUDIT_SECONDS, self.later, self.incarnation, event)

    def rest(self) -> None:
        """Want the devices for a while: no step begins from now on."""
        self.rests = True
        self.trainer.run(self.world.clock.now)
        self.trainer.rests = True
        self.step(ev.Rest())

    def release_trainer(self) -> None:
        """Save and end: what was learnt comes back with the next trainer."""
        self.queue.clear()
        self.working = None
        self.trainer.run(self.world.clock.now)
        self.trainer.state = self.trainer_record = None

    def resume(self) -> None:
        """Train again."""
        self.rests = False
        self.on_directives_changed(self.changed)
        self.step(ev.Resume())

    def hear(self, message) -> None:
        if self.alive:
            self.step(ev.MessageReceived(message))

    # -- blobs and certificates from others -------------------------------------------------------------------

    def gives(self, blob: Digest, to: PeerKey) -> bool:
        """Return whether this node serves a blob to a peer now."""
        return self.alive and blob in self.blobs and self.machine.serve_refusal(blob, to) is None

    def gives_slice(self, blob: Digest, parts: int, part: int, to: PeerKey) -> bool:
        """Return whether this node serves a peer the slice of an update that a part needs."""
        return self.committee_work.gives(blob, parts, part, to)

    def fetch(self, incarnation: int, action: do.FetchBlob | do.FetchShard, deadline: float) -> None:
        w = self.world
        if not self.alive or incarnation != self.incarnation or action.blob not in self.fetching:
            return
        found = action.blob in self.blobs
        for key in action.holders if isinstance(action, do.FetchShard) else (action.author, *action.holders):
            node = w.by_key[key]
            if found or (
                w.network.connected(self.index, node.index) and node is not self and node.gives(action.blob, self.key)
            ):
                found = True
                break
        if found:
            w.clock.after(2 * w.network.delay(), self.fetched, incarnation, action.blob)
        elif w.clock.now >= deadline:
            self.fetching.discard(action.blob)
            self.step(ev.BlobUnavailable(action.blob))
        else:
            w.clock.after(RETRY, self.fetch, incarnation, action, deadline)

    def fetched(self, incarnation: int, blob: Digest) -> None:
        if not self.alive or incarnation != self.incarnation or blob not in self.fetching:
            return
        self.fetching.discard(blob)
        if blob in self.world.bad_blobs:
            self.step(ev.BlobInvalid(blob, "chunk 3: a scale that is not finite"))
        else:
            self.blobs.add(blob)
            self.step(ev.BlobHeld(blob, self.world.made_by.get(blob)))

    def request_chain(self, action: do.RequestChain) -> None:
        to, have = action.to, action.have
        w, node, incarnation = self.world, self.world.by_key[to], self.incarnation
        lost = w.network.rng.random() < w.network.weather.loss
        if lost or not node.alive or not w.network.connected(self.index, node.index):
            w.clock.after(CHAIN_DEADLINE, self.later, incarnation, ev.ChainUnanswered(to))
            return
        w.clock.after(w.network.delay(), node.answer_chain, self, incarnation, have)

    def answer_chain(self, asker: Node, incarnation: int, have) -> None:
        w = self.world
        if not self.alive:
            w.clock.after(CHAIN_DEADLINE, asker.later, incarnation, ev.ChainUnanswered(self.key))
            return
        chain = self.machine.chain
        if older := chain.older_records_after(have, count=8):
            held = {c.digest: c for c in self.certificates}
            certificates, more = tuple(held[record] for _, record in older), True
        else:
            certificates, more = chain.certificates_after(have, count=8)
        event = ev.ChainReceived(certificates, chain.finalization, self.key, more, chain.newest_directive)
        w.clock.after(w.network.delay(), asker.later, incarnation, event)

    # -- the trainer: one thing at a time, in order ------------------------------------------------------------

    def work(self) -> None:
        if self.queue and self.working is None:
            action = self.working = self.queue.pop(0)
            seconds = self.world.trainer_seconds * (3 if isinstance(action, do.SyncState) else 1)
            self.world.clock.after(seconds, self.worked, self.incarnation, action)

    def worked(self, incarnation: int, action) -> None:
        if not self.alive or incarnation != self.incarnation or action is not self.working:
            return
        self.working = None
        match action:
            case do.RequestUpdate():
                self.make_update(action)
            case do.ApplyRecord():
                self.apply(action)
            case do.SyncState():
                self.resync(action)
            case do.KeepState():
                self.write_state(action)
        self.work()

    def make_update(self, action: do.RequestUpdate) -> None:
        self.trainer.run(self.world.clock.now)
        made = self.trainer.make()
        if made is None:
            self.step(ev.UpdateReady(action.parent, 0, 0, 0, 0, None, 0, 0.0))
            return
        first, end, content = made
        blob = self.world.new_blob(self, action.parent, content)
        self.blobs.add(blob)
        self.made[blob] = action.parent
        self.step(ev.UpdateReady(action.parent, first, first, end, end - first, blob, 1000, 1.0))

    def write_state(self, action: do.KeepState) -> None:
        if self.trainer_record != action.record or self.trainer.state is None:
            raise AssertionError(f"peer {self.index} was told to write a state that its trainer does not hold")
        self.checkpoints.add(self.trainer.state)
        self.step(ev.StateReached(action.record, self.trainer.state))

    def apply(self, action: do.ApplyRecord) -> None:
        record, name = action.certificate.record, action.certificate.digest
        trainer, w = self.trainer, self.world
        trainer.run(self.world.clock.now)
        missing = [blob for blob in applied_blobs(action.certificate) if blob not in self.blobs]
        own = {u.body.blob for u in record.body.updates if u.author == self.key}
        if any(blob in w.bad_blobs and blob not in own for blob in applied_blobs(action.certificate)):
            raise AssertionError(f"peer {self.index} was told to apply a bad update")
        if missing or self.trainer_record != record.body.parent:
            kept = self.trainer_record == record.body.parent
            self.step(ev.SyncFailed(name, "a blob is not in the store, or this is the wrong state", kept=kept))
            return
        assert trainer.state is not None
        state = state_after(trainer.state, action.certificate)
        if trainer.state in w.wrong_states:
            w.wrong_states.add(state)
        self.reached(action, name, state)

    def reached(self, action: do.ApplyRecord | do.SyncState, record: Digest, state: Digest) -> None:
        w = self.world
        # By the world's records: a final may have cut this one off our tree meanwhile.
        height = 0 if record == self.machine.chain.genesis else w.records[record].record.body.round + 1
        if height % w.policy.checkpoint_every == 0:
            self.checkpoints.add(state)
        if self.drifts:
            self.drifts = False
            state = Digest(sha256(b"drifted", state))
            w.wrong_states.add(state)
        before, self.trainer_record = self.trainer_record, record
        for blob in action.missed:
            self.made.pop(blob, None)
        if isinstance(action, do.SyncState) and action.reset:
            self.made.clear()
            self.trainer.begin_afresh()
        self.trainer.move(action, state, w.contents)
        w.moved(self, before, record)
        self.step(ev.StateReached(record, state))
        self.step(ev.TrainingProgress(self.trainer.uncovered, 1.0, self.speed * 128))

    def resync(self, action: do.SyncState) -> None:
        w = self.world
        self.trainer.run(w.clock.now)
        path = action.path
        reachable = [n for n in w.nodes if n is self or (n.alive and w.network.connected(self.index, n.index))]
        if not path and action.start is not None:
            if any(action.start.state in n.checkpoints for n in reachable):
                self.reached(action, action.start.record, action.start.state)
            else:
                self.step(
                    ev.SyncFailed(action.start.record, "nobody has the state that the run is rolled back to", kept=True)
                )
            return
        if not path:
            self.reached(action, self.machine.chain.genesis, w.genesis_state)
            return
        start = None
        for i in reversed(range(len(path))):
            base = path[i].record.body.base_state
            if any(base in n.checkpoints for n in reachable):
                start = i
                break
        head = path[-1].digest
        if start is None:
            self.step(ev.SyncFailed(head, "nobody has a checkpoint that the path starts from", kept=True))
            return
        state = path[start].record.body.base_state
        for certificate in path[start:]:
            record = certificate.record
            if record.body.base_state != state:
                self.step(ev.SyncFailed(head, "the path names another state than it leads to"))
                return
            own = {u.body.blob for u in record.body.updates if u.author == self.key}
            for blob, role in applied_blobs(certificate).items():
                if role.header is not None and w.made_by[blob] != role.responsible:
                    self.step(ev.BlobHeld(blob, w.made_by[blob]))
                    self.step(ev.SyncFailed(head, "an update on the path names another author", kept=True))
                    return
                if blob not in self.blobs:
                    if not any(n.gives(blob, self.key) for n in reachable if n is not self):
                        self.step(ev.SyncFailed(head, "a blob cannot be had", kept=True))
                        return
                    if blob in w.bad_blobs and blob not in own:
                        self.step(ev.BlobInvalid(blob, "chunk 3: a scale that is not finite"))
                        self.step(ev.SyncFailed(head, "an update on the path is bad", kept=True))
                        return
                    self.blobs.add(blob)
            state = state_after(state, certificate)
            if (record.body.round + 1) % w.policy.checkpoint_every == 0:
                self.checkpoints.add(state)
        self.reached(action, head, state)

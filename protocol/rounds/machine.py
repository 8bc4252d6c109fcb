"""The round machine of one peer: `step(event, now)` returns the actions that follow (docs/rounds.md).

    machine = RoundMachine(RoundPolicy.of(spec), spec.run_id, signer, chain, now=time)
    actions = machine.start(time)
    loop: carry out the actions; on a message, an answer, or at `machine.next_tick`: actions = machine.step(event, time)

Time is in seconds of any monotonic clock. Nothing here blocks, and every container has a bound (`sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.chain import Chain, FinalizedConflict, UnknownParent
from protocol.errors import ChainError
from protocol.ids import Digest, PeerKey, RunId
from protocol.message_codec import Signer
from protocol.messages import (
    Certificate,
    Directive,
    Finalization,
    Goodbye,
    Heartbeat,
    RoundRecord,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Vote,
)
from protocol.rounds import events as ev
from protocol.rounds.actions import (
    Action,
    Broadcast,
    DirectivesChanged,
    RequestChain,
    Send,
    StoreCertificate,
    StoreEpoch,
    StoreFinalization,
)
from protocol.rounds.chain_sync import Bootstrap, ChainSync
from protocol.rounds.consensus import Consensus
from protocol.rounds.context import Context
from protocol.rounds.departure import Departure
from protocol.rounds.directive_gossip import DirectiveGossip
from protocol.rounds.exchange import Slice
from protocol.rounds.faults import blob_invalid, conflicting_shards
from protocol.rounds.future_messages import AHEAD, FutureMessages
from protocol.rounds.gathered_exchange import GatheredExchange
from protocol.rounds.header_repair import known_headers, pass_on_headers
from protocol.rounds.phase import InvariantError, Phase, check_transition, phase_of
from protocol.rounds.policy import LocalStatus, RoundPolicy
from protocol.rounds.retention import retained
from protocol.rounds.round_state import RoundState
from protocol.rounds.state_sync import StateSync
from protocol.rounds.summary import Summary, summarise

MAX_TURNS = 100
"""Maximum number of turns in a step: each turn of a correct machine decides or moves something."""


class RoundMachine:
    """See the module. Events and the peer's status come in with `step`; actions are its only output.

    Queries: `next_tick`, `phase`, `chain`, `serve_refusal`, `slices_for`, `retained_blobs`, `summary` and `sizes`.
    """

    def __init__(
        self,
        policy: RoundPolicy,
        run: RunId,
        signer: Signer,
        chain: Chain,
        *,
        now: float,
        observer: bool = False,
        blob_size: int | Callable[[int], bool] | None = None,
        status: LocalStatus | None = None,
    ):
        """`chain` is loaded with what the store holds, and is the machine's from now on.

        `blob_size` is the size in bytes of updates of the run's codec: a number, or a predicate; None accepts any size.
        """
        accepts_size = blob_size if callable(blob_size) else (lambda size: blob_size in (None, size))
        self._c = Context(policy, run, signer, chain, observer, accepts_size, now)
        self._status = status or LocalStatus()
        self._sync = StateSync(self._c)
        self._consensus = Consensus(self._c, self._sync)
        self._governance = DirectiveGossip(self._c)
        self._departure = Departure(self._c)
        self._chain_sync = ChainSync(policy.max_members + 64, policy.heartbeat_seconds)
        self._future = FutureMessages(2 * policy.max_members)
        self._bootstrap = Bootstrap(now, policy.member_seconds)
        self._phase = Phase.OBSERVING if observer else Phase.JOINING
        self._sequence = self._beats = 0
        self._walked = -1
        """Height that the answers to the present series of chain requests have reached."""

        self._beat_at = now
        self._requested_for: tuple = ()
        """The inputs that the blob requests were derived from."""

        self._published: DirectivesChanged | None = None
        self._stored_epoch: int | None = None
        self.next_tick = now
        """The time to step with a `Tick`, if no other event comes before; infinite once we have left."""

    # -- the only entry --------------------------------------------------------------------------------------

    def start(self, now: float, status: LocalStatus | None = None, *, alone: bool = False) -> list[Action]:
        """Begin. `alone`: nobody else is there, so do not wait for anybody before training. `status` as in `step`."""
        c = self._c
        c.begin_step(now)
        self._status = status or self._status
        c.own.recall(c.chain)
        self._departure.begin()
        self._governance.notify_pause(None, c.directive)
        self._bootstrap.begin(now, 0.0 if alone else 2 * c.policy.heartbeat_seconds)
        self._beat()
        self._advance()
        return c.actions

    def step(self, event: ev.Event, now: float, status: LocalStatus | None = None) -> list[Action]:
        """Return what follows from an event at a time. Times never decrease. `status`: None where nothing changed.

        Raise `InvariantError` when the machine contradicts itself: a bug.
        """
        c = self._c
        c.begin_step(now)
        if self._departure.has_left:
            return c.actions
        if status is not None:
            self._status = status
        match event:
            case ev.Tick():
                pass
            case ev.MessageReceived(message):
                self._receive(message)
            case ev.CertificateReceived(certificate, source):
                self._add_certificates((certificate,), source)
            case ev.ChainReceived():
                self._chain_received(event)
            case ev.ChainUnanswered(source):
                self._chain_sync.failed(source, c.now)
            case ev.TrainingProgress():
                self._consensus.progress(event)
            case ev.UpdateReady():
                self._consensus.update_ready(event, self._status.admission)
            case ev.BlobHeld(blob):
                c.blobs.hold(blob)
                self._consensus.blob_held(blob)
            case ev.BlobInvalid(blob, reason):
                blob_invalid(c, self._consensus, self._sync.retried_tip, blob, reason)
                self._close_dropped_round()
            case ev.ShardReduced() | ev.ShardUnavailable():
                self._admit_own(self._consensus.shard_answered(event))
            case ev.BlobUnavailable(blob):
                c.blobs.unavailable(blob, c.now)
            case ev.StateReached(record, state):
                self._state_reached(record, state)
            case ev.SyncFailed(record, reason, kept):
                self._sync.failed(record, reason, kept)
            case ev.Leave():
                exchange = self._consensus.exchange
                self._departure.leave(GatheredExchange.leave_seconds if exchange is None else exchange.leave_seconds)
        self._advance()
        return c.actions

    # -- queries ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The machine's phase (see the module `phase`)."""
        return self._phase

    @property
    def chain(self) -> Chain:
        """The tree of records: to be read only."""
        return self._c.chain

    @property
    def open_round(self) -> RoundState | None:
        """The undecided round: to be read only, for tests and for finding bugs."""
        return self._consensus.round

    def serve_refusal(self, blob: Digest, requester: PeerKey) -> str | None:
        """Return why a blob must not be given to a peer now; None when it may.

        The banned get nothing. An undecided round's updates are only for those who have announced their own (commit,
        then reveal).
        """
        if self._c.is_banned(requester):
            return "the run's owner has banned you"
        r = self._consensus.round
        if r is None or requester in r.headers or self._sync.is_behind:
            return None
        if not self._consensus.concerns(blob):
            return None
        return f"you have not announced an update in round {r.number} yet"

    def slices_for(self, blob: Digest, member: PeerKey) -> list[Slice]:
        """Return the shards that a member is to make with an update, with each one's proposal and committee."""
        r, exchange = self._consensus.round, self._consensus.exchange
        return [] if r is None or exchange is None else exchange.slices_for(blob, member)

    def retained_blobs(self) -> set[Digest]:
        """Return the checkpoints and blobs that the store must keep for this machine and for other members.

        They are the last checkpoints, all blobs applied since the oldest of them, those of the open round, and own
        updates that may still return to the error feedback.
        """
        c = self._c
        final = -1 if c.chain.finalization is None else c.chain.finalization.body.round
        return retained(c.base, c.chain) | self._consensus.blobs() | set(c.own.since(final + 1))

    def summary(self, now: float) -> Summary:
        """Return a frozen view for people."""
        return summarise(self._c, self._consensus, self._sync, self.phase, now)

    def sizes(self) -> dict[str, tuple[int, int]]:
        c = self._c
        found = c.members.sizes() | c.blobs.sizes() | c.own.sizes() | self._sync.sizes() | self._consensus.sizes()
        found |= self._chain_sync.sizes() | self._future.sizes() | self._governance.sizes()
        limits = c.chain.limits
        return found | {"records": (len(c.chain), limits.max_records + limits.max_side_records)}

    # -- messages --------------------------------------------------------------------------------------------

    def _receive(self, message: Signed) -> None:
        c, body = self._c, message.body
        if isinstance(body, Heartbeat):
            self._receive_heartbeat(message)
        elif isinstance(body, Goodbye) and c.members.goodbye(message):
            self._chain_sync.forget(message.author)
        elif isinstance(body, Finalization):
            self._receive_finalization(message)
        elif isinstance(body, Directive):
            self._receive_directive(message, None)
        elif isinstance(body, UpdateHeader | RoundRecord) and c.is_banned(message.author):
            pass  # until a record carries the ban, updates of this peer count when others list them
        elif isinstance(body, UpdateHeader | RoundRecord | Vote | ShardAttestation):
            if isinstance(body, RoundRecord) and body.directive is not None:
                self._receive_directive(body.directive, message.author)
            r = self._consensus.round
            if (
                r is not None
                and body.round == r.number
                and (isinstance(body, Vote | ShardAttestation) or body.parent == r.parent)
            ):
                self._admit_own(self._consensus.receive(message))
            elif (-1 if r is None else r.number) < body.round <= (c.chain.height(c.chain.head) + AHEAD):
                trusted = c.members.has_room_for(message.author) or isinstance(body, UpdateHeader)
                self._future.keep(message, trusted=trusted)

    def _receive_heartbeat(self, message: Signed[Heartbeat]) -> None:
        c, beat, source = self._c, message.body, message.author
        if source == c.me:
            return
        self._governance.inform(source, beat)
        if c.is_banned(source) or beat.admission and not c.members.add_heartbeat(message, c.now):
            return
        if (member := c.members.get(source)) is not None:
            self._sync.member_at(beat.head, member.since)
        self._chain_sync.claim(source, beat.head, beat.weight, c.chain, c.now, member=source in c.members)
        r = self._consensus.round
        if r is not None and beat.head == r.parent and self._consensus.is_working:
            pass_on_headers(c, r, source, beat)

    def _receive_finalization(self, message: Signed[Finalization]) -> None:
        c = self._c
        try:
            if c.chain.add_finalization(message):
                c.emit(StoreFinalization(message))
                self._close_dropped_round()
        except ChainError as e:
            c.notify("error", "final", str(e), message.author)

    # -- directives ------------------------------------------------------------------------------------------

    def _receive_directive(self, directive: Signed[Directive], source: PeerKey | None) -> None:
        before = self._c.chain.newest_directive
        if self._governance.accept(directive, source):
            self._directive_changed(before)
            self._close_dropped_round()

    def _directive_changed(self, before: Signed[Directive] | None) -> None:
        """Follow a newer directive of the chain: from a message, or from a record."""
        c, newest = self._c, self._c.chain.newest_directive
        if newest is None:
            return
        was, now = (None if before is None else before.body), newest.body
        self._governance.publish(newest)
        if now.rollback is not None and (was is None or was.rollback != now.rollback):
            self._roll_back()
        self._governance.dismiss_banned(now)
        self._departure.directive_changed()
        self._consensus.exclude_banned()
        if was is not None and was.run_status != "running" and not c.resting:
            self._consensus.pause_ended()
        self._governance.notify_pause(was, now)

    def _roll_back(self) -> None:
        c, back = self._c, self._c.chain.rollback
        if back is None:
            return
        text = f"the run's owner has rolled the run back to round {back.round}, record {back.record.short}"
        if c.chain.is_rolled_back_past_root:
            text += ": that is further back than is remembered here"
            c.notify("warning", "rollback", text + (". Start the coordinator again" if c.observer else ""))
            self._departure.strand(text)
            return
        c.notify("warning", "rollback", text)
        self._sync.rolled_back()
        r = self._consensus.round
        if r is not None and r.parent in c.chain and r.epoch != c.chain.epoch(r.parent):
            self._consensus.reopen()

    # -- certificates ----------------------------------------------------------------------------------------

    def _admit_own(self, certificate: Certificate | None) -> None:
        """Put a certificate that the open round has completed into the tree."""
        if certificate is not None:
            self._add_certificates((certificate,), None)

    def _add_certificates(self, certificates: Iterable[Certificate], source: PeerKey | None) -> int:
        """Put certificates into the tree, oldest first; return how many were new."""
        c, added = self._c, 0
        for certificate in certificates:
            twice, before = conflicting_shards(c.chain, certificate), c.chain.newest_directive
            try:
                if not c.chain.add(certificate):
                    continue
            except UnknownParent:
                # Heartbeats show who has the rest; it is requested in due time.
                break
            except FinalizedConflict as e:
                c.notify("info", "refused", f"a certificate is refused: {e}", source)
                proof = tuple(m for m in (c.chain.finalization, c.chain.newest_directive) if m is not None)
                if source is not None and proof:
                    c.emit(Send(source, proof))
                break
            except ChainError as e:
                c.notify("warning", "refused", f"a certificate is refused: {e}", source)
                break
            finally:
                if c.chain.newest_directive is not before:
                    self._directive_changed(before)
            added += 1
            if twice is not None:
                c.notify("warning", "equivocation", *twice)
            c.emit(StoreCertificate(certificate))
            self._hold_back(certificate)
        self._close_dropped_round()
        return added

    def _close_dropped_round(self) -> None:
        """Close the round if its parent was cut off the tree, by a finalization or by the tree's bounds."""
        r = self._consensus.round
        if r is not None and r.parent not in self._c.chain:
            self._consensus.abandon()

    def _hold_back(self, certificate: Certificate) -> None:
        """Quarantine a record with less than half of what we saw announced, until patience has run out."""
        c, consensus, sync = self._c, self._consensus, self._sync
        record, body, r = certificate.digest, certificate.record.body, self._consensus.round
        if r is None or r.first_header_at is None or c.observer or sync.applied != r.parent:
            return
        if body.parent != r.parent:
            sync.reconsider(record, consensus.announced_windows // 2)
        elif not consensus.is_heavy_enough(body):
            c.notify("info", "light", f"record {record.short} lists too little of what was announced")
            sync.hold_back(record, r.first_header_at + c.policy.patience_seconds)

    def _chain_received(self, event: ev.ChainReceived) -> None:
        c = self._c
        if event.directive is not None:
            self._receive_directive(event.directive, event.source)
        added = self._add_certificates(event.certificates, event.source)
        if event.finalization is not None:
            self._receive_finalization(event.finalization)
        last = event.certificates[-1].digest if event.certificates else c.chain.root
        reached = c.chain.height(last) if last in c.chain else -1
        # Records that we have are news too when more follow them: a walk along a branch, always upwards.
        onwards = event.more and bool(event.certificates) and reached > self._walked
        if added and event.more:
            self._bootstrap.grew(c.now)
        self._chain_sync.answered(event.source, useful=added > 0 or onwards, now=c.now)
        self._walked = reached if onwards else -1
        if onwards and self._chain_sync.asked is None:
            self._chain_sync.ask(event.source, c.now)
            c.emit(RequestChain(event.source, (last, *c.chain.locator())))

    # -- what is due -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Let every part do what is due, until nothing changes any more."""
        c = self._c
        self._update_phase()
        self._join()
        for _ in range(MAX_TURNS):
            if not self._turn():
                break
        else:
            raise InvariantError(f"the round machine does not come to rest: {self._describe()}")
        self._request_blobs()
        self._request_chain()
        if c.deadlines.due("heartbeat", self._beat_at):
            for key in c.members.expire(c.now):
                self._chain_sync.forget(key)
            self._beat()
        self._take_leave()
        self._departure.stay(anybody_behind=self._is_anybody_behind, bytes_up=self._status.bytes_up)
        self._publish_directives()
        self._update_phase()
        self.next_tick = float("inf") if self._departure.has_left else c.deadlines.next_tick

    def _turn(self) -> bool:
        """Return whether something changed that other parts depend on."""
        c, sync, consensus = self._c, self._sync, self._consensus
        changed = sync.advance()
        r, applied = consensus.round, sync.applied
        if c.observer and applied is not None and (r is None or r.parent != applied):
            self._begin_round(applied)
        head = c.chain.head
        if self._departure.is_over:
            consensus.rest()
        else:
            self._admit_own(consensus.advance(hurry=self._departure.is_hurrying))
        self._departure.follow_order(announced=self._is_exchanging, busy=sync.is_busy)
        return changed or head != c.chain.head

    @property
    def _is_exchanging(self) -> bool:
        r = self._consensus.round
        return self._consensus.is_working and r is not None and r.announced_at is not None

    @property
    def _is_anybody_behind(self) -> bool:
        head = self._sync.best_record
        return any(m.beat.head != head for m in self._c.members)

    def _join(self) -> None:
        """Let a newcomer collect what the others have before it loads a state and trains; not without end."""
        sync, c = self._sync, self._c
        if sync.joined:
            return
        ahead = self._chain_sync.asked is not None or bool(self._chain_sync.wanted(c.chain))
        equal = any(m.beat.head in c.chain for m in c.members)
        if self._bootstrap.is_over(c.deadlines, ahead=ahead, equal=equal):
            sync.join()

    def _state_reached(self, record: Digest, state: Digest) -> None:
        # A finalization may have cut the record off meanwhile: then the trainer moves on from there.
        if self._sync.reached(record, state) and record in self._c.chain:
            self._begin_round(record)
        epoch = self._c.directive.epoch
        if not self._sync.reset and epoch != self._stored_epoch:
            self._stored_epoch = epoch
            self._c.emit(StoreEpoch(epoch))

    def _begin_round(self, parent: Digest) -> None:
        c, consensus = self._c, self._consensus
        if consensus.round is not None and consensus.round.parent == parent:
            # The trainer was lost and is back at its place: what was announced stands.
            consensus.rebase()
            self._beat()
            return
        if parent != c.chain.root:
            decided = c.chain.certificate(parent)
            listed = decided.record.body.updates
            c.members.contributed(u.author for u in listed)
            unused = consensus.blobs() - {u.body.blob for u in listed} - set(decided.shards)
            for action in c.blobs.forget(b for b in sorted(unused) if b not in c.own):
                c.emit(action)
        c.adopt_policy(parent)
        self._chain_sync.grow(c.policy.max_members + 64)
        self._future.grow(2 * c.policy.max_members)
        r = consensus.open(parent)
        for message in self._future.pop(r.number):
            if isinstance(message.body, Vote | ShardAttestation) or message.body.parent == parent:
                self._admit_own(consensus.receive(message))
        self._departure.reached_total(c.chain.weight(parent))
        self._beat()

    def _request_blobs(self) -> None:
        c, consensus, sync = self._c, self._consensus, self._sync
        if c.observer:
            return
        r = consensus.round
        key = (
            c.chain.head, sync.retried_tip, sync.applied, sync.sync_target, sync.joined,
            None if r is None else (r.parent, r.revision), consensus.is_working,
        )  # fmt: skip
        retry = c.blobs.is_retry_due(c.deadlines)
        if key == self._requested_for and not retry:
            return
        self._requested_for = key
        needed = sync.needed() | consensus.needed() | sync.needed_again()
        for action in c.blobs.request(needed, consensus.holders, c.now):
            c.emit(action)

    def _request_chain(self) -> None:
        c = self._c
        source = self._chain_sync.next_request(c.chain, c.deadlines, eager=not self._sync.joined)
        if source is not None:
            c.emit(RequestChain(source, c.chain.locator()))

    def _take_leave(self) -> None:
        consensus, r = self._consensus, self._consensus.round
        hurrying = self._departure.is_hurrying
        if self._departure.is_time_to_go(
            None if r is None else r.number,
            busy=self._sync.is_busy,
            announced=r is not None and r.announced_at is not None,
            has_work=consensus.is_working and consensus.work.windows >= 1,
        ):
            self._departure.say_goodbye(self._next_sequence())
        elif self._departure.is_hurrying and not hurrying:
            self._admit_own(consensus.advance(hurry=True))  # the work that no update covers is announced at once

    def _publish_directives(self) -> None:
        """Emit what the owner's directives mean here, if that has changed."""
        c, before = self._c, self._published
        if before is not None and before.directive is c.directive and before.policy is c.policy:
            return
        now = DirectivesChanged(c.directive, c.resting, c.policy)
        if now != before:
            c.emit(now)
        self._published = now

    def _update_phase(self) -> Phase:
        """Return the phase after what has happened so far, and check that the table has the transition."""
        r = self._consensus.round
        phase = phase_of(
            observer=self._c.observer,
            left=self._departure.has_left,
            leaving=self._departure.is_leaving,
            joined=self._sync.joined,
            holds_state=self._sync.holds_state,
            announced=r is not None and r.announced_at is not None,
            resting=self._c.resting,
        )
        check_transition(self._phase, phase)
        self._phase = phase
        return phase

    # -- heartbeats ------------------------------------------------------------------------------------------

    def _next_sequence(self) -> int:
        self._sequence = max(self._sequence + 1, self._status.sequence)
        return self._sequence

    def _beat(self) -> None:
        c, s, sync = self._c, self._status, self._sync
        work, r, head, phase = self._consensus.work, self._consensus.round, sync.best_record, self._update_phase()
        self._beats += 1
        known = known_headers(r, head, phase, self._beats)
        body = Heartbeat(
            c.run, self._next_sequence(), c.chain.height(head), head, c.chain.weight(head), work.windows, phase.value,
            work.tokens_per_second, work.loss, s.bytes_up, s.bytes_down, known, s.addresses,
            b"" if c.observer else s.admission, s.device,
            sync.state if head == sync.applied else None, s.unreachable, c.directive.sequence,
        )  # fmt: skip
        c.emit(Broadcast(c.signer.sign(body)))
        self._beat_at = c.now + c.policy.heartbeat_seconds
        c.deadlines.due("heartbeat", self._beat_at)

    def _describe(self) -> str:
        """Return what the machine holds, for the report of a bug."""
        c, r, sync = self._c, self._consensus.round, self._sync
        pending = {name: round(at - c.now, 3) for name, at in c.deadlines.pending.items()}
        return (
            f"phase {self._phase}, head {c.chain.head.short}, applied {sync.applied}, target {sync.sync_target}, "
            f"round {None if r is None else r.number}, {sync.sizes()['quarantined'][0]} branches quarantined, "
            f"deadlines in {pending}"
        )

"""The round machine of one peer: `step(event, now)` returns the actions that follow (docs/rounds.md).

    machine = RoundMachine(RoundPolicy.of(spec), spec.run_id, signer, chain, now=time)
    actions = machine.start(time)
    loop: carry out the actions; on a message, an answer, or at `machine.next_tick`: actions = machine.step(event, time)

Time is in seconds of any monotonic clock. Nothing here blocks, and every container has a bound (`sizes`). `actions` and
`events` define each action and event. These rules bind whoever drives the machine:

- The `sequence` of a status is the unix time in milliseconds, or more. It exceeds that of the last goodbye, even if the
  clock was set back: others ignore older heartbeats.
- Only verified messages come in (`MessageDecoder`). The chain gets the stored directive before the stored certificates.
- The trainer gets `RequestUpdate`, `ApplyRecord`, `SyncState` and `KeepState` in order, and must not train before the
  first `SyncState` is done. docs/trainer.md says what it restores.
- At `ReleaseTrainer` the trainer saves and ends, and the check that is being made ends. At `AcquireTrainer` both start
  again.
- Fetch all that a state sync needs before the trainer receives it. If something is unavailable, `SyncFailed` with
  `kept=True` lets the machine continue from the present state. For an invalid blob, send `BlobInvalid` first. When the
  trainer dies, send `SyncFailed` with any record. When a state that was asked for is not in the store, send
  `StateNotKept`.
- After `RunCompleted`, stop the trainer and keep driving until `Finished`; the coordinator's observer gets none.
  `Finished` with `again`: load the chain from the store and start again. A rollback reaches further back than the tree
  in memory, or the record that the run ended with is not the last any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set
from functools import partial

from protocol.chain import Chain, FinalizedConflict, UnknownParent
from protocol.errors import ChainError
from protocol.ids import Digest, PeerKey, Round, RunId
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
    WorkReport,
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
from protocol.rounds.audit_notices import notify_audits
from protocol.rounds.audit_scheduler import AuditScheduler
from protocol.rounds.chain_sync import ChainSync, JoinTimer, is_left_behind
from protocol.rounds.consensus import Consensus
from protocol.rounds.context import Context
from protocol.rounds.departure import Departure
from protocol.rounds.directive_gossip import DirectiveGossip
from protocol.rounds.exchange import Exchange, ShardDuty
from protocol.rounds.faults import blob_invalid, conflicting_shards
from protocol.rounds.future_messages import MAX_ROUNDS_AHEAD, FutureMessages
from protocol.rounds.header_repair import known_headers, pass_on_headers
from protocol.rounds.phase import InvariantError, Phase, check_transition, phase_of
from protocol.rounds.policy import LocalStatus, RoundPolicy
from protocol.rounds.rest import RestSteps
from protocol.rounds.retention import retained, retained_states
from protocol.rounds.round_state import RoundState, header_refusal
from protocol.rounds.state_sync import StateSync
from protocol.rounds.summary import Summary, summarise

MAX_TURNS = 100
"""Maximum number of turns in a step: each turn of a correct machine decides or moves something."""

COUNTED_ROUNDS = 16
"""Rounds before the head's of which headers count that come late, or for another branch."""

REMEMBERED_BEATS = 512
"""Own heartbeats that are remembered: longer than others keep them for newcomers."""


LEFT_BEHIND = (
    "most members have records of the run that are missing here, and nobody gives them: this peer does not train, and "
    "asks again. If this lasts, look at the connection (cairn peer doctor), update this peer, or ask the run's owner "
    "to start the coordinator, which has all records"
)


class RoundMachine:
    """One peer's state machine of the protocol. Events and the peer's status come in with `step`; actions come out.

    Before the driver serves a blob, it asks `serve_refusal`: the rule of commit-then-reveal is there. Other queries:
    `next_tick`, `phase`, `chain`, `open_round`, `duties_of`, `retained_blobs`, `summary` and `sizes`. `introduction`
    gives the heartbeat for the time before `start`.
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
        assets: Set[Digest] = frozenset(),
        report_signer: Signer | None = None,
        announced: Signed[UpdateHeader] | None = None,
    ):
        """`chain` is loaded with what the store holds, and is the machine's from now on. Anybody may have `assets`.

        `blob_size` is the size in bytes of updates of the run's codec: a number, or a predicate; None accepts any size.
        `report_signer` signs the reports on the checks of `AuditUpdate`; None: the driver cannot make them. An
        `observer` with one is a peer that audits without training. `announced` is the header of the last `StoreHeader`.
        """
        accepts_size = blob_size if callable(blob_size) else (lambda size: blob_size in (None, size))
        is_peer = not observer or report_signer is not None
        reporter = (report_signer or signer).key
        self._context = Context(policy, run, signer, chain, observer, is_peer, accepts_size, now, reporter)
        self._status = status or LocalStatus()
        self._sync = StateSync(self._context)
        self._consensus = Consensus(self._context, self._sync, announced)
        self._audits = AuditScheduler(self._context, report_signer)
        self._directives = DirectiveGossip(self._context)
        self._departure = Departure(self._context)
        self._rest = RestSteps(self._context, self._sync, self._consensus)
        self._chain_sync = ChainSync(policy.max_members + 64, policy.heartbeat_seconds, signer.key)
        self._future = FutureMessages(2 * policy.max_members)
        self._join_timer = JoinTimer(now, policy.member_seconds)
        self._phase = Phase.OBSERVING if observer else Phase.JOINING
        self._sequence = self._beats = 0
        self._sent: deque[int] = deque(maxlen=REMEMBERED_BEATS)
        """Sequences of our last heartbeats."""

        self._foreign: int | None = None
        """The sequence of the last heartbeat by our key that is not ours.

        One alone may be ours from before a restart, if the clock was set back. Two are another machine's.
        """

        self._reached_height = -1
        """Height that the answers to the present series of chain requests have reached."""

        self._beat_at = now
        self._requested_for: tuple = ()
        """The inputs that the blob requests were derived from."""

        self._assets = assets
        self._applied: Set[Digest] = frozenset()
        self._applied_at: Digest | None = None
        """The head that `_applied` was derived from: it is needed for every request while no round is open."""

        self._published: DirectivesChanged | None = None
        self._stored_epoch: int | None = None
        self.next_tick = now
        """The time to step with a `Tick`, if no other event comes before; infinite once we have left."""

    # -- the only entry --------------------------------------------------------------------------------------

    def start(self, now: float, status: LocalStatus | None = None, *, alone: bool = False) -> list[Action]:
        """Begin. `alone`: no other peer is known, so wait for nobody before training. `status` as in `step`."""
        context = self._context
        context.begin_step(now)
        self._status = status or self._status
        context.own.recall(context.chain)
        self._sync.begin()
        self._departure.begin()
        self._directives.notify_pause(None, context.directive)
        self._join_timer.begin(now, 0.0 if alone else 2 * context.policy.heartbeat_seconds)
        self._beat()
        self._advance()
        return context.actions

    def step(self, event: ev.Event, now: float, status: LocalStatus | None = None) -> list[Action]:
        """Return the actions that follow from an event at time `now`, which never decreases.

        `status`: None where nothing changed. Raises `InvariantError` when the machine contradicts itself: a bug.
        """
        context = self._context
        context.begin_step(now)
        if self._departure.has_left:
            return context.actions
        if status is not None:
            self._status = status
        match event:
            case ev.MessageReceived(message):
                self._receive(message)
            case ev.CertificateReceived(certificate, source):
                self._add_certificates((certificate,), source)
            case ev.ChainReceived():
                self._chain_received(event)
            case ev.ChainUnanswered(source):
                self._chain_sync.failed(source, context.now)
            case ev.TrainingProgress():
                self._consensus.progress(event)
            case ev.UpdateReady():
                self._consensus.update_ready(event, self._status.admission)
            case ev.BlobHeld(blob, author):
                self._consensus.blob_held(blob, author)
            case ev.BlobInvalid(blob, reason):
                blob_invalid(context, self._consensus, self._sync.retried_tip, blob, reason)
                self._close_dropped_round()
            case ev.ShardReduced() | ev.ShardUnavailable():
                self._add_own_certificate(self._consensus.shard_answered(event))
            case ev.BlobUnavailable(blob):
                context.blobs.unavailable(blob, context.now)
            case ev.UpdateAudited() | ev.AuditNotMade():
                self._audits.answered(event)
            case ev.StateReached(record, state):
                self._state_reached(record, state)
            case ev.SyncFailed() | ev.StateNotKept():
                self._sync.failed(event)
            case ev.Leave() | ev.Rest() | ev.Resume():
                self._follow_user(event)
        if not isinstance(event, ev.Tick):
            self._update_phase()  # checks the transition that the event alone made, before what follows makes another
        self._advance()
        return context.actions

    # -- queries ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The machine's phase (see the module `phase`)."""
        return self._phase

    @property
    def chain(self) -> Chain:
        """The tree of records: to be read only."""
        return self._context.chain

    @property
    def open_round(self) -> RoundState | None:
        """The undecided round: to be read only, for tests, benchmarks and for finding bugs."""
        return self._consensus.round

    def serve_refusal(self, blob: Digest, requester: PeerKey) -> str | None:
        """Return why a blob must not be given to a peer now; None when it may.

        The banned get nothing. Commit, then reveal: updates of an undecided round are only for those that announced
        their own, or they could be copied. While no round is open here, or it is only followed, nobody can be known to
        have announced. Own updates from before a restart may be of an undecided round, so all get only what the chain
        has applied.
        """
        context, round_ = self._context, self._consensus.round
        if context.chain.is_banned(requester):
            return "the run's owner has banned you"
        if not context.is_peer:
            return None  # an observer that does not audit holds blobs of decided rounds only
        if round_ is None or context.observer:
            if blob in self._applied_blobs():
                return None
            return "no round is open here yet, and no record on the chain has applied this blob: ask again later"
        if requester in round_.headers:
            return None  # it has committed itself
        head = context.chain.head
        if head != round_.parent and context.chain.is_ancestor(round_.parent, head):
            return None  # decided: a copy comes too late for it, and late members need its updates
        if blob not in self._consensus.blobs():
            return None  # of an earlier round, whose updates all may have, or a checkpoint
        return f"you have not announced an update in round {round_.number} yet"

    def _applied_blobs(self) -> Set[Digest]:
        """Return the run's assets, and the checkpoints and blobs that the head's path has applied."""
        chain = self._context.chain
        if self._applied_at != chain.head:
            self._applied_at, self._applied = chain.head, self._assets | retained(self._context.spec_policy, chain)
        return self._applied

    def duties_of(self, blob: Digest, member: PeerKey) -> list[ShardDuty]:
        """Return the shards that a member is to make with an update, with each one's proposal and committee."""
        round_, exchange = self._consensus.round, self._consensus.exchange
        return [] if round_ is None or exchange is None else exchange.duties_of(blob, member)

    def retained_blobs(self) -> set[Digest]:
        """Return the checkpoints and blobs that the store must keep for this machine and for other members.

        They are the last checkpoints, all blobs applied since the oldest of them, those of the open round, and own
        updates that may still return to the error feedback. An observer that is no peer keeps the checkpoints alone.
        """
        context, policy = self._context, self._context.spec_policy
        if not context.is_peer:
            return retained_states(policy, context.chain)
        final = -1 if context.chain.finalization is None else context.chain.finalization.body.round
        return retained(policy, context.chain) | self._consensus.blobs() | set(context.own.since(final + 1))

    def summary(self, now: float) -> Summary:
        """Return a frozen view for people."""
        return summarise(self._context, self._consensus, self._sync, self.phase, now)

    def sizes(self) -> dict[str, tuple[int, int]]:
        context = self._context
        found = context.members.sizes() | context.blobs.sizes() | context.own.sizes() | self._sync.sizes()
        found |= self._consensus.sizes() | self._chain_sync.sizes() | self._future.sizes() | self._directives.sizes()
        found |= self._audits.sizes()
        limits = context.chain.limits
        return found | {"records": (len(context.chain), limits.max_records + limits.max_side_records)}

    def _follow_user(self, event: ev.Leave | ev.Rest | ev.Resume) -> None:
        """Do what this peer's user wants; nothing any more once it is to leave, or the run is over.

        At the end of the run the driver has stopped the trainer, and others need our heartbeats to confirm the last
        state.
        """
        if isinstance(event, ev.Leave):
            exchange = self._consensus.exchange
            self._departure.leave(Exchange.leave_seconds if exchange is None else exchange.leave_seconds)
        elif not self._departure.is_leaving and not self._departure.is_over and self._rest.follow(event):
            self._requested_for = ()
            self._beat()  # it tells the others whether to wait for us

    # -- messages --------------------------------------------------------------------------------------------

    def _receive(self, message: Signed) -> None:
        context, body = self._context, message.body
        if isinstance(body, Heartbeat):
            self._receive_heartbeat(message)
        elif isinstance(body, Goodbye) and context.members.goodbye(message):
            self._chain_sync.forget(message.author)
            self._sync.quarantine.reconsider(self._is_supported)
        elif isinstance(body, Finalization):
            self._receive_finalization(message)
        elif isinstance(body, Directive):
            self._receive_directive(message, None)
        elif isinstance(body, WorkReport):
            self._audits.receive(message)
        elif isinstance(body, UpdateHeader | RoundRecord) and context.is_excluded(message.author):
            pass  # until a record carries the ban, updates of this peer count when others list them
        elif isinstance(body, UpdateHeader | RoundRecord | Vote | ShardAttestation):
            if isinstance(body, RoundRecord) and body.directive is not None:
                self._receive_directive(body.directive, message.author)
            round_ = self._consensus.round
            number = -1 if round_ is None else round_.number
            parent = None if isinstance(body, Vote | ShardAttestation) else body.parent
            if round_ is not None and body.round == number and parent in (None, round_.parent):
                self._add_own_certificate(self._consensus.receive(message))
            else:
                if isinstance(body, UpdateHeader):
                    self._count_elsewhere(message)
                if number < body.round <= context.chain.height(context.chain.head) + MAX_ROUNDS_AHEAD:
                    self._future.keep(message, trusted=context.members.has_room_for(message.author))

    def _count_elsewhere(self, header: Signed[UpdateHeader]) -> None:
        """Count a header of another branch in fork choice, or those with the same records would have other heads."""
        context, chain, body = self._context, self._context.chain, header.body
        if body.round < chain.height(chain.head) - COUNTED_ROUNDS:
            return  # to find who has stake there takes long
        if chain.is_ancestor(chain.fork_choice_root, body.parent):
            if header_refusal(header, chain, context.accepts_size) is None:
                chain.announce(header)

    def _receive_heartbeat(self, message: Signed[Heartbeat]) -> None:
        context, beat, source = self._context, message.body, message.author
        if source == context.me:
            if self._sent and beat.sequence > self._sent[0] and beat.sequence not in self._sent:
                if self._foreign not in (None, beat.sequence):
                    context.notify_copied_key()
                self._foreign = beat.sequence
            return
        self._directives.inform(source, beat)
        if context.is_excluded(source) or beat.admission and not context.members.add_heartbeat(message, context.now):
            return
        if (member := context.members.get(source)) is not None:
            self._sync.quarantine.member_at(beat.head, member.since)
        is_member = source in context.members
        self._chain_sync.claim(source, beat.head, context.chain, context.now, member=is_member)
        round_ = self._consensus.round
        if round_ is not None and beat.head == round_.parent and self._consensus.is_working:
            pass_on_headers(context, round_, source, beat)

    def _receive_finalization(self, message: Signed[Finalization]) -> None:
        context = self._context
        try:
            if context.chain.add_finalization(message):
                context.emit(StoreFinalization(message, awaited=context.chain.finalization is not message))
                self._close_dropped_round()
        except ChainError as e:
            context.notify("error", "final", str(e), message.author)

    # -- directives ------------------------------------------------------------------------------------------

    def _receive_directive(self, directive: Signed[Directive], source: PeerKey | None) -> None:
        before = self._context.chain.newest_directive
        if self._directives.accept(directive, source):
            self._directive_changed(before)
            self._close_dropped_round()

    def _directive_changed(self, before: Signed[Directive] | None) -> None:
        """Follow a newer directive of the chain: from a message, or from a record."""
        context, newest = self._context, self._context.chain.newest_directive
        if newest is None:
            return
        was, now = (None if before is None else before.body), newest.body
        self._directives.publish(newest)
        if now.rollback is not None and (was is None or was.rollback != now.rollback):
            self._roll_back()
        self._directives.dismiss_banned(now)
        self._departure.directive_changed()
        self._consensus.exclude_banned()
        if was is not None and was.run_status != "running" and not context.is_paused:
            self._consensus.pause_ended()
        self._directives.notify_pause(was, now)

    def _roll_back(self) -> None:
        context, back = self._context, self._context.chain.rollback
        if back is None:
            return
        text = f"the run's owner has rolled the run back to round {back.round}, record {back.record.short}"
        if context.chain.is_rolled_back_past_root:
            text += ": that is further back than is remembered here"
            context.notify("warning", "rollback", text + ("" if context.is_peer else ". Start the coordinator again"))
            self._departure.strand(text)
            return
        context.notify("warning", "rollback", text)
        self._sync.rolled_back()
        round_ = self._consensus.round
        if round_ is not None and round_.parent in context.chain and round_.epoch != context.chain.epoch(round_.parent):
            self._consensus.reopen()

    # -- certificates ----------------------------------------------------------------------------------------

    def _add_own_certificate(self, certificate: Certificate | None) -> None:
        """Put a certificate that the open round has completed into the tree."""
        if certificate is not None:
            self._add_certificates((certificate,), None)

    def _add_certificates(self, certificates: Iterable[Certificate], source: PeerKey | None) -> int:
        """Put certificates into the tree, oldest first; return how many were new."""
        context, quarantine, added = self._context, self._sync.quarantine, 0
        for certificate in certificates:
            head = context.chain.head
            if certificate.digest in context.chain:
                if context.chain.add_votes(certificate):
                    quarantine.reconsider(self._is_supported, certificate.digest)
                continue
            if source is not None and quarantine.is_forgotten(certificate):
                continue
            twice, before = conflicting_shards(context.chain, certificate), context.chain.newest_directive
            final = context.chain.finalization
            try:
                if not context.chain.add(certificate):
                    continue
            except UnknownParent:
                quarantine.built_on(certificate)
                # Heartbeats show who has the rest; it is requested in due time.
                break
            except FinalizedConflict as e:
                context.notify("info", "refused", f"a certificate is refused: {e}", source)
                proof = tuple(m for m in (context.chain.finalization, context.chain.newest_directive) if m is not None)
                if source is not None and proof:
                    context.emit(Send(source, proof))
                break
            except ChainError as e:
                context.notify("warning", "refused", f"a certificate is refused: {e}", source)
                break
            finally:
                if context.chain.newest_directive is not before:
                    self._directive_changed(before)
            added += 1
            if twice is not None:
                context.notify("warning", "equivocation", *twice)
            context.emit(StoreCertificate(certificate))
            if (newest := context.chain.finalization) is not None and newest is not final:
                context.emit(StoreFinalization(newest, awaited=False))
            notify_audits(context, certificate)
            self._hold_back_if_unsupported(certificate, head)
        self._close_dropped_round()
        return added

    def _close_dropped_round(self) -> None:
        """Close the round if its parent was cut off the tree, by a finalization or by the tree's bounds."""
        round_ = self._consensus.round
        if round_ is not None and round_.parent not in self._context.chain:
            self._consensus.abandon()

    def _hold_back_if_unsupported(self, certificate: Certificate, head: Digest) -> None:
        """Quarantine a record on the head without support, until it has some or patience has run out."""
        context, sync, record = self._context, self._sync, certificate.digest
        if not sync.joined or record not in context.chain:
            return
        sync.quarantine.reconsider(self._is_supported, record)
        parent = certificate.record.body.parent
        if parent != head or context.chain.is_quarantined(record) or self._is_supported(record):
            return
        if not self._consensus.is_patience_over(parent, context.now):
            context.notify("info", "unsupported", f"record {record.short} has no support: it waits for a better one")
            sync.hold_back(record)

    def _hold_back_what_came_while_joining(self) -> None:
        """Quarantine the first record of the chain without support: members would have held it back when it came."""
        chain = self._context.chain
        path = [c.digest for c in chain.path(chain.fork_choice_root, chain.head)]
        if (supported := chain.count_followed(path, self._has_support)) < len(path):
            self._sync.hold_back(path[supported])

    def _is_supported(self, record: Digest, *, starts: bool = False) -> bool:
        chain = self._context.chain
        if record == chain.root:  # nothing is beside it
            return True
        voters = self._consensus.voters_for(chain.certificate(record).record.digest)
        return self._has_support(record, chain.keys_for(record) | voters, starts=starts)

    def _has_support(self, record: Digest, signers: set[PeerKey], *, starts: bool = False) -> bool:
        """Return whether a record has support. Members whose state is of the record, or of a later one, are for it."""
        chain = self._context.chain
        holders = {m.key for m in self._context.members if m.takes_part and chain.is_ancestor(record, m.beat.head)}
        return self._consensus.is_supported(chain.parent(record), signers | holders, starts=starts)

    def _chain_received(self, event: ev.ChainReceived) -> None:
        context = self._context
        if event.directive is not None:
            self._receive_directive(event.directive, event.source)
        if event.finalization is not None:
            self._receive_finalization(event.finalization)  # before the records: no ban cuts those up to it
        added = self._add_certificates(event.certificates, event.source)
        last = event.certificates[-1].digest if event.certificates else context.chain.root
        reached = context.chain.height(last) if last in context.chain else -1
        # Records that we have are news too when more follow them: a walk along a branch, always upwards.
        onwards = event.more and bool(event.certificates) and reached > self._reached_height
        if added and event.more:
            self._join_timer.grew(context.now)
        self._chain_sync.answered(event.source, useful=added > 0 or onwards, now=context.now)
        self._reached_height = reached if onwards else -1
        if onwards and self._chain_sync.may_ask:
            self._chain_sync.ask(event.source, context.now)
            context.emit(RequestChain(event.source, (last, *context.chain.locator())))

    # -- what is due -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Let every part do what is due, until nothing changes any more."""
        context = self._context
        self._join()
        for _ in range(MAX_TURNS):
            if not self._advance_once():
                break
        else:
            raise InvariantError(f"the round machine does not come to rest: {self._describe()}")
        # Only after the loop: turns in between may need blobs that the final state does not.
        self._request_blobs()
        self._request_chain()
        if context.deadlines.due("heartbeat", self._beat_at):
            for key in context.members.expire(context.now):
                self._chain_sync.forget(key)
            self._sync.quarantine.reconsider(self._is_supported)
            self._beat()
        self._leave_if_due()
        self._departure.stay(self._is_anybody_behind, self._status, partial(self._is_supported, starts=True))
        self._publish_directives()
        self._update_phase()
        self.next_tick = float("inf") if self._departure.has_left else context.deadlines.next_tick

    def _advance_once(self) -> bool:
        """Return whether something changed that other parts depend on."""
        context, sync, consensus = self._context, self._sync, self._consensus
        changed = sync.advance(consensus.is_patience_over)
        round_, applied = consensus.round, sync.applied
        if context.observer and applied is not None and (round_ is None or round_.parent != applied):
            self._begin_round(applied)
        head = context.chain.head
        if self._departure.is_over:
            consensus.stop_exchange()
        else:
            self._add_own_certificate(consensus.advance(hurry=self._departure.is_hurrying or self._rest.is_hurrying))
        if context.is_run_stopped and not (context.observer or context.is_resting) and sync.joined:
            if not self._is_occupied() and not self._departure.is_over:  # else the driver has stopped the trainer
                sync.keep()
        if not self._departure.is_leaving and self._rest.advance():
            self._beat()
            changed = True
        self._departure.follow_directive(self._is_occupied, self._is_behind)
        return changed or head != context.chain.head

    def _is_occupied(self) -> bool:
        """Return whether the trainer owes us an answer or a checkpoint, or the round that we announced in is open."""
        round_ = self._consensus.round
        announced = self._consensus.is_working and round_ is not None and round_.announced_at is not None
        return announced or self._sync.is_busy or self._sync.is_keeping

    def _is_behind(self) -> bool:
        """Return whether our trainer is without the newest state. The genesis is an asset of the run."""
        return self._sync.is_behind and self._context.chain.head != self._context.chain.genesis

    def _is_anybody_behind(self) -> bool:
        head = self._sync.best_record
        return any(m.beat.head != head for m in self._context.members)

    def _join(self) -> None:
        """Let a newcomer collect what the others have before it loads a state and trains; not without end."""
        sync, context = self._sync, self._context
        if sync.joined:
            return
        ahead = self._chain_sync.is_ahead(context.chain)
        # One that is joining may be a newcomer, too: its head says nothing of how far the others are.
        equal = any(context.chain.has_seen(m.beat.head) and m.beat.phase != "joining" for m in context.members)
        if not self._join_timer.is_over(context.deadlines, ahead=ahead, equal=equal):
            return
        is_late = self._join_timer.is_late(context.deadlines)
        if is_left_behind(context.chain, context.members, context.me, is_late=is_late):
            if self._join_timer.is_stalled(context.now):
                context.notify("warning", "left-behind", LEFT_BEHIND)
            return
        sync.join()
        self._hold_back_what_came_while_joining()

    def _state_reached(self, record: Digest, state: Digest) -> None:
        # A finalization may have dropped the record's branch meanwhile: then the trainer moves on from there.
        if self._sync.reached(record, state) and record in self._context.chain:
            self._begin_round(record)
        epoch = self._context.directive.epoch
        if not self._sync.reset and epoch != self._stored_epoch:
            self._stored_epoch = epoch
            self._context.emit(StoreEpoch(epoch))

    def _begin_round(self, parent: Digest) -> None:
        context, consensus = self._context, self._consensus
        if consensus.round is not None and consensus.round.parent == parent:
            # The trainer was lost and holds the same state again: the announced update stands.
            consensus.continue_round()
            self._beat()
            return
        if parent != context.chain.root:
            decided = context.chain.certificate(parent)
            body = decided.record.body
            context.members.note_contributors(body.contributors, on_time_in=None if body.attempt else body.round)
            for decision in body.decisions:
                if decision.convicted:
                    context.members.dismiss(decision.author)
            consensus.note_decided(decided)
            unused = consensus.blobs() - {u.body.blob for u in body.updates} - set(decided.shards)
            for action in context.blobs.forget(b for b in sorted(unused) if b not in context.own):
                context.emit(action)
        context.adopt_policy(parent)
        self._chain_sync.grow(context.policy.max_members + 64)
        self._future.grow(2 * context.policy.max_members)
        round_ = consensus.open(parent)
        for message in self._future.pop(round_.number):
            if isinstance(message.body, Vote | ShardAttestation) or message.body.parent == parent:
                self._add_own_certificate(consensus.receive(message))
        if self._sync.joined:  # until then an observer passes records of long ago
            self._audits.round_begun(parent)
        self._departure.reached_total(context.chain.weight(parent))
        self._beat()

    def _request_blobs(self) -> None:
        context, consensus, sync = self._context, self._consensus, self._sync
        if context.observer:
            return
        round_ = consensus.round
        key = (
            context.chain.head, sync.retried_tip, sync.applied, sync.sync_target, sync.joined,
            None if round_ is None else (round_.parent, round_.revision), consensus.is_working,
        )  # fmt: skip
        retry = context.blobs.is_retry_due(context.deadlines)
        if key == self._requested_for and not retry:
            return
        self._requested_for = key
        needed = sync.needed() | consensus.needed() | sync.needed_again()
        for action in context.blobs.request(needed, consensus.holders, context.deadlines):
            context.emit(action)

    def _request_chain(self) -> None:
        context = self._context
        source = self._chain_sync.next_request(context.chain, context.deadlines, eager=not self._sync.joined)
        if source is not None:
            context.emit(RequestChain(source, context.chain.locator()))

    def _leave_if_due(self) -> None:
        if not self._departure.is_leaving:
            return
        consensus, round_ = self._consensus, self._consensus.round
        hurrying = self._departure.is_hurrying
        if self._departure.is_time_to_go(
            None if round_ is None else round_.number,
            busy=self._sync.is_busy,
            announced=round_ is not None and round_.announced_at is not None,
            has_work=consensus.is_working and consensus.work.windows >= 1,
        ):
            self._departure.say_goodbye(self._next_sequence())
        elif self._departure.is_hurrying and not hurrying:
            self._add_own_certificate(
                consensus.advance(hurry=True)
            )  # the work that no update covers is announced at once

    def _publish_directives(self) -> None:
        """Emit what the owner's directives mean here, if that has changed."""
        context, before = self._context, self._published
        if before is not None and before.directive is context.directive and before.policy is context.policy:
            return
        barred_until = context.chain.barred_until(context.me, context.chain.head)
        barred_until = barred_until if context.chain.is_barred(context.me, context.chain.head) else Round(0)
        now = DirectivesChanged(context.directive, context.is_paused, context.policy, barred_until)
        if now != before:
            context.emit(now)
        self._published = now

    def _update_phase(self) -> Phase:
        """Return the phase after what has happened so far, and check that the table has the transition."""
        round_ = self._consensus.round
        phase = phase_of(
            left=self._departure.has_left,
            observer=self._context.observer,
            leaving=self._departure.is_leaving,
            resting=self._context.is_resting,
            joined=self._sync.joined,
            holds_state=self._sync.holds_state,
            announced=round_ is not None and round_.announced_at is not None,
            paused=self._context.is_paused,
        )
        check_transition(self._phase, phase)
        self._phase = phase
        return phase

    # -- heartbeats ------------------------------------------------------------------------------------------

    def _next_sequence(self) -> int:
        self._context.members.note_time(self._status.sequence)
        self._sequence = max(self._sequence + 1, self._status.sequence)
        return self._sequence

    def introduction(self, status: LocalStatus) -> Signed[Heartbeat]:
        """Return a heartbeat for the time before `start`, in which the driver fetches what training needs.

        Others then know us as a member: they give non-members little of their uplink.
        """
        self._status = status
        return self._heartbeat()

    def _beat(self) -> None:
        context = self._context
        context.emit(Broadcast(self._heartbeat()))
        self._beat_at = context.now + context.policy.heartbeat_seconds
        context.deadlines.register("heartbeat", self._beat_at)

    def _heartbeat(self) -> Signed[Heartbeat]:
        context, status, sync = self._context, self._status, self._sync
        work, round_, head, phase = self._consensus.work, self._consensus.round, sync.best_record, self._update_phase()
        self._beats += 1
        self._sent.append(self._next_sequence())
        known = known_headers(round_, head, phase, self._beats)
        body = Heartbeat(
            run=context.run, sequence=self._sequence, phase=phase.value,
            round=context.chain.height(head), head=head, weight=context.chain.weight(head),
            windows=work.windows, tokens_per_second=work.tokens_per_second, loss=work.loss,
            bytes_up=status.bytes_up, bytes_down=status.bytes_down, known_headers=known, addresses=status.addresses,
            admission=status.admission if context.is_peer else b"", device=status.device,
            state=sync.state if head == sync.applied else None, unreachable=status.unreachable,
            directive_sequence=context.directive.sequence,
        )  # fmt: skip
        return context.signer.sign(body)

    def _describe(self) -> str:
        """Return what the machine holds, for the report of a bug."""
        context, round_, sync = self._context, self._consensus.round, self._sync
        pending = {name: round(at - context.now, 3) for name, at in context.deadlines.pending.items()}
        return (
            f"phase {self._phase}, head {context.chain.head.short}, applied {sync.applied}, target {sync.sync_target}, "
            f"round {None if round_ is None else round_.number}, "
            f"{sync.sizes()['quarantined'][0]} branches quarantined, deadlines in {pending}"
        )

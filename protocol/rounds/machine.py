"""The round machine of one peer: `step(event, now)` gives the actions that follow (docs/rounds.md).

    machine = RoundMachine(Policy.of(spec), spec.run_id, signer, chain, now=time)
    actions = machine.start(time)
    loop: carry out the actions; on a message, an answer, or at `machine.next_tick`: actions = machine.step(event, time)

Time is in seconds of any monotonic clock. Nothing here blocks, and every container has a bound (`sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.chain import Chain, RivalOfFinal, UnknownParent
from protocol.errors import ChainError, MalformedError
from protocol.ids import Digest, PeerKey, RunId
from protocol.message_codec import Signer, check_certificate
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
    Finished,
    KeepCertificate,
    KeepFinal,
    RequestChain,
    Send,
)
from protocol.rounds.blame import blob_bad, two_means
from protocol.rounds.context import Context
from protocol.rounds.deciding import Deciding
from protocol.rounds.early import AHEAD, Early
from protocol.rounds.follower import Follower
from protocol.rounds.helping import help_with_headers, known_headers
from protocol.rounds.joining import Joining
from protocol.rounds.orders import Orders
from protocol.rounds.policy import Facts, Policy
from protocol.rounds.position import Position
from protocol.rounds.summary import Summary, summarise

LEAVE_SECONDS = 6.0
"""How long a leaver waits for its last update's round."""

MAX_TURNS = 100


class RoundMachine:
    """See the module. `facts` is the driver's: set it when it changes."""

    def __init__(
        self,
        policy: Policy,
        run: RunId,
        signer: Signer,
        chain: Chain,
        *,
        now: float,
        observer: bool = False,
        blob_size: int | Callable[[int], bool] | None = None,
        facts: Facts | None = None,
    ):
        """`chain` is loaded with what the store holds. `blob_size` is what updates of the run's codec measure: exactly,
        or a predicate; None accepts any size."""
        size_ok = blob_size if callable(blob_size) else (lambda size: blob_size in (None, size))
        self._c = Context(policy, run, signer, chain, observer, size_ok)
        self._c.now = now
        self.facts = facts or Facts()
        self._position = Position(self._c)
        self._deciding = Deciding(self._c, self._position)
        self._orders = Orders(self._c, self._deciding, self._position)
        self._follower = Follower(policy.max_members + 64, policy.heartbeat_seconds)
        self._early = Early(2 * policy.max_members)
        self._sequence = self._beats = 0
        self._walked = -1
        """Height up to which the answers to the present chain of requests have brought us."""
        self._beat_at = now
        self._joining = Joining(now, policy.member_seconds)
        self._leave_at: float | None = None
        self._left_round: int | None = None
        self._gone = False
        self._blobs_for: tuple = ()
        self._retry_blobs = False
        self.next_tick = now

    # -- the way in ------------------------------------------------------------------------------------------

    def start(self, now: float, *, alone: bool = False) -> list[Action]:
        """Begin. `alone`: there is nobody to hear, so do not wait for anybody before training."""
        c = self._c
        c.now = now
        c.out = []
        c.own.recall(c.chain)
        self._orders.begin()
        self._joining.begin(now, 0.0 if alone else 2 * c.policy.heartbeat_seconds)
        self._beat()
        self._advance()
        return c.out

    def step(self, event: ev.Event, now: float) -> list[Action]:
        """What follows from an event at a time. Times never go back."""
        c = self._c
        c.now = max(c.now, now)
        c.out = []
        if self._gone:
            return c.out
        match event:
            case ev.Tick():
                pass
            case ev.Heard(message):
                self._heard(message)
            case ev.CertificateHeard(certificate, source):
                self._admit((certificate,), source)
            case ev.ChainHeard():
                self._chain_heard(event)
            case ev.ChainSilent(source):
                self._follower.failed(source, c.now)
            case ev.Progress():
                self._deciding.work = event
            case ev.UpdateReady():
                self._deciding.update_ready(event, self.facts.admission)
            case ev.BlobHeld(blob):
                c.blobs.hold(blob)
                if self._deciding.ballot is not None:
                    self._deciding.ballot.blob_held(blob)
            case ev.BlobBad(blob, reason):
                blob_bad(c, self._deciding, self._position.tip, blob, reason)
                self._forget_dropped()
            case ev.PartReduced() | ev.PartLacking():
                self._part_done(event)
            case ev.BlobMissing(blob):
                c.blobs.missing(blob, c.now)
            case ev.Applied(record, state):
                # A final may have cut the record off meanwhile: then the trainer is moved on from there.
                if self._position.moved(record, state) and record in c.chain:
                    self._begin_round(record)
            case ev.ApplyFailed(record, reason, kept):
                self._position.failed(record, reason, kept)
            case ev.Leave():
                b = self._deciding.ballot
                # Committees need a leaver's update for longer.
                wait = c.policy.exchange_seconds if b is not None and b.reduces else 0.0
                self._leave_at = c.now + max(LEAVE_SECONDS, wait)
        self._advance()
        return c.out

    def may_serve(self, blob: Digest, requester: PeerKey) -> str | None:
        """Why a blob must not be given to a peer yet; None when it may. An undecided round's updates are only for those
        who have announced their own (commit, then reveal)."""
        b = self._deciding.ballot
        if b is None or requester in b.headers or self._position.behind:
            return None
        return f"you have not announced an update in round {b.number} yet" if b.concerns(blob) else None

    def slices_for(self, blob: Digest, member: PeerKey) -> list[tuple[Signed[RoundRecord], int, tuple[PeerKey, ...]]]:
        """Of the undecided slates that list an update: each part that a member is to make with it, and who else is."""
        b = self._deciding.ballot
        return [] if b is None else b.slices_for(blob, member)

    # -- messages --------------------------------------------------------------------------------------------

    def _heard(self, message: Signed) -> None:
        c, body = self._c, message.body
        if isinstance(body, Heartbeat):
            self._heartbeat(message)
        elif isinstance(body, Goodbye) and c.members.goodbye(message):
            self._follower.forget(message.author)
        elif isinstance(body, Finalization):
            self._final(message)
        elif isinstance(body, Directive):
            self._accept_directive(message, None)
        elif isinstance(body, UpdateHeader | RoundRecord) and c.is_banned(message.author):
            pass  # what others list of it, until a record carries the ban, counts all the same
        elif isinstance(body, UpdateHeader | RoundRecord | Vote | ShardAttestation):
            if isinstance(body, RoundRecord) and body.directive is not None:
                self._accept_directive(body.directive, message.author)
            b = self._deciding.ballot
            if (
                b is not None
                and body.round == b.number
                and (isinstance(body, Vote | ShardAttestation) or body.parent == b.parent)
            ):
                self._ballot(message)
            elif (-1 if b is None else b.number) < body.round <= (c.chain.height(c.chain.head) + AHEAD):
                self._early.keep(message, self._deciding.has_room(message.author) or isinstance(body, UpdateHeader))

    def _ballot(self, message: Signed) -> None:
        self._decided(self._deciding.hear(message))

    def _part_done(self, event: ev.PartReduced | ev.PartLacking) -> None:
        b, reducing = self._deciding.ballot, self._deciding.reducing
        if b is None:
            return
        if isinstance(event, ev.PartReduced):
            reducing.reduced(b, event.record, event.part, event.blob)
        else:
            reducing.lacking(b, event.record, event.part, event.authors)
        self._decided(b.certified([event.record]))

    def _heartbeat(self, message: Signed[Heartbeat]) -> None:
        c, beat, source = self._c, message.body, message.author
        if source == c.me:
            return
        self._orders.tell(source, beat)
        if c.is_banned(source) or beat.admission and not c.members.heard(message, c.now):
            return
        if (member := c.members.get(source)) is not None:
            self._position.heard_at(beat.head, member.since)
        self._follower.claim(source, beat.head, beat.weight, c.chain, c.now, member=source in c.members)
        b = self._deciding.ballot
        if b is not None and beat.head == b.parent and self._deciding.working:
            help_with_headers(c, b, source, beat)

    def _final(self, message: Signed[Finalization]) -> None:
        c = self._c
        try:
            if c.chain.add_final(message):
                c.emit(KeepFinal(message))
                self._forget_dropped()
        except ChainError as e:
            c.report("error", "final", str(e), message.author)

    def _accept_directive(self, word: Signed[Directive], source: PeerKey | None) -> None:
        if self._orders.take(word, source):
            self._forget_dropped()

    # -- certificates ----------------------------------------------------------------------------------------

    def _decided(self, certificate: Certificate | None) -> None:
        if certificate is None:
            return
        try:
            check_certificate(certificate)
        except MalformedError as e:
            raise RuntimeError(f"votes were counted wrongly: {e}") from e
        self._admit((certificate,), None)

    def _admit(self, certificates: Iterable[Certificate], source: PeerKey | None) -> int:
        """Put certificates into the tree, oldest first; how many were new."""
        c, added = self._c, 0
        for certificate in certificates:
            twice, word = two_means(c.chain, certificate), c.chain.newest
            try:
                if not c.chain.add(certificate):
                    continue
            except UnknownParent:
                # Heartbeats say who has the rest; asked for in due time.
                break
            except RivalOfFinal as e:
                c.report("info", "refused", f"a certificate is refused: {e}", source)
                told = tuple(m for m in (c.chain.final, c.chain.newest) if m is not None)
                if source is not None and told:
                    c.emit(Send(source, told))
                break
            except ChainError as e:
                c.report("warning", "refused", f"a certificate is refused: {e}", source)
                break
            finally:
                if c.chain.newest is not word:
                    self._orders.took(word)
            added += 1
            if twice is not None:
                c.report("warning", "equivocation", *twice)
            c.emit(KeepCertificate(certificate))
            self._hold_back(certificate)
        self._forget_dropped()
        return added

    def _forget_dropped(self) -> None:
        """What we held may have been cut off the tree, by a final or by the tree's bounds."""
        b = self._deciding.ballot
        if b is not None and b.parent not in self._c.chain:
            self._deciding.ballot = None

    def _hold_back(self, certificate: Certificate) -> None:
        """A record with less than half of what we saw announced is not followed until patience has run out."""
        d, p, record, body = self._deciding, self._position, certificate.digest, certificate.record.body
        b = d.ballot
        if b is None or b.first_heard is None or self._c.observer or p.applied != b.parent:
            return
        if body.parent == b.parent and not d.is_heavy_enough(body):
            self._c.report("info", "light", f"record {record.short} lists too little of what was announced")
            p.hold_back(record, b.first_heard + self._c.policy.patience_seconds)
        elif body.parent != b.parent:
            p.reconsider(record, d.announced_windows(b) // 2)

    def _chain_heard(self, event: ev.ChainHeard) -> None:
        c = self._c
        if event.directive is not None:
            self._accept_directive(event.directive, event.source)
        added = self._admit(event.certificates, event.source)
        if event.final is not None:
            self._final(event.final)
        last = event.certificates[-1].digest if event.certificates else c.chain.root
        reached = c.chain.height(last) if last in c.chain else -1
        # Records that we have are news too when more come after them: a walk along a branch, ever upwards.
        onwards = event.more and bool(event.certificates) and reached > self._walked
        if added and event.more:
            self._joining.grew(c.now)
        self._follower.answered(event.source, useful=added > 0 or onwards, now=c.now)
        self._walked = reached if onwards else -1
        if onwards and self._follower.asked is None:
            self._follower.ask(event.source, c.now)
            c.emit(RequestChain(event.source, (last, *c.chain.locator())))

    # -- one thing after the other ---------------------------------------------------------------------------

    def _advance(self) -> None:
        c = self._c
        self._join()
        for _ in range(MAX_TURNS):
            changed = self._position.advance()
            b, applied = self._deciding.ballot, self._position.applied
            if c.observer and applied is not None and (b is None or b.parent != applied):
                self._begin_round(applied)
            head = c.chain.head
            self._decided(self._deciding.advance())
            self._orders.advance()
            if not changed and head == c.chain.head:
                break
        self._blobs()
        self._ask()
        if c.now >= self._beat_at:
            for key in c.members.expire(c.now):
                self._follower.forget(key)
            self._beat()
        self._leave()
        self._set_next_tick()

    def _join(self) -> None:
        """A newcomer hears what the others have before it loads a state and trains; not for ever."""
        p, c = self._position, self._c
        if p.joined:
            return
        ahead = self._follower.asked is not None or bool(self._follower.wanting(c.chain))
        heard_equal = any(m.beat.head in c.chain for m in c.members)
        if self._joining.is_over(c.now, ahead=ahead, heard_equal=heard_equal):
            p.joined = True

    def _begin_round(self, parent: Digest) -> None:
        c, d, old = self._c, self._deciding, self._deciding.ballot
        if old is not None and old.parent == parent:
            # The trainer was lost and is back where it was: what was announced stands.
            old.rebase(self._position.state)
            self._beat()
            return
        if parent != c.chain.root:
            decided = c.chain.certificate(parent)
            listed = decided.record.body.updates
            c.members.contributed(u.author for u in listed)
            if decided.parts:
                for u in listed:
                    c.members.withheld.forgive(u.author)
            if old is not None:
                known = {h.body.blob for h in old.headers.values()}
                known |= {u.body.blob for p in old.proposals.values() for u in p.record.body.updates}
                known |= old.parts()
                known -= {u.body.blob for u in listed} | set(decided.parts)
                for action in c.blobs.forget(b for b in known if b not in c.own):
                    c.emit(action)
        c.govern(parent)
        self._follower.grow(c.policy.max_members + 64)
        self._early.grow(2 * c.policy.max_members)
        ballot = d.open(parent)
        for message in self._early.take(ballot.number):
            if isinstance(message.body, Vote | ShardAttestation) or message.body.parent == parent:
                self._ballot(message)
        total = c.policy.total_windows
        if total and c.chain.weight(parent) >= total and not d.finished:
            d.finished = d.reached_total = True
            c.emit(Finished(f"the run has reached its {total} windows"))
        self._beat()

    def _blobs(self) -> None:
        c, d, p = self._c, self._deciding, self._position
        if c.observer:
            return
        b = d.ballot
        key = (c.chain.head, p.tip, p.applied, p.target, p.joined, id(b), d.working)
        if b is not None:
            key += (len(b.headers), len(b.proposals), b.announced, len(b.excluded), *d.reducing.stage)
        retry = c.blobs.next_retry()
        if key == self._blobs_for and (retry is None or retry > c.now):
            return
        self._blobs_for = key
        needed = p.needed() | d.needed() | p.asked_again()
        for action in c.blobs.want(needed, d.holders, c.now):
            c.emit(action)

    def _ask(self) -> None:
        c = self._c
        source = self._follower.next_request(c.chain, c.now, eager=not self._position.joined)
        if source is not None:
            c.emit(RequestChain(source, c.chain.locator()))

    def _leave(self) -> None:
        d, p, c = self._deciding, self._position, self._c
        if self._leave_at is None:
            return
        b = d.ballot
        if c.now < self._leave_at and b is not None and not c.observer and not d.finished:
            undecided = self._left_round is None or b.number <= self._left_round
            if p.busy or (b.announced is not None and undecided):
                self._left_round = b.number if self._left_round is None else self._left_round
                return
            if self._left_round is None and d.working and d.work.windows >= 1:
                d.ending = True
                self._left_round = b.number
                d.advance()
                return
        self._sequence = max(self._sequence + 1, self.facts.sequence)
        c.emit(Broadcast(c.signer.sign(Goodbye(c.run, self._sequence))))
        c.emit(Finished("left the swarm"))
        self._gone = True

    # -- heartbeats, time, views -----------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """As in heartbeats."""
        p, b = self._position, self._deciding.ballot
        if self._c.observer:
            return "observing"
        if self._leave_at is not None:
            return "leaving"
        if not p.joined:
            return "joining"
        if p.applied is None or p.applied not in self._c.chain:
            return "syncing"
        if b is not None and b.announced is not None:
            return "exchanging"
        return "paused" if self._c.rests else "training"

    def _beat(self) -> None:
        c, f, work, b = self._c, self.facts, self._deciding.work, self._deciding.ballot
        self._sequence = max(self._sequence + 1, f.sequence)
        head = self._position.applied
        if head is None or head not in c.chain:
            head = c.chain.head
        self._beats += 1
        known = known_headers(b, head, self.phase, self._beats)
        body = Heartbeat(
            c.run, self._sequence, c.chain.height(head), head, c.chain.weight(head), work.windows, self.phase,
            work.tokens_per_second, work.loss, f.bytes_up, f.bytes_down, known, f.addresses,
            b"" if c.observer else f.admission, f.device,
            self._position.state if head == self._position.applied else None, f.unheard, c.word.sequence,
        )  # fmt: skip
        c.emit(Broadcast(c.signer.sign(body)))
        self._beat_at = c.now + c.policy.heartbeat_seconds

    def _set_next_tick(self) -> None:
        c, p = self._c, self._position
        times = [self._beat_at, *p.times(), *self._deciding.times(), *self._orders.times()]
        if not p.joined:
            times += self._joining.times()
        for due in (self._follower.next_time(c.chain, eager=not p.joined), c.blobs.next_retry(), self._leave_at):
            if due is not None:
                times.append(due)
        self.next_tick = min(t for t in times if t > c.now)

    @property
    def orders(self) -> Orders:
        """What the run's owner has ordered, as far as it is known here: to be read only."""
        return self._orders

    def summary(self, now: float) -> Summary:
        """A frozen view for people."""
        return summarise(self._c, self._deciding, self._position, self.phase, now)

    @property
    def chain(self) -> Chain:
        """The tree of records: to be read only."""
        return self._c.chain

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Every container: what it holds, and its bound."""
        c = self._c
        found = c.members.sizes() | c.blobs.sizes() | c.own.sizes() | self._position.sizes()
        found |= self._follower.sizes() | self._early.sizes() | self._orders.sizes()
        if self._deciding.ballot is not None:
            found |= self._deciding.ballot.sizes()
        limits = c.chain.limits
        return found | {"records": (len(c.chain), limits.max_records + limits.max_side)}

"""The undecided round after the state that we hold: when to announce, propose and vote, and what to repeat."""

from __future__ import annotations

from dataclasses import replace

from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey
from protocol.message_codec import check_certificate
from protocol.messages import (
    Certificate,
    RoundRecord,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Vote,
    quorum,
    shards_digest,
)
from protocol.rounds.actions import Broadcast
from protocol.rounds.awaited_members import AwaitedMembers
from protocol.rounds.blobs import BlobRole
from protocol.rounds.context import Context
from protocol.rounds.events import ShardReduced, ShardUnavailable, TrainingProgress, UpdateReady
from protocol.rounds.exchange import Exchange
from protocol.rounds.gathered_exchange import GatheredExchange
from protocol.rounds.phase import InvariantError
from protocol.rounds.reduced_exchange import ReducedExchange
from protocol.rounds.round_state import Proposal, RoundState
from protocol.rounds.state_sync import StateSync

MAX_REPEATED_VOTES = 64
MAX_HOLDERS = 8


class Consensus:
    """Runs one round after the other. Every method acts on the round after the trainer's state."""

    def __init__(self, context: Context, sync: StateSync):
        self._c = context
        self._sync = sync
        self.round: RoundState | None = None
        """The open round; None before the first, and when its parent left the chain."""

        self.exchange: Exchange | None = None
        """The open round's; None when there is no round."""

        self._stragglers: AwaitedMembers | None = None
        self.work = TrainingProgress(0, 0.0, 0.0)
        """The own trainer's work that no update covers yet."""

        self._revision = 0
        self._repeat_at = 0.0
        self._repeats = 0
        self._contradicted: Digest | None = None
        self._headers_compared = 0

    def open(self, parent: Digest) -> RoundState:
        """Begin the round after a record."""
        c, before = self._c, self.round
        self.rest()
        if before is not None:
            self._revision = before.revision + 1
        r = RoundState(c.policy, c.chain, parent, self._sync.state, c.now, self._revision)
        self.round = r
        self.exchange = ReducedExchange(c, r) if c.chain.is_reduced_after(parent) else GatheredExchange(c, r)
        lasted = 0.0 if before is None or before.number + 1 != r.number else c.now - before.began
        self._stragglers = AwaitedMembers(c, r, self.exchange, lasted)
        self._repeats = 0
        self._headers_compared = 0
        c.members.watch(parent, r.number)
        return r

    def reopen(self) -> None:
        """Begin the round once more, on another branch: what was announced for it counts no more."""
        if self.round is not None:
            self.open(self.round.parent)

    def abandon(self) -> None:
        """Close the round: its parent has left the chain."""
        if self.round is not None:
            self._revision = self.round.revision + 1
        self.round = None

    def rest(self) -> None:
        """Stop work on the round's proposals: it is decided, or our state is lost."""
        if self.exchange is not None:
            self.exchange.stop()

    # -- what arrives ----------------------------------------------------------------------------------------

    def receive(self, message: Signed) -> Certificate | None:
        """Handle a message of this round. Return a certificate when it completes one."""
        match message.body:
            case UpdateHeader():
                self._receive_header(message)
            case RoundRecord():
                return self._receive_record(message)
            case Vote():
                return self._receive_vote(message)
            case ShardAttestation() if self.exchange is not None and self.exchange.receive(message):
                return self._certified(message.body.record)
        return None

    def _receive_header(self, header: Signed[UpdateHeader]) -> None:
        """Handle a header of this round, alone or in a record."""
        c, r = self._c, self.round
        if r is None:
            return
        known = r.headers.get(header.author)
        if known is not None:
            if known.digest != header.digest and r.report_once(header.author):
                c.notify("warning", "equivocation", f"peer {header.author.short} announced two updates", header.author)
            return
        if (reason := r.header_refusal(header, c.accepts_size)) is not None:
            c.notify("warning", "refused", f"the update of {header.author.short} is refused: {reason}", header.author)
            return
        if header.author == c.me and (c.observer or self._sync.is_making):
            return
        if not r.add_header(header, c.now, c.members.has_room_for):
            return
        if c.is_banned(header.author):
            r.exclude(header.author)
        c.members.announced(header.author)
        if header.author == c.me:
            # Announced before a crash: it stands, so that we do not contradict ourselves.
            c.own.made(header.body.blob, r.parent, r.number)
            self._announced(r)

    def _receive_record(self, record: Signed[RoundRecord]) -> Certificate | None:
        c, r, x = self._c, self.round, self.exchange
        if r is None or x is None or record.digest in r.proposals:
            return None
        if record.body.parent != r.parent or r.parent not in c.chain:
            return None
        refused = f"a record of {record.author.short} is refused: "
        if record.author not in record.body.contributors or len(record.body.updates) > c.policy.max_members:
            c.notify("warning", "refused", refused + "it breaks the rules", record.author)
            return None
        if (reason := c.chain.record_refusal(record.body)) is not None:
            c.notify("warning", "refused", refused + reason, record.author)
            return None
        for u in record.body.updates:
            if (reason := r.header_refusal(u, c.accepts_size)) is not None:
                c.notify("warning", "refused", f"{refused}the update of {u.author.short}: {reason}", record.author)
                return None
        for u in record.body.updates:
            self._receive_header(u)
            if u.author == c.me:
                c.own.made(u.body.blob, r.parent, r.number)
        p = r.add_record(record, c.now, x.missing_for(record.body), c.blobs.is_invalid)
        if p is not None and p.equivocated and r.report_once(record.author):
            text = f"peer {record.author.short} proposed two records at once"
            c.notify("warning", "equivocation", text, record.author)
        if p is not None and not p.equivocated:
            r.jump(record.author, record.body.attempt, c.now)
        x.proposals_changed(p)
        return self._certified(record.digest)

    def _receive_vote(self, vote: Signed[Vote]) -> Certificate | None:
        r, x = self.round, self.exchange
        if r is None or x is None or (vote.body.shards_digest is not None) is not x.has_shards:
            return None
        if not r.add_vote(vote, self._c.members.has_room_for):
            return None
        return self._certified(vote.body.record)

    def _certified(self, digest: Digest) -> Certificate | None:
        """Return the certificate of a record that has the votes it needs."""
        r, x = self.round, self.exchange
        p = None if r is None else r.proposals.get(digest)
        if r is None or x is None or p is None or p.bad:
            return None
        needed = quorum(len(p.record.body.updates))
        if len(r.votes) < needed:
            return None  # too few have voted for anything: a cheap check, made for each vote
        if (shards := x.shards(p)) is None:
            return None
        votes = r.votes_for(p.record, shards_digest(shards))
        if len(votes) < needed:
            return None
        certificate = Certificate(p.record, tuple(votes), shards)
        try:
            check_certificate(certificate)
        except MalformedError as e:
            raise InvariantError(f"votes were counted wrongly: {e}") from e
        return certificate

    def shard_answered(self, event: ShardReduced | ShardUnavailable) -> Certificate | None:
        """Attest a shard that our driver has made, or cannot make. Return a certificate when that completes one."""
        if self.exchange is None:
            return None
        if isinstance(event, ShardReduced):
            self.exchange.shard_reduced(event.record, event.shard, event.blob)
        else:
            self.exchange.shard_unavailable(event.record, event.shard, event.authors)
        return self._certified(event.record)

    def progress(self, work: TrainingProgress) -> None:
        self.work = work

    def update_ready(self, event: UpdateReady, admission: bytes) -> None:
        c, r, requested = self._c, self.round, self._sync.update_ready(event)
        if event.blob is None:
            self.work = replace(self.work, windows=0)
            return
        windows = event.end_window - event.first_window
        self.work = replace(self.work, windows=max(0, self.work.windows - windows))
        if r is None or requested != event.parent or r.parent != event.parent or c.me in r.headers:
            return
        if self._sync.applied != r.parent:
            # The state that it was made from turned out to be wrong, or is lost.
            return
        body = UpdateHeader(
            c.run, r.number, r.parent, self._state(), event.first_window, event.end_window, event.inner_steps,
            event.blob, event.blob_size, event.loss, admission, r.epoch,
        )  # fmt: skip
        header = c.signer.sign(body)
        if (reason := r.header_refusal(header, c.accepts_size)) is not None:
            c.notify("error", "refused", f"our own update cannot be announced: {reason}")
            return
        if r.add_header(header, c.now, c.members.has_room_for):
            self._announced(r)
            c.emit(Broadcast(header))

    def _state(self) -> Digest:
        state = self._sync.state
        if state is None:
            raise InvariantError("a round was worked on without a state")
        return state

    def _announced(self, r: RoundState) -> None:
        r.mark_announced(self._c.now)
        self._repeats = 0
        self._repeat_at = self._c.now + 2 * self._c.policy.heartbeat_seconds

    def blob_held(self, blob: Digest) -> None:
        if self.round is not None:
            self.round.hold(blob)

    def rebase(self) -> None:
        """Continue the open round with the trainer's state: it was lost, and is back."""
        if self.round is not None:
            self.round.rebase(self._sync.state)

    def exclude_banned(self) -> None:
        """Leave banned authors out of the open round."""
        if self.round is not None:
            for key in [k for k in self.round.headers if self._c.is_banned(k)]:
                self.round.exclude(key)

    def pause_ended(self) -> None:
        """Start the open round's time from now, unless we announced in it."""
        if self.round is not None and self.round.announced_at is None:
            self.round.restart_clock(self._c.now)

    # -- what is due -----------------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """True when the round is ours to decide: the trainer holds its base, and it is not decided yet."""
        t, r = self._sync, self.round
        if r is None or self._c.observer:
            return False
        return not t.is_moving and t.applied == r.parent and not t.is_behind

    def advance(self, *, hurry: bool = False) -> Certificate | None:
        """Do what is due; return a certificate when that completes one. `hurry`: announce now, since we are leaving."""
        r, x = self.round, self.exchange
        if r is None or x is None or not self.is_working:
            self.rest()
            return None
        if (vouched := self._contradiction(r)) is not None:
            self._sync.contradicted(vouched)
            return None
        if r.announced_at is None:
            due = not self._sync.is_making and self.work.windows >= 1 and not self._c.resting
            if due and self._should_announce(r, hurry):
                self._sync.request_update(r.number, r.parent)
            return None
        if self._stragglers is not None:
            self._stragglers.update()
        x.refresh(lambda: self._best(r, x))
        certificate = self._propose(r, x) or self._vote(r, x)
        self._repeat(r, x)
        return certificate

    def _contradiction(self, r: RoundState) -> Digest | None:
        if len(r.headers) < 2 or self._contradicted == r.parent or self._headers_compared == len(r.headers):
            return None
        self._headers_compared = len(r.headers)
        vouched = r.contradicting_state()
        if vouched is not None:
            self._contradicted = r.parent
        return vouched

    def _should_announce(self, r: RoundState, hurry: bool) -> bool:
        c = self._c
        if hurry or c.deadlines.due("round", r.began + c.policy.max_seconds):
            return True
        members, headers = c.members, r.headers
        announced = sum(h.body.windows for a, h in headers.items() if not members.distrusted.holds(a, r.number))
        target, total = c.policy.target_windows, self.work.windows + announced + members.windows
        if total >= target or not headers:
            return total >= target
        # Others have seen enough. Those that kept earlier rounds waiting in vain are not believed.
        enough = sum(not (members.late.holds(a, r.number) or members.withheld.holds(a, r.number)) for a in headers)
        return enough > 0 and (enough * 3 > 1 + len(headers) + members.training or total * 2 >= target)

    def _propose(self, r: RoundState, x: Exchange) -> Certificate | None:
        c = self._c
        attempt = r.attempt(c.now)
        following = r.next_attempt_at(c.now)
        if following is not None:
            c.deadlines.due("attempt", following)
        order = r.proposer_order
        if attempt <= r.proposed_attempt or c.me not in order or order[attempt % len(order)] != c.me:
            return None
        if x.is_occupied:
            return None
        listed = x.listable()
        if attempt >= 1:
            listed = [h for h in listed if h.author == c.me or self._answers(r, x, h.author, attempt)]
        r.begin_attempt(attempt)
        if not any(h.author == c.me for h in listed):
            return None
        updates = tuple(sorted(listed, key=lambda h: h.author))
        directive = c.chain.directive_to_include(r.parent)
        record = c.signer.sign(RoundRecord(c.run, r.number, r.parent, self._state(), attempt, updates, directive))
        r.propose(record)
        c.emit(Broadcast(record))
        return self._receive_record(record)

    def _answers(self, r: RoundState, x: Exchange, author: PeerKey, attempt: int) -> bool:
        """Return whether to count on a contributor's vote, when an earlier attempt did not get the votes it needed."""
        attempt = x.attempts_in_vain(attempt)
        if attempt >= 4 and r.voted_for:
            # Only those that voted as we did lately: a silent peer, or one that receives other records, is left out.
            return any(record in r.votes.get(author, ()) for record in r.voted_for)
        if author in r.votes:
            return True
        if attempt >= 2 and r.voted_for:
            return False
        member = self._c.members.get(author)
        return member is not None and self._c.now - member.heard <= 3 * self._c.policy.heartbeat_seconds

    def _vote(self, r: RoundState, x: Exchange) -> Certificate | None:
        p = x.choose(lambda: self._best(r, x))
        if p is None or r.last_vote is not None and r.last_vote.body.record == p.record.digest:
            return None
        c, record = self._c, p.record
        vote = c.signer.sign(Vote(c.run, r.number, record.digest, shards_digest(x.shards(p) or ())))
        r.cast(vote, c.now)
        c.emit(Broadcast(vote))
        return self._receive_vote(vote)

    def _best(self, r: RoundState, x: Exchange) -> Proposal | None:
        """Return the proposal that our vote goes to, if we vote now."""
        c, order = self._c, r.proposer_order
        reached = max(0, r.attempt(c.now))
        best: tuple | None = None
        for p in r.proposals.values():
            if not self._is_votable(r, x, p):
                continue
            body = p.record.body
            # Anybody can name an attempt that is far off and its own.
            ranked = bool(order) and body.attempt <= reached and order[body.attempt % len(order)] == p.record.author
            if not ranked and not c.deadlines.due("out of turn", p.seen + c.policy.propose_seconds / 2):
                continue
            key = (ranked, body.attempt, body.windows, p.record.digest)
            if best is None or key > best[0]:
                best = (key, p)
        return None if best is None else best[1]

    def _is_votable(self, r: RoundState, x: Exchange, p: Proposal) -> bool:
        body = p.record.body
        if p.bad or p.equivocated or body.base_state != r.state or self._c.me not in body.contributors:
            return False
        return x.is_votable(p) and self.is_heavy_enough(body)

    def is_heavy_enough(self, record: RoundRecord) -> bool:
        """Return whether a record of this round may be voted for and followed now.

        It has half of the windows that we saw announced, or most of those who announced, or patience has run out. Most
        of them are enough because two members that missed rounds, and announce the work of all of them, could else hold
        back each other's rounds for good.
        """
        c, r = self._c, self.round
        if r is None or r.first_header_at is None:
            return True
        if c.deadlines.due("patience", r.first_header_at + c.policy.patience_seconds):
            return True
        windows = {h.author: h.body.windows for h in self._believed(r)}
        listed = windows.keys() & set(record.contributors)
        return 2 * record.windows >= sum(windows.values()) or 2 * len(listed) > len(windows)

    @property
    def announced_windows(self) -> int:
        """Windows that we saw announced."""
        return 0 if self.round is None else sum(h.body.windows for h in self._believed(self.round))

    def _believed(self, r: RoundState) -> list[Signed[UpdateHeader]]:
        """Return the headers that count: anybody can claim windows, and give nothing."""
        x = self.exchange
        return [h for a, h in r.headers.items() if a not in r.excluded and (x is None or x.believed(h))]

    def _repeat(self, r: RoundState, x: Exchange) -> None:
        """Broadcast again, while the round is undecided, what may have been lost; less often each time."""
        c = self._c
        if not c.deadlines.due("repeat", self._repeat_at):
            return
        self._repeats += 1
        self._repeat_at = c.now + c.policy.heartbeat_seconds * 2 ** min(1 + self._repeats, 3)
        c.deadlines.due("repeat", self._repeat_at)
        if c.me in r.headers:
            c.emit(Broadcast(r.headers[c.me]))
        x.repeat(self._repeats)
        if r.last_vote is not None and (p := r.proposals.get(r.last_vote.body.record)) is not None:
            # Others' too: not everyone receives everyone.
            few = c.members.is_my_turn(p.record.digest, self._repeats)
            if few or p.record.author == c.me:
                c.emit(Broadcast(p.record))
            for vote in r.votes_for(p.record)[:MAX_REPEATED_VOTES] if few else ():
                if vote.author != c.me:
                    c.emit(Broadcast(vote))
            c.emit(Broadcast(r.last_vote))

    # -- blobs and views -------------------------------------------------------------------------------------

    def needed(self) -> dict[Digest, BlobRole]:
        """Return the blobs of the round to fetch. Nobody gives them to us before we have announced."""
        r, x = self.round, self.exchange
        if r is None or x is None or r.announced_at is None or not self.is_working:
            return {}
        return x.needed()

    def holders(self, blob: Digest, origin: BlobRole) -> tuple[PeerKey, ...]:
        """Return the peers that are likely to have a blob, the best first.

        For an update: its author, then voters for it, then those that announced in its round. For a shard: its signers,
        then voters for its record.
        """
        c, r, x = self._c, self.round, self.exchange
        found: dict[PeerKey, None] = {}
        found.update((a, None) for a in origin.first_holders(blob, None if r is None else x))
        for branch in (c.chain.head, self._sync.retried_tip):
            decided = None if branch is None else c.chain.ancestor_at(branch, origin.round + 1)
            if decided is not None and decided != c.chain.root and origin.belongs_to(c.chain.certificate(decided)):
                found.update((v.author, None) for v in c.chain.certificate(decided).votes)
        if r is not None:
            found.update((a, None) for a in origin.other_holders(r))
        found.pop(c.me, None)
        return tuple(found)[:MAX_HOLDERS]

    def concerns(self, blob: Digest) -> bool:
        """Return whether a blob is an update of the round, or a shard that somebody made."""
        r, x = self.round, self.exchange
        return r is not None and x is not None and (blob in r.update_blobs() or bool(x.signers_of(blob)))

    def blobs(self) -> set[Digest]:
        """Return the blobs of the round's updates, and of the shards that somebody attested."""
        r, x = self.round, self.exchange
        return set() if r is None or x is None else r.update_blobs() | x.shard_blobs()

    def awaited(self) -> tuple[PeerKey, ...]:
        """Return the members that the first proposer waits for, once we have announced."""
        r, s = self.round, self._stragglers
        return () if r is None or s is None or r.announced_at is None else tuple(s.awaited())

    def sizes(self) -> dict[str, tuple[int, int]]:
        r, x = self.round, self.exchange
        return {} if r is None or x is None else r.sizes() | x.sizes()

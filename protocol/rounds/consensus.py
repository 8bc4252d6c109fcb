"""The undecided round after the state that we hold: when to announce, propose and vote, and what to repeat."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from protocol.errors import MalformedError
from protocol.ids import Digest, PeerKey, sha256
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
from protocol.rounds.actions import Broadcast, StoreHeader
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
from protocol.rounds.update_fate import UpdateFate, fate_of
from protocol.stake import is_majority

MAX_REPEATED_VOTES = 64
MAX_HOLDERS = 8

MAX_LEAVE_SECONDS = max(GatheredExchange.leave_seconds, ReducedExchange.leave_seconds)
"""The longest time that a leaver waits for its last round, of any kind: then it says goodbye."""


class Consensus:
    """One peer's part in deciding the open round: the one that follows the record of the trainer's state.

    A round has four steps (docs/rounds.md). Members announce headers, which commit to their updates. In each attempt
    one author, in an order that those who hold the same updates compute alike, proposes a record of the announced
    updates. The contributors that it lists vote once they hold the data. Votes of more than two thirds of them are a
    certificate.

    A certificate is not final: its quorum is of the contributors that the record lists, not of all members. A member
    may vote for a second record of the round, because a record whose voters fell silent would stop it for ever. So two
    records of a round can both be certified without a fault, as two branches. Safety is not in the votes: the chain
    checks each record by itself, and the fork choice leads everyone to the branch with the most stake. No correct peer
    leaves a record that the owner has finalized, except by the owner's rollback.
    """

    def __init__(self, context: Context, sync: StateSync, announced: Signed[UpdateHeader] | None = None):
        self._context = context
        self._sync = sync
        self._last_header = announced
        """Our newest header, from before a restart too: the same update is never announced by another one."""

        self.round: RoundState | None = None
        """The open round; None before the first, and when its parent left the chain."""

        self.exchange: Exchange | None = None
        """The exchange of the open round; None when there is no round."""

        self._awaited_members: AwaitedMembers | None = None
        self.work = TrainingProgress(0, 0.0, 0.0)
        """Our trainer's work that no update covers yet."""

        self.fate: UpdateFate | None = None
        """Of our newest update; None before the first."""

        self._revision = 0
        self._announced_again: RoundState | None = None
        self._repeat_at = 0.0
        self._repeats = 0
        self._contradicted: Digest | None = None
        self._headers_compared = 0

    def open(self, parent: Digest) -> RoundState:
        """Begin the round after a record."""
        context, before = self._context, self.round
        self.stop_exchange()
        if before is not None:
            self._revision = before.revision + 1
        is_reduced = context.chain.is_reduced_after(parent)
        round_ = RoundState(
            context.policy, context.chain, parent, self._sync.state, context.now, self._revision,
            is_delivered=(lambda header: True) if is_reduced else context.blobs.holds_update,
        )  # fmt: skip
        self.round = round_
        kind = ReducedExchange if is_reduced else GatheredExchange
        self.exchange = kind(context, round_)
        lasted = 0.0 if before is None or before.number + 1 != round_.number else context.now - before.began
        self._awaited_members = AwaitedMembers(context, round_, self.exchange, lasted)
        self._repeats = 0
        self._headers_compared = 0
        context.members.watch(parent, round_.number, partial(context.chain.countable, parent))
        return round_

    def reopen(self) -> None:
        """Begin the round once more, on another branch: headers announced for it no longer count."""
        if self.round is not None:
            self.open(self.round.parent)

    def abandon(self) -> None:
        """Close the round: its parent has left the chain."""
        self.stop_exchange()
        if self.round is not None:
            self._revision = self.round.revision + 1
        self._context.members.stop_watching()
        self.round = self.exchange = self._awaited_members = None

    def stop_exchange(self) -> None:
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

    def _receive_header(self, header: Signed[UpdateHeader], *, listed: bool = False) -> None:
        """Handle a header of this round, which came by itself, or is `listed` by a record."""
        context, round_ = self._context, self.round
        if round_ is None:
            return
        author, known = header.author, round_.headers.get(header.author)
        if known is not None:
            if known.digest != header.digest:
                self._equivocation(round_, header, listed=listed)
            elif not listed:
                round_.confirm(author)
                context.chain.announce(header)
            return
        if (reason := round_.header_refusal(header, context.accepts_size)) is not None:
            context.notify("warning", "refused", f"the update of {author.short} is refused: {reason}", author)
            return
        if author == context.me and (context.observer or self._sync.is_making_update):
            return
        if not round_.add_header(header, context.now, context.members.rank, listed=listed):
            return
        if context.is_excluded(author):
            round_.exclude(author)
        if context.blobs.is_unusable(header):
            self._leave_out(round_, author)
        context.members.note_announced(author)
        if not listed:
            context.chain.announce(header)
        if author == context.me:
            # Announced before a crash: it stands, so that we do not contradict ourselves.
            context.own.made(header.body.blob, round_.parent, round_.number)
            self._announced(round_)

    def _equivocation(self, round_: RoundState, second: Signed[UpdateHeader], *, listed: bool) -> None:
        """Leave out an author of two headers, and pass on the second, so that all others leave it out too."""
        context, author = self._context, second.author
        if author in round_.equivocators or round_.header_refusal(second, context.accepts_size) is not None:
            return
        round_.equivocate(second, listed=listed)
        context.members.equivocated.penalise(author, round_.number)
        if author == context.me:
            context.notify_copied_key()
        elif round_.report_once(author):
            context.notify("warning", "equivocation", f"peer {author.short} announced two updates", author)
        if context.members.is_my_turn(second.digest, 0):
            context.emit(Broadcast(round_.headers[author]))
            context.emit(Broadcast(second))

    def _receive_record(self, record: Signed[RoundRecord]) -> Certificate | None:
        context, round_, exchange = self._context, self.round, self.exchange
        if round_ is None or exchange is None or record.digest in round_.proposals:
            return None
        if record.body.parent != round_.parent or round_.parent not in context.chain:
            return None
        text = f"a record of {record.author.short} is refused: "
        if record.author not in record.body.contributors or len(record.body.updates) > context.policy.max_members:
            context.notify("warning", "refused", text + "it breaks the rules", record.author)
            return None
        if (reason := context.chain.record_refusal(record.body)) is not None:
            context.notify("warning", "refused", text + reason, record.author)
            return None
        for u in record.body.updates:
            if (reason := round_.header_refusal(u, context.accepts_size)) is not None:
                text += f"the update of {u.author.short}: {reason}"
                context.notify("warning", "refused", text, record.author)
                return None
        is_refused = any(u.author in round_.equivocators or round_.contradicts(u) for u in record.body.updates)
        for u in record.body.updates:
            self._receive_header(u, listed=u.author != record.author)
            if u.author == context.me:
                context.own.made(u.body.blob, round_.parent, round_.number)
        proposal = round_.add_record(
            record, context.now, exchange.missing_for(record.body), context.blobs.is_invalid, refused=is_refused
        )
        if proposal is not None and proposal.equivocated and round_.report_once(record.author):
            text = f"peer {record.author.short} proposed two records at once"
            context.notify("warning", "equivocation", text, record.author)
        exchange.proposals_changed(proposal)
        return self._certified(record.digest)

    def _receive_vote(self, vote: Signed[Vote]) -> Certificate | None:
        round_, exchange = self.round, self.exchange
        if round_ is None or exchange is None or not exchange.accepts(vote):
            return None
        if not round_.add_vote(vote, self._context.members.rank):
            return None
        return self._certified(vote.body.record)

    def _certified(self, digest: Digest) -> Certificate | None:
        """Return the certificate of a record that has the votes it needs."""
        round_, exchange = self.round, self.exchange
        proposal = None if round_ is None else round_.proposals.get(digest)
        if round_ is None or exchange is None or proposal is None or proposal.bad:
            return None
        needed = quorum(len(proposal.record.body.updates))
        if len(round_.votes) < needed:
            return None  # too few have voted for anything: a cheap check, made for each vote
        if (shards := exchange.shards(proposal)) is None:
            return None
        votes = round_.votes_for(proposal.record, shards_digest(shards))
        if len(votes) < needed or not self._may_follow(proposal, {vote.author for vote in votes}):
            return None  # the rest of the votes may be on the way
        certificate = Certificate(proposal.record, tuple(votes), shards)
        try:
            check_certificate(certificate)
        except MalformedError as e:
            raise InvariantError(f"votes were counted wrongly: {e}") from e
        return certificate

    def note_decided(self, certificate: Certificate) -> None:
        """Penalise peers whose silence made an attempt fail; forgive those that voted for the decided record."""
        context, round_, exchange, body = self._context, self.round, self.exchange, certificate.record.body
        self._note_fate(certificate)
        silent = context.members.silent
        for vote in certificate.votes:
            silent.forgive(vote.author)
        if round_ is None or exchange is None or body.parent != round_.parent or body.attempt == 0:
            return
        for author in sorted(exchange.silent_authors(body) - {context.me}):
            silent.penalise(author, round_.number)
            text = f"peer {author.short} neither proposed nor voted: rounds do not depend on it for a while"
            context.notify("info", "silent", text, author)

    def _note_fate(self, certificate: Certificate) -> None:
        """Note what became of our newest update, now that a record of its round or a later one is followed."""
        chain, fate = self._context.chain, self.fate
        if fate is None or fate.accepted is not None:
            return
        record = chain.ancestor_at(certificate.digest, fate.round + 1)
        if record is not None and record != chain.root:
            self.fate = fate_of(chain.certificate(record), self._context.me, self.round)

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
        context, round_, requested = self._context, self.round, self._sync.update_ready(event)
        if event.blob is None:
            self.work = replace(self.work, windows=0)
            return
        windows = event.end_window - event.first_window
        self.work = replace(self.work, windows=max(0, self.work.windows - windows))
        if round_ is None or requested != event.parent or round_.parent != event.parent or context.me in round_.headers:
            return
        if self._sync.applied != round_.parent:
            # The state that it was made from turned out to be wrong, or is lost.
            return
        body = UpdateHeader(
            run=context.run, round=round_.number, parent=round_.parent, base_state=self._state(), epoch=round_.epoch,
            first_window=event.first_window, rebase_window=event.rebase_window, end_window=event.end_window,
            inner_steps=event.inner_steps, blob=event.blob, blob_size=event.blob_size, loss=event.loss,
            admission=admission,
        )  # fmt: skip
        header = context.signer.sign(body)
        last = self._last_header
        is_stored = last is not None and replace(last.body, admission=header.body.admission) == header.body
        if last is not None and is_stored:
            header = last  # only the admission is newer, and a second header of one round is equivocation
        if (reason := round_.header_refusal(header, context.accepts_size)) is not None:
            context.notify("error", "refused", f"our own update cannot be announced: {reason}")
            return
        if round_.add_header(header, context.now, context.members.rank):
            self._announced(round_)
            context.chain.announce(header)
            if not is_stored:
                self._last_header = header
                context.emit(StoreHeader(header))
            context.emit(Broadcast(header))

    def _state(self) -> Digest:
        state = self._sync.state
        if state is None:
            raise InvariantError("a round was worked on without a state")
        return state

    def _announced(self, round_: RoundState) -> None:
        round_.mark_announced(self._context.now)
        self.fate = UpdateFate(round_.number)
        self._repeats = 0
        self._repeat_at = self._context.now + 2 * self._context.policy.heartbeat_seconds

    def blob_held(self, blob: Digest, author: PeerKey | None) -> None:
        """Leave out those who announced the blob as theirs if it names another `author`."""
        context, round_ = self._context, self.round
        context.blobs.hold(blob, author)
        if round_ is None:
            return
        round_.hold(blob, author)
        for copier in [h.author for h in round_.headers.values() if h.body.blob == blob and h.author != author]:
            self._leave_out(round_, copier)

    def _leave_out(self, round_: RoundState, announcer: PeerKey) -> None:
        """Leave out a peer that announced a blob that is invalid, or another's. It is penalised once a round."""
        context, members = self._context, self._context.members
        if announcer in round_.excluded:
            return
        round_.exclude(announcer)
        members.late.penalise(announcer, round_.number)
        members.distrusted.penalise(announcer, round_.number)
        if round_.report_once(announcer):
            text = f"peer {announcer.short} announced a blob that another made, or that is invalid"
            context.notify("warning", "bad-blob", text, announcer)

    def continue_round(self) -> None:
        """Continue the open round with the trainer's state: it was lost, and is back."""
        if self.round is not None:
            self.round.set_state(self._sync.state)

    def exclude_banned(self) -> None:
        """Leave banned and barred authors out of the open round."""
        if self.round is not None:
            for key in [k for k in self.round.headers if self._context.is_excluded(k)]:
                self.round.exclude(key)

    def pause_ended(self) -> None:
        """Start the open round's time from now, unless we announced in it."""
        if self.round is not None and self.round.announced_at is None:
            self.round.restart_clock(self._context.now)

    # -- what is due -----------------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """True when the round is ours to decide: the trainer holds its base, and it is not decided yet."""
        sync, round_ = self._sync, self.round
        if round_ is None or self._context.observer:
            return False
        return not sync.is_moving and sync.applied == round_.parent and not sync.is_behind

    def advance(self, *, hurry: bool = False) -> Certificate | None:
        """Do what is due; return a certificate when that completes one. `hurry`: announce now: we leave or rest."""
        round_, exchange = self.round, self.exchange
        if round_ is None or exchange is None or not self.is_working:
            self.stop_exchange()
            return None
        if (vouched := self._contradiction(round_)) is not None:
            self._sync.discard_state(vouched)
            return None
        if round_.announced_at is None:
            self._announce_again(round_)
        if round_.announced_at is None:
            due = not self._sync.is_making_update and self.work.windows >= 1 and not self._context.is_paused
            if due and self._should_announce(round_, hurry):
                self._sync.request_update(round_.number, round_.parent)
            return None
        if self._awaited_members is not None:
            self._awaited_members.update()
        exchange.refresh(lambda: self._best(round_, exchange))
        certificate = self._propose(round_, exchange) or self._vote(round_, exchange)
        if certificate is None and round_.last_vote is not None:
            certificate = self._certified(round_.last_vote.body.record)  # patience may be over, or members gone
        self._repeat(round_, exchange)
        return certificate

    def _announce_again(self, round_: RoundState) -> None:
        """Announce our update of this round once more, if the head is back at its parent: a second is equivocation.

        After a restart the trainer is asked for the update, which is the same then: the store may not have it.
        """
        header = self._last_header
        if header is None or self._announced_again is round_ or not self._context.blobs.holds_update(header):
            return
        if (header.body.parent, header.body.epoch) == (round_.parent, round_.epoch):
            self._announced_again = round_
            self._receive_header(header)
            if self._context.me in round_.headers:
                self._context.emit(Broadcast(header))

    def _contradiction(self, round_: RoundState) -> Digest | None:
        count = len(round_.headers)
        if count < 2 or self._contradicted == round_.parent or self._headers_compared == count:
            return None
        self._headers_compared = count
        vouched = round_.contradicting_state(self._present())
        if vouched is not None:
            self._contradicted = round_.parent
        return vouched

    def _should_announce(self, round_: RoundState, hurry: bool) -> bool:
        """Return whether to end training of this round: its target is reached, as we or enough of the others see it.

        Others that announced have seen enough. We follow them once they are more than a third of those that take part,
        or once we see half of the target ourselves. Nobody has measured these two fractions. Authors that kept an
        earlier round waiting in vain do not count: false claims would end everybody's rounds. Nor do headers that only
        a record lists: one record can name any number of keys.
        """
        context = self._context
        if hurry or context.deadlines.due("round", round_.began + context.policy.max_seconds):
            return True
        members, number = context.members, round_.number
        headers = {author: h for author, h in round_.headers.items() if author in round_.direct_authors}
        trusted = {a: h.body.windows for a, h in headers.items() if not members.is_doubted(a, number)}
        announced = sum(members.counted(author, windows) for author, windows in trusted.items())
        target, total = context.policy.target_windows, self.work.windows + announced + members.windows
        if total >= target or not headers:
            return total >= target
        enough = sum(
            not any(p.applies_to(a, number) for p in (members.late, members.withheld, members.silent)) for a in headers
        )
        return enough > 0 and (enough * 3 > 1 + len(headers) + members.training or total * 2 >= target)

    def _propose(self, round_: RoundState, exchange: Exchange) -> Certificate | None:
        context, members = self._context, self._context.members
        round_.skip(lambda a: a != context.me and members.is_unreliable(a, round_.number), context.now)
        round_.follow_named_attempts(context.now)
        attempt = round_.attempt(context.now)
        following = round_.next_attempt_at(context.now)
        if following is not None:
            context.deadlines.register("attempt", following)
        order = round_.proposer_order
        if attempt <= round_.proposed_attempt or context.me not in order or order[attempt % len(order)] != context.me:
            return None
        if exchange.is_occupied:
            return None
        listed = exchange.listable()
        if attempt >= 1:
            listed = [h for h in listed if h.author == context.me or self._answers(round_, exchange, h.author, attempt)]
        reports, decisions = context.reports.to_include(round_.parent)
        convicted = {d.author for d in decisions if d.convicted}
        listed = self._without_surplus_silent(round_, [h for h in listed if h.author not in convicted])
        round_.begin_attempt(attempt)
        if not any(h.author == context.me for h in listed):
            return None
        updates = tuple(sorted(listed, key=lambda h: h.author))
        directive = context.chain.directive_to_include(round_.parent)
        weights = context.chain.weights(round_.parent, updates)
        voided = context.chain.voided(round_.parent, directive, decisions)
        body = RoundRecord(
            context.run, round_.number, round_.parent, self._state(), attempt, updates, directive, weights, reports,
            decisions, voided=voided,
        )  # fmt: skip
        record = context.signer.sign(body)
        round_.propose(record)
        context.emit(Broadcast(record))
        return self._receive_record(record)

    def _without_surplus_silent(
        self, round_: RoundState, listed: list[Signed[UpdateHeader]]
    ) -> list[Signed[UpdateHeader]]:
        """Return the headers that a record of ours lists: none by an author with a penalty for two headers.

        It lists silent authors only while the others' votes suffice; after our first vote only those that voted.
        """
        members, me = self._context.members, self._context.me
        listed = [h for h in listed if h.author == me or not members.equivocated.applies_to(h.author, round_.number)]
        silent = {
            h.author
            for h in listed
            if members.silent.applies_to(h.author, round_.number) and h.author != me and h.author not in round_.votes
        }
        sound = len(listed) - len(silent)
        room = 0
        while round_.last_vote is None and room < len(silent) and quorum(sound + room + 1) <= sound:
            room += 1
        seed = self._context.chain.seed(round_.parent)
        kept = set(sorted(silent, key=lambda a: sha256(seed, a))[:room])  # others in each round
        return [h for h in listed if h.author not in silent or h.author in kept]

    def _answers(self, round_: RoundState, exchange: Exchange, author: PeerKey, attempt: int) -> bool:
        """Return whether to list a contributor although earlier attempts failed: see "Attempts" in docs/rounds.md."""
        attempt = exchange.failed_attempts(attempt)
        if attempt >= 4 and round_.voted_for:
            # Only those that voted as we did lately: a silent peer, or one that receives other records, is left out.
            return any(record in round_.votes.get(author, ()) for record in round_.voted_for)
        if author in round_.votes:
            return True
        if attempt >= 2 and round_.voted_for:
            return False
        member = self._context.members.get(author)
        return member is not None and self._context.now - member.heard <= 3 * self._context.policy.heartbeat_seconds

    def _vote(self, round_: RoundState, exchange: Exchange) -> Certificate | None:
        proposal = exchange.choose(lambda: self._best(round_, exchange))
        if proposal is None or round_.last_vote is not None and round_.last_vote.body.record == proposal.record.digest:
            return None
        context, shards = self._context, shards_digest(exchange.shards(proposal) or ())
        vote = context.signer.sign(Vote(context.run, round_.number, proposal.record.digest, shards))
        round_.cast(vote, context.now)
        context.emit(Broadcast(vote))
        return self._receive_vote(vote)

    def _best(self, round_: RoundState, exchange: Exchange) -> Proposal | None:
        """Return the proposal that our vote goes to, if we vote now."""
        context, order = self._context, round_.proposer_order
        reached = max(0, round_.attempt(context.now))
        best: tuple | None = None
        for proposal in round_.proposals.values():
            body = proposal.record.body
            # Anybody can name an attempt that is far off and its own.
            turn = order[body.attempt % len(order)] if order and body.attempt <= reached else None
            ranked, waits_until = turn == proposal.record.author, proposal.seen + 1.5 * context.policy.propose_seconds
            if not ranked and not context.deadlines.due("out of turn", waits_until):
                continue
            if not self._is_votable(round_, exchange, proposal):  # it costs more than the above
                continue
            key = (ranked, body.attempt, body.windows, proposal.record.digest)
            if best is None or key > best[0]:
                best = (key, proposal)
        return None if best is None else best[1]

    def _is_votable(self, round_: RoundState, exchange: Exchange, proposal: Proposal) -> bool:
        body = proposal.record.body
        if proposal.bad or proposal.equivocated or proposal.refused or body.base_state != round_.state:
            return False
        if self._context.me not in body.contributors or not exchange.is_votable(proposal):
            return False
        return self._may_follow(proposal, set(body.contributors)) and not self._leaves_out_many(
            round_, exchange, proposal
        )

    def _leaves_out_many(self, round_: RoundState, exchange: Exchange, proposal: Proposal) -> bool:
        """Return whether a first attempt leaves out more than a third of the stake that we would list.

        A record needs only most of the stake. So a coalition could leave out nearly half of it in each of its turns,
        and its own share of the stake would grow. Later attempts may: those left out may not reach the proposers.
        """
        body = proposal.record.body
        if body.attempt:
            return False
        stakes = self._context.chain.stakes(body.parent)
        convicted = {d.author for d in body.decisions if d.convicted}
        ours = {h.author for h in self._without_surplus_silent(round_, exchange.listable())} - convicted
        left_out = sum(stakes.get(key, 0) for key in ours.difference(body.contributors))
        return 3 * left_out > sum(stakes.get(key, 0) for key in ours)

    def _may_follow(self, proposal: Proposal, signers: set[PeerKey]) -> bool:
        """Return whether a record that these keys back may be followed now, or voted for if they all voted."""
        parent = proposal.record.body.parent
        return self.is_patience_over(parent, proposal.seen) or self.is_supported(parent, signers)

    def is_supported(self, parent: Digest, signers: set[PeerKey], *, starts: bool = False) -> bool:
        """Return whether a record that these keys back has support.

        Their stake at the parent is more than that of the others that take part, we included. While nobody of them has
        stake, they are most of those that announced. `starts`: as a peer judges that starts.
        """
        context, round_ = self._context, self.round
        present = self._present() - {context.me} if starts else self._present()
        decided = is_majority(context.chain.stakes(parent), signers, present)
        if decided is not None:
            return decided
        is_open = round_ is not None and round_.parent == parent
        announced = {h.author for h in self._believed(round_)} if is_open and round_ is not None else set()
        return 2 * len(signers) > len(announced | signers)

    def _present(self) -> set[PeerKey]:
        """Return the keys that take part in rounds: ours in the phases in which others count us (`Member.takes_part`).

        A peer that was away must not judge by its old stake what the others certified meanwhile.
        """
        context, sync = self._context, self._sync
        follows = context.observer or context.is_resting or not (sync.joined and sync.holds_state)
        return {m.key for m in context.members if m.takes_part} | (set() if follows else {context.me})

    def is_patience_over(self, parent: Digest, arrived: float) -> bool:
        """Return whether a record without support that came at `arrived` may be followed: nothing better has come.

        While the round after its parent is not open here, although the parent is the head, nothing better can come.
        """
        context, round_ = self._context, self.round
        if round_ is not None and round_.parent == parent:
            arrived = round_.patience_since(arrived)
        elif parent == context.chain.head:
            return False
        return context.deadlines.due("patience", arrived + context.policy.patience_seconds)

    def voters_for(self, record: Digest) -> set[PeerKey]:
        """Return the keys whose votes for a record (record digest) of the open round have arrived."""
        proposal = None if self.round is None else self.round.proposals.get(record)
        if self.round is None or proposal is None:
            return set()
        return {vote.author for vote in self.round.votes_for(proposal.record)}

    def _believed(self, round_: RoundState) -> list[Signed[UpdateHeader]]:
        """Return the headers that count as announced: anybody can announce, and give nothing."""
        exchange = self.exchange
        members, number = self._context.members, round_.number
        headers = [
            h for a, h in round_.headers.items() if a not in round_.excluded and not members.is_unreliable(a, number)
        ]
        return [h for h in headers if exchange is None or exchange.counts_as_announced(h)]

    def _repeat(self, round_: RoundState, exchange: Exchange) -> None:
        """Broadcast again, while the round is undecided, what may have been lost; less often each time."""
        context = self._context
        if not context.deadlines.due("repeat", self._repeat_at):
            return
        self._repeats += 1
        self._repeat_at = context.now + context.policy.heartbeat_seconds * 2 ** min(1 + self._repeats, 3)
        context.deadlines.register("repeat", self._repeat_at)
        if context.me in round_.headers:
            context.emit(Broadcast(round_.headers[context.me]))
        exchange.repeat(self._repeats)
        vote = round_.last_vote
        if vote is not None and (proposal := round_.proposals.get(vote.body.record)) is not None:
            # Others' too: not every member receives every other directly.
            few = context.members.is_my_turn(proposal.record.digest, self._repeats)
            if few or proposal.record.author == context.me:
                context.emit(Broadcast(proposal.record))
            for other in round_.votes_for(proposal.record)[:MAX_REPEATED_VOTES] if few else ():
                if other.author != context.me:
                    context.emit(Broadcast(other))
            context.emit(Broadcast(vote))

    # -- blobs and views -------------------------------------------------------------------------------------

    def needed(self) -> dict[Digest, BlobRole]:
        """Return the blobs of the round to fetch. Nobody gives them to us before we have announced."""
        round_, exchange = self.round, self.exchange
        if round_ is None or exchange is None or round_.announced_at is None or not self.is_working:
            return {}
        return exchange.needed()

    def holders(self, blob: Digest, role: BlobRole) -> tuple[PeerKey, ...]:
        """Return the peers that are likely to have a blob, the best first.

        For an update: who announced it, then voters for it, then those that announced in its round. For a shard: its
        signers, then voters for its record.
        """
        chain, round_, exchange = self._context.chain, self.round, self.exchange
        found: dict[PeerKey, None] = {}
        found.update((a, None) for a in role.first_holders(blob, None if round_ is None else exchange))
        # All who announced an update are asked: one is its author, and anybody can copy the header of another.
        most = MAX_HOLDERS if role.header is None else max(MAX_HOLDERS, len(found))
        for branch in (chain.head, self._sync.retried_tip):
            decided = None if branch is None else chain.ancestor_at(branch, role.round + 1)
            if decided is not None and decided != chain.root and role.belongs_to(chain.certificate(decided)):
                found.update((v.author, None) for v in chain.certificate(decided).votes)
        if round_ is not None:
            found.update((a, None) for a in role.other_holders(round_))
        found.pop(self._context.me, None)
        return tuple(found)[:most]

    def blobs(self) -> set[Digest]:
        """Return the blobs of the round's updates, and of the shards that somebody attested."""
        round_, exchange = self.round, self.exchange
        return set() if round_ is None or exchange is None else round_.update_blobs() | exchange.shard_blobs()

    def awaited(self) -> tuple[PeerKey, ...]:
        """Return the members that the first proposer waits for, once we have announced."""
        round_, awaited = self.round, self._awaited_members
        return () if round_ is None or awaited is None or round_.announced_at is None else tuple(awaited.awaited())

    def sizes(self) -> dict[str, tuple[int, int]]:
        round_, exchange = self.round, self.exchange
        return {} if round_ is None or exchange is None else round_.sizes() | exchange.sizes()

"""The undecided round after the state that we hold: when to announce, propose and vote, and what to repeat."""

from __future__ import annotations

from dataclasses import replace

from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, RoundRecord, ShardAttestation, Signed, UpdateHeader, Vote, parts_digest
from protocol.rounds.actions import Broadcast, MakeUpdate
from protocol.rounds.awaiting import Awaiting
from protocol.rounds.ballot import Ballot, Proposal
from protocol.rounds.blobs import PartOf, Source
from protocol.rounds.context import Context
from protocol.rounds.events import Progress, UpdateReady
from protocol.rounds.position import Position
from protocol.rounds.reducing import Reducing

MAX_REPEATED_VOTES = 64
MAX_HOLDERS = 8


class Deciding:
    """Drives one ballot after the other. Every method acts on the ballot for the round after `position.applied`."""

    def __init__(self, context: Context, position: Position):
        self._c = context
        self._position = position
        self.ballot: Ballot | None = None
        self.reducing = Reducing(context)
        self.awaiting = Awaiting(context)
        self.work = Progress(0, 0.0, 0.0)
        """The own trainer's work that no update covers yet."""
        self.finished = self.reached_total = False
        self.ending = False
        """Announce as soon as possible: we are leaving."""
        self._repeat_at = 0.0
        self._repeats = 0
        self._drifted: Digest | None = None
        self._looked_at = 0
        self._making_height = 0

    def open(self, parent: Digest) -> Ballot:
        """Begin the round after a record."""
        c = self._c
        self.reducing.stop()
        old, b = self.ballot, Ballot(c.policy, c.chain, parent, self._position.state, c.now)
        self.ballot = b
        self.awaiting.open(b, 0.0 if old is None or old.number + 1 != b.number else c.now - old.began)
        self._repeats = 0
        self._looked_at = 0
        c.members.watch(parent, b.number)
        return b

    def reopen(self) -> None:
        """The round begins once more, on another branch: what was announced for it counts no more."""
        if self.ballot is not None:
            self.open(self.ballot.parent)

    # -- what arrives ----------------------------------------------------------------------------------------

    def hear(self, message: Signed) -> Certificate | None:
        """A header, record, vote or word on a part of this round; a certificate when it was what lacked."""
        match message.body:
            case UpdateHeader():
                self.header(message)
            case RoundRecord():
                return self.record(message)
            case Vote():
                return self.vote(message)
            case ShardAttestation():
                return self.word(message)
        return None

    def header(self, header: Signed[UpdateHeader]) -> None:
        """Somebody's header for this round, alone or in a record."""
        c, b = self._c, self.ballot
        if b is None:
            return
        known = b.headers.get(header.author)
        if known is not None:
            if known.digest != header.digest and header.author not in b.reported:
                b.reported.add(header.author)
                c.report("warning", "equivocation", f"peer {header.author.short} announced two updates", header.author)
            return
        if (flaw := b.flaw(header, c.size_ok)) is not None:
            c.report("warning", "refused", f"the update of {header.author.short} is refused: {flaw}", header.author)
            return
        if header.author == c.me and (c.observer or self._position.making is not None):
            return
        if not b.add_header(header, c.now, self.has_room):
            return
        if c.is_banned(header.author):
            b.exclude(header.author)
        c.members.settle(header.author)
        if header.author == c.me:
            # Announced before a crash: it stands, so that we do not contradict ourselves.
            c.own.made(header.body.blob, b.parent, b.number)
            self._announced(header)

    def has_room(self, author: PeerKey) -> bool:
        return author == self._c.me or author in self._c.members or self._c.members.is_veteran(author)

    def record(self, record: Signed[RoundRecord]) -> Certificate | None:
        """Somebody's record for this round; a certificate when its votes were here before it."""
        c, b = self._c, self.ballot
        if b is None or record.digest in b.proposals or record.body.parent != b.parent or b.parent not in c.chain:
            return None
        if record.author not in record.body.contributors or len(record.body.updates) > c.policy.max_members:
            c.report(
                "warning",
                "refused",
                f"a record of {record.author.short} is refused: it breaks the rules",
                record.author,
            )
            return None
        if (flaw := c.chain.flaw(record.body)) is not None:
            c.report("warning", "refused", f"a record of {record.author.short} is refused: {flaw}", record.author)
            return None
        for u in record.body.updates:
            if (flaw := b.flaw(u, c.size_ok)) is not None:
                text = f"a record of {record.author.short} is refused: the update of {u.author.short}: {flaw}"
                c.report("warning", "refused", text, record.author)
                return None
        for u in record.body.updates:
            self.header(u)
            if u.author == c.me:
                c.own.made(u.body.blob, b.parent, b.number)
        p = b.add_record(record, c.now, c.blobs.holds, c.blobs.is_bad)
        if p is not None and p.equivocal and record.author not in b.reported:
            b.reported.add(record.author)
            c.report(
                "warning", "equivocation", f"peer {record.author.short} proposed two records at once", record.author
            )
        if p is not None and not p.equivocal:
            b.jump(record.author, record.body.attempt, c.now)
        self.reducing.look_for_lost(b)
        return b.certified([record.digest])

    def vote(self, vote: Signed[Vote]) -> Certificate | None:
        """Somebody's vote in this round; a certificate when it was the last one needed."""
        b = self.ballot
        if b is None or not b.add_vote(vote, self.has_room):
            return None
        return b.certified([vote.body.record])

    def word(self, word: Signed[ShardAttestation]) -> Certificate | None:
        """Somebody's word on a part; a certificate when all votes were here before the parts were agreed on."""
        b = self.ballot
        if b is None or not self.reducing.heard(b, word):
            return None
        return b.certified([word.body.record])

    def update_ready(self, event: UpdateReady, admission: bytes) -> None:
        """The own trainer made an update, or has nothing to make one of."""
        c, b = self._c, self.ballot
        asked = self._position.making
        self._position.making = None
        if event.blob is None:
            self.work = replace(self.work, windows=0)
            return
        c.blobs.hold(event.blob)
        windows = event.end_window - event.first_window
        self.work = replace(self.work, windows=max(0, self.work.windows - windows))
        if not self._position.afresh:
            c.own.made(event.blob, event.parent, self._making_height)
        if b is None or asked != event.parent or b.parent != event.parent or c.me in b.headers:
            return
        if self._position.applied != b.parent:
            # The state that it was made from turned out to be wrong, or is lost.
            return
        body = UpdateHeader(
            c.run, b.number, b.parent, self._state(), event.first_window, event.end_window, event.inner_steps,
            event.blob, event.blob_size, event.loss, admission, b.epoch,
        )  # fmt: skip
        header = c.signer.sign(body)
        if (flaw := b.flaw(header, c.size_ok)) is not None:
            c.report("error", "refused", f"our own update cannot be announced: {flaw}")
            return
        if b.add_header(header, c.now, self.has_room):
            self._announced(header)
            c.emit(Broadcast(header))

    def _state(self) -> Digest:
        state = self._position.state
        if state is None:
            raise RuntimeError("a round was decided upon without a state: a bug of the round machine")
        return state

    def _announced(self, header: Signed[UpdateHeader]) -> None:
        c = self._c
        if self.ballot is not None:
            self.ballot.announced = c.now
        self._repeats = 0
        self._repeat_at = c.now + 2 * c.policy.heartbeat_seconds

    # -- what is due -----------------------------------------------------------------------------------------

    @property
    def working(self) -> bool:
        """Whether this round is ours to decide: we hold its base, and it is not decided yet."""
        p, b = self._position, self.ballot
        return b is not None and not self._c.observer and p.target is None and p.applied == b.parent and not p.behind

    def advance(self) -> Certificate | None:
        """Do what is due. A certificate when the own vote was the last one needed."""
        b = self.ballot
        if b is None or not self.working or self.finished:
            self.reducing.stop()
            return None
        c = self._c
        if self._check_drift(b):
            return None
        if b.announced is None:
            if self._position.making is None and self.work.windows >= 1 and not c.rests and self._should_announce(b):
                self._position.making = b.parent
                self._making_height = b.number
                self._c.emit(MakeUpdate(b.number, b.parent))
            return None
        self.awaiting.look(b)
        if b.reduces:
            certificate = self._reduce(b) or self._propose(b) or self._reduce(b)
        else:
            certificate = self._propose(b) or self._vote(b)
        self._repeat(b)
        return certificate

    def _check_drift(self, b: Ballot) -> bool:
        if len(b.headers) < 2 or self._drifted == b.parent or self._looked_at == len(b.headers):
            return False
        self._looked_at = len(b.headers)
        vouched = b.drifted()
        if vouched is None:
            return False
        self._drifted = b.parent
        return self._position.drift(vouched)

    def _should_announce(self, b: Ballot) -> bool:
        c = self._c
        if self.ending or c.now >= b.began + c.policy.max_seconds:
            return True
        members, headers = c.members, b.headers
        announced = sum(h.body.windows for a, h in headers.items() if not members.discredited.holds(a, b.number))
        target, total = c.policy.target_windows, self.work.windows + announced + members.windows
        if total >= target or not headers:
            return total >= target
        # Others have seen enough. Those who kept earlier rounds waiting in vain are not believed.
        enough = sum(members.is_waited_for(a, b.number) and not members.withheld.holds(a, b.number) for a in headers)
        return enough > 0 and (enough * 3 > 1 + len(headers) + members.training or total * 2 >= target)

    def _propose(self, b: Ballot) -> Certificate | None:
        c = self._c
        attempt = b.attempt(c.now)
        if attempt <= b.proposed_attempt or c.me not in b.ranks or b.ranks[attempt % len(b.ranks)] != c.me:
            return None
        if self.reducing.current is not None:
            return None  # others may still finish what they, and we, are working on
        listed = self._listed(b)
        if attempt >= 1:
            listed = [h for h in listed if h.author == c.me or self._answers(b, h.author, attempt)]
        b.proposed_attempt = attempt
        if not any(h.author == c.me for h in listed):
            return None
        updates = tuple(sorted(listed, key=lambda h: h.author))
        directive = c.chain.to_carry(b.parent)
        record = c.signer.sign(RoundRecord(c.run, b.number, b.parent, self._state(), attempt, updates, directive))
        b.proposed = record
        c.emit(Broadcast(record))
        return self.record(record)

    def _listed(self, b: Ballot) -> list[Signed[UpdateHeader]]:
        """What a record of ours would list: what is held, or, in a round that is reduced, what should be to be had."""
        c = self._c
        if not b.reduces:
            return [h for h in b.candidates() if c.blobs.holds(h.body.blob)]
        return [h for h in b.candidates() if h.author == c.me or self._expected(b, h)]

    def _expected(self, b: Ballot, header: Signed[UpdateHeader]) -> bool:
        c, author = self._c, header.author
        known_bad = c.blobs.is_bad(header.body.blob) or author in b.left_out or author in b.silent
        return not known_bad and not c.members.withheld.holds(author, b.number)

    def _answers(self, b: Ballot, author: PeerKey, attempt: int) -> bool:
        """Whether to count on a contributor's vote, when an earlier attempt did not get the votes it needed."""
        if b.reduces:
            # Attempts go by while a slate is worked on: what counts is how many were in vain.
            attempt = min(attempt, 1 + b.given_up)
        if attempt >= 4 and b.voted_for:
            # Those that voted as we did lately: who has fallen silent, or hears other records than we, is left out.
            return any(record in b.votes.get(author, ()) for record in b.voted_for)
        if author in b.votes:
            return True
        if attempt >= 2 and b.voted_for:
            return False
        member = self._c.members.get(author)
        return member is not None and self._c.now - member.heard <= 3 * self._c.policy.heartbeat_seconds

    def _vote(self, b: Ballot) -> Certificate | None:
        c = self._c
        if not b.proposals or (b.last_vote is not None and c.now < b.voted_at + c.policy.propose_seconds):
            return None
        best = self._best(b)
        return None if best is None else self._vote_for(b, best)

    def _reduce(self, b: Ballot) -> Certificate | None:
        """Work on the slate whose turn it is; vote for it when all its parts are held."""
        p = self.reducing.follow(b, lambda: self._best(b))
        if p is None or p.slate is None or p.slate.open or p.lacking:
            return None
        return self._vote_for(b, p)

    def _best(self, b: Ballot) -> Proposal | None:
        """The proposal that our vote goes to, when we vote now."""
        c, ranks = self._c, b.ranks
        reached = max(0, b.attempt(c.now))
        best: tuple | None = None
        for p in b.proposals.values():
            if not self._votable(b, p):
                continue
            body = p.record.body
            # Anybody can name an attempt that is far off and its own.
            ranked = bool(ranks) and body.attempt <= reached and ranks[body.attempt % len(ranks)] == p.record.author
            if not ranked and c.now < p.seen + c.policy.propose_seconds / 2:
                continue
            key = (ranked, body.attempt, body.windows, p.record.digest)
            if best is None or key > best[0]:
                best = (key, p)
        return None if best is None else best[1]

    def _vote_for(self, b: Ballot, p: Proposal) -> Certificate | None:
        c, record = self._c, p.record
        if b.last_vote is not None and b.last_vote.body.record == record.digest:
            return None
        parts = () if p.slate is None else tuple(part for part in p.slate.parts if part is not None)
        b.last_vote = c.signer.sign(Vote(c.run, b.number, record.digest, parts_digest(parts)))
        b.voted_at = c.now
        b.voted_for = (*b.voted_for[-2:], record.digest)
        c.emit(Broadcast(b.last_vote))
        return self.vote(b.last_vote)

    def _votable(self, b: Ballot, p: Proposal) -> bool:
        c, body = self._c, p.record.body
        if p.bad or p.equivocal or body.base_state != b.state or c.me not in body.contributors:
            return False
        if not self.reducing.may_follow(b, p) if b.reduces else p.lacking:
            return False
        return self.is_heavy_enough(body)

    def is_heavy_enough(self, record: RoundRecord) -> bool:
        """Whether a record of this round has half of the windows that we saw announced, or most of those who announced,
        or patience has run out. Most: those who missed rounds, and announce the work of all of them, could else hold
        back each other's rounds for good."""
        c, b = self._c, self.ballot
        if b is None or b.first_heard is None or c.now >= b.first_heard + c.policy.patience_seconds:
            return True
        windows = {h.author: h.body.windows for h in self._announced_headers(b)}
        listed = windows.keys() & set(record.contributors)
        return 2 * record.windows >= sum(windows.values()) or 2 * len(listed) > len(windows)

    def announced_windows(self, b: Ballot) -> int:
        """Windows seen announced."""
        return sum(h.body.windows for h in self._announced_headers(b))

    def _announced_headers(self, b: Ballot) -> list[Signed[UpdateHeader]]:
        """Seen announced. Anyone can claim: what was not to be had for `exchange_seconds`, or by a committee, does not
        count."""
        c = self._c
        headers = [h for author, h in b.headers.items() if author not in b.excluded]
        if b.reduces:
            return [h for h in headers if self._expected(b, h)]
        longest = c.policy.exchange_seconds
        return [h for h in headers if c.blobs.holds(h.body.blob) or c.now - b.heard[h.author] <= longest]

    def _repeat(self, b: Ballot) -> None:
        """While the round is undecided: what may have been lost, again; less often each time."""
        c = self._c
        if c.now < self._repeat_at:
            return
        self._repeats += 1
        self._repeat_at = c.now + c.policy.heartbeat_seconds * 2 ** min(1 + self._repeats, 3)
        if c.me in b.headers:
            c.emit(Broadcast(b.headers[c.me]))
        if b.reduces:
            self.reducing.repeat(b, self._repeats)
        elif b.proposed is not None and (b.last_vote is None or b.last_vote.body.record != b.proposed.digest):
            c.emit(Broadcast(b.proposed))
        if b.last_vote is not None and (p := b.proposals.get(b.last_vote.body.record)) is not None:
            # Others' too: not everyone hears everyone.
            few = c.members.is_my_turn(p.record.digest, self._repeats)
            if few or p.record.author == c.me:
                c.emit(Broadcast(p.record))
            for vote in b.votes_for(p.record)[:MAX_REPEATED_VOTES] if few else ():
                if vote.author != c.me:
                    c.emit(Broadcast(vote))
            c.emit(Broadcast(b.last_vote))

    # -- blobs and time --------------------------------------------------------------------------------------

    def needed(self) -> dict[Digest, Source]:
        """Blobs of the round to fetch. Nobody gives them to us before we have announced."""
        b = self.ballot
        if b is None or b.announced is None or not self.working:
            return {}
        if b.reduces:
            return dict(self.reducing.needed())
        found: dict[Digest, Source] = {h.body.blob: h for h in b.candidates()}
        for p in b.proposals.values():
            if p.lacking and not p.bad and p.record.body.base_state == b.state:
                found.update((u.body.blob, u) for u in p.record.body.updates if u.body.blob in p.lacking)
        return found

    def times(self) -> list[float]:
        """When something will be due."""
        b, policy = self.ballot, self._c.policy
        if b is None or not self.working:
            return []
        if b.announced is None:
            return [b.began + policy.max_seconds]
        found = [
            self._repeat_at,
            b.announced + policy.exchange_seconds,
            *self.reducing.times(),
            *self.awaiting.times(b),
        ]
        if b.first_heard is not None:
            found.append(b.first_heard + policy.patience_seconds)
        if (following := b.next_attempt_at(self._c.now)) is not None:
            found.append(following)
        if b.last_vote is not None:
            found.append(b.voted_at + policy.propose_seconds)
        found += [p.seen + policy.propose_seconds / 2 for p in b.proposals.values()]
        return found

    def holders(self, blob: Digest, source: Source) -> tuple[PeerKey, ...]:
        """Who is likely to have a blob: its author, who voted for it, who announced in its round. Of a part: who signed
        it, who voted for its record."""
        c, b = self._c, self.ballot
        found: dict[PeerKey, None] = {}
        if isinstance(source, PartOf):
            number = source.record.body.round
            if b is not None:
                found.update((a, None) for a in self.reducing.holders(b, blob, source))
        else:
            number = source.body.round
            found[source.author] = None
        for branch in (c.chain.head, self._position.tip):
            decided = None if branch is None else c.chain.ancestor_at(branch, number + 1)
            if decided is not None and decided != c.chain.root and _is_of(source, c.chain.certificate(decided)):
                found.update((v.author, None) for v in c.chain.certificate(decided).votes)
        if b is not None and not isinstance(source, PartOf):
            found.update((a, None) for a in b.votes)
            found.update((a, None) for a in b.headers)
        found.pop(c.me, None)
        return tuple(found)[:MAX_HOLDERS]


def _is_of(source: Source, certificate: Certificate) -> bool:
    """Whether a blob's source may be of this certificate: not of one on another branch."""
    if isinstance(source, PartOf):
        return source.record.digest == certificate.record.digest
    return source.body.parent == certificate.record.body.parent

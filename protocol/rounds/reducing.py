"""Rounds that are reduced: which slate is worked on, the own part of that work, and what is said and heard of parts.

One slate at a time is worked on: its parts are made and fetched until it is voted for and certified, or until it is
hopeless, or its time (`exchange_seconds` from when it was heard) is over. Then the next proposer's turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.ids import Digest, PeerKey
from protocol.messages import MAX_LACKING, ShardAttestation, Signed
from protocol.rounds.actions import Broadcast, DropReduce, Reduce
from protocol.rounds.ballot import Ballot, Proposal
from protocol.rounds.blobs import PartOf
from protocol.rounds.context import Context

MAX_REPEATED_WORDS = 64


class Reducing:
    """Every method acts on the ballot it is given: the one that is being decided."""

    def __init__(self, context: Context):
        self._c = context
        self.current: Proposal | None = None
        """The slate that is worked on."""
        self._changes = 0

    # -- which slate -----------------------------------------------------------------------------------------

    def follow(self, b: Ballot, best: Callable[[], Proposal | None]) -> Proposal | None:
        """The slate that is worked on now: the one before, unless that is over; else the best, which is begun."""
        p = self.current
        if p is not None and (p.record.digest not in b.proposals or not self._is_open(p)):
            self._give_up(b, p)
            p = None
        if p is None and (p := best()) is not None:
            self.current = p
            self._begin(p)
        return p

    def stop(self) -> None:
        """There is no slate to work on here and now: the round is decided, or our state is lost."""
        p, c = self.current, self._c
        if p is not None:
            c.emit(DropReduce(p.record.digest))
            c.blobs.ask_again([] if p.slate is None else [d for d in p.slate.parts if d is not None], c.now)
            self.current = None
            self._changes += 1

    def may_follow(self, b: Ballot, p: Proposal) -> bool:
        """Whether a slate can be begun: nothing is known yet that makes it fail."""
        hindered = any(author in b.lost and author != self._c.me for author in p.record.body.contributors)
        return not p.over and not hindered and self._is_open(p)

    def ends(self, p: Proposal) -> float:
        """When the time of a slate is over."""
        return p.seen + self._c.policy.exchange_seconds

    def _is_open(self, p: Proposal) -> bool:
        hopeless = p.slate is None or p.slate.hopeless is not None
        return not (p.bad or p.equivocal or hopeless) and self._c.now < self.ends(p)

    def _begin(self, p: Proposal) -> None:
        c, slate = self._c, p.slate
        self._changes += 1
        if slate is None:
            return
        for part in slate.duties(c.me):
            c.emit(Reduce(p.record, part, slate.committees[part]))

    def _give_up(self, b: Ballot, p: Proposal) -> None:
        """Those who let it fail are left out of our own records of this round."""
        c, slate = self._c, p.slate
        self.stop()
        p.over = True
        b.given_up += 1
        if slate is None:
            return
        b.evidence = ()
        if slate.hopeless is not None:
            b.evidence = tuple(slate.words[slate.hopeless].values())
        elif p.equivocal:
            b.evidence = tuple(q.record for q in b.proposals.values() if q.record.author == p.record.author)
        b.left_out |= slate.lacking_to(c.me) & b.headers.keys()
        if not p.bad and not p.equivocal and slate.hopeless is None:
            b.silent = (slate.silent() & b.headers.keys()) - {c.me}

    # -- own words -------------------------------------------------------------------------------------------

    def reduced(self, b: Ballot, record: Digest, part: int, blob: Digest) -> None:
        """Our driver has made a part."""
        c = self._c
        p = b.proposals.get(record)
        if p is None or p.slate is None or not p.slate.seats(c.me, part) or c.me in p.slate.words[part]:
            return
        c.blobs.hold(blob)
        b.blob_held(blob)
        self._say(b, ShardAttestation(c.run, b.number, record, part, blob))

    def lacking(self, b: Ballot, record: Digest, part: int, authors: Iterable[PeerKey]) -> None:
        """Our driver cannot make a part, for want of these authors' slices."""
        c = self._c
        p = b.proposals.get(record)
        if p is None or p.slate is None or not p.slate.seats(c.me, part) or c.me in p.slate.words[part]:
            return
        listed = p.record.body.contributors
        named = sorted({a for a in authors if a in listed and a != c.me})[:MAX_LACKING]
        if named:
            self._say(b, ShardAttestation(c.run, b.number, record, part, None, tuple(named)))

    def bad_update(self, b: Ballot, blob: Digest) -> None:
        """An update breaks the codec's rules: those who see another slice of it are told so by our words."""
        for p in list(b.proposals.values()):
            for author in [u.author for u in p.record.body.updates if u.body.blob == blob]:
                for part in [] if p.slate is None else p.slate.duties(self._c.me):
                    self.lacking(b, p.record.digest, part, (author,))

    def _say(self, b: Ballot, body: ShardAttestation) -> None:
        word = self._c.signer.sign(body)
        self.heard(b, word)
        self._c.emit(Broadcast(word))

    # -- others' words ---------------------------------------------------------------------------------------

    def heard(self, b: Ballot, word: Signed[ShardAttestation]) -> bool:
        """A word on a part, our own too. False when it does not count."""
        c = self._c
        p = b.proposals.get(word.body.record)
        if not b.add_word(word, self._has_room, c.blobs.holds, c.blobs.is_bad):
            self._look_for_a_second_word(b, p, word)
            return False
        if p is not None:
            if p is self.current and p.slate is not None and p.slate.parts[word.body.part] is not None:
                self._changes += 1
            self._compare(b, p, word.body.part)
            self.look_for_lost(b)
        return True

    def look_for_lost(self, b: Ballot) -> None:
        """Report whom a committee could not get; records of ours do not list them for a while."""
        c = self._c
        for author in sorted(b.lost - b.struck - {c.me}):
            b.struck.add(author)
            b.left_out.add(author)
            c.members.withheld.strike(author, b.number)
            text = f"a committee cannot get, or use, the update of {author.short}: the round goes on without it"
            c.report("warning", "withheld", text, author)

    def _has_room(self, author: PeerKey) -> bool:
        return author == self._c.me or author in self._c.members or self._c.members.is_veteran(author)

    def _look_for_a_second_word(self, b: Ballot, p: Proposal | None, word: Signed[ShardAttestation]) -> None:
        author, body = word.author, word.body
        if p is None or p.slate is None or not p.slate.seats(author, body.part):
            return
        first = p.slate.words[body.part].get(author)
        # Who lacked something and had it later has not lied.
        if first is not None and None not in (first.body.blob, body.blob) and first.body.blob != body.blob:
            self.accuse(b, author, "equivocation", f"peer {author.short} signed two digests of one part")

    def _compare(self, b: Ballot, p: Proposal, part: int) -> None:
        """The same updates give the same bytes: who signs others than we do, or than most, is wrong or lies."""
        c, slate = self._c, p.slate
        if slate is None:
            return
        mine = slate.words[part].get(c.me)
        truth = slate.parts[part] if mine is None or mine.body.blob is None else mine.body.blob
        if truth is None:
            return
        if slate.parts[part] not in (None, truth) and c.me not in b.reported:
            b.reported.add(c.me)
            text = f"part {part} of record {p.record.digest.short} came out otherwise than for most of its committee: "
            c.report("error", "part-differs", text + "they lie, or this device computes wrongly")
        for author, word in slate.words[part].items():
            if author != c.me and word.body.blob not in (None, truth):
                text = f"peer {author.short} signed a digest of a part that is not what its updates give"
                self.accuse(b, author, "part-differs", text)

    def accuse(self, b: Ballot, author: PeerKey, kind: str, text: str) -> None:
        """What a peer signed is wrong: it is reported, and left out of our own records of this round."""
        if author in b.headers and author != self._c.me:
            b.left_out.add(author)
        if author not in b.reported:
            b.reported.add(author)
            self._c.report("warning", kind, text, author)

    # -- what is fetched and repeated ------------------------------------------------------------------------

    @property
    def stage(self) -> tuple[int, bool]:
        """Changes with all that changes what is needed."""
        return self._changes, self.current is not None and self._is_late(self.current)

    def _is_late(self, p: Proposal) -> bool:
        """Others were faster with the parts that we make too: take theirs."""
        return self._c.now >= p.seen + self._c.policy.propose_seconds

    def needed(self) -> dict[Digest, PartOf]:
        """Parts of the slate to fetch: those that are agreed on, and that we do not make ourselves in a moment."""
        p = self.current
        if p is None or p.slate is None:
            return {}
        mine = set() if self._is_late(p) else set(p.slate.duties(self._c.me))
        parts = enumerate(p.slate.parts)
        return {d: PartOf(p.record, i) for i, d in parts if d is not None and d in p.lacking and i not in mine}

    def holders(self, b: Ballot, blob: Digest, part: PartOf) -> tuple[PeerKey, ...]:
        """Who has signed a part's digest, then who has voted for its record, and so holds it."""
        p = b.proposals.get(part.record.digest)
        if p is None or p.slate is None:
            return ()
        return (*p.slate.signers(part.index, blob), *(v.author for v in b.votes_for(p.record)))

    def repeat(self, b: Ballot, count: int) -> None:
        """What may have been lost, again: the slate, our words on it, and why the one before was given up. Once we have
        voted, others' words too, some at a time: not everyone hears everyone."""
        c, p = self._c, self.current
        for message in b.evidence:
            if message.author == c.me or b.proposed is not None:
                c.emit(Broadcast(message))
        if p is None or p.slate is None:
            return
        every = max(1, len(c.members) // 3)
        voted = b.last_vote is not None and b.last_vote.body.record == p.record.digest
        if not voted and (p.record.author == c.me or (c.me[0] + p.record.digest[0] + count) % every == 0):
            c.emit(Broadcast(p.record))
        words = list(p.slate.said())
        for word in words:
            if word.author == c.me:
                c.emit(Broadcast(word))
        if voted and c.members.is_my_turn(p.record.digest, count):
            others = [w for w in words if w.author != c.me]
            first = count * MAX_REPEATED_WORDS % max(1, len(others))
            for word in (*others[first:], *others[:first])[:MAX_REPEATED_WORDS]:
                c.emit(Broadcast(word))

    def times(self) -> list[float]:
        """When something will be due."""
        p = self.current
        return [] if p is None else [self.ends(p), p.seen + self._c.policy.propose_seconds]

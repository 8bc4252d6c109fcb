"""The undecided round: headers announced for one parent, records proposed, words on parts, votes. Data, pure rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import (
    Certificate,
    RoundRecord,
    ShardAttestation,
    Signed,
    UpdateHeader,
    Vote,
    parts_digest,
    votes_needed,
)
from protocol.rounds.policy import Policy
from protocol.rounds.slate import Slate

RECORDS_PER_AUTHOR = 4
MAX_RECORDS = 64
MAX_RECORD_BYTES = 128 * 1024 * 1024
VOTES_PER_AUTHOR = 4
MAX_WORD_BYTES = 64 * 1024 * 1024
MAX_ATTEMPT = 2**20
MAX_JUMP = 1024


class Proposal:
    """A record, and what is known of it."""

    __slots__ = ("record", "seen", "lacking", "bad", "equivocal", "slate", "over")

    def __init__(
        self, record: Signed[RoundRecord], seen: float, lacking: set[Digest], bad: bool, slate: Slate | None = None
    ):
        self.record = record
        self.seen = seen
        self.lacking = lacking
        """Its blobs (of a slate: the blobs of the parts that are agreed on) that are not held here yet."""
        self.bad = bad
        self.equivocal = False
        self.slate = slate
        """In a round that is reduced."""
        self.over = False
        """Worked on and given up."""


class Ballot:
    """One undecided round. Everything in it is bounded by the policy's `max_members` and the constants above."""

    def __init__(self, policy: Policy, chain: Chain, parent: Digest, state: Digest | None, now: float):
        self.policy = policy
        self.chain = chain
        self.parent = parent
        self.state = state
        """Own state after the parent; None for an observer."""
        self.number: Round = chain.height(parent)
        self.epoch = chain.epoch(parent)
        self.began = now
        self.headers: dict[PeerKey, Signed[UpdateHeader]] = {}
        self.heard: dict[PeerKey, float] = {}
        self.excluded: set[PeerKey] = set()
        """Authors whose blob broke the codec's rules."""
        self.proposals: dict[Digest, Proposal] = {}
        self.votes: dict[PeerKey, dict[Digest, Signed[Vote]]] = {}
        self.first_heard: float | None = None
        self.announced: float | None = None
        self.ready: float | None = None
        self.last_vote: Signed[Vote] | None = None
        self.voted_at = 0.0
        self.voted_for: tuple[Digest, ...] = ()
        """The last three records that we voted for."""
        self.proposed: Signed[RoundRecord] | None = None
        self.proposed_attempt = -1
        self.reduces = chain.reduces(parent)
        self.unheard: dict[PeerKey, dict[tuple[Digest, int], Signed[ShardAttestation]]] = {}
        """Words on records that are not here yet."""
        self.left_out: set[PeerKey] = set()
        """Contributors that no record of ours lists any more in this round: their slices are lacking, or their words
        on parts were wrong."""
        self.lost: set[PeerKey] = set()
        """Whom more than half of a committee could not get: nor does another's record that lists them get our vote."""
        self.struck: set[PeerKey] = set()
        """Those of `lost` who were reported."""
        self.silent: set[PeerKey] = set()
        """Who said nothing on a part of the last slate that was given up for lack of words."""
        self.given_up = 0
        """Slates worked on in vain."""
        self.evidence: tuple[Signed, ...] = ()
        """Why the last of them was hopeless: for those who still work on it."""
        self.reported: set[PeerKey] = set()
        """Authors whose equivocation was reported."""
        self._ranks: tuple[PeerKey, ...] | None = None
        self._record_bytes = 0
        self._word_bytes = 0
        self._jumped: tuple[int, float] | None = None
        self._jumps: dict[PeerKey, float] = {}
        """Whose record made us skip attempts, and when; contributors of records are as many as headers at most."""

    # -- headers ---------------------------------------------------------------------------------------------

    def flaw(self, header: Signed[UpdateHeader], size_ok: Callable[[int], bool]) -> str | None:
        """Why this header can be part of no record of this round; None when it can."""
        body = header.body
        if body.round != self.number or body.parent != self.parent:
            return "it is of another round"
        if body.windows > self.policy.max_update_windows:
            return f"it claims {body.windows} windows: at most {self.policy.max_update_windows} fit one update"
        if body.first_window < self.chain.next_window(header.author, self.parent):
            return f"it claims windows from {body.first_window} on, which the chain has accepted already"
        if body.epoch != self.epoch:
            return "it is from before the run was rolled back, or from after it"
        if header.author in self.chain.standing(self.parent).banned:
            return "the run's owner has banned its author"
        if not size_ok(body.blob_size):
            return f"a blob of {body.blob_size} bytes is no update of this run"
        return None

    def add_header(self, header: Signed[UpdateHeader], now: float, room_for: Callable[[PeerKey], bool]) -> bool:
        """Take a header without a flaw. False when its author has one already, or there is no room."""
        if header.author in self.headers:
            return False
        if len(self.headers) >= self.policy.max_members:
            spare = [a for a in self.headers if not room_for(a)]
            if not room_for(header.author) or not spare:
                return False
            del self.headers[spare[-1]]
            self.heard.pop(spare[-1], None)
            self._jumps.pop(spare[-1], None)
        self.headers[header.author] = header
        self.heard[header.author] = now
        if self.first_heard is None:
            self.first_heard = now
        self._ranks = None
        return True

    def exclude(self, author: PeerKey) -> None:
        self.excluded.add(author)
        self._ranks = None

    def candidates(self) -> list[Signed[UpdateHeader]]:
        """Headers that a record of ours may list, as far as their authors' base goes."""
        return [h for h in self.headers.values() if self.is_candidate(h)]

    def is_candidate(self, header: Signed[UpdateHeader]) -> bool:
        """Whether a record of ours may list it: same base as ours, and its blob is not known to be bad."""
        return header.author not in self.excluded and self.state in (None, header.body.base_state)

    @property
    def ranks(self) -> tuple[PeerKey, ...]:
        """Candidates' authors in the order in which they propose: by SHA-256 of the parent and the key."""
        if self._ranks is None:
            self._ranks = tuple(sorted((h.author for h in self.candidates()), key=lambda a: sha256(self.parent, a)))
        return self._ranks

    def drifted(self) -> Digest | None:
        """The base state that more than two thirds of the contributors share when it is not ours."""
        counts: dict[Digest, int] = {}
        for h in self.headers.values():
            counts[h.body.base_state] = counts.get(h.body.base_state, 0) + 1
        for state, count in counts.items():
            if state != self.state and count * 3 > len(self.headers) * 2:
                return state
        return None

    def rebase(self, state: Digest | None) -> None:
        """Our state after the parent turned out to be this."""
        self.state = state
        self._ranks = None

    # -- records and votes -----------------------------------------------------------------------------------

    def add_record(
        self, record: Signed[RoundRecord], now: float, holds: Callable[[Digest], bool], bad: Callable[[Digest], bool]
    ) -> Proposal | None:
        """Take a record of this round whose headers have no flaw. None when it is known, or there is no room."""
        if record.digest in self.proposals:
            return None
        by_author = [p for p in self.proposals.values() if p.record.author == record.author]
        if len(by_author) >= RECORDS_PER_AUTHOR or len(self.proposals) >= MAX_RECORDS:
            gone = self._to_give_up(by_author, record)
            if gone is None:
                return None
            self.forget_record(gone)
        if self._record_bytes + len(record.sent) > MAX_RECORD_BYTES:
            return None
        blobs = [u.body.blob for u in record.body.updates]
        slate = Slate(self.policy.exchange.committees(record.body)) if self.reduces else None
        lacking = set() if self.reduces else {b for b in blobs if not holds(b)}
        p = Proposal(record, now, lacking, any(bad(b) for b in blobs), slate)
        for other in by_author:
            if other.record.body.attempt == record.body.attempt and other.record.digest in self.proposals:
                other.equivocal = p.equivocal = True
        self.proposals[record.digest] = p
        self._record_bytes += len(record.sent)
        for author, words in list(self.unheard.items()):
            for key in [key for key in words if key[0] == record.digest]:
                word = words.pop(key)
                self._word_bytes -= len(word.sent)
                self._add_to_slate(p, word, holds, bad)
            if not words:
                del self.unheard[author]
        return p

    def _to_give_up(self, by_author: list[Proposal], record: Signed[RoundRecord]) -> Digest | None:
        """Which record goes for a new one: its author's oldest; else, that a few do not keep out the one whose turn it
        is, of those of who has the most here the one that lists the fewest."""
        voted = self.last_vote.body.record if self.last_vote is not None else None
        for p in by_author:
            if p.record.digest != voted:
                return p.record.digest
        kept = (voted, self.proposed.digest if self.proposed is not None else None)
        counts = Counter(p.record.author for p in self.proposals.values())
        others = [p for p in self.proposals.values() if p.record.digest not in kept]
        weakest = min(
            others, key=lambda p: (-counts[p.record.author], len(p.record.body.updates), p.seen), default=None
        )
        if weakest is None:
            return None
        better = len(record.body.updates) > len(weakest.record.body.updates)
        return weakest.record.digest if better or counts[weakest.record.author] > 1 else None

    def forget_record(self, record: Digest) -> None:
        gone = self.proposals.pop(record, None)
        if gone is not None:
            self._record_bytes -= len(gone.record.sent)
            if gone.slate is not None:
                self._word_bytes -= sum(len(w.sent) for w in gone.slate.said())

    def add_word(
        self,
        word: Signed[ShardAttestation],
        known: Callable[[PeerKey], bool],
        holds: Callable[[Digest], bool],
        bad: Callable[[Digest], bool],
    ) -> bool:
        """Take a word on a part, also of a record that is not here yet. False when it does not count: its author has
        said something on the part before, has no seat in its committee, or there is no room."""
        if not self.reduces or self._word_bytes + len(word.sent) > MAX_WORD_BYTES:
            return False
        if (p := self.proposals.get(word.body.record)) is not None:
            return self._add_to_slate(p, word, holds, bad)
        mine = self.unheard.get(word.author)
        if mine is None:
            if word.author not in self.headers and not known(word.author):
                return False
            if len(self.unheard) >= 2 * self.policy.max_members:
                return False
            mine = self.unheard[word.author] = {}
        key = (word.body.record, word.body.part)
        if key in mine:
            return False
        if len(mine) >= self._words_per_author:
            self._word_bytes -= len(mine.pop(next(iter(mine))).sent)
        mine[key] = word
        self._word_bytes += len(word.sent)
        return True

    @property
    def _words_per_author(self) -> int:
        return RECORDS_PER_AUTHOR * self.policy.exchange.committee

    def _add_to_slate(
        self,
        p: Proposal,
        word: Signed[ShardAttestation],
        holds: Callable[[Digest], bool],
        bad: Callable[[Digest], bool],
    ) -> bool:
        slate, part = p.slate, word.body.part
        if slate is None or not slate.seats(word.author, part) or word.author in slate.words[part]:
            return False
        self._word_bytes += len(word.sent)
        if slate.hear(word) and (blob := slate.parts[part]) is not None:
            p.bad = p.bad or bad(blob)
            if not holds(blob):
                p.lacking.add(blob)
        listed = p.record.body.contributors
        # Not of a slate that leaves out most: its author could have filled the committees with its own.
        if word.body.lacking and 2 * len(listed) > len(self.headers):
            self.lost |= slate.lacking(part) & set(listed) & self.headers.keys()
        return True

    def signers_of(self, blob: Digest) -> set[PeerKey]:
        """Who has named a blob as a part, in a word that counts."""
        slates = [p.slate for p in self.proposals.values() if p.slate is not None]
        return {w.author for slate in slates for w in slate.said() if w.body.blob == blob}

    def concerns(self, blob: Digest) -> bool:
        """Whether it is an update of this round, or a part that somebody made."""
        if any(h.body.blob == blob for h in self.headers.values()):
            return True
        if any(u.body.blob == blob for p in self.proposals.values() for u in p.record.body.updates):
            return True
        return self.reduces and bool(self.signers_of(blob))

    def slices_for(self, blob: Digest, member: PeerKey) -> list[tuple[Signed[RoundRecord], int, tuple[PeerKey, ...]]]:
        """Of the slates that list an update: each part that a member has a seat for, and its committee."""
        found = []
        for p in self.proposals.values():
            if p.slate is not None and not p.over and any(u.body.blob == blob for u in p.record.body.updates):
                seated = enumerate(p.slate.committees)
                found += [(p.record, part, committee) for part, committee in seated if member in committee]
        return found

    def parts(self) -> set[Digest]:
        """The blobs of all parts that somebody named in a word that counts."""
        slates = [p.slate for p in self.proposals.values() if p.slate is not None]
        return {w.body.blob for slate in slates for w in slate.said() if w.body.blob is not None}

    def add_vote(self, vote: Signed[Vote], known: Callable[[PeerKey], bool]) -> bool:
        """Take a vote, also for a record that is not here yet. False when it is known, or there is no room."""
        if (vote.body.parts is not None) != self.reduces:
            return False
        mine = self.votes.get(vote.author)
        if mine is None:
            if vote.author not in self.headers and not known(vote.author):
                return False
            if len(self.votes) >= 2 * self.policy.max_members:
                return False
            mine = self.votes[vote.author] = {}
        if (old := mine.get(vote.body.record)) is not None:
            if old.body.parts == vote.body.parts:
                return False
            del mine[vote.body.record]
        if len(mine) >= VOTES_PER_AUTHOR:
            del mine[next(iter(mine))]
        mine[vote.body.record] = vote
        return True

    def votes_for(self, record: Signed[RoundRecord], parts: Digest | None = None) -> list[Signed[Vote]]:
        """Votes by its contributors, by ascending key; of a slate, those that name these parts."""
        found = []
        for author in record.body.contributors:
            vote = self.votes.get(author, {}).get(record.digest)
            if vote is not None and (not self.reduces or parts in (None, vote.body.parts)):
                found.append(vote)
        return found

    def certified(self, records: Iterable[Digest]) -> Certificate | None:
        """The first of these records that has the votes it needs."""
        for digest in records:
            p = self.proposals.get(digest)
            if p is None or len(self.votes) < votes_needed(len(p.record.body.updates)):
                continue  # too few have voted for anything: looked at for each vote
            if not p.bad and (p.slate is None or not p.slate.open):
                parts = () if p.slate is None else tuple(part for part in p.slate.parts if part is not None)
                votes = self.votes_for(p.record, parts_digest(parts))
                if len(votes) >= votes_needed(len(p.record.body.updates)):
                    return Certificate(p.record, tuple(votes), parts)
        return None

    def blob_held(self, blob: Digest) -> None:
        for p in self.proposals.values():
            p.lacking.discard(blob)

    def blob_bad(self, blob: Digest) -> None:
        for p in self.proposals.values():
            p.bad = p.bad or any(u.body.blob == blob for u in p.record.body.updates)
            p.bad = p.bad or (p.slate is not None and blob in p.slate.parts)

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def starts(self) -> float | None:
        """When the first in rank proposes: all is there, or the exchange lasted long enough. None: not announced."""
        if self.announced is None:
            return None
        late = self.announced + self.policy.exchange_seconds
        return late if self.ready is None else min(self.ready, late)

    def attempt(self, now: float) -> int:
        """The attempt whose time it is; -1 before the first."""
        base, since = self._jumped or (0, self.starts)
        if since is None or now < since:
            return -1
        return min(MAX_ATTEMPT, base + int((now - since + 1e-9) / self.policy.propose_seconds))

    def next_attempt_at(self, now: float) -> float | None:
        """When the next attempt begins; None before we have announced."""
        base, since = self._jumped or (0, self.starts)
        if since is None or now < since:
            return since
        return since + (self.attempt(now) - base + 1) * self.policy.propose_seconds

    def jump(self, author: PeerKey, attempt: int, now: float) -> None:
        """Somebody is at a later attempt: so are we from now on, or we would never look at one record at one time.

        For one author only once in the time of everybody's turns: who skips to its own each time would be the only one
        to propose.
        """
        if self.announced is None or not max(0, self.attempt(now)) < attempt <= self.attempt(now) + MAX_JUMP:
            return
        if author not in self.headers:
            return
        before = self._jumps.get(author)
        if before is None or now - before >= len(self.ranks) * self.policy.propose_seconds:
            self._jumps[author] = now
            self._jumped = (attempt, now)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and its bound."""
        top = self.policy.max_members
        return {
            "headers": (len(self.headers), top),
            "proposals": (len(self.proposals), MAX_RECORDS + RECORDS_PER_AUTHOR),
            "record bytes": (self._record_bytes, MAX_RECORD_BYTES),
            "voters": (len(self.votes), 2 * top),
            "votes": (sum(len(v) for v in self.votes.values()), 2 * top * VOTES_PER_AUTHOR),
            "excluded": (len(self.excluded), 2 * top),
            "words ahead": (sum(len(w) for w in self.unheard.values()), 2 * top * self._words_per_author),
            "word bytes": (self._word_bytes, MAX_WORD_BYTES),
            "left out": (len(self.left_out | self.lost | self.silent), 2 * top),
        }

"""The undecided round: headers announced for one parent, records proposed, votes for them. Data and pure rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import Certificate, Header, Record, Signed, Vote, votes_needed
from protocol.rounds.policy import Policy

RECORDS_PER_AUTHOR = 4
MAX_RECORDS = 64
MAX_RECORD_BYTES = 128 * 1024 * 1024
VOTES_PER_AUTHOR = 4
MAX_ATTEMPT = 2**20
MAX_JUMP = 1024


class Proposal:
    """A record, and what is known of it."""

    __slots__ = ("record", "seen", "lacking", "bad", "equivocal")

    def __init__(self, record: Signed[Record], seen: float, lacking: set[Digest], bad: bool):
        self.record = record
        self.seen = seen
        self.lacking = lacking
        """Its blobs that are not held here yet."""
        self.bad = bad
        self.equivocal = False


class Ballot:
    """One undecided round. Everything in it is bounded by the policy's `max_members` and the constants above."""

    def __init__(self, policy: Policy, chain: Chain, parent: Digest, state: Digest | None, now: float):
        self.policy = policy
        self.chain = chain
        self.parent = parent
        self.state = state
        """Own state after the parent; None for an observer."""
        self.number: Round = chain.height(parent)
        self.began = now
        self.headers: dict[PeerKey, Signed[Header]] = {}
        self.heard: dict[PeerKey, float] = {}
        self.windows = 0
        """Announced in all."""
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
        self.proposed: Signed[Record] | None = None
        self.proposed_attempt = -1
        self.reported: set[PeerKey] = set()
        """Authors whose equivocation was reported."""
        self._ranks: tuple[PeerKey, ...] | None = None
        self._record_bytes = 0
        self._jumped: tuple[int, float] | None = None

    # -- headers ---------------------------------------------------------------------------------------------

    def flaw(self, header: Signed[Header], size_ok: Callable[[int], bool]) -> str | None:
        """Why this header can be part of no record of this round; None when it can."""
        body = header.body
        if body.round != self.number or body.parent != self.parent:
            return "it is of another round"
        if body.windows > self.policy.max_update_windows:
            return f"it claims {body.windows} windows: at most {self.policy.max_update_windows} fit one update"
        if body.first_window < self.chain.next_window(header.author, self.parent):
            return f"it claims windows from {body.first_window} on, which the chain has accepted already"
        if not size_ok(body.blob_size):
            return f"a blob of {body.blob_size} bytes is no update of this run"
        return None

    def add_header(self, header: Signed[Header], now: float, room_for: Callable[[PeerKey], bool]) -> bool:
        """Take a header without a flaw. False when its author has one already, or there is no room."""
        if header.author in self.headers:
            return False
        if len(self.headers) >= self.policy.max_members:
            spare = [a for a in self.headers if not room_for(a)]
            if not room_for(header.author) or not spare:
                return False
            self.windows -= self.headers.pop(spare[-1]).body.windows
            self.heard.pop(spare[-1], None)
        self.headers[header.author] = header
        self.windows += header.body.windows
        self.heard[header.author] = now
        if self.first_heard is None:
            self.first_heard = now
        self._ranks = None
        return True

    def exclude(self, author: PeerKey) -> None:
        self.excluded.add(author)
        self._ranks = None

    def candidates(self) -> list[Signed[Header]]:
        """Headers that a record of ours may list, as far as their authors' base goes."""
        return [h for h in self.headers.values() if self.is_candidate(h)]

    def is_candidate(self, header: Signed[Header]) -> bool:
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

    def announced_windows(self, holds: Callable[[Digest], bool], now: float) -> int:
        """Windows seen announced. What was not to be had for `exchange_seconds` does not count: anyone can claim."""
        return sum(
            h.body.windows
            for a, h in self.headers.items()
            if a not in self.excluded and (holds(h.body.blob) or now - self.heard[a] <= self.policy.exchange_seconds)
        )

    def rebase(self, state: Digest | None) -> None:
        """Our state after the parent turned out to be this."""
        self.state = state
        self._ranks = None

    # -- records and votes -----------------------------------------------------------------------------------

    def add_record(
        self, record: Signed[Record], now: float, holds: Callable[[Digest], bool], bad: Callable[[Digest], bool]
    ) -> Proposal | None:
        """Take a record of this round whose headers have no flaw. None when it is known, or there is no room."""
        if record.digest in self.proposals:
            return None
        by_author = [p for p in self.proposals.values() if p.record.author == record.author]
        if len(by_author) >= RECORDS_PER_AUTHOR or len(self.proposals) >= MAX_RECORDS:
            # The oldest by an author that repeats itself goes; a swarm of proposers keeps what came first.
            if not by_author or (
                self.last_vote is not None and by_author[0].record.digest == self.last_vote.body.record
            ):
                return None
            self.forget_record(by_author[0].record.digest)
        if self._record_bytes + len(record.sent) > MAX_RECORD_BYTES:
            return None
        blobs = [u.body.blob for u in record.body.updates]
        p = Proposal(record, now, {b for b in blobs if not holds(b)}, any(bad(b) for b in blobs))
        for other in by_author:
            if other.record.body.attempt == record.body.attempt and other.record.digest in self.proposals:
                other.equivocal = p.equivocal = True
        self.proposals[record.digest] = p
        self._record_bytes += len(record.sent)
        return p

    def forget_record(self, record: Digest) -> None:
        gone = self.proposals.pop(record, None)
        if gone is not None:
            self._record_bytes -= len(gone.record.sent)

    def add_vote(self, vote: Signed[Vote], known: Callable[[PeerKey], bool]) -> bool:
        """Take a vote, also for a record that is not here yet. False when it is known, or there is no room."""
        mine = self.votes.get(vote.author)
        if mine is None:
            if vote.author not in self.headers and not known(vote.author):
                return False
            if len(self.votes) >= 2 * self.policy.max_members:
                return False
            mine = self.votes[vote.author] = {}
        if vote.body.record in mine:
            return False
        if len(mine) >= VOTES_PER_AUTHOR:
            del mine[next(iter(mine))]
        mine[vote.body.record] = vote
        return True

    def votes_for(self, record: Signed[Record]) -> list[Signed[Vote]]:
        """Votes by its contributors, by ascending key."""
        found = []
        for author in record.body.contributors:
            vote = self.votes.get(author, {}).get(record.digest)
            if vote is not None:
                found.append(vote)
        return found

    def certified(self, records: Iterable[Digest]) -> Certificate | None:
        """The first of these records that has the votes it needs."""
        for digest in records:
            p = self.proposals.get(digest)
            if p is not None and not p.bad:
                votes = self.votes_for(p.record)
                if len(votes) >= votes_needed(len(p.record.body.updates)):
                    return Certificate(p.record, tuple(votes))
        return None

    def blob_held(self, blob: Digest) -> None:
        for p in self.proposals.values():
            p.lacking.discard(blob)

    def blob_bad(self, blob: Digest) -> None:
        for p in self.proposals.values():
            p.bad = p.bad or any(u.body.blob == blob for u in p.record.body.updates)

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

    def jump(self, attempt: int, now: float) -> None:
        """Somebody is at a later attempt: so are we from now on, or we would never look at one record at one time."""
        if self.announced is not None and max(0, self.attempt(now)) < attempt <= self.attempt(now) + MAX_JUMP:
            self._jumped = (attempt, now)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """What is held, and its bound."""
        top = self.policy.max_members
        return {
            "headers": (len(self.headers), top),
            "records": (len(self.proposals), MAX_RECORDS + RECORDS_PER_AUTHOR),
            "record bytes": (self._record_bytes, MAX_RECORD_BYTES),
            "voters": (len(self.votes), 2 * top),
            "votes": (sum(len(v) for v in self.votes.values()), 2 * top * VOTES_PER_AUTHOR),
            "excluded": (len(self.excluded), 2 * top),
        }

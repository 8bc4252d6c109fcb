"""The undecided round: headers announced for one parent, proposals and votes. Data and pure rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from math import log
from types import MappingProxyType

from protocol.bounded import BoundedDict
from protocol.chain import Chain
from protocol.ids import Digest, PeerKey, Round, sha256
from protocol.messages import MAX_ATTEMPT, RoundRecord, Signed, UpdateHeader, Vote
from protocol.rounds.policy import RoundPolicy
from protocol.stake import is_majority

RECORDS_PER_AUTHOR = 4
MAX_RECORDS = 64
MAX_RECORD_BYTES = 128 * 1024 * 1024
VOTES_PER_AUTHOR = 4
MAX_JUMP = 1024
ROUNDING_SECONDS = 1e-9
"""A boundary of a turn counts as reached when it is less than this away: times are rounded."""

RECENT_RECORDS = 8
"""Number of records before a round whose contributors take the first turns to propose."""

Rank = Callable[[PeerKey], tuple[int, ...]]
"""A peer's claim to a place in a full table: see `Members.rank`."""

MIN_STRANGERS = 8
STRANGER_SHARE = 8
"""Headers of non-members: at most `max_members` divided by this number, but at least MIN_STRANGERS."""


def proposer_order(
    seed: bytes,
    authors: Iterable[PeerKey],
    stakes: Mapping[PeerKey, int] = MappingProxyType({}),
    recent: Collection[PeerKey] = (),
) -> tuple[PeerKey, ...]:
    """Return the order in which authors propose after a record, whose seed this is.

    Those with stake come first, and the first turn is drawn by stake: stake that is divided over many keys gains none.
    Then recent contributors come, then the others. The order of two authors does not depend on who else there is, since
    peers may hold other updates (weighted rendezvous hashing: Thaler and Ravishankar 1998). Peers whose logarithms
    round differently may see another order, about once in 10^15 turns, and it decides nothing by itself.
    """
    return tuple(sorted(authors, key=lambda author: _turn_of(author, seed, stakes, recent)))


def _turn_of(
    author: PeerKey, seed: bytes, stakes: Mapping[PeerKey, int], recent: Collection[PeerKey]
) -> tuple[bool, bool, float]:
    """Return an author's place in the order: the least comes first."""
    drawn = (int.from_bytes(sha256(b"cairn/v1/turn", seed, author)[:8], "little") >> 11) + 0.5
    stake = stakes.get(author, 0)
    return stake <= 0, stake <= 0 and author not in recent, -log(drawn / 2**53) / max(1, stake)


def header_refusal(header: Signed[UpdateHeader], chain: Chain, accepts_size: Callable[[int], bool]) -> str | None:
    """Return why a header can be in no record that follows its parent, which the chain has; None when it can."""
    body, parent = header.body, header.body.parent
    if body.round != chain.height(parent):
        return "it is of another round"
    most, _ = chain.limits.round_limits(chain.directives(parent))
    if body.windows > most:
        return f"it claims {body.windows} windows: at most {most} fit one update"
    if body.first_window < chain.next_window(header.author, parent):
        return f"it claims windows from {body.first_window} on, which the chain has accepted already"
    if (reason := chain.rebase_refusal(header, parent)) is not None:
        return reason
    if body.epoch != chain.epoch(parent):
        return "it is from before the run was rolled back, or from after it"
    if header.author in chain.directives(parent).banned:
        return "the run's owner has banned its author"
    if chain.is_barred(header.author, parent):
        return "its author is barred after a conviction"
    if not accepts_size(body.blob_size):
        return f"a blob of {body.blob_size} bytes is no update of this run"
    return None


class Proposal:
    """A record that was proposed, and what is known of it."""

    __slots__ = ("record", "seen", "blobs", "missing", "bad", "equivocated", "refused")

    def __init__(self, record: Signed[RoundRecord], seen: float, missing: set[Digest], *, bad: bool, refused: bool):
        self.record = record
        self.seen = seen
        """The time of its arrival."""

        self.blobs = {u.body.blob for u in record.body.updates}
        """The blobs that make it bad if they are invalid: its updates, and the agreed shards of their mean."""

        self.missing = missing
        """Blobs that a vote for it waits for."""

        self.bad = bad
        self.equivocated = False
        """Its author signed another one of the same attempt."""

        self.refused = refused
        """It lists a header that contradicts what was received before: it gets no vote of ours."""


class RoundState:
    """One undecided round, bounded by the policy's `max_members` and the constants above.

    `revision` grows with every change of the blobs that the round may need.
    """

    def __init__(
        self,
        policy: RoundPolicy,
        chain: Chain,
        parent: Digest,
        state: Digest | None,
        now: float,
        revision: int = 0,
        *,
        is_delivered: Callable[[Signed[UpdateHeader]], bool] = lambda header: True,
    ):
        """Open a round. `is_delivered` returns whether an update is held. In a reduced round none need be: True."""
        self.policy = policy
        self.chain = chain
        self.parent = parent
        self.state = state
        """Own state after the parent; None for an observer."""

        self.revision = revision
        self.number: Round = chain.height(parent)
        self.epoch = chain.epoch(parent)
        self.began = now
        self.headers: dict[PeerKey, Signed[UpdateHeader]] = {}
        self.received_at: dict[PeerKey, float] = {}
        """The time of each header's arrival."""

        self.direct_authors: set[PeerKey] = set()
        """Authors whose header arrived on its own. One whose header only a record lists takes no turn, and nobody waits
        for its update."""

        self.equivocators: set[PeerKey] = set()
        """Authors of two headers: no record of ours lists either."""

        self.excluded: set[PeerKey] = set()
        """Authors that no record of ours lists: of an invalid blob, a copy or two headers, banned or barred."""

        self.proposals: dict[Digest, Proposal] = {}
        self.votes: dict[PeerKey, BoundedDict[Digest, Signed[Vote]]] = {}
        self.first_header_at: float | None = None
        self.announced_at: float | None = None
        """The time of our own announcement."""

        self.ready_at: float | None = None
        """The time from which nobody else is awaited."""

        self.last_vote: Signed[Vote] | None = None
        self.voted_at = 0.0
        self.voted_for: tuple[Digest, ...] = ()
        """The last three records that we voted for."""

        self.proposed: Signed[RoundRecord] | None = None
        self.proposed_attempt = -1
        self.reported: set[PeerKey] = set()
        """Authors of whom an equivocation or a wrong digest was reported."""

        self._is_delivered = is_delivered
        recent = (record for record in islice(chain.ancestors(parent), RECENT_RECORDS) if record != chain.root)
        self._recent = frozenset(a for record in recent for a in chain.certificate(record).record.body.contributors)
        self._stakes = chain.stakes(parent)
        self._seed = chain.seed(parent)
        self._order: tuple[PeerKey, ...] | None = None
        self._record_bytes = 0
        self._jumped: tuple[int, float] | None = None
        self._jumps: dict[PeerKey, float] = {}
        """Authors whose record made us skip attempts, and when; at most as many as there are headers."""

    def count_change(self) -> None:
        """Count a change of the blobs that the round may need."""
        self.revision += 1

    # -- headers ---------------------------------------------------------------------------------------------

    def header_refusal(self, header: Signed[UpdateHeader], accepts_size: Callable[[int], bool]) -> str | None:
        """Return why this header can be in no record of this round; None when it can."""
        if header.body.parent != self.parent:
            return "it is of another round"
        return header_refusal(header, self.chain, accepts_size)

    def add_header(self, header: Signed[UpdateHeader], now: float, rank: Rank, *, listed: bool = False) -> bool:
        """Add a valid header. Return False when its author has one already, or there is no room.

        `listed`: it came in a record, not by itself.
        """
        author = header.author
        if author in self.headers:
            return False
        if not any(rank(author)):
            strangers = sum(not any(rank(a)) for a in self.headers)
            if strangers >= max(MIN_STRANGERS, self.policy.max_members // STRANGER_SHARE):
                return False
        if len(self.headers) >= self.policy.max_members:
            last = self.displaced_by(author, self.headers, rank)
            if last is None:
                return False
            self._forget_header(last)
        self.headers[author] = header
        self.received_at[author] = now
        if not listed:
            self.direct_authors.add(author)
        if self.first_header_at is None:
            self.first_header_at = now
        self._order = None
        self.count_change()
        return True

    def displaced_by(self, author: PeerKey, held: Iterable[PeerKey], rank: Rank) -> PeerKey | None:
        """Return whom an author displaces in a full table: the newest of the lowest rank; None if that is not lower.

        Excluded authors have the lowest. `held` are in order of arrival.
        """

        def claim(key: PeerKey) -> tuple[int, ...]:
            own, *rest = rank(key)
            return (own, key not in self.excluded, *rest)

        last = min(reversed(list(held)), key=claim, default=None)
        return last if last is not None and claim(last) < claim(author) else None

    def _forget_header(self, author: PeerKey) -> None:
        del self.headers[author], self.received_at[author]
        self.direct_authors.discard(author)
        self._jumps.pop(author, None)
        self._order = None
        self.count_change()

    def confirm(self, author: PeerKey) -> None:
        """Note that the header that a record listed has come by itself."""
        if author not in self.direct_authors:
            self.direct_authors.add(author)
            self._order = None

    def equivocate(self, second: Signed[UpdateHeader], *, listed: bool) -> None:
        """Note that an author announced a second header. Both are left out; the first that came by itself counts."""
        author = second.author
        if not listed and author not in self.direct_authors:
            received = self.received_at[author]
            self._forget_header(author)
            self.headers[author], self.received_at[author] = second, received
            self.direct_authors.add(author)
            self.refuse_contradictions()
        self.equivocators.add(author)
        self.exclude(author)

    def contradicts(self, listed: Signed[UpdateHeader]) -> bool:
        """Return whether a header of a record contradicts one that came by itself."""
        author = listed.author
        return author in self.direct_authors and self.headers[author].digest != listed.digest

    def refuse_contradictions(self) -> None:
        """Refuse the proposals that list a header which contradicts what came by itself."""
        for proposal in self.proposals.values():
            proposal.refused = proposal.refused or any(self.contradicts(u) for u in proposal.record.body.updates)

    def exclude(self, author: PeerKey) -> None:
        self.excluded.add(author)
        self._order = None
        self.count_change()

    def candidates(self) -> list[Signed[UpdateHeader]]:
        """Return the headers that a record of ours may list: same base as ours, and author not excluded."""
        return [h for h in self.headers.values() if self.is_candidate(h)]

    def is_candidate(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether a record of ours may list a header."""
        return header.author not in self.excluded and self.state in (None, header.body.base_state)

    @property
    def proposer_order(self) -> tuple[PeerKey, ...]:
        """Authors in the order in which they propose: the candidates that came by themselves and whose blob is held.

        Those with stake come first, then recent contributors, so a key that only announces takes no turn from them.
        Peers that hold other updates see another order: a record out of turn still counts after a while.
        """
        if self._order is None:
            ready = (h.author for h in self.candidates() if h.author in self.direct_authors and self._is_delivered(h))
            self._order = proposer_order(self._seed, ready, self._stakes, self._recent)
        return self._order

    def contradicting_state(self, present: set[PeerKey]) -> Digest | None:
        """Return another base state than ours if authors name it that have more stake than the others `present`.

        While nobody has stake, they must be more than two thirds. To load a state takes minutes: two keys that cost
        nothing must not have everybody do it.
        """
        authors: dict[Digest, set[PeerKey]] = {}
        for author in self.direct_authors:
            authors.setdefault(self.headers[author].body.base_state, set()).add(author)
        everybody = present | self.direct_authors
        for state, named in authors.items():
            decided = is_majority(self._stakes, named, everybody)
            if state != self.state and (3 * len(named) > 2 * len(everybody) if decided is None else decided):
                return state
        return None

    def set_state(self, state: Digest | None) -> None:
        """Correct our own state after the parent."""
        self.state = state
        self._order = None
        self.count_change()

    def restart_clock(self, now: float) -> None:
        """Start the round's time from now: a pause was no part of it."""
        self.began = now

    def mark_announced(self, now: float) -> None:
        self.announced_at = now
        self.count_change()

    def mark_ready(self, now: float) -> None:
        self.ready_at = now

    def patience_since(self, arrived: float) -> float:
        """Return the time from which patience counts for a record without support that came at `arrived`.

        It counts from when this peer could decide the round: from its own announcement, or from the round's
        `max_seconds` on, whichever is earlier. While the others train, nothing better can come. Nor does it count
        before the round's first header came.
        """
        first = arrived if self.first_header_at is None else self.first_header_at
        latest = self.began + self.policy.max_seconds
        return max(first, latest if self.announced_at is None else min(latest, self.announced_at))

    def report_once(self, author: PeerKey) -> bool:
        """Return True the first time that an author is to be reported in this round.

        Beyond twice `max_members` authors, no more are reported: anybody can make keys.
        """
        if author in self.reported or len(self.reported) >= 2 * self.policy.max_members:
            return False
        self.reported.add(author)
        return True

    # -- proposals and votes ---------------------------------------------------------------------------------

    def add_record(
        self,
        record: Signed[RoundRecord],
        now: float,
        missing: set[Digest],
        is_invalid: Callable[[Digest], bool],
        *,
        refused: bool,
    ) -> Proposal | None:
        """Add a valid record of this round. Return None when it is known, or there is no room."""
        if record.digest in self.proposals:
            return None
        by_author = [proposal for proposal in self.proposals.values() if proposal.record.author == record.author]
        bad = any(is_invalid(u.body.blob) for u in record.body.updates)
        proposal = Proposal(record, now, missing, bad=bad, refused=refused)
        evicted, freed = None, 0
        if len(by_author) >= RECORDS_PER_AUTHOR or len(self.proposals) >= MAX_RECORDS:
            evicted = self._to_evict(by_author, proposal)
            if evicted is None:
                return None
            freed = len(self.proposals[evicted].record.encoded)
        if self._record_bytes - freed + len(record.encoded) > MAX_RECORD_BYTES:
            return None
        if evicted is not None:
            self._forget_record(evicted)
        for other in by_author:
            if other.record.body.attempt == record.body.attempt and other.record.digest in self.proposals:
                other.equivocated = proposal.equivocated = True
        self.proposals[record.digest] = proposal
        self._record_bytes += len(record.encoded)
        self.count_change()
        return proposal

    def _to_evict(self, by_author: list[Proposal], proposal: Proposal) -> Digest | None:
        """Return the record to evict for a new one; None when the new one must not come in.

        The same author's oldest goes first. Then one that can get no vote of ours goes, and then that of the author
        whose turn comes last. An author's second newest counts as if it had half of its stake, and so on. So neither
        many keys nor many records keep the proposer out whose turn it is: turns are drawn by stake.
        """
        voted = self.last_vote.body.record if self.last_vote is not None else None
        for other in by_author:
            if other.record.digest != voted:
                return other.record.digest
        kept = (voted, self.proposed.digest if self.proposed is not None else None)
        newer: Counter[PeerKey] = Counter()
        last, latest = None, self._eviction_order(proposal, newer)
        for other in reversed(self.proposals.values()):
            order = self._eviction_order(other, newer)
            if order > latest and other.record.digest not in kept:
                last, latest = other.record.digest, order
        return last

    def _eviction_order(self, proposal: Proposal, newer: Counter[PeerKey]) -> tuple[bool, bool, bool, float]:
        """Return the place of a record in the order of eviction, the greatest first; count it as one of its author's.

        `newer`: the author's newer records.
        """
        author = proposal.record.author
        newer[author] += 1
        is_votable = proposal.record.body.base_state == self.state or self.state is None
        is_votable = is_votable and not (proposal.bad or proposal.refused or proposal.equivocated)
        no_stake, not_recent, drawn = _turn_of(author, self._seed, self._stakes, self._recent)
        return not is_votable or author in self.excluded, no_stake, not_recent, drawn * newer[author]

    def _forget_record(self, record: Digest) -> None:
        evicted = self.proposals.pop(record, None)
        if evicted is not None:
            self._record_bytes -= len(evicted.record.encoded)
            self.count_change()

    def require(self, proposal: Proposal, blob: Digest, *, held: bool, invalid: bool) -> None:
        """Note that a vote for a proposal needs one more blob."""
        proposal.blobs.add(blob)
        proposal.bad = proposal.bad or invalid
        if not held:
            proposal.missing.add(blob)
        self.count_change()

    def update_blobs(self) -> set[Digest]:
        """Return the blobs of all updates of this round."""
        found = {h.body.blob for h in self.headers.values()}
        return found | {u.body.blob for proposal in self.proposals.values() for u in proposal.record.body.updates}

    def add_vote(self, vote: Signed[Vote], rank: Rank) -> bool:
        """Add a vote, also for a record that is not here yet. Return False when it is known, or there is no room."""
        mine = self.votes.get(vote.author)
        if mine is None:
            if (leaving := self.leaving_for(vote.author, self.votes, rank)) is None:
                return False
            for author in leaving:
                del self.votes[author]
            mine = self.votes[vote.author] = BoundedDict(VOTES_PER_AUTHOR)
        old = mine.get(vote.body.record)
        if old is not None and old.body.shards_digest == vote.body.shards_digest:
            return False
        mine.renew(vote.body.record, vote)
        return True

    def leaving_for(self, author: PeerKey, held: Collection[PeerKey], rank: Rank) -> list[PeerKey] | None:
        """Return the authors that leave a table of votes, in order of arrival, for another; None if it has no place."""
        if author not in self.headers and not any(rank(author)):
            return None
        if len(held) < 2 * self.policy.max_members:
            return []
        last = self.displaced_by(author, held, rank)
        return None if last is None else [last]

    def votes_for(self, record: Signed[RoundRecord], shards: Digest | None = None) -> list[Signed[Vote]]:
        """Return the votes by its contributors, by ascending key; only those for these shards, if a digest is given."""
        found = []
        for author in record.body.contributors:
            vote = self.votes.get(author, {}).get(record.digest)
            if vote is not None and shards in (None, vote.body.shards_digest):
                found.append(vote)
        return found

    def cast(self, vote: Signed[Vote], now: float) -> None:
        self.last_vote = vote
        self.voted_at = now
        self.voted_for = (*self.voted_for[-2:], vote.body.record)

    def propose(self, record: Signed[RoundRecord]) -> None:
        self.proposed = record

    def hold(self, blob: Digest, author: PeerKey | None) -> None:
        """Note that a blob is held, and the author that it names: as another's update it is still missing."""
        self._order = None
        for proposal in self.proposals.values():
            listed = proposal.record.body.updates if blob in proposal.missing else ()
            if all(u.author == author for u in listed if u.body.blob == blob):
                proposal.missing.discard(blob)

    def reject(self, blob: Digest) -> None:
        """Note that a blob is invalid: no proposal with it gets our vote."""
        for proposal in self.proposals.values():
            proposal.bad = proposal.bad or blob in proposal.blobs

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def starts_at(self) -> float | None:
        """The time of the first attempt: all is there, or the exchange lasted long enough. None before announcing."""
        if self.announced_at is None:
            return None
        late = self.announced_at + self.policy.exchange_seconds
        return late if self.ready_at is None else min(self.ready_at, late)

    def _turn(self, now: float) -> tuple[int, float, float] | None:
        """Return the attempt whose time it is, and the middle and the end of that time; None before the first."""
        base, since = self._jumped or (0, self.starts_at)
        if since is None or now < since:
            return None
        seconds = self.policy.propose_seconds
        attempt = min(MAX_ATTEMPT, base + int((now - since + ROUNDING_SECONDS) / seconds))
        middle = since + (attempt - base + 0.5) * seconds
        return attempt, middle, middle + 0.5 * seconds

    def attempt(self, now: float) -> int:
        """Return the attempt whose time it is; -1 before the first."""
        turn = self._turn(now)
        return -1 if turn is None else turn[0]

    def next_attempt_at(self, now: float) -> float | None:
        """Return when the attempt may change next; None before we have announced."""
        if (turn := self._turn(now)) is None:
            return self.starts_at
        _, middle, end = turn
        return middle if now < middle else end

    def begin_attempt(self, attempt: int) -> None:
        """Note that our turn of an attempt has been used."""
        self.proposed_attempt = attempt

    def skip(self, passed_over: Callable[[PeerKey], bool], now: float) -> None:
        """Move to the next attempt whose proposer is not passed over, if there is one."""
        order, attempt = self.proposer_order, self.attempt(now)
        if attempt < 0 or not order or not passed_over(order[attempt % len(order)]):
            return
        following = range(attempt + 1, attempt + len(order))
        to = next((a for a in following if not passed_over(order[a % len(order)])), None)
        if to is not None and to <= MAX_ATTEMPT:
            self._jumped = (to, now)

    def expired_turns(self, before: int, now: float) -> set[PeerKey]:
        """Return the authors whose turn lasted `propose_seconds` here, of the attempts before this one."""
        order, base = self.proposer_order, 0 if self._jumped is None else self._jumped[0]
        return {order[a % len(order)] for a in range(base, min(before, self.attempt(now), base + len(order))) if order}

    def follow_named_attempts(self, now: float) -> None:
        """Move to the next attempt if a record names a later one: so peers consider the same record at the same time.

        The turn under way first has half of its time, and one author can move us only once in a full rotation of turns.
        Otherwise an author could propose in every round, or choose among the turns of many keys, and so among seeds.
        """
        if (turn := self._turn(now)) is None:
            return
        current, middle, _ = turn
        if now < middle - ROUNDING_SECONDS:
            return
        rotation = len(self.proposer_order) * self.policy.propose_seconds
        for proposal in self.proposals.values():
            author, named = proposal.record.author, proposal.record.body.attempt
            before = self._jumps.get(author)
            is_due = before is None or now - before >= rotation
            if current < named <= current + MAX_JUMP and author in self.headers and is_due and not proposal.equivocated:
                self._jumps[author] = now
                self._jumped = (current + 1, now)
                return

    def sizes(self) -> dict[str, tuple[int, int]]:
        top = self.policy.max_members
        return {
            "headers": (len(self.headers), top),
            "proposals": (len(self.proposals), MAX_RECORDS + RECORDS_PER_AUTHOR),
            "record bytes": (self._record_bytes, MAX_RECORD_BYTES),
            "voters": (len(self.votes), 2 * top),
            "votes": (sum(len(v) for v in self.votes.values()), 2 * top * VOTES_PER_AUTHOR),
            "excluded": (len(self.excluded), 2 * top),
            "equivocators": (len(self.equivocators), 2 * top),
            "reported": (len(self.reported), 2 * top),
        }

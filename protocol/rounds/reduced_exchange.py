"""Rounds that are reduced: committees make the mean of a proposal's updates in shards, and attest their digests.

One proposal at a time is worked on: its shards are made and fetched until it is voted for and certified. Work also ends
when the proposal is deadlocked, or its time (`exchange_seconds` from its arrival) is over. Then the next proposer has
its turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.ids import Digest, PeerKey
from protocol.messages import MAX_MISSING_AUTHORS, RoundRecord, ShardAttestation, Signed, UpdateHeader, Vote
from protocol.rounds.actions import Broadcast, CancelReduce, ReduceShard
from protocol.rounds.blobs import BlobRole, ShardBlob
from protocol.rounds.context import Context
from protocol.rounds.exchange import Best, Exchange, ShardDuty
from protocol.rounds.round_state import MAX_RECORDS, RECORDS_PER_AUTHOR, Proposal, RoundState
from protocol.rounds.shard_tally import ShardTally

MAX_REPEATED_ATTESTATIONS = 64
MAX_ATTESTATION_BYTES = 64 * 1024 * 1024


class ReducedExchange(Exchange):
    """The exchange of one reduced round."""

    leave_seconds = 6.0
    """Longer than in a gathered round: an update is fetched only once a proposal lists it."""

    def __init__(self, context: Context, round_: RoundState):
        super().__init__(context, round_)
        self._tallies: dict[Digest, ShardTally] = {}
        """Of each proposal of the round."""

        self._abandoned: set[Digest] = set()
        """Proposals that were worked on in vain."""

        self._current: Proposal | None = None
        """The proposal that is worked on."""

        self._early: dict[PeerKey, dict[tuple[Digest, int], Signed[ShardAttestation]]] = {}
        """Attestations of records that are not here yet."""

        self._bytes = 0
        """Size of all attestations that are held."""

        self._left_out: set[PeerKey] = set()
        """Contributors that no record of ours lists any more in this round: their slices are unavailable, or their
        attestations were wrong."""

        self._unavailable: set[PeerKey] = set()
        """Contributors whose slices more than half of a committee could not fetch. We do not vote for others' records
        that list them."""

        self._penalised: set[PeerKey] = set()
        """Those of `_unavailable` who were reported."""

        self._silent: set[PeerKey] = set()
        """Committee members that attested nothing before the last proposal ran out of time."""

        self._fetches_own_shards = False
        """The shards that we make for the current proposal are late: those that others have agreed on are fetched."""

        self._failed_attempts = 0
        """Number of proposals that were worked on in vain."""

        self._evidence: tuple[Signed, ...] = ()
        """Why the last of them was deadlocked, for those who still work on it."""

    # -- proposals and votes ---------------------------------------------------------------------------------

    def listable(self) -> list[Signed[UpdateHeader]]:
        """Return the candidates that should be available: nobody holds others' updates."""
        return [h for h in self._round.candidates() if h.author == self._context.me or self.counts_as_announced(h)]

    def counts_as_announced(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether nothing is known against the author or the update."""
        context, author = self._context, header.author
        known_bad = context.blobs.is_unusable(header) or author in self._left_out or author in self._silent
        return not known_bad and not context.members.withheld.applies_to(author, self._round.number)

    def awaits(self, header: Signed[UpdateHeader]) -> bool:
        """Return False: an update is fetched only once a proposal lists it."""
        return False

    def failed_attempts(self, attempt: int) -> int:
        """Return the attempt, at most one more than the abandoned proposals: attempts pass while one is worked on."""
        return min(attempt, 1 + self._failed_attempts)

    def missing_for(self, record: RoundRecord) -> set[Digest]:
        """Return nothing: the shards are not made yet."""
        return set()

    def proposals_changed(self, added: Proposal | None) -> None:
        """Open the tally of a new proposal with the attestations that came before it; drop those of evicted ones."""
        current = None if self._current is None else self._current.record.digest
        for digest in [d for d in self._tallies if d not in self._round.proposals and d != current]:
            self._bytes -= sum(len(a.encoded) for a in self._tallies.pop(digest).all())
        self._abandoned &= self._round.proposals.keys()
        if added is None:
            return
        record = added.record
        seed = self._context.chain.seed(record.body.parent)
        self._tallies[record.digest] = ShardTally(self._context.policy.exchange.committees(seed, record.body))
        for author, attestations in list(self._early.items()):
            for key in [key for key in attestations if key[0] == record.digest]:
                attestation = attestations.pop(key)
                self._bytes -= len(attestation.encoded)
                self._add(added, attestation)
            if not attestations:
                del self._early[author]
        self._report_unavailable()

    def is_votable(self, proposal: Proposal) -> bool:
        """Return whether work on a proposal can start: nothing is known yet that makes it fail."""
        hindered = any(a in self._unavailable and a != self._context.me for a in proposal.record.body.contributors)
        return proposal.record.digest not in self._abandoned and not hindered and self._is_open(proposal)

    def accepts(self, vote: Signed[Vote]) -> bool:
        return vote.body.shards_digest is not None

    def silent_authors(self, decided: RoundRecord) -> set[PeerKey]:
        """Return nobody: attempts also pass while shards are made, so nothing follows from them."""
        return set()

    @property
    def is_occupied(self) -> bool:
        return self._current is not None

    def refresh(self, best: Best) -> None:
        """Abandon the current proposal if it is over, and start the best one if there is none."""
        self._continue_with(best)
        proposal, seconds = self._current, self._context.policy.propose_seconds
        late = proposal is not None and self._context.deadlines.due("own shards", proposal.seen + seconds)
        if late is not self._fetches_own_shards:
            self._fetches_own_shards = late
            self._round.count_change()

    def _continue_with(self, best: Best) -> None:
        proposal, held = self._current, self._round.proposals
        if proposal is not None and (proposal.record.digest not in held or not self._is_open(proposal)):
            self._abandon(proposal)
            proposal = None
        if proposal is None and (proposal := best()) is not None:
            self._current = proposal
            self._round.count_change()
            tally = self._tallies[proposal.record.digest]
            for shard in tally.duties(self._context.me):
                self._context.emit(ReduceShard(proposal.record, shard, tally.committees[shard]))

    def choose(self, best: Best) -> Proposal | None:
        """Return the current proposal once all its shards are agreed and held."""
        self.refresh(best)
        proposal = self._current
        return None if proposal is None or self._tallies[proposal.record.digest].open or proposal.missing else proposal

    def shards(self, proposal: Proposal) -> tuple[Digest, ...] | None:
        return self._tallies[proposal.record.digest].digests

    def _is_open(self, proposal: Proposal) -> bool:
        if proposal.bad or proposal.equivocated or self._tallies[proposal.record.digest].deadlocked is not None:
            return False
        return not self._context.deadlines.due("proposal", proposal.seen + self._context.policy.exchange_seconds)

    def _abandon(self, proposal: Proposal) -> None:
        """Leave those who let a proposal fail out of our own records of this round."""
        round_, tally = self._round, self._tallies.get(proposal.record.digest)
        self.stop()
        self._abandoned.add(proposal.record.digest)
        self._failed_attempts += 1
        if tally is None:
            return
        self._evidence = ()
        if tally.deadlocked is not None:
            self._evidence = tuple(tally.attestations[tally.deadlocked].values())
        elif proposal.equivocated:
            records = [other.record for other in round_.proposals.values()]
            self._evidence = tuple(record for record in records if record.author == proposal.record.author)
        self._left_out |= tally.unavailable_to(self._context.me) & round_.headers.keys()
        if not proposal.bad and not proposal.equivocated and tally.deadlocked is None:
            self._silent = (tally.silent() & round_.headers.keys()) - {self._context.me}

    # -- blobs -----------------------------------------------------------------------------------------------

    def needed(self) -> dict[Digest, BlobRole]:
        """Return the agreed shards of the current proposal, without those that we are about to make ourselves."""
        proposal = self._current
        if proposal is None:
            return {}
        tally = self._tallies[proposal.record.digest]
        mine = set() if self._fetches_own_shards else set(tally.duties(self._context.me))
        agreed = [(i, d) for i, d in enumerate(tally.agreed) if d is not None and i not in mine]
        return {d: ShardBlob(proposal.record, i) for i, d in agreed if d in proposal.missing}

    def shard_holders(self, record: Signed[RoundRecord], shard: int, blob: Digest) -> tuple[PeerKey, ...]:
        tally = self._tallies.get(record.digest)
        if tally is None:
            return ()
        return (*tally.signers(shard, blob), *(v.author for v in self._round.votes_for(record)))

    def signers_of(self, blob: Digest) -> set[PeerKey]:
        return {a.author for tally in self._tallies.values() for a in tally.all() if a.body.blob == blob}

    def shard_blobs(self) -> set[Digest]:
        return {a.body.blob for tally in self._tallies.values() for a in tally.all() if a.body.blob is not None}

    def duties_of(self, blob: Digest, member: PeerKey) -> list[ShardDuty]:
        found = []
        for digest, proposal in self._round.proposals.items():
            if digest not in self._abandoned and any(u.body.blob == blob for u in proposal.record.body.updates):
                seated = enumerate(self._tallies[digest].committees)
                found += [(proposal.record, shard, committee) for shard, committee in seated if member in committee]
        return found

    # -- own attestations ------------------------------------------------------------------------------------

    def shard_reduced(self, record: Digest, shard: int, blob: Digest) -> None:
        if self._has_duty(record, shard):
            self._context.blobs.hold(blob, None)
            self._round.hold(blob, None)
            self._attest(ShardAttestation(self._context.run, self._round.number, record, shard, blob))

    def shard_unavailable(self, record: Digest, shard: int, authors: Iterable[PeerKey]) -> None:
        proposal = self._round.proposals.get(record)  # the tally of one that was evicted is kept while it is current
        if proposal is None or not self._has_duty(record, shard):
            return
        listed = proposal.record.body.contributors
        named = sorted({a for a in authors if a in listed and a != self._context.me})[:MAX_MISSING_AUTHORS]
        if named:
            self._attest(ShardAttestation(self._context.run, self._round.number, record, shard, None, tuple(named)))

    def blob_invalid(self, blob: Digest, signers: Iterable[PeerKey]) -> None:
        """Attest an invalid update as unavailable, for those who see another slice of it; accuse a shard's signers."""
        for digest, proposal in list(self._round.proposals.items()):
            for author in [u.author for u in proposal.record.body.updates if u.body.blob == blob]:
                for shard in self._tallies[digest].duties(self._context.me):
                    self.shard_unavailable(digest, shard, (author,))
        for author in signers:
            self._accuse(author, "bad-shard", f"peer {author.short} signed a shard that breaks the rules")

    def _has_duty(self, record: Digest, shard: int) -> bool:
        tally, me = self._tallies.get(record), self._context.me
        return tally is not None and tally.has_seat(me, shard) and me not in tally.attestations[shard]

    def _attest(self, body: ShardAttestation) -> None:
        attestation = self._context.signer.sign(body)
        self.receive(attestation)
        self._context.emit(Broadcast(attestation))

    # -- others' attestations --------------------------------------------------------------------------------

    def receive(self, attestation: Signed[ShardAttestation]) -> bool:
        """Add an attestation, our own too, also of a record that is not here yet. Return False when it does not count.

        It does not count when its author has already attested the shard or has no seat in the committee, or when there
        is no room.
        """
        proposal = self._round.proposals.get(attestation.body.record)
        if self._bytes + len(attestation.encoded) > MAX_ATTESTATION_BYTES:
            added = False
        else:
            added = self._add_early(attestation) if proposal is None else self._add(proposal, attestation)
        if not added:
            self._check_second(proposal, attestation)
            return False
        if proposal is not None:
            shard = attestation.body.shard
            if proposal is self._current and self._tallies[proposal.record.digest].agreed[shard] is not None:
                self._round.count_change()
            self._compare(proposal, shard)
            self._report_unavailable()
        return True

    def _add_early(self, attestation: Signed[ShardAttestation]) -> bool:
        round_, author = self._round, attestation.author
        mine = self._early.get(author)
        if mine is None:
            if (leaving := round_.leaving_for(author, self._early, self._context.members.rank)) is None:
                return False
            for other in leaving:
                self._bytes -= sum(len(a.encoded) for a in self._early.pop(other).values())
            mine = self._early[author] = {}
        key = (attestation.body.record, attestation.body.shard)
        if key in mine:
            return False
        if len(mine) >= self._per_author:
            self._bytes -= len(mine.pop(next(iter(mine))).encoded)
        mine[key] = attestation
        self._bytes += len(attestation.encoded)
        return True

    @property
    def _per_author(self) -> int:
        return RECORDS_PER_AUTHOR * self._round.policy.exchange.committee

    def _add(self, proposal: Proposal, attestation: Signed[ShardAttestation]) -> bool:
        context, tally, shard = self._context, self._tallies[proposal.record.digest], attestation.body.shard
        if not tally.has_seat(attestation.author, shard) or attestation.author in tally.attestations[shard]:
            return False
        self._bytes += len(attestation.encoded)
        if tally.add(attestation) and (blob := tally.agreed[shard]) is not None:
            self._round.require(
                proposal, blob, held=context.blobs.holds_shard(blob), invalid=context.blobs.is_invalid(blob)
            )
        listed = proposal.record.body.contributors
        # A proposal that leaves out most does not count: its author could have filled the committees with its own.
        if attestation.body.missing and 2 * len(listed) > len(self._round.headers):
            self._unavailable |= tally.unavailable(shard) & set(listed) & self._round.headers.keys()
        return True

    def _report_unavailable(self) -> None:
        """Report authors that a committee could not get; records of ours do not list them for a while."""
        context = self._context
        for author in sorted(self._unavailable - self._penalised - {context.me}):
            self._penalised.add(author)
            self._left_out.add(author)
            context.members.withheld.penalise(author, self._round.number)
            text = f"a committee cannot get, or use, the update of {author.short}: the round goes on without it"
            context.notify("warning", "withheld", text, author)

    def _check_second(self, proposal: Proposal | None, attestation: Signed[ShardAttestation]) -> None:
        author, body = attestation.author, attestation.body
        tally = None if proposal is None else self._tallies[proposal.record.digest]
        if tally is None or not tally.has_seat(author, body.shard):
            return
        first = tally.attestations[body.shard].get(author)
        # A member that missed slices at first and got them later has not lied.
        if first is not None and None not in (first.body.blob, body.blob) and first.body.blob != body.blob:
            self._accuse(author, "equivocation", f"peer {author.short} signed two digests of one shard")

    def _compare(self, proposal: Proposal, shard: int) -> None:
        """Accuse members whose digest is not ours, or not the majority's: the same updates give the same bytes."""
        context, tally = self._context, self._tallies[proposal.record.digest]
        mine = tally.attestations[shard].get(context.me)
        truth = tally.agreed[shard] if mine is None or mine.body.blob is None else mine.body.blob
        if truth is None:
            return
        if tally.agreed[shard] not in (None, truth) and self._round.report_once(context.me):
            text = f"shard {shard} of record {proposal.record.digest.short} differs from that of most of its committee"
            context.notify("error", "shard-differs", text + ": they lie, or this device computes wrongly")
        for author, attestation in tally.attestations[shard].items():
            if author != context.me and attestation.body.blob not in (None, truth):
                text = f"peer {author.short} signed a digest of a shard that is not what its updates give"
                self._accuse(author, "shard-differs", text)

    def _accuse(self, author: PeerKey, kind: str, text: str) -> None:
        """Report a peer for what it signed, and leave it out of our own records of this round."""
        if author in self._round.headers and author != self._context.me:
            self._left_out.add(author)
        if self._round.report_once(author):
            self._context.notify("warning", kind, text, author)

    # -- time ------------------------------------------------------------------------------------------------

    def repeat(self, count: int) -> None:
        """Broadcast again the proposal, our attestations of it, and the evidence against the previous one.

        Once we have voted, some of the others' attestations too: not everyone receives everyone.
        """
        context, round_, proposal = self._context, self._round, self._current
        for message in self._evidence:
            if message.author == context.me or round_.proposed is not None:
                context.emit(Broadcast(message))
        if proposal is None:
            return
        record = proposal.record
        voted = round_.last_vote is not None and round_.last_vote.body.record == record.digest
        if not voted and (record.author == context.me or context.members.is_my_turn(record.digest, count)):
            context.emit(Broadcast(record))
        attestations = list(self._tallies[proposal.record.digest].all())
        for attestation in attestations:
            if attestation.author == context.me:
                context.emit(Broadcast(attestation))
        if voted and context.members.is_my_turn(proposal.record.digest, count):
            others = [a for a in attestations if a.author != context.me]
            first = count * MAX_REPEATED_ATTESTATIONS % max(1, len(others))
            for attestation in (*others[first:], *others[:first])[:MAX_REPEATED_ATTESTATIONS]:
                context.emit(Broadcast(attestation))

    def stop(self) -> None:
        """Cancel the work on the current proposal."""
        context, proposal = self._context, self._current
        if proposal is not None:
            context.emit(CancelReduce(proposal.record.digest))
            tally = self._tallies.get(proposal.record.digest)
            agreed = () if tally is None else tally.agreed
            context.blobs.request_again((d for d in agreed if d is not None), context.now)
            self._current = None
            self._round.count_change()

    def sizes(self) -> dict[str, tuple[int, int]]:
        top = self._round.policy.max_members
        return {
            "early attestations": (sum(len(a) for a in self._early.values()), 2 * top * self._per_author),
            "attestation bytes": (self._bytes, MAX_ATTESTATION_BYTES),
            "left out": (len(self._left_out | self._unavailable | self._silent), 2 * top),
            "abandoned": (len(self._abandoned), MAX_RECORDS + RECORDS_PER_AUTHOR + 1),
        }

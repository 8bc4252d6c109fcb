"""Rounds that are gathered: every member fetches every update, and votes for records of which it holds all."""

from __future__ import annotations

from protocol.ids import Digest, PeerKey
from protocol.messages import RoundRecord, Signed, UpdateHeader
from protocol.rounds.actions import Broadcast
from protocol.rounds.blobs import BlobRole, UpdateBlob
from protocol.rounds.exchange import Best, Exchange
from protocol.rounds.round_state import Proposal


class GatheredExchange(Exchange):
    """The exchange of one gathered round."""

    def listable(self) -> list[Signed[UpdateHeader]]:
        """Return the candidates whose blobs are held."""
        return [h for h in self._round.candidates() if self.is_delivered(h)]

    def counts_as_announced(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update is held, or was announced less than `exchange_seconds` ago: anybody can claim.

        The time is for authors that announced it themselves, and did not let such a time pass before.
        """
        context, round_ = self._context, self._round
        if self.is_delivered(header):
            return True
        if header.author not in round_.direct_authors or context.members.late.applies_to(header.author, round_.number):
            return False
        return not context.deadlines.due("claim", round_.received_at[header.author] + context.policy.exchange_seconds)

    def awaits(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update of a candidate that announced itself is not held yet."""
        round_ = self._round
        return header.author in round_.direct_authors and round_.is_candidate(header) and not self.is_delivered(header)

    def is_delivered(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update is held."""
        return self._context.blobs.holds_update(header)

    def failed_attempts(self, attempt: int) -> int:
        """Return the attempt: each one before it failed."""
        return attempt

    def missing_for(self, record: RoundRecord) -> set[Digest]:
        """Return the updates that are not held."""
        return {u.body.blob for u in record.updates if not self.is_delivered(u)}

    def is_votable(self, proposal: Proposal) -> bool:
        """Return whether all its updates are held."""
        return not proposal.missing

    def silent_authors(self, decided: RoundRecord) -> set[PeerKey]:
        """Return the authors that voted for nothing, and let their turn pass or a proposal that listed them fail.

        A proposal has failed when it had `propose_seconds`, and the round was decided without the author. A turn has
        failed when it is over without a proposal.
        """
        context, round_ = self._context, self._round
        due = context.now - context.policy.propose_seconds
        proposers = {p.record.author for p in round_.proposals.values()}
        failed = {a for p in round_.proposals.values() if p.seen <= due for a in p.record.body.contributors}
        failed -= set(decided.contributors)
        failed |= round_.expired_turns(decided.attempt, context.now) - proposers
        return failed - round_.votes.keys()

    def choose(self, best: Best) -> Proposal | None:
        """Return the best proposal; for `propose_seconds` after a vote, none."""
        context, round_ = self._context, self._round
        if not round_.proposals:
            return None
        next_vote_at = round_.voted_at + context.policy.propose_seconds
        if round_.last_vote is not None and not context.deadlines.due("next vote", next_vote_at):
            return None
        return best()

    def needed(self) -> dict[Digest, BlobRole]:
        """Return the updates of all candidates, and those that good proposals list."""
        round_ = self._round
        found: dict[Digest, BlobRole] = {h.body.blob: UpdateBlob(h) for h in round_.candidates()}
        for proposal in round_.proposals.values():
            record, missing = proposal.record.body, proposal.missing
            # Those that get no vote of ours are many, if one key signs one after the other: a certificate has us fetch.
            ours = not (proposal.bad or proposal.refused or proposal.equivocated)
            if missing and ours and record.base_state == round_.state:
                found.update((u.body.blob, UpdateBlob(u)) for u in record.updates if u.body.blob in missing)
        return found

    def repeat(self, count: int) -> None:
        """Broadcast our own proposal again while another one has our vote."""
        mine, vote = self._round.proposed, self._round.last_vote
        if mine is not None and (vote is None or vote.body.record != mine.digest):
            self._context.emit(Broadcast(mine))

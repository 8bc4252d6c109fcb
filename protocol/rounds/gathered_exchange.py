"""Rounds that are gathered: every member fetches every update, and votes for records of which it holds all."""

from __future__ import annotations

from protocol.ids import Digest
from protocol.messages import RoundRecord, Signed, UpdateHeader
from protocol.rounds.actions import Broadcast
from protocol.rounds.blobs import BlobRole, UpdateBlob
from protocol.rounds.exchange import Best, Exchange
from protocol.rounds.round_state import Proposal


class GatheredExchange(Exchange):
    """The exchange of one gathered round."""

    leave_seconds = 3.0

    def listable(self) -> list[Signed[UpdateHeader]]:
        """Return the candidates whose blobs are held."""
        return [h for h in self._r.candidates() if self.is_delivered(h)]

    def believed(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update is held, or was announced less than `exchange_seconds` ago: anybody can claim."""
        c = self._c
        return self.is_delivered(header) or not c.deadlines.due(
            "claim", self._r.received_at[header.author] + c.policy.exchange_seconds
        )

    def awaits(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update of a candidate is not held yet."""
        return self._r.is_candidate(header) and not self.is_delivered(header)

    def is_delivered(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update is held."""
        return self._c.blobs.holds(header.body.blob)

    def attempts_in_vain(self, attempt: int) -> int:
        """Return the attempt: each one before it failed."""
        return attempt

    def missing_for(self, record: RoundRecord) -> set[Digest]:
        """Return the updates that are not held."""
        return {u.body.blob for u in record.updates if not self.is_delivered(u)}

    def is_votable(self, p: Proposal) -> bool:
        """Return whether all its updates are held."""
        return not p.missing

    def choose(self, best: Best) -> Proposal | None:
        """Return the best proposal; for `propose_seconds` after a vote, none."""
        c, r = self._c, self._r
        if not r.proposals:
            return None
        if r.last_vote is not None and not c.deadlines.due("next vote", r.voted_at + c.policy.propose_seconds):
            return None
        return best()

    def needed(self) -> dict[Digest, BlobRole]:
        """Return the updates of all candidates, and those that good proposals list."""
        r = self._r
        found: dict[Digest, BlobRole] = {h.body.blob: UpdateBlob(h) for h in r.candidates()}
        for p in r.proposals.values():
            if p.missing and not p.bad and p.record.body.base_state == r.state:
                found.update((u.body.blob, UpdateBlob(u)) for u in p.record.body.updates if u.body.blob in p.missing)
        return found

    def repeat(self, count: int) -> None:
        """Broadcast our own proposal again while another one has our vote."""
        r = self._r
        if r.proposed is not None and (r.last_vote is None or r.last_vote.body.record != r.proposed.digest):
            self._c.emit(Broadcast(r.proposed))

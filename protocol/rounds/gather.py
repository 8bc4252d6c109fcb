"""Rounds that are gathered: every member fetches every update, and votes for records of which it holds all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.ids import Digest, PeerKey
from protocol.messages import RoundRecord, ShardAttestation, Signed, UpdateHeader, Vote
from protocol.rounds.actions import Broadcast
from protocol.rounds.blobs import BlobOrigin, UpdateBlob
from protocol.rounds.context import Context
from protocol.rounds.exchange import Slice
from protocol.rounds.round_state import Proposal, RoundState


class Gather:
    """The exchange of one gathered round."""

    leave_seconds = 3.0
    is_occupied = False

    def __init__(self, context: Context, round_state: RoundState):
        self._c = context
        self._r = round_state

    # -- proposals and votes ---------------------------------------------------------------------------------

    def listable(self) -> list[Signed[UpdateHeader]]:
        """Return the candidates whose blobs are held."""
        return [h for h in self._r.candidates() if self._c.blobs.holds(h.body.blob)]

    def believed(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update is held, or was announced less than `exchange_seconds` ago: anybody can claim."""
        c = self._c
        return c.blobs.holds(header.body.blob) or not c.deadlines.due(
            "claim", self._r.received_at[header.author] + c.policy.exchange_seconds
        )

    def awaits(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update of a candidate is not held yet."""
        return self._r.is_candidate(header) and not self._c.blobs.holds(header.body.blob)

    def is_delivered(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the update is held."""
        return self._c.blobs.holds(header.body.blob)

    def attempts_in_vain(self, attempt: int) -> int:
        """Return the attempt: each one before it failed."""
        return attempt

    def missing_for(self, record: RoundRecord) -> set[Digest]:
        """Return the updates that are not held."""
        return {u.body.blob for u in record.updates if not self._c.blobs.holds(u.body.blob)}

    def proposals_changed(self, added: Proposal | None) -> None:
        """Do nothing: a proposal has no shards."""

    def is_votable(self, p: Proposal) -> bool:
        """Return whether all its updates are held."""
        return not p.missing

    def refresh(self, best: Callable[[], Proposal | None]) -> None:
        """Do nothing: there is no work on a proposal beyond fetching its updates."""

    def choose(self, best: Callable[[], Proposal | None]) -> Proposal | None:
        """Return the best proposal; for `propose_seconds` after a vote, none."""
        c, r = self._c, self._r
        if not r.proposals:
            return None
        if r.last_vote is not None and not c.deadlines.due("next vote", r.voted_at + c.policy.propose_seconds):
            return None
        return best()

    def accepts(self, vote: Vote) -> bool:
        """Return whether a vote names no shards."""
        return vote.shards_digest is None

    def shards(self, p: Proposal) -> tuple[Digest, ...] | None:
        """Return no shards: a certificate names none."""
        return ()

    # -- blobs -----------------------------------------------------------------------------------------------

    def needed(self) -> dict[Digest, BlobOrigin]:
        """Return the updates of all candidates, and those that good proposals list."""
        r = self._r
        found: dict[Digest, BlobOrigin] = {h.body.blob: UpdateBlob(h) for h in r.candidates()}
        for p in r.proposals.values():
            if p.missing and not p.bad and p.record.body.base_state == r.state:
                found.update((u.body.blob, UpdateBlob(u)) for u in p.record.body.updates if u.body.blob in p.missing)
        return found

    def shard_holders(self, record: Signed[RoundRecord], shard: int, blob: Digest) -> tuple[PeerKey, ...]:
        """Return nobody: this round has no shards."""
        return ()

    def signers_of(self, blob: Digest) -> set[PeerKey]:
        """Return nobody: this round has no shards."""
        return set()

    def shard_blobs(self) -> set[Digest]:
        """Return no blob: this round has no shards."""
        return set()

    def slices_for(self, blob: Digest, member: PeerKey) -> list[Slice]:
        """Return no shard: this round has none."""
        return []

    # -- shards ----------------------------------------------------------------------------------------------

    def receive(self, attestation: Signed[ShardAttestation]) -> bool:
        """Refuse an attestation: this round has no shards."""
        return False

    def shard_reduced(self, record: Digest, shard: int, blob: Digest) -> None:
        """Do nothing: this round has no shards."""

    def shard_unavailable(self, record: Digest, shard: int, authors: Iterable[PeerKey]) -> None:
        """Do nothing: this round has no shards."""

    def blob_invalid(self, blob: Digest, signers: Iterable[PeerKey]) -> None:
        """Do nothing: the round itself excludes the author."""

    # -- time ------------------------------------------------------------------------------------------------

    def repeat(self, count: int) -> None:
        """Broadcast our own proposal again while another one has our vote."""
        r = self._r
        if r.proposed is not None and (r.last_vote is None or r.last_vote.body.record != r.proposed.digest):
            self._c.emit(Broadcast(r.proposed))

    def stop(self) -> None:
        """Do nothing: the blobs that are not needed any more are dropped elsewhere."""

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return nothing: there is no container."""
        return {}

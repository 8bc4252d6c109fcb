"""How the updates of one round reach its members: what the two kinds of rounds have in common.

`GatheredExchange`: every member fetches every update. `ReducedExchange`: committees make the mean in shards, and every
member fetches those. Only `Consensus.open` knows which of them a round has; all other parts use the interface.
"""

# ruff: noqa: B027 (a round without shards does nothing there)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from protocol.ids import Digest, PeerKey
from protocol.messages import RoundRecord, ShardAttestation, Signed, UpdateHeader, Vote
from protocol.rounds.blobs import BlobRole
from protocol.rounds.context import Context
from protocol.rounds.round_state import Proposal, RoundState

ShardDuty = tuple[Signed[RoundRecord], int, tuple[PeerKey, ...]]
"""One shard that a committee member has to make: the proposal, the shard's index, and its committee."""

Best = Callable[[], Proposal | None]
"""Gives the proposal that our vote should go to."""


class Exchange(ABC):
    """One round's exchange. It reads the round's state, and changes it through its methods.

    The methods for shards do nothing here.
    """

    leave_seconds = 3.0
    """The longest time that a leaver waits for its last round."""

    def __init__(self, context: Context, round_: RoundState):
        self._context = context
        self._round = round_

    # -- proposals and votes ---------------------------------------------------------------------------------

    @abstractmethod
    def listable(self) -> list[Signed[UpdateHeader]]:
        """Return the headers that a record of ours would list now."""

    @abstractmethod
    def counts_as_announced(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether a header counts as announced: see `Consensus.is_supported`."""

    @abstractmethod
    def awaits(self, header: Signed[UpdateHeader]) -> bool:
        """Return whether the first proposer waits for the update of this header."""

    @abstractmethod
    def failed_attempts(self, attempt: int) -> int:
        """Return how many attempts before this one failed because votes were missing."""

    @abstractmethod
    def missing_for(self, record: RoundRecord) -> set[Digest]:
        """Return the blobs that a vote for a new record waits for."""

    def proposals_changed(self, added: Proposal | None) -> None:
        """Note that a proposal was added to the round, and perhaps another evicted."""

    @abstractmethod
    def is_votable(self, proposal: Proposal) -> bool:
        """Return whether our vote may go to a proposal, or will once its shards are made."""

    def accepts(self, vote: Signed[Vote]) -> bool:
        """Return whether a vote is one of this kind of round: it names shards only in a round that has some."""
        return vote.body.shards_digest is None

    @abstractmethod
    def silent_authors(self, decided: RoundRecord) -> set[PeerKey]:
        """Return the authors that let an attempt before the decided one fail in silence."""

    @property
    def is_occupied(self) -> bool:
        """True while members still work on a proposal, so that we make none."""
        return False

    def refresh(self, best: Best) -> None:
        """Abandon work that is over, and start the next."""

    @abstractmethod
    def choose(self, best: Best) -> Proposal | None:
        """Return the proposal that gets our vote now; None when none does."""

    def shards(self, proposal: Proposal) -> tuple[Digest, ...] | None:
        """Return the digests of the shards that a certificate names; None while they are not agreed."""
        return ()

    # -- blobs -----------------------------------------------------------------------------------------------

    @abstractmethod
    def needed(self) -> dict[Digest, BlobRole]:
        """Return the blobs of the round to fetch, once we have announced."""

    def announcers(self, blob: Digest) -> tuple[PeerKey, ...]:
        """Return the peers that announced a blob as their update."""
        return tuple(h.author for h in self._round.headers.values() if h.body.blob == blob)

    def shard_holders(self, record: Signed[RoundRecord], shard: int, blob: Digest) -> tuple[PeerKey, ...]:
        """Return the peers that have signed a shard's digest, then those that voted for its record."""
        return ()

    def signers_of(self, blob: Digest) -> set[PeerKey]:
        """Return the peers that attested a blob as a shard."""
        return set()

    def shard_blobs(self) -> set[Digest]:
        """Return the blobs of all shards that somebody attested."""
        return set()

    def duties_of(self, blob: Digest, member: PeerKey) -> list[ShardDuty]:
        """Return the shards that a member is to make with an update, of the proposals that list it."""
        return []

    # -- shards ----------------------------------------------------------------------------------------------

    def receive(self, attestation: Signed[ShardAttestation]) -> bool:
        """Add an attestation. Return False when it does not count."""
        return False

    def shard_reduced(self, record: Digest, shard: int, blob: Digest) -> None:
        """Attest a shard that our driver has made."""

    def shard_unavailable(self, record: Digest, shard: int, authors: Iterable[PeerKey]) -> None:
        """Attest that our driver cannot make a shard, because these authors' slices are unavailable."""

    def blob_invalid(self, blob: Digest, signers: Iterable[PeerKey]) -> None:
        """Draw the conclusions from a blob that breaks the codec's rules, and that `signers` attested as a shard."""

    # -- time ------------------------------------------------------------------------------------------------

    @abstractmethod
    def repeat(self, count: int) -> None:
        """Broadcast again what may have been lost, for the `count`-th time."""

    def stop(self) -> None:
        """Stop all work: the round is decided, or our state is lost."""

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the size and the bound of each container."""
        return {}

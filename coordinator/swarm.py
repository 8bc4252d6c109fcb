"""The coordinator's interface to the swarm, which an observer of the chain implements.

`cairn` implements it over the peer package's observer node; tests implement it in a few lines. All calls are made on
the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.coordinator_address import CoordinatorAddress
from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Certificate, Directive, Finalization, Heartbeat, Rollback, Signed, UpdateHeader


@dataclass(frozen=True, slots=True)
class ReceivedHeartbeat:
    """A member's newest heartbeat, and its age in seconds."""

    heartbeat: Heartbeat
    seconds_since: float


@dataclass(frozen=True, slots=True)
class AnnouncedUpdate:
    """An announced update.

    `late`: its round was decided already when it came. `flaw`: the rule of the chain that it breaks ("": none).
    """

    header: Signed[UpdateHeader]
    late: bool
    flaw: str


@dataclass(frozen=True, slots=True)
class RestingState:
    """The state after the newest record, with which `round` would begin, of a run that is over or paused.

    `state` is its digest once it is archived. Until then at least `needed` of the peers in `wanted` must come again:
    contributors of the record, who alone can say which state that is.
    """

    record: Digest
    round: int
    state: Digest | None
    contributors: tuple[PeerKey, ...] = ()
    wanted: tuple[PeerKey, ...] = ()
    needed: int = 0


class SwarmView(Protocol):
    """The chain and the members, as an observer holds them."""

    updates_problem: str
    """Why an update between the newest archived state and the head is not here, for people; empty when all are."""

    @property
    def head(self) -> Digest:
        """The newest record of the chain by fork choice, or the genesis."""
        ...

    @property
    def final(self) -> Signed[Finalization] | None:
        """The newest finalization that the swarm knows."""
        ...

    async def certificates_after(self, record: Digest, limit: int) -> Sequence[Certificate] | None:
        """Return the chain from the child of `record` towards the head: oldest first, at most `limit`.

        It is shorter only at the head. `record` may be the genesis. Returns None if `record` is not on the chain that
        leads to the head, or if what follows is not available yet. It may read from disk.
        """
        ...

    def certificate(self, record: Digest) -> Certificate | None:
        """Return the certificate of a record that this observer holds, also of a left branch; None for others."""
        ...

    async def encoded_certificate(self, record: Digest) -> bytes | None:
        """Return the same as bytes, which no event loop waits for: it may read from disk."""
        ...

    async def keep_abandoned(self, number: Round, tip: Digest, rollback: Rollback) -> None:
        """Keep the certificates that a rollback leaves, from its first round up to `tip`, of round `number`.

        `certificate` returns them from then on, also after a restart. It may be repeated. Raises CairnError if they
        cannot be written; those that are not here any more are logged.
        """
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back, on the event loop, when the head, the finalization or the directive has changed.

        Returns the function that ends the subscription.
        """
        ...

    def listen(self, callback: Callable[[Signed[Any]], None]) -> None:
        """Call back, on the event loop, with each verified message of a round (announced updates, proposed records).

        For display only: a message may be missed, or come twice.
        """
        ...

    def heartbeats(self) -> Mapping[PeerKey, ReceivedHeartbeat]:
        """Return the admitted peers with a recent heartbeat, whatever their phase; its `known_headers` are left out.

        Peers without an admission are not among them: anybody can make keys.
        """
        ...

    def announced(self, parent: Digest) -> Sequence[AnnouncedUpdate]:
        """Return the announced updates for the round after a record, accepted or not; the first of each author.

        Only the newest few rounds are kept, and nothing from before the observer's start.
        """
        ...

    def addresses(self) -> Sequence[str]:
        """Return multiaddresses at which the swarm is entered, this observer's own first."""
        ...

    async def publish_final(self, final: Signed[Finalization]) -> None:
        """Publish a finalization, also to newcomers. The same one may be published again."""
        ...

    def own_addresses(self) -> Sequence[str]:
        """Return those of the addresses that are the observer's own."""
        ...

    @property
    def coordinator_address(self) -> Signed[CoordinatorAddress] | None:
        """The newest coordinator address record (body: CoordinatorAddress) that the observer has."""
        ...

    async def publish_coordinator_address(self, address: Signed[CoordinatorAddress]) -> None:
        """Publish a coordinator address record, and store it for the next start; it may be repeated."""
        ...

    @property
    def directive(self) -> Signed[Directive] | None:
        """The newest directive that the observer has."""
        ...

    async def publish_directive(self, directive: Signed[Directive]) -> None:
        """Publish a directive, and store it for the next start. When this returns, the chain follows it."""
        ...

    async def offer_state(self, state: Digest, record: Digest) -> None:
        """Offer peers the archived state after a record.

        Raises CairnError, with a list of the archived states, if this is none that the chain has.
        """
        ...

    def held_states(self) -> list[int]:
        """Return the rounds whose base states are archived, of those on the way to the head: newest first."""
        ...

    def held_state(self) -> int:
        """Return the newest round whose base state this observer holds, of those on the way to the head.

        Nothing newer becomes final: a state that others cannot get must not bind them.
        """
        ...

    def count_backed(self, path: Sequence[Digest]) -> int:
        """Return how many of these records, oldest first, have most of the stake behind them: `Chain.count_backed`.

        Those that this observer has no more in memory count. Nothing else becomes final: an owner cut off with a few
        peers must not bind the others to their branch.
        """
        ...

    def resting_state(self) -> RestingState | None:
        """Return the state after the newest record of a run that is over or paused; None of one that goes on.

        It is also None before the first record: the genesis is archived from the start.
        """
        ...

    def has_blob(self, digest: Digest) -> bool:
        """Return whether a blob (a checkpoint, by its state digest) is in the observer's store."""
        ...

"""What the coordinator sees of the swarm: the interface that an observer of the chain offers.

`cairn` implements it over the peer package's observer node; tests implement it in a few lines. All calls are made on
the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.ids import Digest, PeerKey
from protocol.messages import Certificate, Directive, Finalization, Heartbeat, Signed, UpdateHeader

TRAINING_PHASES = ("training", "exchanging")
"""Phases of a heartbeat in which a peer works at the open round."""


@dataclass(frozen=True, slots=True)
class ReceivedHeartbeat:
    """A member's newest heartbeat, and how long ago it came."""

    heartbeat: Heartbeat
    seconds_since: float


@dataclass(frozen=True, slots=True)
class AnnouncedUpdate:
    """An update that was announced: its header, whether it came when its round was decided already, and what rule of
    the chain it breaks ("": none)."""

    header: Signed[UpdateHeader]
    late: bool
    flaw: str


class SwarmView(Protocol):
    """The chain and the members, as an observer holds them."""

    @property
    def head(self) -> Digest:
        """The newest record of the chain by fork choice, or the genesis."""
        ...

    @property
    def final(self) -> Signed[Finalization] | None:
        """The newest final that the swarm knows."""
        ...

    async def certificates_after(self, record: Digest, limit: int) -> Sequence[Certificate] | None:
        """The chain from the child of `record` towards the head: oldest first, at most `limit`, fewer only at the head.

        `record` may be the genesis. None when `record` is not on the chain that leads to the head, or when what follows
        it is not there yet. May read from disk.
        """
        ...

    def certificate(self, record: Digest) -> Certificate | None:
        """Of any record that this observer holds, also of a branch that was left; None for others."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back, on the event loop, whenever the head, the final or the owner's word changed.
        Returns what ends that."""
        ...

    def listen(self, callback: Callable[[Signed[Any]], None]) -> None:
        """Calls back, on the event loop, with each verified message of a round (updates announced, records proposed) as
        it is heard. For what people are shown; a message may be missed, or come twice."""
        ...

    def heartbeats(self) -> Mapping[PeerKey, ReceivedHeartbeat]:
        """The members that were heard of lately, observers too."""
        ...

    def announced(self, parent: Digest) -> Sequence[AnnouncedUpdate]:
        """The updates that this observer heard announced for the round after a record, accepted or not; of an author
        the first. Of the newest few rounds only, and nothing from before its start."""
        ...

    def addresses(self) -> Sequence[str]:
        """Multiaddresses at which the swarm is entered, this observer's own first."""
        ...

    async def publish_final(self, final: Signed[Finalization]) -> None:
        """Tell the swarm, and keep telling newcomers. The same final may be published again."""
        ...

    def own_addresses(self) -> Sequence[str]:
        """Of these, the observer's own."""
        ...

    @property
    def coordinator_address(self) -> Signed[Any] | None:
        """The owner's newest word on where the coordinator is (body: Whereabouts), as the observer heard or kept it."""
        ...

    async def publish_coordinator_address(self, word: Signed[Any]) -> None:
        """Tell the swarm, and keep it for the next start. The same word may be published again."""
        ...

    @property
    def directive(self) -> Signed[Directive] | None:
        """The owner's newest word on the run, as the observer heard or kept it."""
        ...

    async def publish_directive(self, word: Signed[Directive]) -> None:
        """Tell the swarm, and keep it for the next start. When this returns, the chain has turned as it says."""
        ...

    async def offer_state(self, state: Digest, record: Digest) -> None:
        """Let peers have the archived state after a record. Raises CairnError, with those that there are, when this is
        not one."""
        ...

    def held_state(self) -> int:
        """The newest round whose state (what it starts from) this observer holds, of those on the way to the head.

        Nothing newer is made final: what others cannot get must not bind them.
        """
        ...

    def has_blob(self, digest: Digest) -> bool:
        """Whether a blob (a checkpoint, by its state digest) is in the observer's store."""
        ...

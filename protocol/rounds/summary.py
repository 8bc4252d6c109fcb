"""The machine as people see it: a frozen view for terminals, pages and logs."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Header, Heartbeat, Signed


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member, by its last heartbeat."""

    key: PeerKey
    heartbeat: Heartbeat
    silent_seconds: float
    announced: bool
    voted: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """Where the machine stands."""

    phase: str
    """As in heartbeats: joining, training, exchanging, syncing, observing, leaving."""

    round: Round
    """The round that is being trained, or followed."""

    head: Digest
    """The newest record whose state is held (for an observer: known)."""

    state: Digest | None
    weight: int
    """Windows accepted up to the head."""

    chain_head: Digest
    chain_weight: int
    members: tuple[MemberView, ...]
    headers: tuple[Signed[Header], ...]
    """Announced for this round, own one included."""

    proposals: int
    votes: int
    """Votes seen for the record that we voted for."""

    awaited: tuple[PeerKey, ...]
    """Whom the first in rank waits for, once we have announced."""

    windows: int
    """Own windows that no update covers yet."""

    finished: bool

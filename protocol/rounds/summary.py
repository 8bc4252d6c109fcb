"""The machine as people see it: a frozen view for terminals, pages and logs."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Heartbeat, Signed, UpdateHeader
from protocol.rounds.context import Context
from protocol.rounds.deciding import Deciding
from protocol.rounds.position import Position


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
    headers: tuple[Signed[UpdateHeader], ...]
    """Announced for this round, own one included."""

    proposals: int
    votes: int
    """Votes seen for the record that we voted for."""

    awaited: tuple[PeerKey, ...]
    """Whom the first in rank waits for, once we have announced."""

    windows: int
    """Own windows that no update covers yet."""

    finished: bool


def summarise(c: Context, d: Deciding, p: Position, phase: str, now: float) -> Summary:
    """The view of a machine's parts at a time."""
    b = d.ballot
    head = p.applied if p.applied is not None and p.applied in c.chain else c.chain.head
    votes = 0
    if b is not None and b.last_vote is not None and (mine := b.proposals.get(b.last_vote.body.record)) is not None:
        votes = len(b.votes_for(mine.record))
    announced, voted = ({}, {}) if b is None else (b.headers, b.votes)
    members = tuple(MemberView(m.key, m.beat, now - m.heard, m.key in announced, m.key in voted) for m in c.members)
    return Summary(
        phase=phase,
        round=c.chain.height(head),
        head=head,
        state=p.state,
        weight=c.chain.weight(head),
        chain_head=c.chain.head,
        chain_weight=c.chain.weight(c.chain.head),
        members=members,
        headers=tuple(announced.values()),
        proposals=0 if b is None else len(b.proposals),
        votes=votes,
        awaited=() if b is None or b.announced is None else tuple(d.awaiting.awaited(b)),
        windows=d.work.windows,
        finished=d.finished,
    )

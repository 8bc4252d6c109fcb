"""The machine as people see it: a frozen view for terminals, pages and logs."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Heartbeat, Signed, UpdateHeader
from protocol.rounds.consensus import Consensus
from protocol.rounds.context import Context
from protocol.rounds.phase import Phase
from protocol.rounds.state_sync import StateSync


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member, by its last heartbeat."""

    key: PeerKey
    heartbeat: Heartbeat
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The state of a machine."""

    phase: Phase
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
    """The headers announced for this round, own one included."""

    votes: int
    """Votes seen for the record that we voted for."""

    awaited: tuple[PeerKey, ...]
    """The members that the first proposer waits for, once we have announced."""

    windows: int
    """Own windows that no update covers yet."""


def summarise(c: Context, consensus: Consensus, sync: StateSync, phase: Phase, now: float) -> Summary:
    """Return the view of a machine's parts at a time."""
    r, head = consensus.round, sync.best_record
    votes = 0
    if r is not None and r.last_vote is not None and (mine := r.proposals.get(r.last_vote.body.record)) is not None:
        votes = len(r.votes_for(mine.record))
    return Summary(
        phase=phase,
        round=c.chain.height(head),
        head=head,
        state=sync.state,
        weight=c.chain.weight(head),
        chain_head=c.chain.head,
        chain_weight=c.chain.weight(c.chain.head),
        members=tuple(MemberView(m.key, m.beat, now - m.heard) for m in c.members),
        headers=() if r is None else tuple(r.headers.values()),
        votes=votes,
        awaited=consensus.awaited(),
        windows=consensus.work.windows,
    )

"""The machine as people see it: a frozen view for terminals, pages and logs."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.ids import Digest, PeerKey, Round
from protocol.messages import Heartbeat, Signed, UpdateHeader
from protocol.rounds.consensus import Consensus
from protocol.rounds.context import Context
from protocol.rounds.phase import Phase
from protocol.rounds.state_sync import StateSync
from protocol.rounds.update_fate import UpdateFate


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
    """The state after the head; None while it is not held."""

    weight: int
    """Windows accepted up to the head."""

    chain_head: Digest
    members: tuple[MemberView, ...]
    headers: tuple[Signed[UpdateHeader], ...]
    """The headers announced for this round, our own included."""

    votes: int
    """Votes seen for the record that we voted for."""

    awaited: tuple[PeerKey, ...]
    """The members that the first proposer waits for, once we have announced."""

    windows: int
    """Own windows that no update covers yet."""

    fate: UpdateFate | None
    """Of our newest update; None before the first."""

    seconds_left: float | None
    """Seconds until we announce even if the round's target is not reached; None unless we train in a round."""


def summarise(context: Context, consensus: Consensus, sync: StateSync, phase: Phase, now: float) -> Summary:
    """Return the view of a machine's parts at time `now`."""
    round_, head = consensus.round, sync.best_record
    votes = 0
    vote = None if round_ is None else round_.last_vote
    if round_ is not None and vote is not None and (mine := round_.proposals.get(vote.body.record)) is not None:
        votes = len(round_.votes_for(mine.record))
    return Summary(
        phase=phase,
        round=context.chain.height(head),
        head=head,
        state=sync.state if head == sync.applied else None,
        weight=context.chain.weight(head),
        chain_head=context.chain.head,
        members=tuple(MemberView(m.key, m.beat, now - m.heard) for m in context.members),
        headers=() if round_ is None else tuple(round_.headers.values()),
        votes=votes,
        awaited=consensus.awaited(),
        windows=consensus.work.windows,
        fate=consensus.fate,
        seconds_left=None
        if round_ is None or phase is not Phase.TRAINING
        else max(0.0, round_.began + context.policy.max_seconds - now),
    )

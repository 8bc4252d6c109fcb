"""Headers that a member misses are passed on to it by those who hold them."""

from __future__ import annotations

from protocol.ids import Digest, PeerKey, short_id
from protocol.messages import Heartbeat
from protocol.rounds.actions import Send
from protocol.rounds.context import Context
from protocol.rounds.phase import Phase
from protocol.rounds.round_state import RoundState

MAX_PASSED_ON = 16
"""Maximum number of headers sent at a time to a member whose heartbeat shows that it misses them."""

LIST_ALWAYS, LIST_EVERY = 64, 8
"""An announced peer lists the headers that it knows in each heartbeat while they are few, else in each eighth. For a
thousand peers, 8 bytes for each header to each of them would fill a third of a link of 100 Mbit/s."""


def known_headers(round_: RoundState | None, head: Digest, phase: Phase, beats: int) -> tuple[int, ...]:
    """Return what our heartbeat of this number lists of the headers that we hold."""
    headers = {} if round_ is None or round_.parent != head else round_.headers
    known = tuple(short_id(h.digest) for h in headers.values())
    if len(known) > LIST_ALWAYS and beats % LIST_EVERY and phase is Phase.EXCHANGING:
        # An announced peer knows its own header at least, so an empty list means "not stated", not "none".
        return ()
    return known


def pass_on_headers(context: Context, round_: RoundState, to: PeerKey, beat: Heartbeat) -> None:
    """Send the headers that a member of the same round misses: each by its author, and by a few others of us."""
    if not round_.headers or (not beat.known_headers and beat.phase == Phase.EXCHANGING):
        return
    known = set(beat.known_headers)
    every = max(1, len(context.members) // 3)
    missing = [
        h
        for h in round_.headers.values()
        if h.author != to
        and short_id(h.digest) not in known
        and context.now - round_.received_at[h.author] > context.policy.heartbeat_seconds
        and (h.author == context.me or (context.me[0] + h.digest[0] + beat.sequence) % every == 0)
    ]
    if missing:
        context.emit(Send(to, tuple(missing[:MAX_PASSED_ON])))

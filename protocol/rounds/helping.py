"""Headers that a member lacks, passed on to it by those who hold them: what is lost on the way to one is not lost."""

from __future__ import annotations

from protocol.ids import Digest, PeerKey, short_id
from protocol.messages import Heartbeat
from protocol.rounds.actions import Send
from protocol.rounds.ballot import Ballot
from protocol.rounds.context import Context

HELP_HEADERS = 16
"""Headers sent at most to a member whose heartbeat shows that it lacks them."""

TELL_ALWAYS, TELL_EVERY = 64, 8
"""Which headers it knows a peer that has announced says in each heartbeat while they are few, else in each eighth: 8
bytes for each of a thousand, to a thousand, would fill a third of a line of 100 Mbit/s."""


def known_headers(b: Ballot | None, head: Digest, phase: str, beats: int) -> tuple[int, ...]:
    """What our heartbeat of this number says of the headers that we hold."""
    known = () if b is None or b.parent != head else tuple(short_id(h.digest) for h in b.headers.values())
    if len(known) > TELL_ALWAYS and beats % TELL_EVERY and phase == "exchanging":
        # Who has announced knows its own header at least: that it says nothing cannot mean that it knows nothing.
        return ()
    return known


def help_with_headers(c: Context, b: Ballot, to: PeerKey, beat: Heartbeat) -> None:
    """To a member of the same round: its author does, and a few others of us."""
    if not b.headers or (not beat.known and beat.phase == "exchanging"):
        return
    known = set(beat.known)
    every = max(1, len(c.members) // 3)
    lacking = [
        h
        for h in b.headers.values()
        if h.author != to
        and short_id(h.digest) not in known
        and c.now - b.heard[h.author] > c.policy.heartbeat_seconds
        and (h.author == c.me or (c.me[0] + h.digest[0] + beat.sequence) % every == 0)
    ]
    if lacking:
        c.emit(Send(to, tuple(lacking[:HELP_HEADERS])))

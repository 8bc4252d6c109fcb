"""Who passes on a member's messages to those who do not hear it themselves (two peers behind NATs, a line that is cut).

Each heartbeat names the members of whom its author hears nothing first-hand. Of those who hear both, the RELAYS with
the least hash of the three pass messages on: everyone computes the same few, from heartbeats alone. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocol.ids import PeerKey, sha256
from protocol.messages import Heartbeat, Signed, short_id

RELAYS = 2
"""One may be about to leave."""


def relays(author: PeerKey, to: PeerKey, heartbeats: Mapping[PeerKey, Signed[Heartbeat]]) -> list[PeerKey]:
    """Who is to pass on what `author` says to `to`, by the newest heartbeat of every member.

    None when `to` hears the author itself, as far as it has said, or nobody hears both.
    """
    unheard = {key: beat.body.unheard for key, beat in heartbeats.items()}
    a, t = short_id(author), short_id(to)
    if a not in unheard.get(to, ()):
        return []
    mine = unheard[to]
    between = [
        key
        for key, its in unheard.items()
        if key not in (author, to) and a not in its and t not in its and short_id(key) not in mine
    ]
    return sorted(between, key=lambda key: sha256(author + to + key))[:RELAYS]

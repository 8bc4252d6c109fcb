"""The order in which peers are asked for a blob. Pure: chance is an argument.

Keys and heartbeats cost nothing, so no number of them may come before the peers that can give the blob. A peer that has
sent us a message itself comes before all that are known through others only. Among those, the groups take turns: no
group, however large, keeps another from the first places. Within a group the order is drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import zip_longest

from peer.node.peer_table import PeerEntry
from protocol.ids import Digest, PeerKey


def provider_order(
    holders: Sequence[PeerKey],
    entries: Mapping[PeerKey, PeerEntry],
    entry_peers: Collection[PeerKey],
    unreachable: Container[PeerKey],
    chance: random.Random,
    *,
    state: Digest | None = None,
) -> list[PeerKey]:
    """Return whom to ask for a blob, the likeliest first.

    `holders` are said to have it, the likeliest first. `entry_peers` are those that we entered the swarm by, and the
    coordinator's observers. `unreachable` could not be sent anything the last time. For a checkpoint, `state` is its
    digest. The order is:

    1. the likeliest holder;
    2. in turns: holders and peers whose own heartbeat names `state`, and other peers, both at first hand. Without
       `holders` every member has it, and the entry peers are asked, too;
    3. in turns: holders and peers whose heartbeat names `state`, and other peers, all known through others only;
    4. those that are unreachable.
    """
    everyone = list(dict.fromkeys([*holders, *entries, *entry_peers]))
    chance.shuffle(everyone)
    first_hand = {k for k, e in entries.items() if e.is_first_hand}
    claims = {*holders, *(k for k, e in entries.items() if state is not None and e.heartbeat.body.state == state)}
    entry = frozenset() if holders else frozenset(entry_peers)
    near: list[list[PeerKey]] = [[], [], []]
    far: list[list[PeerKey]] = [[], []]
    last: list[PeerKey] = []
    for key in everyone:
        if key in unreachable:
            last.append(key)
        elif key in entry:
            near[1].append(key)
        elif key in first_hand:
            near[0 if key in claims else 2].append(key)
        else:
            far[0 if key in claims else 1].append(key)
    likeliest = [k for k in holders[:1] if k not in unreachable]
    return list(dict.fromkeys([*likeliest, *_in_turns(near), *_in_turns(far), *last]))


def _in_turns(groups: Sequence[Sequence[PeerKey]]) -> Iterator[PeerKey]:
    """Yield one key of each group, then the next of each."""
    for keys in zip_longest(*groups):
        yield from (k for k in keys if k is not None)

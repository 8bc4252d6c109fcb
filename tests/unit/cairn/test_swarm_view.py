"""The coordinator sees of the swarm only what it may count on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from peer.node.peer_table import PeerEntry
from tests.support.observer_world import Observed
from tests.support.signed import PEERS, heartbeat


def test_only_admitted_peers_are_seen_and_without_the_headers_that_they_know(tmp_path: Path):
    o, now = Observed(tmp_path), time.monotonic() - 3
    member, stranger = heartbeat(PEERS[1], known_headers=(1, 2)), heartbeat(PEERS[2], admission=b"")
    o.node.present = {h.author: PeerEntry(h, now, now) for h in (member, stranger)}
    ((key, seen),) = o.view.heartbeats().items()
    assert key == member.author and member.body.admission and seen.seconds_since >= 3
    assert seen.heartbeat == replace(member.body, known_headers=())

"""The coordinator sees of the swarm only what it may count on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from peer.node.peer_table import PeerEntry
from protocol.chain import ChainLimits
from tests.support.observer_world import Observed
from tests.support.signed import PEERS, heartbeat


def test_only_admitted_peers_are_seen_and_without_the_headers_that_they_know(tmp_path: Path):
    o, now = Observed(tmp_path), time.monotonic() - 3
    member, stranger = heartbeat(PEERS[1], known_headers=(1, 2)), heartbeat(PEERS[2], admission=b"")
    o.node.present = {h.author: PeerEntry(h, now, now) for h in (member, stranger)}
    ((key, seen),) = o.view.heartbeats().items()
    assert key == member.author and member.body.admission and seen.seconds_since >= 3
    assert seen.heartbeat == replace(member.body, known_headers=())


@pytest.mark.parametrize("is_backed", [True, False])
def test_what_memory_has_no_more_is_backed_if_what_follows_it_is(tmp_path: Path, monkeypatch, is_backed: bool):
    few = ChainLimits(max_update_windows=64, max_members=8, max_records=4, min_main_records=3, max_side_records=2)
    o = Observed(tmp_path, few)
    o.made.weighs = True
    o.rounds(12, {1: 2, 2: 3})
    digests = [c.digest for c in o.made.certificates]
    at = digests.index(o.chain.root)
    assert at >= 4
    if not is_backed:  # as for an owner who is cut off with a few peers
        monkeypatch.setattr(o.chain, "count_backed", lambda path: 0)
    for path in (digests[:4], digests[: at + 1], digests):  # the pages of a ledger that was lost
        assert o.view.count_backed(path) == len(path) * is_backed

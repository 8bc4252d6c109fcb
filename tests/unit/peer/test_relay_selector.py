"""Messages reach members that their author does not: by few, the same for everybody, and only where it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.node.message_relay import RELAYS, SEARCHED, RelaySelector
from peer.node.peer_table import PeerTable
from protocol.ids import PeerKey, sha256, short_id
from protocol.messages import Heartbeat, Signed
from tests.support.signed import PEERS, heartbeat

KEYS = [p.key for p in PEERS[:6]]


def beats(deaf: set[tuple[int, int]]) -> dict[PeerKey, Signed[Heartbeat]]:
    """Return the heartbeats of six members; for each (a, b) in `deaf`, b receives nothing from a."""
    return {
        KEYS[b]: heartbeat(PEERS[b], unreachable=tuple(short_id(KEYS[a]) for a in range(6) if (a, b) in deaf))
        for b in range(6)
    }


PAIRS = st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1])


@given(st.sets(PAIRS))
def test_whoever_is_not_heard_reaches_everyone_by_few_who_hear_it_and_are_heard(deaf: set[tuple[int, int]]):
    relaying = RelaySelector(beats(deaf))
    for a in range(6):
        assert {KEYS.index(k) for k in relaying.cut_off_from(KEYS[a])} == {b for x, b in deaf if x == a}
        for b in relaying.cut_off_from(KEYS[a]):
            b = KEYS.index(b)
            chosen = relaying.relays(KEYS[a], KEYS[b])
            between = [
                c
                for c in range(6)
                if c not in (a, b) and (a, c) not in deaf and (b, c) not in deaf and (c, b) not in deaf
            ]
            assert len(chosen) == min(RELAYS, len(between))
            assert {KEYS.index(k) for k in chosen} <= set(between)
            assert {c for c in range(6) if relaying.connects(KEYS[c], KEYS[a], KEYS[b])} == set(between)
            assert relaying.is_cut_off(KEYS[a], KEYS[b]) and relaying.is_cut_off_from_some(KEYS[b])


def test_the_work_is_spread_over_those_who_can_do_it():
    half = [PEERS[i] for i in range(3)]
    said = {p.key: heartbeat(p, unreachable=tuple(short_id(o.key) for o in half if o is not p)) for p in half}
    said |= {p.key: heartbeat(p) for p in PEERS[3:]}
    relaying = RelaySelector(said)
    doing = [k for p in half for to in relaying.cut_off_from(p.key) for k in relaying.relays(p.key, to)]
    assert len(doing) == 6 * RELAYS and len(set(doing)) >= min(3, len(PEERS) - 3)
    assert not {p.key for p in half} & set(doing)


def test_strangers_neither_relay_nor_are_relayed_nor_ask_for_it():
    said = beats({(0, 1)})
    strangers = {k: heartbeat(p, admission=b"", unreachable=(short_id(KEYS[0]),)) for p in PEERS[2:6] if (k := p.key)}
    relaying = RelaySelector(said | strangers)
    assert relaying.cut_off_from(KEYS[0]) == [KEYS[1]]
    assert relaying.relays(KEYS[0], KEYS[1]) == []  # all who receive from both are strangers
    assert relaying.cut_off_from(KEYS[2]) == [] == relaying.relays(KEYS[2], KEYS[1])


@pytest.mark.parametrize("heard", [0, 1, 60])
def test_members_that_name_nearly_everybody_as_unreachable_cost_few_looks(monkeypatch, heard: int):
    """Else 40 of them among 256 would take each event loop more time than there is."""
    keys = [PeerKey(sha256(bytes([i]))) for i in range(120)]
    liars, honest = keys[:20], keys[20:]
    made = heartbeat(PEERS[0])
    names = tuple(short_id(k) for k in honest[heard:])
    said = {k: replace(made, author=k) for k in honest}
    said |= {k: replace(made, author=k, body=replace(made.body, unreachable=names)) for k in liars}
    looks = 0

    def connects(self: RelaySelector, key: PeerKey, author: PeerKey, to: PeerKey) -> bool:
        nonlocal looks
        looks += 1
        return False

    monkeypatch.setattr(RelaySelector, "connects", connects)
    relaying = RelaySelector(said)
    for author in honest:
        assert {k for k in relaying.cut_off_from(author)} <= set(liars)
        for to in relaying.cut_off_from(author):
            relaying.relays(author, to)
    assert looks <= len(honest) * len(liars) * SEARCHED < len(honest) * len(liars) * len(keys)


def test_an_author_that_few_of_many_hear_reaches_all_by_those():
    keys = [PeerKey(sha256(bytes([i]))) for i in range(120)]
    author, *hearing = keys[:3]
    made = heartbeat(PEERS[0])
    deaf = replace(made, body=replace(made.body, unreachable=(short_id(author),)))
    said = {k: replace(deaf if k in keys[3:] else made, author=k) for k in keys}
    relaying = RelaySelector(said)
    assert relaying.cut_off_from(author) == keys[3:]
    assert all(set(relaying.relays(author, to)) == set(hearing) for to in keys[3:])


def test_a_member_is_unheard_when_only_others_tell_of_it_and_no_more_once_it_speaks_itself():
    here = PeerTable(KEYS[0], forget_seconds=60.0, limit=10)
    here.note_heartbeat(heartbeat(PEERS[1], sequence=1), 0.0, direct=False)
    assert here.unreachable(1.0, 3.0) == []  # it has had no time yet
    here.note_heartbeat(heartbeat(PEERS[1], sequence=2), 4.0, direct=False)
    assert here.unreachable(4.0, 3.0) == [KEYS[1]]
    here.note_heartbeat(heartbeat(PEERS[1], sequence=2), 5.0, direct=True)  # no news, but first-hand
    assert here.unreachable(6.0, 3.0) == []


def test_an_observer_is_not_waited_for():
    here = PeerTable(KEYS[0], forget_seconds=60.0, limit=10)
    here.note_heartbeat(heartbeat(PEERS[1], admission=b""), 0.0, direct=False)
    assert here.unreachable(10.0, 3.0) == []

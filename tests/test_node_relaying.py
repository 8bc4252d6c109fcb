"""Messages reach members that do not hear their author: by few, the same for everybody, and only where it is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.node.directory import Directory
from peer.node.relaying import RELAYS, relays
from protocol.ids import PeerKey
from protocol.messages import Heartbeat, Signed, short_id
from tests.signed import PEERS, heartbeat

KEYS = [p.key for p in PEERS[:6]]


def beats(deaf: set[tuple[int, int]]) -> dict[PeerKey, Signed[Heartbeat]]:
    """Of six members; (a, b) in `deaf`: b hears nothing of a."""
    return {
        KEYS[b]: heartbeat(PEERS[b], unheard=tuple(short_id(KEYS[a]) for a in range(6) if (a, b) in deaf))
        for b in range(6)
    }


PAIRS = st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1])


@given(st.sets(PAIRS))
def test_whoever_is_not_heard_reaches_everyone_by_few_who_hear_it_and_are_heard(deaf: set[tuple[int, int]]):
    said = beats(deaf)
    for a in range(6):
        for b in range(6):
            if a == b:
                continue
            chosen = relays(KEYS[a], KEYS[b], said)
            between = [
                c
                for c in range(6)
                if c not in (a, b) and (a, c) not in deaf and (b, c) not in deaf and (c, b) not in deaf
            ]
            if (a, b) not in deaf:
                assert chosen == []
                continue
            assert len(chosen) == min(RELAYS, len(between))
            assert {KEYS.index(k) for k in chosen} <= set(between)


def test_the_work_is_spread_over_those_who_can_do_it():
    said = beats({(0, 1), (1, 0), (2, 1), (3, 1), (0, 2), (2, 0)})
    doing = [k for a in KEYS for b in KEYS if a != b for k in relays(a, b, said)]
    assert len(doing) >= 8 and len(set(doing)) >= 3


def test_a_member_is_unheard_when_only_others_tell_of_it_and_no_more_once_it_speaks_itself():
    here = Directory(KEYS[0], forget_seconds=60.0, limit=10)
    here.hear(heartbeat(PEERS[1], sequence=1), 0.0, direct=False)
    assert here.unheard(1.0, 3.0) == []  # it has had no time yet
    here.hear(heartbeat(PEERS[1], sequence=2), 4.0, direct=False)
    assert here.unheard(4.0, 3.0) == [KEYS[1]]
    here.hear(heartbeat(PEERS[1], sequence=2), 5.0, direct=True)  # no news, but first-hand
    assert here.unheard(6.0, 3.0) == []


def test_an_observer_is_not_waited_for():
    here = Directory(KEYS[0], forget_seconds=60.0, limit=10)
    here.hear(heartbeat(PEERS[1], admission=b""), 0.0, direct=False)
    assert here.unheard(10.0, 3.0) == []

"""The peers that a node knows of: bounded, whoever knocks, and not fooled by old news."""

from __future__ import annotations

import pytest

from peer.node.peer_table import News, PeerTable
from protocol.identity import Identity
from protocol.invite import to_base58
from protocol.messages import Heartbeat, Signed
from tests.support.signed import PEERS, heartbeat
from tests.support.specs import identity

ME = identity("me").key


def directory(**how) -> PeerTable:
    return PeerTable(ME, **({"forget_seconds": 60.0, "limit": 4, "nonmembers": 2} | how))


def member(i: int, sequence: int = 1, **how) -> Signed[Heartbeat]:
    return heartbeat(PEERS[i], sequence=sequence, **how)


def stranger(name: str, sequence: int = 1) -> Signed[Heartbeat]:
    return heartbeat(Identity(bytes(identity(name).key)), sequence=sequence, admission=b"")


def test_a_newcomer_is_news_once_and_later_heartbeats_replace_its_first():
    d = directory()
    assert d.note_heartbeat(member(1), 0.0) is News.NEW_PEER
    assert d.note_heartbeat(member(1, 2), 1.0) is News.UPDATE
    assert d.note_heartbeat(member(1, 2), 2.0) is News.NONE
    assert d.note_heartbeat(member(1, 1), 2.0) is News.NONE
    (entry,) = d.entries().values()
    assert entry.heartbeat.body.sequence == 2 and entry.last_news == 1.0
    assert [h.body.sequence for h in d.heartbeats()] == [2]


def test_own_heartbeats_that_others_pass_on_are_no_news():
    assert PeerTable(PEERS[1].key, forget_seconds=1, limit=4).note_heartbeat(member(1), 0.0) is News.NONE


def test_strangers_do_not_take_the_places_of_members_nor_the_other_way_round():
    d = directory()
    new, none = News.NEW_PEER, News.NONE
    assert [d.note_heartbeat(stranger(str(i)), 0.0) for i in range(4)] == [new, new, none, none]
    assert [d.note_heartbeat(member(i), 0.0) for i in range(6)] == [new] * 4 + [none] * 2
    assert len(d.keys()) == 6


def test_a_stranger_cannot_come_and_go_under_ever_new_names():
    d = directory()
    for i in range(2):
        assert d.note_heartbeat(stranger(str(i)), 0.0) is News.NEW_PEER
        d.note_goodbye(stranger(str(i)).author, 5)
    assert d.note_heartbeat(stranger("third"), 0.0) is News.NONE
    assert len(d.forget_silent(61.0)) == 2
    assert d.note_heartbeat(stranger("third"), 61.0) is News.NEW_PEER


def test_who_left_is_gone_until_it_comes_back_itself():
    d = directory()
    d.note_heartbeat(member(1, 5), 0.0)
    d.note_goodbye(PEERS[1].key, 4)  # older than the heartbeat received since
    assert d.keys() == [PEERS[1].key]
    d.note_goodbye(PEERS[1].key, 6)
    assert d.keys() == []
    assert d.note_heartbeat(member(1, 5), 0.0) is News.NONE  # passed on by somebody who does not know of the goodbye
    assert d.note_heartbeat(member(1, 7), 0.0) is News.NEW_PEER


def test_goodbyes_of_the_unknown_are_not_remembered():
    d = directory()
    for i in range(6):
        d.note_goodbye(PEERS[i].key, 10)
    assert d.note_heartbeat(member(1, 1), 0.0) is News.NEW_PEER


def at(host: str, peer: int) -> str:
    return f"/ip4/{host}/tcp/1/p2p/{to_base58(PEERS[peer].key.libp2p_id)}"


def test_addresses_are_those_heard_of_last_first_each_once():
    d = directory()
    d.note_heartbeat(member(1, addresses=(at("1.1.1.1", 1), at("2.2.2.2", 1), at("1.1.1.1", 1))), 1.0)
    d.note_heartbeat(member(2, addresses=(at("3.3.3.3", 2),)), 2.0)
    assert d.addresses() == [at("3.3.3.3", 2), at("1.1.1.1", 1), at("2.2.2.2", 1)]


def test_strangers_addresses_are_nothing_to_enter_by():
    d = directory()
    d.note_heartbeat(heartbeat(PEERS[1], admission=b"", addresses=(at("1.1.1.1", 1),)), 1.0)
    assert d.addresses() == []


@pytest.mark.parametrize("bad", ["x", "/dns4/b\u00fccher.example/tcp/1", "/ip4/1.1.1.1/tcp/1", at("1.1.1.1", 2)])
def test_an_address_that_does_not_name_its_member_goes_into_no_invite(bad: str):
    """One that no invite can name ended the coordinator, and one of somebody else has everybody dial it."""
    d = directory()
    d.note_heartbeat(member(1, addresses=(bad, at("2.2.2.2", 1))), 1.0)
    assert d.addresses() == [at("2.2.2.2", 1)]


@pytest.mark.parametrize("seconds, left", [(59.0, 1), (61.0, 0)])
def test_the_silent_are_forgotten(seconds, left):
    d = directory()
    d.note_heartbeat(member(1), 0.0)
    assert len(d.forget_silent(seconds)) == 1 - left and len(d.keys()) == left


def test_where_the_silent_were_is_remembered_until_they_are_heard_again():
    d = directory()
    d.note_heartbeat(member(1, addresses=("/a",)), 0.0)
    d.note_heartbeat(member(2, addresses=("/b",)), 0.0)
    d.note_heartbeat(member(3, addresses=("/c",)), 0.0)
    d.note_heartbeat(stranger("x"), 0.0)
    d.note_goodbye(PEERS[3].key, 9)
    d.forget_silent(61.0)
    assert d.lost() == {PEERS[1].key: ("/a",), PEERS[2].key: ("/b",)}
    d.note_heartbeat(member(2, 2, addresses=("/b",)), 62.0)
    assert d.lost() == {PEERS[1].key: ("/a",)}
    d.note_goodbye(PEERS[1].key, 9)
    assert d.lost() == {}


def test_who_said_goodbye_has_left_until_it_is_heard_again():
    d = directory()
    d.note_heartbeat(member(1), 0.0)
    assert not d.has_left(PEERS[1].key)
    d.note_goodbye(PEERS[1].key, 9)
    assert d.has_left(PEERS[1].key)
    d.note_heartbeat(member(1, 9), 1.0)
    assert d.has_left(PEERS[1].key)
    d.note_heartbeat(member(1, 10, addresses=("/a",)), 2.0)
    assert not d.has_left(PEERS[1].key)
    d.forget_silent(100.0)
    assert not d.has_left(PEERS[1].key), "it came back and fell silent"


def test_of_the_silent_so_many_are_remembered(monkeypatch):
    monkeypatch.setattr("peer.node.peer_table.MAX_LOST", 2)
    d = directory()
    for i in range(1, 5):
        d.note_heartbeat(member(i, addresses=("/a",)), float(i))
        d.forget_silent(100.0 * i)
    assert list(d.lost()) == [PEERS[3].key, PEERS[4].key]

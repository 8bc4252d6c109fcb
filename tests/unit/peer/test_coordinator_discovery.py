"""How members keep, pass on and give what the owner said of its coordinator's place; and how a newcomer finds it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn.commands.invite import renewed_invite
from peer.node import coordinator_discovery as module
from peer.node.coordinator_discovery import COORDINATOR_ADDRESS, SPEC, CoordinatorLocator
from peer.node.enrollment import OWN_ADDRESSES, Enrollment, run_folder
from peer.node.packet_decoder import MAX_ADDRESS_RECORDS, PacketDecoder
from peer.store import Store, StoreFull
from peer.swarm import anonymous
from protocol.coordinator_address import CoordinatorAddress, sign_coordinator_address
from protocol.errors import CairnError, MalformedError, ProtocolError
from protocol.identity import Identity
from protocol.ids import PeerKey
from protocol.invite import HostPort, Invite, to_base58
from protocol.messages import Signed
from protocol.spec import sign_spec
from protocol.version import PROTOCOL, VersionError
from protocol.wire import swarm_pb2 as wire
from tests.support.signed import HEADERS, PEERS, decoder
from tests.support.specs import OWNER, digest, identity, tiny_spec
from tests.support.waiting import until

RUN = tiny_spec()
SENT = sign_spec(OWNER, RUN).encoded
NOW, MOVED = HostPort("c.example", 7410), HostPort("d.example", 7410)


def word(sequence: int, where: HostPort = NOW, owner: Identity = OWNER, run=RUN.run_id):
    return sign_coordinator_address(
        owner, CoordinatorAddress(run, sequence, (where,), digest("certificate"), ("/ip4/9.9.9.9/tcp/1",))
    )


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store", 1 << 30) as s:
        s.write_value(SPEC, SENT)
        yield s


def test_the_newest_word_is_kept_over_a_restart_and_said_once(store):
    moved: list[Any] = []
    locator = CoordinatorLocator(store, RUN, cast(Any, SimpleNamespace(moved=moved.append)))
    assert locator.newest is None
    taken = [locator.accept(word(s).encoded) for s in (5, 7, 7, 6, 5, 8)]
    assert taken == [True, True, False, False, False, True]
    assert [body.sequence for body in moved] == [5, 7, 8]
    assert CoordinatorLocator(store, RUN).newest == word(8)


@pytest.mark.parametrize(
    "sent", [word(9, owner=identity("liar")).encoded, word(9, run=digest("x")).encoded, b"\x0a\x0bwhere"]
)
def test_what_is_not_the_owners_word_on_this_run_changes_nothing(store, sent, caplog):
    locator = CoordinatorLocator(store, RUN)
    locator.accept(word(5).encoded)
    with pytest.raises(ProtocolError):
        locator.accept(sent)
    assert locator.newest == word(5) and store.read_value(COORDINATOR_ADDRESS) == word(5).encoded
    store.write_value(COORDINATOR_ADDRESS, sent)
    assert CoordinatorLocator(store, RUN).newest is None and "is ignored" in caplog.text


def test_a_full_disk_costs_the_next_start_a_question_not_this_one_the_word(store, monkeypatch, caplog):
    def full(name: str, data: bytes) -> None:
        raise StoreFull("no space left")

    locator = CoordinatorLocator(store, RUN)
    monkeypatch.setattr(cast(Any, store), "write_value", full)
    assert locator.accept(word(5).encoded) and locator.newest == word(5) and "no space left" in caplog.text


def test_anybody_is_told_of_this_run_and_nobody_of_another(store):
    locator = CoordinatorLocator(store, RUN)
    ask = wire.CoordinatorAddressRequest(run=RUN.run_id, wants_spec=True)
    assert locator.answer(ask, ()) == wire.CoordinatorAddressReply(spec=SENT)
    locator.accept(word(5).encoded)
    reply = locator.answer(ask, [f"/ip4/1.1.1.1/tcp/{i}" for i in range(1000)])
    assert reply.coordinator_address == word(5).encoded and len(reply.addresses) == 16
    assert not locator.answer(wire.CoordinatorAddressRequest(run=RUN.run_id), ()).spec
    with pytest.raises(MalformedError, match="another run"):
        locator.answer(wire.CoordinatorAddressRequest(run=bytes(32)), ())


def test_in_a_packet_a_flood_of_words_is_not_looked_at_and_the_rest_of_it_is(store, caplog):
    locator = CoordinatorLocator(store, RUN)
    packets = PacketDecoder(decoder(), locator)
    flood = [word(i).encoded for i in range(1, 50)]
    packet = wire.Packet(messages=[*flood, HEADERS[1].encoded])
    assert sum(e is not None for e in packets.decode_packet(PEERS[1].key, packet, 1e9)) == 1
    assert locator.newest == word(MAX_ADDRESS_RECORDS) and not caplog.text
    list(packets.decode_packet(PEERS[1].key, wire.Packet(messages=[word(99, owner=identity("liar")).encoded]), 1e9))
    assert locator.newest == word(MAX_ADDRESS_RECORDS) and "not signed by the run's owner" in caplog.text


class FakeNetwork:
    """Members, and what each answers; what was broadcast."""

    def __init__(self, answers: dict[PeerKey, wire.CoordinatorAddressReply | Exception]):
        self._answers = answers
        self.said: list[bytes] = []

    def send_to_all(self, message: Signed[Any]) -> None:
        self.said.append(message.encoded)

    def providers(self) -> list[PeerKey]:
        return list(self._answers)

    async def request_coordinator_address(
        self, to: PeerKey, request: wire.CoordinatorAddressRequest
    ) -> wire.CoordinatorAddressReply:
        assert request.run == RUN.run_id and not request.wants_spec
        answer = self._answers[to]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_of_what_members_say_the_newest_true_word_is_kept(store):
    locator = CoordinatorLocator(store, RUN)
    keys = [identity(i).key for i in range(6)]
    answers: list[Any] = [
        wire.CoordinatorAddressReply(coordinator_address=word(99, owner=identity("liar")).encoded),
        wire.CoordinatorAddressReply(coordinator_address=word(5).encoded),
        wire.CoordinatorAddressReply(coordinator_address=word(7, MOVED).encoded),
        wire.CoordinatorAddressReply(coordinator_address=b"x" * 1_000_000),
        wire.CoordinatorAddressReply(),
        CairnError("silent"),
    ]
    network = FakeNetwork(dict(zip(keys, answers, strict=True)))
    await module.ask_members(cast(Any, network), locator, RUN.run_id)
    assert locator.newest == word(7, MOVED)


async def test_a_newer_word_is_passed_on_once_and_of_many_at_once_only_the_last(store, monkeypatch):
    monkeypatch.setattr(module, "PASS_ON_SECONDS", 0.05)
    locator, network = CoordinatorLocator(store, RUN), FakeNetwork({})
    passing = asyncio.create_task(module.pass_on(cast(Any, network), locator))
    await asyncio.sleep(0)
    locator.accept(word(1).encoded)
    await until(lambda: network.said)
    for i in range(2, 30):
        locator.accept(word(i).encoded)
        locator.accept(word(i).encoded)
    await until(lambda: network.said[-1] == word(29).encoded)
    assert network.said == [word(1).encoded, word(29).encoded]
    passing.cancel()


# -- the way in -----------------------------------------------------------------------------------------------


def heard(*replies: wire.CoordinatorAddressReply):
    """Return a stand-in for `ask_for_coordinator`: members gave these replies, whatever the addresses."""

    async def ask_for_coordinator(run, addresses: Iterable[str], good, **_: Any) -> int:
        return sum(good(identity(i).key, reply) for i, reply in enumerate(replies))

    return ask_for_coordinator


async def found(monkeypatch, *replies: wire.CoordinatorAddressReply) -> module.DiscoveredRun | None:
    monkeypatch.setattr(anonymous, "ask_for_coordinator", heard(*replies))
    return await module.discover_run(RUN.run_id, ["/some"])


async def test_a_newcomer_takes_the_runs_own_spec_and_the_newest_word_of_its_owner(monkeypatch, caplog):
    other = tiny_spec(seed=2)
    here = "/ip4/1.1.1.1/tcp/1/p2p/X"
    got = await found(
        monkeypatch,
        wire.CoordinatorAddressReply(),
        wire.CoordinatorAddressReply(spec=sign_spec(OWNER, other).encoded),
        wire.CoordinatorAddressReply(
            spec=SENT, coordinator_address=word(99, owner=identity("liar")).encoded, addresses=["/lie"]
        ),
        wire.CoordinatorAddressReply(spec=SENT, coordinator_address=word(5).encoded, addresses=[here, "no", "/" * 300]),
        wire.CoordinatorAddressReply(spec=SENT, coordinator_address=word(7, MOVED).encoded, addresses=[here]),
        wire.CoordinatorAddressReply(spec=SENT),
    )
    assert got is not None and got.encoded == SENT and got.coordinator_address == word(7, MOVED)
    assert got.addresses == (here,) and got.members == 3
    assert "not signed by the run's owner" in caplog.text


async def test_a_newcomer_hears_from_members_that_the_run_speaks_another_protocol(monkeypatch):
    spec = RUN.model_copy(update={"version": PROTOCOL + 1})
    sent = sign_spec(OWNER, spec).encoded
    monkeypatch.setattr(anonymous, "ask_for_coordinator", heard(wire.CoordinatorAddressReply(spec=sent)))
    with pytest.raises(VersionError, match="run `cairn peer upgrade`"):
        await module.discover_run(spec.run_id, ["/some"])


async def test_nobody_who_tells_the_truth_is_nobody_at_all(monkeypatch):
    assert await found(monkeypatch, wire.CoordinatorAddressReply(spec=b"x" * 2_000_000)) is None
    assert await found(monkeypatch) is None


def test_whom_to_ask_is_bounded_and_an_address_may_be_anything():
    def address(i: int, port: int) -> str:
        return f"/ip4/1.2.3.4/tcp/{port}/p2p/{to_base58(identity(i).key.libp2p_id)}"

    many = [address(i % 40, 1000 + i) for i in range(4000)]
    members = anonymous.members_at(["rubbish", "/ip4/1.2.3.4/tcp/1", *many])
    assert len(members) == anonymous.MAX_MEMBERS
    assert {len(a) for a in members.values()} == {anonymous.ADDRESSES_PER_MEMBER}


async def test_without_an_address_nothing_is_started():
    assert await anonymous.ask_for_coordinator(RUN.run_id, ["/ip4/1.2.3.4/tcp/1", ""], lambda *_: True) == 0


# -- a current invite, of any member --------------------------------------------------------------------------


def test_a_member_prints_an_invite_with_where_the_coordinator_is_and_itself_first(tmp_path):
    old = Invite(RUN.run_id, digest("old"), (NOW,), "the-code", ("/ip4/1.1.1.1/tcp/1/p2p/OLD",))
    with pytest.raises(CairnError, match="never been in run"):
        renewed_invite(str(old), tmp_path)
    with Store(run_folder(tmp_path, RUN.run_id) / "store", 1 << 30) as store:
        store.write_value(SPEC, SENT)
        assert Invite.parse(renewed_invite(str(old), tmp_path)) == old
        m = Enrollment(identity("me"), RUN, store, None, "me", b"")
        m.learn(
            [f"/ip4/2.2.2.2/tcp/{i}/p2p/{name}" for name in "BCD" for i in (1, 2)], own=["/ip4/3.3.3.3/tcp/1/p2p/ME"]
        )
        assert (store.read_value(OWN_ADDRESSES) or b"").endswith(b"ME")
        m.locator.accept(word(5, MOVED).encoded)
        new = Invite.parse(renewed_invite(str(old), tmp_path))
    assert new.coordinators == (MOVED,) and new.fingerprint == digest("certificate") and new.code == "the-code"
    assert [a.rpartition("/")[2] for a in new.addresses] == ["ME", "B", "C", "D", "OLD", "B", "C", "D"]
    with pytest.raises(CairnError, match="not an invite"):
        renewed_invite("nonsense", tmp_path)

"""How a peer gets into its run and stays there, whatever becomes of the coordinator."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from peer.coordinator_client import (
    CoordinatorRefused,
    CoordinatorUnreachable,
    GrantedAdmission,
    RunInfo,
    WrongCoordinator,
)
from peer.errors import PeerError
from peer.node import enrollment as membership_module
from peer.node.coordinator_discovery import SPEC, DiscoveredRun
from peer.node.enrollment import ADMISSION, Enrollment, known_addresses
from peer.store import Store, StoreFull
from protocol.coordinator_address import CoordinatorAddress, sign_coordinator_address
from protocol.errors import CairnError
from protocol.ids import Digest
from protocol.invite import HostPort, Invite
from protocol.proof_of_work import is_proof
from protocol.spec import sign_spec
from tests.support.specs import OWNER, admission, identity, tiny_spec
from tests.support.waiting import until

RUN = tiny_spec()
INVITE = Invite(RUN.run_id, Digest(bytes(32)), (HostPort("c.example", 7410),), addresses=("/ip4/1.1.1.1/tcp/1",))
ME = identity("me")
AWAY = CoordinatorUnreachable("the coordinator does not answer")
OTHER = WrongCoordinator("another certificate")


class Client:
    """A coordinator's answers, as a test says."""

    def __init__(self):
        self.run: CairnError | None = None
        self.admission: CairnError | None = None
        self.seconds = 86_400
        self.ahead = 0.0
        self.renamed = ""
        self.asked = 0
        self.closed = False
        self.places: list[Any] = []
        self.found: DiscoveredRun | None = None
        self.spec = RUN
        self.nonces: list[int] = []

    async def get_run(self, *, attempts=None) -> RunInfo:
        if self.run is not None:
            raise self.run
        return RunInfo(self.spec, sign_spec(OWNER, self.spec).encoded, ("/ip4/2.2.2.2/tcp/2",), "")

    async def admit(self, who, name: str, *, nonce: int) -> GrantedAdmission:
        self.asked += 1
        self.nonces.append(nonce)
        if self.admission is not None:
            raise self.admission
        given = admission(self.spec, who, not_after=int(time.time()) + self.seconds, name=self.renamed)
        return GrantedAdmission(given, ("/ip4/3.3.3.3/tcp/3",), self.ahead)

    def moved(self, to) -> None:
        self.places.append(to)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store", 1 << 30) as s:
        yield s


@pytest.fixture
def client(monkeypatch) -> Client:
    c = Client()
    monkeypatch.setattr(membership_module, "CoordinatorClient", lambda invite: c)
    monkeypatch.setattr(membership_module, "load_or_make", lambda path: ME)
    return c


async def enter(store: Store, tmp_path: Path) -> Enrollment:
    return await Enrollment.enter(INVITE, tmp_path, store, name="me")


async def nobody() -> None:
    """Ask no member."""


async def visit(store: Store, seconds: int = 86_400) -> None:
    """Store the spec and the admission that an earlier visit left."""
    store.write_value(SPEC, sign_spec(OWNER, RUN).encoded)
    store.write_value(ADMISSION, admission(RUN, ME, not_after=int(time.time()) + seconds).encoded)


async def test_who_enters_has_the_spec_an_admission_and_every_address_also_for_the_next_time(store, client, tmp_path):
    m = await enter(store, tmp_path)
    assert m.spec == RUN and 23 < m.hours_left <= 24
    want = {"/ip4/1.1.1.1/tcp/1", "/ip4/2.2.2.2/tcp/2", "/ip4/3.3.3.3/tcp/3"}
    assert set(m.addresses) == want == set(known_addresses(store))
    assert store.read_value(ADMISSION) == m.admission


async def test_what_this_machine_lacks_is_said_before_an_admission_is_asked_for(store, client, tmp_path):
    async def check(spec) -> None:
        raise PeerError(f"{spec.name}: no such device")

    with pytest.raises(PeerError, match=f"{RUN.name}: no such device"):
        await Enrollment.enter(INVITE, tmp_path, store, name="me", check=check)
    assert client.asked == 0 and client.closed


@pytest.mark.parametrize("run, admitted", [(AWAY, None), (OTHER, None), (None, AWAY), (None, OTHER)])
async def test_without_the_coordinator_the_admission_of_an_earlier_visit_will_do(
    store, client, tmp_path, caplog, run, admitted
):
    await visit(store)
    client.run, client.admission = run, admitted
    m = await enter(store, tmp_path)
    assert m.spec == RUN and m.hours_left > 23 and "earlier visit" in caplog.text


@pytest.mark.parametrize("run, admitted", [(AWAY, None), (None, AWAY)])
async def test_one_that_has_ended_will_not(store, client, tmp_path, run, admitted):
    await visit(store, seconds=-10)
    client.run, client.admission = run, admitted
    with pytest.raises(PeerError, match="it has no valid admission, and no member"):
        await enter(store, tmp_path)
    assert client.closed


async def test_the_cost_of_a_key_is_paid_once(store, client, tmp_path, monkeypatch):
    client.spec = tiny_spec(admission={"work_bits": 5})
    invite = replace(INVITE, run=client.spec.run_id)
    await Enrollment.enter(invite, tmp_path, store, name="me")
    monkeypatch.setattr(membership_module, "find_proof", None)
    m = await Enrollment.enter(invite, tmp_path, store, name="me")
    await m.renew()
    first, *later = client.nonces
    assert is_proof(client.spec.run_id, ME.key, first, 5) and later == [first, first]


async def test_a_run_without_a_cost_is_entered_without_a_proof(store, client, tmp_path):
    await enter(store, tmp_path)
    assert client.nonces == [0]


async def test_a_refusal_is_a_refusal_also_with_a_valid_admission(store, client, tmp_path):
    await visit(store)
    client.admission = CoordinatorRefused("your clock is 3600 s ahead: set it")
    with pytest.raises(CoordinatorRefused, match="3600 s ahead"):
        await enter(store, tmp_path)


@pytest.mark.parametrize("left, kept", [(0.95, True), (0.55, True), (0.45, False)])
async def test_a_restart_keeps_the_admission_for_half_of_its_time_and_asks_the_coordinator_all_the_same(
    store, client, tmp_path, left, kept
):
    """With another admission a header would be a second one: an announced one is kept as it is (`StoreHeader`)."""
    client.seconds = int(left * RUN.admission.seconds)  # of an earlier visit
    before = (await enter(store, tmp_path)).admission
    client.seconds = RUN.admission.seconds
    after = await enter(store, tmp_path)
    assert client.asked == 2 and (after.admission == before) == kept
    client.renamed = "ada"
    renamed = await enter(store, tmp_path)
    assert renamed.admission != after.admission and store.read_value(ADMISSION) == renamed.admission


async def test_the_first_visit_needs_the_coordinator(store, client, tmp_path):
    client.run = AWAY
    with pytest.raises(CoordinatorUnreachable):
        await enter(store, tmp_path)


async def test_a_spec_of_another_run_is_not_taken(store, client, tmp_path, monkeypatch):
    other = tiny_spec(seed=2)

    async def get_run(*, attempts=None) -> RunInfo:
        return RunInfo(other, sign_spec(OWNER, other).encoded, (), "")

    monkeypatch.setattr(client, "get_run", get_run)
    with pytest.raises(CairnError):
        await enter(store, tmp_path)
    assert store.read_value(SPEC) is None


@pytest.mark.parametrize("ahead, words", [(120.0, "120 s ahead of"), (-40.0, "40 s behind"), (1.0, "")])
async def test_a_clock_that_is_off_is_said_with_its_offset(store, client, tmp_path, caplog, ahead, words):
    client.ahead = ahead
    await enter(store, tmp_path)
    assert (words in caplog.text) if words else not caplog.text


async def test_addresses_are_written_only_when_they_are_news(store, client, tmp_path, monkeypatch):
    m = await enter(store, tmp_path)
    written: list[bytes] = []
    monkeypatch.setattr(store, "write_value", lambda name, data: written.append(data))
    m.learn(list(reversed(m.addresses)))
    assert written == []
    m.learn(["/ip4/9.9.9.9/tcp/9"])
    assert len(written) == 1 and m.addresses[0] == "/ip4/9.9.9.9/tcp/9"
    m.learn([f"/ip4/9.9.9.9/tcp/{i}" for i in range(500)])
    assert len(m.addresses) == 64


async def test_a_few_peers_push_out_neither_the_others_addresses_nor_those_of_the_invite(store, client, tmp_path):
    m = await enter(store, tmp_path)
    m.learn([f"/ip4/9.9.9.9/tcp/{i}/p2p/greedy{i // 16}" for i in range(64)])
    assert {"/ip4/2.2.2.2/tcp/2", "/ip4/3.3.3.3/tcp/3"} < set(m.addresses) and len(m.addresses) == 3 + 4 * 2
    m.learn([f"/ip4/9.9.9.9/tcp/{i}/p2p/member{i}" for i in range(500)])
    assert m.addresses[0] == "/ip4/9.9.9.9/tcp/0/p2p/member0" and len(m.addresses) == 64
    assert set(INVITE.addresses) <= set(m.addresses) == set(known_addresses(store))


async def test_an_admission_is_renewed_before_it_ends_and_an_outage_is_said_louder_near_the_end(
    store, client, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(membership_module, "RENEW_SECONDS", 0.01)
    client.seconds = 2  # of the day that the policy gives: renewal is due at once
    m = await enter(store, tmp_path)
    keeping = asyncio.create_task(m.keep_valid(nobody))
    try:
        client.admission = AWAY
        await until(lambda: client.asked >= 3)
        assert "0.0 h left" in caplog.text and m.seconds_left() > 0
        m.admission = admission(RUN, ME, not_after=int(time.time()) - 1).encoded
        asked = client.asked
        await until(lambda: client.asked >= asked + 2)
        assert "it has ended: the others refuse" in caplog.text
        client.admission, client.seconds = None, 86_400
        await until(lambda: m.hours_left > 1)
        assert not keeping.done()
    finally:
        keeping.cancel()


async def test_an_admission_that_ends_sooner_than_the_sleep_seemed_is_renewed(store, client, tmp_path, monkeypatch):
    """A suspended machine's sleep is longer than its clock says."""
    monkeypatch.setattr(membership_module, "RENEW_SECONDS", 0.01)
    m = await enter(store, tmp_path)
    asked = client.asked
    keeping = asyncio.create_task(m.keep_valid(nobody))
    try:
        await asyncio.sleep(0.05)
        assert client.asked == asked and m.hours_left > 20
        m.admission = admission(RUN, ME, not_after=int(time.time()) + 60).encoded
        await until(lambda: client.asked > asked and m.hours_left > 20)
    finally:
        keeping.cancel()


async def test_a_renewal_that_only_the_disk_refuses_is_not_told_as_a_failed_one(
    store, client, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(membership_module, "RENEW_SECONDS", 0.01)
    client.seconds = 60
    m = await enter(store, tmp_path)

    def full(name: str, data: bytes) -> None:
        raise StoreFull("no space left: free some")

    monkeypatch.setattr(cast(Any, store), "write_value", full)
    client.seconds = 86_400
    keeping = asyncio.create_task(m.keep_valid(nobody))
    try:
        await until(lambda: "the disk failed: no space left: free some" in caplog.text)
        assert "is renewed, valid for 24.0 h" in caplog.text and "not renewed" not in caplog.text
    finally:
        keeping.cancel()


async def test_a_full_disk_at_a_renewal_costs_no_admission(store, client, tmp_path, monkeypatch):
    m = await enter(store, tmp_path)

    def full(name: str, data: bytes) -> None:
        raise StoreFull("no space left: free some")

    monkeypatch.setattr(cast(Any, store), "write_value", full)
    m.admission, client.seconds = admission(RUN, ME, not_after=int(time.time()) + 60).encoded, 90_000
    with pytest.raises(StoreFull):
        await m.renew()
    assert m.seconds_left() > 86_400


# -- the coordinator has moved --------------------------------------------------------------------------------

THERE = HostPort("d.example", 7410)


def word(sequence: int = 5):
    return sign_coordinator_address(OWNER, CoordinatorAddress(RUN.run_id, sequence, (THERE,), Digest(bytes(32))))


@pytest.fixture
def members(client, monkeypatch):
    """Members who know where the coordinator is (`found`), and who were asked."""
    asked: list[list[str]] = []

    async def find(run, addresses):
        asked.append(list(addresses))
        if client.found is not None and client.found.coordinator_address is not None:
            client.run = client.admission = None
        return client.found

    monkeypatch.setattr(membership_module, "discover_run", find)
    return asked


def found(coordinator_address=None) -> DiscoveredRun:
    return DiscoveredRun(sign_spec(OWNER, RUN).encoded, coordinator_address, ("/ip4/5.5.5.5/tcp/5",), 2)


async def test_with_an_old_invite_members_say_where_the_coordinator_is_and_it_admits(store, client, members, tmp_path):
    client.run, client.found = AWAY, found(word())
    m = await Enrollment.enter(INVITE, tmp_path, store, name="me", via=["/ip4/6.6.6.6/tcp/6"])
    assert members == [["/ip4/6.6.6.6/tcp/6", "/ip4/1.1.1.1/tcp/1"]]
    assert client.places[0] == word().body and m.hours_left > 23
    assert m.locator.newest == word() and {"/ip4/5.5.5.5/tcp/5", "/ip4/2.2.2.2/tcp/2"} <= set(m.addresses)
    # The next time it is looked for there first, and no member need be asked.
    client.places.clear()
    await enter(store, tmp_path)
    assert client.places[0] == word().body and len(members) == 1


async def test_while_it_is_nowhere_a_newcomer_is_in_without_an_admission(store, client, members, tmp_path, caplog):
    client.run, client.found = AWAY, found()
    m = await enter(store, tmp_path)
    assert not m.seconds_left() and m.spec == RUN and "waiting in the swarm" in caplog.text
    assert "/ip4/5.5.5.5/tcp/5" in known_addresses(store)
    client.run = client.admission = None
    await m.renew()
    assert m.hours_left > 23


@pytest.mark.parametrize("coordinator_address", [None, word()])
async def test_a_newcomer_waits_with_members_also_when_it_goes_before_the_admission(
    store, client, members, tmp_path, caplog, coordinator_address
):
    client.admission, client.found = AWAY, found(coordinator_address)
    m = await enter(store, tmp_path)
    assert not m.seconds_left() and "waiting in the swarm" in caplog.text
    assert members == [["/ip4/2.2.2.2/tcp/2", "/ip4/1.1.1.1/tcp/1"]] and m.locator.newest == coordinator_address
    assert "/ip4/5.5.5.5/tcp/5" in known_addresses(store)


@pytest.mark.parametrize("run, admitted", [(AWAY, None), (None, AWAY)])
async def test_who_has_a_valid_admission_asks_nobody_and_goes_on(store, client, members, tmp_path, run, admitted):
    await visit(store)
    client.run, client.admission = run, admitted
    await enter(store, tmp_path)
    assert members == []


async def test_when_no_member_answers_either_it_says_what_to_do(store, client, members, tmp_path):
    client.run = AWAY
    with pytest.raises(CoordinatorUnreachable, match="cairn peer invite"):
        await enter(store, tmp_path)
    assert len(members) == 1 and client.closed


async def test_a_renewal_asks_members_only_when_nobody_answers_and_goes_where_they_say(store, client, tmp_path):
    m = await enter(store, tmp_path)
    asked: list[int] = []

    async def ask() -> None:
        asked.append(1)
        if len(asked) == 2:
            m.locator.accept(word().encoded)
            client.admission = None

    await m.renew_anywhere(ask)
    assert not asked
    client.admission = AWAY
    with pytest.raises(CoordinatorUnreachable):
        await m.renew_anywhere(ask)
    await m.renew_anywhere(ask)
    assert client.places == [word().body] and len(asked) == 2
    client.admission = CoordinatorRefused("no")
    with pytest.raises(CoordinatorRefused):
        await m.renew_anywhere(ask)
    assert len(asked) == 2

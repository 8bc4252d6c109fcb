"""The coordinator as it is asked: over gRPC by its client, over HTTP by browsers, by friends and by strangers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import grpc
import grpc.aio
import pytest

from cairn.commands import status
from coordinator import address_publisher, admission, admission_table, interceptor, rpc, service
from coordinator.admission_table import AdmissionTable
from coordinator.alerts import rules
from coordinator.errors import CoordinatorError, LedgerError, PortTakenError, RefusedError, TooManyError
from coordinator.ledger import Ledger
from coordinator.limits import NetworkLimit, Rate, RateLimit, caller_of, is_loopback
from coordinator.page.app import STATIC
from coordinator.page.feed import Feed
from coordinator.service import Coordinator, CoordinatorConfig
from coordinator.swarm import RestingState
from peer import coordinator_client
from peer.coordinator_client import (
    CoordinatorClient,
    CoordinatorRefused,
    CoordinatorUnreachable,
    WrongCoordinator,
    server_certificate,
)
from peer.node import coordinator_discovery
from protocol.coordinator_address import CoordinatorAddress
from protocol.envelope import seal
from protocol.errors import CairnError
from protocol.ids import Digest
from protocol.invite import HostPort, Invite
from protocol.proof_of_work import find_proof, is_proof
from protocol.spec import sign_spec
from protocol.version import PROTOCOL
from protocol.wire import coordinator_pb2 as wire
from tests.support.coordinator_fakes import FakeSwarm, make_archiver, make_spec, peer, state
from tests.support.coordinator_service import SPEC, client, raw_stub, refusal, running, settled, web
from tests.support.specs import OWNER
from tests.support.waiting import LIMIT, NEVER, ended, until


async def test_a_fault_in_what_is_shown_does_not_silence_the_page_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("coordinator.tasks.RETRY_SECONDS", 0.05)
    async with running(tmp_path) as (coordinator, swarm):
        real, fails = coordinator.api.event, [True]

        def event():
            if fails:
                raise ValueError("out of range")
            return real()

        monkeypatch.setattr(coordinator.api, "event", event)
        swarm.round({0: 10})
        await until(lambda: "publisher: a fault of the coordinator" in caplog.text, "the fault is logged")
        shown: list[bytes] = []
        monkeypatch.setattr(coordinator.feed, "publish", shown.append)
        fails.clear()
        await until(lambda: shown, "the page is shown again")


# -- the four calls ----------------------------------------------------------------------------------------------


async def test_a_peer_gets_the_spec_and_an_admission_that_the_owner_signed(tmp_path):
    async with running(tmp_path) as (c, _), client(c) as ask:
        run = await ask.get_run()
        assert run.spec == SPEC and run.addresses
        got = await ask.admit(peer(1), "ada")
        body = got.admission.body
        assert (got.admission.author, body.peer, body.name, body.run) == (OWNER.key, peer(1).key, "ada", SPEC.run_id)
        assert body.not_after - body.not_before == SPEC.admission.seconds
        assert abs(got.clock_ahead) < 60


async def test_who_asks_again_gets_no_second_spec_and_is_informed_of_the_end(tmp_path):
    spec = make_spec(total_tokens=20 * SPEC.data.window)
    async with running(tmp_path, spec=spec) as (c, swarm), client(c) as ask, raw_stub(c) as stub:
        first = await ask.get_run_again()
        assert (first.spec, first.over, first.last) == (spec, "", None)
        assert not (await stub.GetRun(wire.GetRunRequest(run=bytes(spec.run_id), knows_spec=True))).spec
        swarm.round({1: 10, 2: 10})
        swarm.resting = RestingState(swarm.head, 1, None, (peer(1).key, peer(2).key), (peer(2).key,), 1)
        await until(lambda: c.overview().health == "finished", "the run has reached its total")
        again = await ask.get_run_again()
        assert again.spec == spec and again.last is not None and again.last.state is None
        assert again.over.startswith("finished: all 320 tokens are trained, in 1 rounds")
        assert again.over.endswith(
            f"the last state, of round 1, is not archived: ask {peer(2).key.short} to join again"
        )
        swarm.resting = replace(swarm.resting, state=state(1))
        await until(lambda: not c.overview().missing_state, "it is archived")
        o, again = c.overview(), await ask.get_run_again()
        assert again.last is not None and (again.last.state, again.last.record) == (state(1), swarm.head)
        assert (o.state, o.state_round, o.tokens_per_second, o.archive_problem) == (state(1), 1, 0.0, "")


async def test_a_wide_network_has_a_few_times_the_reads_of_one_address(tmp_path, monkeypatch):
    monkeypatch.setattr(rpc, "READS", Rate(per_second=1e-6, burst=5))
    callers = (caller_of(f"ipv6:[2001:db8:0:{n:x}00::1]:1") for n in range(50))
    monkeypatch.setattr(rpc, "caller_of", lambda _: next(callers))
    request, answered = wire.GetRunRequest(run=bytes(SPEC.run_id)), 0
    async with running(tmp_path) as (c, _), raw_stub(c) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="too many requests"):
            while True:
                await stub.GetRun(request, timeout=LIMIT)
                answered += 1
    assert answered == 4 * 5


async def test_asking_again_gives_the_same_admission_and_later_a_newer_one(tmp_path):
    clock = [time.time()]
    async with running(tmp_path, now=lambda: clock[0]) as (c, _), client(c) as ask:
        first = (await ask.admit(peer(1), "ada")).admission.body
        assert (await ask.admit(peer(1), "ada")).admission.body == first
        clock[0] += 500
        other_name = (await ask.admit(peer(1), "grace")).admission.body
        assert other_name.name == "grace" and other_name.not_after > first.not_after


async def test_an_admission_outlives_a_restart_of_the_coordinator(tmp_path):
    async with running(tmp_path) as (c, _), client(c) as ask:
        first = await ask.admit(peer(1), "ada")
        fingerprint = c.fingerprint
    async with running(tmp_path) as (c, _), client(c) as ask:
        assert c.fingerprint == fingerprint
        assert (await ask.admit(peer(1), "ada")).admission.body == first.admission.body


async def test_a_fault_of_the_coordinator_is_no_refusal_and_it_is_asked_again(tmp_path, monkeypatch):
    faults = [RuntimeError("a bug"), RuntimeError("a bug")]
    real = Ledger.add_admission

    def fails(*given: object) -> object:
        if faults:
            raise faults.pop()
        return real(*given)

    monkeypatch.setattr(Ledger, "add_admission", fails)
    async with running(tmp_path) as (c, _), client(c) as once, CoordinatorClient(c.invite()) as patient:
        with pytest.raises(CoordinatorUnreachable, match="a fault of its own: its operator finds the reason"):
            await once.admit(peer(1), "ada")
        assert (await patient.admit(peer(2), "grace")).admission.body.name == "grace" and not faults


@pytest.mark.parametrize("fault", [LedgerError("the disk is full"), RuntimeError("a bug")])
async def test_an_admission_that_could_not_be_stored_is_not_remembered(tmp_path, monkeypatch, fault):
    def fails(*_: object) -> None:
        raise fault

    async with running(tmp_path) as (c, _), client(c) as ask:
        with monkeypatch.context() as m:
            m.setattr(Ledger, "add_admission", fails)
            with pytest.raises(CairnError):
                await ask.admit(peer(1), "ada")
        assert not c.admitter.knows(peer(1).key)
        await ask.admit(peer(1), "ada")
        stored = await c.ledger.read(lambda ledger: [a.peer for a in ledger.admissions()])
        assert stored == [peer(1).key] and c.admitter.knows(peer(1).key)


def failing_write(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Have writes of admissions wait and fail. Return what the first of them sets, and what they wait for."""
    begun, go = threading.Event(), threading.Event()

    def fails(*_: object) -> None:
        begun.set()
        go.wait(LIMIT)
        raise LedgerError("the disk is full")

    monkeypatch.setattr(Ledger, "add_admission", fails)
    return begun, go


async def test_an_admission_that_could_not_be_stored_after_its_caller_left_is_not_remembered(tmp_path, monkeypatch):
    begun, go = failing_write(monkeypatch)
    monkeypatch.setattr("coordinator.interceptor.DEADLINE", 0.1)
    async with running(tmp_path) as (c, _), client(c) as ask:
        with pytest.raises(CairnError):
            await ask.admit(peer(1), "ada")
        await until(begun.is_set, "the write has begun")
        go.set()
        await until(lambda: not c.admitter.knows(peer(1).key), "it is not remembered")


async def test_of_two_admissions_of_one_key_that_cannot_be_stored_none_is_remembered(tmp_path, monkeypatch):
    begun, go = failing_write(monkeypatch)
    async with running(tmp_path) as (c, _), client(c) as ask, client(c) as other:
        first = asyncio.create_task(ask.admit(peer(1), "ada"))
        await until(begun.is_set, "the write has begun")
        try:
            with pytest.raises(CoordinatorUnreachable, match="is being stored: try again"):
                await other.admit(peer(1), "grace")
        finally:
            go.set()
        with pytest.raises(CairnError):
            await first
        await until(lambda: not c.admitter.knows(peer(1).key), "neither is remembered")
        with pytest.raises(CoordinatorUnreachable, match="disk is full|its operator"):
            await other.admit(peer(1), "grace")


@pytest.mark.parametrize("offset, says", [(3600, r"3[56]\d\d s ahead of"), (-3600, r"36\d\d s behind")])
async def test_a_wrong_clock_is_refused_with_the_offset(tmp_path, offset, says):
    async with running(tmp_path, now=lambda: time.time() - offset) as (c, _), client(c) as ask:
        with pytest.raises(CoordinatorRefused, match=f"your clock is {says}.*NTP"):
            await ask.admit(peer(1))


async def test_a_run_whose_keys_have_a_cost_admits_a_new_key_with_a_proof_of_work_only(tmp_path):
    spec = make_spec(admission={"work_bits": 5})
    async with running(tmp_path, spec) as (c, _), client(c) as ask:
        wrong = next(n for n in range(100) if not is_proof(spec.run_id, peer(1).key, n, 5))
        with pytest.raises(CoordinatorRefused, match="proof of work of 5 bits"):
            await ask.admit(peer(1), "ada", nonce=wrong)
        assert not c.admitter.knows(peer(1).key)
        right = find_proof(spec.run_id, peer(1).key, 5, range(10_000))
        assert right is not None
        await ask.admit(peer(1), "ada", nonce=right)
        await ask.admit(peer(1), "alan")  # known by now: a new name costs no new proof


async def test_a_run_by_invite_takes_its_codes_only(tmp_path):
    spec = make_spec(admission={"mode": "invite"})
    async with running(tmp_path, spec, codes=("alpha", "beta")) as (c, _):
        async with client(c, code="beta") as ask:
            assert (await ask.admit(peer(1))).admission.body.peer == peer(1).key
        async with client(c, code="alph") as ask:
            with pytest.raises(CoordinatorRefused, match="not valid.*ask the run's owner"):
                await ask.admit(peer(2))
        async with client(c) as ask:
            with pytest.raises(CoordinatorRefused, match="has no code"):
                await ask.admit(peer(2))
    async with running(tmp_path, spec, codes=("gamma",)) as (c, _):  # a code was passed on to others
        async with client(c, code="beta") as ask:
            assert (await ask.admit(peer(1), "renamed")).admission.body.name == "renamed", "it is in"
            with pytest.raises(CoordinatorRefused, match="not valid"):
                await ask.admit(peer(2))
    with pytest.raises(RefusedError, match="at least one code"):
        async with running(tmp_path, spec):
            pass


async def test_a_run_with_an_allow_list_takes_those_on_it_only(tmp_path):
    spec = make_spec(admission={"mode": "allow", "allow": [str(peer(1).key)]})
    async with running(tmp_path, spec) as (c, _), client(c) as ask:
        assert (await ask.admit(peer(1))).admission.body.peer == peer(1).key
        with pytest.raises(CoordinatorRefused, match="only the keys on its list"):
            await ask.admit(peer(2))


async def test_status_and_totals_say_what_the_chain_says(tmp_path):
    async with running(tmp_path) as (c, swarm), client(c) as ask:
        await ask.admit(peer(0), "ada")
        swarm.blobs.add(swarm.spec.genesis.name)
        for n in (0, 1):
            swarm.beat(n, loss=4.5, device="NVIDIA H200")
        for _ in range(6):
            swarm.round({0: 600, 1: 700}, loss=3.25)
        await settled(c, 6)
        s = await ask.status()
        assert (s.name, s.round, s.state_round, s.final_round) == ("tiny", 6, 5, 2)
        assert s.tokens == 6 * 1300 * SPEC.data.window and s.loss == 3.25
        assert s.head == swarm.head and s.page == c.page_url
        assert (s.checkpoint, s.checkpoint_round) == (SPEC.genesis.name, 0)
        shown = {p.name: p for p in s.peers}
        assert shown["ada"].device == "NVIDIA H200" and shown["ada"].loss == 4.5
        totals = await ask.totals(peer(0).key)
        assert totals.rounds == 6 and totals.micro_credits_settled == totals.micro_credits_pending > 0
        assert (await ask.totals(peer(99).key)).rounds == 0


# -- who is not who they should be -------------------------------------------------------------------------------


async def test_another_certificate_than_the_invites_is_refused_before_anything_is_said(tmp_path):
    async with running(tmp_path) as (c, _), client(c, fingerprint=Digest(bytes(32))) as ask:
        with pytest.raises(WrongCoordinator, match="another certificate than the invite"):
            await ask.get_run()


async def test_a_client_that_pinned_one_certificate_is_not_answered_by_another(tmp_path, monkeypatch):
    """A server put in the coordinator's place after the certificate was fetched is stopped by TLS itself."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with running(tmp_path / "a") as (a, _), running(tmp_path / "b") as (b, _):
        fetched: list[HostPort] = []

        def certificate(endpoint: HostPort) -> bytes:
            """Return what the first server shows, which was at every address a moment ago."""
            fetched.append(endpoint)
            return server_certificate(HostPort("127.0.0.1", a.grpc_port))

        monkeypatch.setattr(coordinator_client, "server_certificate", certificate)
        async with client(b, fingerprint=a.fingerprint) as ask:
            with pytest.raises(CoordinatorUnreachable):
                await ask.get_run()
        async with client(a) as ask:
            await ask.get_run()
            await ask.get_run()
        assert fetched == [HostPort("127.0.0.1", c.grpc_port) for c in (b, a)], "once for a connection"


async def test_nobody_there_and_no_coordinator_there_are_told_apart(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    async with running(tmp_path) as (c, _):
        async with client(c, coordinators=(HostPort("127.0.0.1", free),)) as ask:
            with pytest.raises(CoordinatorUnreachable, match=f"127.0.0.1:{free} does not answer.*is it running"):
                await ask.status()
        async with client(c, coordinators=(HostPort("127.0.0.1", c.page_port),)) as ask:
            with pytest.raises(WrongCoordinator, match="does not speak TLS"):
                await ask.status()
        # The second address of the invite is tried when the first is silent.
        both = (HostPort("127.0.0.1", free), HostPort("127.0.0.1", c.grpc_port))
        async with client(c, coordinators=both) as ask:
            assert (await ask.status()).name == "tiny"


async def test_a_client_finds_its_coordinator_again_after_a_restart(tmp_path):
    async with running(tmp_path) as (c, _):
        invite, port = c.invite(), c.grpc_port
        ask = CoordinatorClient(invite, attempts=3)
        await ask.status()
    with pytest.raises(CoordinatorUnreachable):
        await CoordinatorClient(invite, attempts=1).status()
    async with running(tmp_path, listen_port=port):
        assert (await ask.status()).name == "tiny"
    await ask.close()


# -- it moves ----------------------------------------------------------------------------------------------------


async def told(swarm: FakeSwarm, count: int) -> CoordinatorAddress:
    """Return the newest coordinator address once the swarm has received `count` of them."""
    await until(lambda: len(swarm.address_records) >= count, f"the swarm has {count} addresses")
    return swarm.address_records[-1].body


async def test_it_says_where_it_is_again_and_again_and_anew_only_when_something_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(address_publisher, "AGAIN_SECONDS", 0.05)
    swarm = FakeSwarm(SPEC)
    async with running(tmp_path, swarm=swarm) as (c, _):
        first = await told(swarm, 3)
        assert first.coordinators == c.invite().coordinators and first.fingerprint == c.fingerprint
        assert first.addresses == tuple(swarm.own_addresses()) and len({w.digest for w in swarm.address_records}) == 1
        port = c.grpc_port
    swarm.address_records = swarm.address_records[:1]
    async with running(tmp_path, swarm=swarm, listen_port=port):
        assert await told(swarm, 3) == first
    swarm.address_records = swarm.address_records[:1]
    public = (HostPort("new.example", 1),)
    # Its clock was set back meanwhile: what it says is newer all the same.
    async with running(tmp_path, swarm=swarm, public=public, now=lambda: 1000.0):
        moved = await told(swarm, 2)
    assert moved.coordinators == public and moved.sequence == first.sequence + 1
    (tmp_path / "tls.pem").unlink()
    async with running(tmp_path, swarm=swarm, public=public):
        again = await told(swarm, len(swarm.address_records) + 1)
    assert again.fingerprint != moved.fingerprint and again.sequence > moved.sequence


async def test_two_coordinators_with_one_key_are_trouble_that_the_page_and_the_alert_show(tmp_path, monkeypatch):
    monkeypatch.setattr(address_publisher, "AGAIN_SECONDS", 0.1)
    swarm = FakeSwarm(SPEC)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with running(tmp_path / "one", swarm=swarm) as (one, _):
        async with running(tmp_path / "two", swarm=swarm) as (two, _):
            await until(lambda: "another coordinator" in one.overview().message, "it is noticed", every=0.05)
            shown = one.overview()
            assert shown.health == "trouble" and f"127.0.0.1:{two.grpc_port}" in shown.message
            assert "run's key" in (rules.chain({}, one.alert_input()) or "")
        await until(lambda: one.overview().health != "trouble", "the other has stopped", every=0.05)
        assert not one.overview().problem


async def test_a_client_goes_where_the_owner_says_and_back_to_the_invites_address_when_that_is_old(tmp_path):
    swarm = FakeSwarm(SPEC)
    async with running(tmp_path, swarm=swarm) as (c, _):
        old, before = c.invite(), await told(swarm, 1)
    async with CoordinatorClient(old, attempts=1) as ask:
        with pytest.raises(CoordinatorUnreachable):
            await ask.status()
        (tmp_path / "tls.pem").unlink()  # and the certificate that the old invite names is lost
        async with running(tmp_path, swarm=swarm) as (c, _):
            ask.moved(await told(swarm, len(swarm.address_records) + 1))
            assert (await ask.get_run()).spec == SPEC and (await ask.admit(peer(1))).admission.body.peer == peer(1).key
            now = c.invite()
            async with CoordinatorClient(now, attempts=1) as later:
                later.moved(before)  # an old word, which a member replays: nobody is there any more
                assert (await later.status()).name == "tiny"
        with pytest.raises(CairnError, match=str(now.coordinators[0].port)):
            await ask.status()


async def test_a_status_with_an_old_invite_is_asked_where_members_say(tmp_path, monkeypatch):
    async with running(tmp_path) as (c, swarm):
        old = replace(c.invite(), coordinators=(HostPort("127.0.0.1", 1),))
        await told(swarm, 1)
        asked: list[list[str]] = []
        known = coordinator_discovery.DiscoveredRun(sign_spec(OWNER, SPEC).encoded, swarm.address_records[0], (), 1)

        async def find(run, addresses):
            asked.append(list(addresses))
            return known

        monkeypatch.setattr(coordinator_discovery, "discover_run", find)
        monkeypatch.setattr(asyncio, "sleep", lambda _, sleep=asyncio.sleep: sleep(0))
        assert (await status.fetch_status(old, ["/via"])).name == "tiny"
        assert asked == [["/via", *old.addresses]]
        known = replace(known, coordinator_address=None)
        with pytest.raises(CairnError, match="1 members answer, and know of no other address"):
            await status.fetch_status(old, [])


async def test_at_the_place_that_the_owner_names_another_certificate_is_refused(tmp_path):
    async with running(tmp_path) as (c, swarm), client(c, coordinators=(HostPort("127.0.0.1", 1),)) as ask:
        ask.moved(replace(await told(swarm, 1), fingerprint=Digest(bytes(32))))
        with pytest.raises(WrongCoordinator):
            await ask.get_run()


async def test_a_silent_server_is_given_up_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr("peer.coordinator_client.CONNECT_SECONDS", 0.5)
    async with running(tmp_path) as (c, _):
        server = await asyncio.start_server(lambda r, w: asyncio.sleep(NEVER), "127.0.0.1", 0)
        endpoint = HostPort("127.0.0.1", server.sockets[0].getsockname()[1])
        async with client(c, coordinators=(endpoint,)) as ask:
            with pytest.raises(CairnError):
                await ended(ask.status())
        server.close()


# -- what strangers send -----------------------------------------------------------------------------------------


async def test_rubbish_is_refused_with_a_reason_and_hurts_nobody(tmp_path):
    code = grpc.StatusCode
    async with running(tmp_path) as (c, _), raw_stub(c) as stub:
        body = wire.AdmissionRequest(run=bytes(SPEC.run_id), time=int(time.time()), name="x", protocol=PROTOCOL)
        good = seal(peer(1), "admission-request", body.SerializeToString(deterministic=True))
        forged = bytearray(good.encoded)
        forged[-1] ^= 1
        other_kind = seal(peer(1), "vote", good.payload).encoded
        long_name = seal(peer(1), "admission-request", wire.AdmissionRequest(run=bytes(SPEC.run_id), time=int(time.time()), name="n" * 41).SerializeToString())  # fmt: skip  # noqa: E501
        other_run = seal(
            peer(1),
            "admission-request",
            wire.AdmissionRequest(run=bytes(32), time=int(time.time())).SerializeToString(),
        )
        for request, expected in [
            (b"", code.INVALID_ARGUMENT),
            (b"\xff" * 200, code.INVALID_ARGUMENT),
            (bytes(forged), code.UNAUTHENTICATED),
            (other_kind, code.UNAUTHENTICATED),
            (long_name.encoded, code.INVALID_ARGUMENT),
            (other_run.encoded, code.NOT_FOUND),
            (b"x" * 2000, code.INVALID_ARGUMENT),
        ]:
            got, said = await refusal(stub.Admit(wire.AdmitRequest(request=request), timeout=LIMIT))
            assert got is expected and said, (request[:20], got, said)
        assert (await refusal(stub.Status(wire.StatusRequest(run=b"nope"), timeout=LIMIT)))[0] is code.NOT_FOUND
        run = bytes(SPEC.run_id)
        assert (await refusal(stub.Account(wire.AccountRequest(run=run, peer=b"x"), timeout=LIMIT)))[
            0
        ] is code.INVALID_ARGUMENT
        too_big = await refusal(stub.Admit(wire.AdmitRequest(request=b"x" * 100_000), timeout=LIMIT))
        assert too_big[0] is code.RESOURCE_EXHAUSTED
        assert (await stub.Admit(wire.AdmitRequest(request=good.encoded), timeout=LIMIT)).admission


async def test_a_compressed_call_is_refused(tmp_path):
    async with running(tmp_path) as (c, _), raw_stub(c) as stub:
        request = wire.GetRunRequest(run=bytes(SPEC.run_id))
        compressed = stub.GetRun(request, timeout=LIMIT, compression=grpc.Compression.Gzip)
        assert (await refusal(compressed))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert (await stub.GetRun(request, timeout=LIMIT)).spec


async def test_one_who_asks_too_much_is_told_to_wait_and_the_table_of_callers_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(rpc, "ADMISSIONS_OF_ONE", Rate(0.1, 3))
    async with running(tmp_path) as (c, _), client(c) as ask:
        for _ in range(3):
            await ask.admit(peer(1))
        with pytest.raises(CoordinatorUnreachable, match="too many requests: try again in"):
            await ask.admit(peer(1))
        await ask.admit(peer(2))
    limit = RateLimit(Rate(1, 2), callers=5)
    for i in range(100):
        limit.take(i, 0.0)
    assert len(limit) == 5
    limit.take(99, 0.0)
    with pytest.raises(TooManyError):
        limit.take(99, 0.0)
    limit.take(99, 1.5)


def test_callers_are_counted_by_network():
    assert caller_of("ipv4:203.0.113.7:55") == "203.0.113.7"
    assert caller_of("ipv6:%5B2001:db8::1%5D:55") == caller_of("ipv6:[2001:db8::2]:7") == "2001:db8::/64"
    assert caller_of("ipv6:[::ffff:203.0.113.7]:1") == "203.0.113.7"
    assert caller_of("unix:/tmp/x") == "unix:/tmp/x"
    here = ("ipv4:127.0.0.1:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "ipv6:[::ffff:127.0.0.1]:5", "unix:/tmp/x", "unix:")
    assert all(is_loopback(caller_of(c)) for c in here)
    assert not any(is_loopback(caller_of(c)) for c in ("ipv4:10.0.0.1:5", "ipv6:[::2]:5", "ipv6:[2001:db8::1]:5", ""))


def test_an_owner_of_many_addresses_is_one_caller():
    # A /48 has the limit of four addresses, a /56 of two; a /64 and an IPv4 address are one.
    limit, calls = NetworkLimit(Rate(1, 10)), interceptor.ConcurrencyLimit(1000, 10)

    def accepted(hosts: Iterable[str], take: Callable[[str], object]) -> int:
        count = 0
        for host in hosts:
            with contextlib.suppress(TooManyError):
                take(caller_of(f"ipv6:[{host}]:1" if ":" in host else f"ipv4:{host}:1"))
                count += 1
        return count

    for take in (lambda caller: limit.take(caller, 0.0), calls.take):
        assert accepted((f"2001:db8:1:{i:x}::1" for i in range(0, 0x10000, 64)), take) == 40
        assert accepted((f"2001:db8:2:{i:x}::1" for i in range(0x100)), take) == 20
        assert accepted((f"2001:db8:3::{i:x}" for i in range(100)), take) == 10
        assert accepted(["203.0.113.7"] * 100, take) == 10


async def test_a_call_that_takes_too_long_is_ended_by_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(interceptor, "DEADLINE", 0.2)
    async with running(tmp_path) as (c, _), raw_stub(c) as stub:

        async def slow(_service):
            await asyncio.sleep(NEVER)

        monkeypatch.setattr(rpc.CoordinatorService, "run_reply", slow)
        code, said = await refusal(stub.GetRun(wire.GetRunRequest(run=bytes(SPEC.run_id))))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "busy" in said


async def test_a_flood_of_new_keys_is_bounded_and_locks_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "AdmissionTable", partial(AdmissionTable, limit=2))
    async with running(tmp_path) as (c, swarm), client(c) as ask:
        swarm.round({1: 10})
        await until(lambda: c.chain.has_credits(peer(1).key), "the round is indexed")
        for n in (1, 2, 3, 4):
            await ask.admit(peer(n), f"p{n}")
        assert c.admitter.count == 2 and c.admitter.knows(peer(1).key) and c.admitter.knows(peer(4).key)
        stored = await c.ledger.run(lambda ledger: {a.peer for a in ledger.admissions()})
        assert stored == {peer(1).key, peer(4).key}


async def test_keys_that_the_swarm_never_saw_are_forgotten_without_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "TEND_SECONDS", 0.05)
    monkeypatch.setattr(admission_table, "UNSEEN_SECONDS", 0.5)
    async with running(tmp_path) as (c, swarm), client(c) as ask:
        for n in (1, 2):
            await ask.admit(peer(n))
        swarm.beat(1)
        await until(lambda: not c.admitter.knows(peer(2).key), "the key that was never seen is forgotten")
        assert c.admitter.knows(peer(1).key)
        assert await c.ledger.run(lambda ledger: [a.peer for a in ledger.admissions()]) == [peer(1).key]


async def test_a_database_that_is_away_is_no_fault_and_what_was_to_be_forgotten_is_when_it_is_back(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(service, "TEND_SECONDS", 0.05)
    monkeypatch.setattr(admission_table, "UNSEEN_SECONDS", 0.0)
    tries = []

    def fails(*_: object) -> None:
        tries.append(1)
        raise LedgerError("the database is away")

    async with running(tmp_path) as (c, _), client(c) as ask:
        with monkeypatch.context() as m:
            m.setattr(admission_table, "UNSEEN_SECONDS", NEVER)
            await ask.admit(peer(1))
            m.setattr(Ledger, "forget_admissions", fails)
            m.setattr(admission_table, "UNSEEN_SECONDS", 0.0)
            await until(lambda: len(tries) >= 3, "it is tried again")
            assert await c.ledger.read(lambda ledger: ledger.admissions())

        async def are_forgotten() -> bool:
            return not await c.ledger.read(lambda ledger: ledger.admissions())

        await until(are_forgotten, "it is back")
    said = [r for r in caplog.records if "database is away" in r.getMessage()]
    assert len(said) == 1 and said[0].exc_info is None and "a fault of the coordinator" not in caplog.text


# -- starting and stopping ---------------------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_named_with_the_remedy_and_nothing_is_left_running(tmp_path):
    (tmp_path / "second").mkdir()
    async with running(tmp_path) as (c, _):
        for place in ({"listen_port": c.grpc_port}, {"page_port": c.page_port}):
            with pytest.raises(PortTakenError, match=f"{next(iter(place.values()))}.*choose another"):
                async with running(tmp_path / "second", **place):
                    pass
        assert not [t for t in asyncio.all_tasks() if t.get_name() == "chain indexer"][1:]


async def test_a_missing_folder_and_a_foreign_key_are_named(tmp_path):
    with pytest.raises(CoordinatorError, match="check that the folder exists"):
        async with running(tmp_path / "missing"):
            pass
    swarm = FakeSwarm(SPEC)
    with pytest.raises(CoordinatorError, match="does not own run"):
        Coordinator(CoordinatorConfig(tmp_path), SPEC, b"", peer(1), swarm, make_archiver(SPEC, tmp_path, swarm))


async def test_it_stops_though_viewers_watch(tmp_path):
    async with running(tmp_path) as (c, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", c.page_port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"data: ")
        idle = await asyncio.open_connection("127.0.0.1", c.page_port)
        await ended(c.stop())
        writer.close()
        idle[1].close()


# -- the page ----------------------------------------------------------------------------------------------------


async def test_the_page_and_all_that_it_names_is_served_with_a_strict_policy(tmp_path):
    async with running(tmp_path) as (c, _), web(c) as get:
        page = await get.get("/")
        assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        import re

        for link in set(re.findall(r'(?:href|src)="(/[^"]*)"', page.text)) | {"/favicon.ico"}:
            answer = await get.get(link.replace("&amp;", "&"))
            assert answer.status_code == 200 and answer.content, link
        assert not re.search(r"<[^>]+ (on\w+|style)=", page.text)
        scripts, found = ["main.js"], {}
        while scripts:  # the modules, each by what imports it
            name = scripts.pop()
            script = found[name] = (await get.get(f"/static/js/{name}")).raise_for_status().text
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script), name
            scripts += set(re.findall(r'from "\./([a-z]+\.js)"', script)) - found.keys()
        assert found.keys() == {p.name for p in (STATIC / "js").iterdir()}, "one that nothing imports"
        for licence in ("uPlot.LICENSE.txt", "pico.LICENSE.txt"):
            assert "Permission is hereby granted" in (await get.get(f"/static/vendor/{licence}")).text
        for bad in ("/static/../service.py", "/static/%2e%2e/app.py", "/nothing"):
            assert (await get.get(bad)).status_code == 404
        assert (await get.post("/api/status")).status_code == 405


async def test_the_api_gives_every_round_with_its_credits(tmp_path):
    async with running(tmp_path) as (c, swarm), web(c) as get:
        for _ in range(7):
            swarm.round({0: 600, 1: 700})
        await settled(c, 7)
        rounds = (await get.get("/api/rounds/newest?limit=100")).json()["rounds"][::-1]
        assert [(r["round"], r["final"]) for r in rounds] == [(r, r < 4) for r in range(7)]
        assert [r["record"] for r in rounds] == [str(x.record.digest) for x in swarm.chain.certificates]
        whole = [(await get.get(f"/api/rounds/{r}")).json() for r in range(4)]
        assert (
            sum(c["micro_credits"] for r in whole for c in r["contributors"])
            == ((await get.get("/api/status")).json()["micro_credits_settled"])
        )
        for bad in ("before=x", "limit=0", "limit=100000", "before=1e3", "limit=²", "before=" + "9" * 50):
            assert (await get.get(f"/api/rounds/newest?{bad}")).status_code == 400
        assert len((await get.get("/api/charts")).json()["loss"]) == 7


async def test_the_state_comes_first_and_in_words(tmp_path):
    clock = [1e9]
    spec = make_spec(total_tokens=200_000)
    async with running(tmp_path, spec, now=lambda: clock[0]) as (c, swarm):

        async def says(health, words=""):
            def seen() -> bool:
                clock[0] += 0.3
                o = c.overview()
                return o.health == health and words in o.message

            await until(seen, f"{health}: {words}", every=0.05)

        await says("waiting", "no peer is training yet")
        for n in range(4):
            swarm.beat(n)
        await says("healthy", "4 peers training in round 0")
        swarm.round({0: 600, 1: 700}, loss=5.314)
        await says("healthy", "4 peers training, round 1, loss 5.31")
        clock[0] += 1000
        await says("stalled", "round 1 has not ended for")
        for n in (1, 2):
            swarm.beat(n, head=Digest(bytes(32)))
        swarm.round({0: 10, 1: 10})
        for n in (0, 3):
            swarm.beat(n)
        await says("split", "2 of 4 training peers")
        for n in range(4):
            swarm.beat(n, seconds_since=30)
        await says("idle", "no peer is training")
        swarm.updates_problem = "the updates of round 1 are held by nobody here: ada, bob have them"
        await says("idle", f"the chain stands at round 2; {swarm.updates_problem}")
        swarm.round({0: 6000, 1: 6000})
        await says("finished", "tokens are trained")


async def test_names_and_devices_of_strangers_reach_the_page_as_data_only(tmp_path):
    async with running(tmp_path) as (c, swarm), client(c) as ask, web(c) as get:
        await ask.admit(peer(1), "<img src=x onerror=alert(1)>")
        swarm.beat(1, device="<script>alert(1)</script>")

        async def shown() -> bool:
            peers = (await get.get("/api/status")).json()["peers"]
            return bool(peers) and peers[0]["device"] != ""

        await until(shown, "the peer is shown", every=0.05)
        assert "onerror" not in (await get.get("/")).text
        status = await get.get("/api/status")
        assert status.headers["content-type"] == "application/json"
        assert status.headers["x-content-type-options"] == "nosniff"
        assert status.json()["peers"][0]["name"] == "<img src=x onerror=alert(1)>"
        with pytest.raises(CoordinatorRefused, match="printable"):
            await ask.admit(peer(2), "a\x1b[2Jb")


async def test_a_viewer_is_told_of_a_round_at_once_and_viewers_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "Feed", partial(Feed, limit=1))
    async with running(tmp_path) as (c, swarm), web(c) as get:
        async with get.stream("GET", "/events") as events:
            lines = events.aiter_lines()

            async def round_shown():
                async for line in lines:
                    if line.startswith("data: "):
                        return json.loads(line[6:])["round"]

            assert await round_shown() == 0
            swarm.round({0: 600})
            while await ended(round_shown()) != 1:
                pass
            assert (await get.get("/events")).status_code == 503
        await until(lambda: len(c.feed) == 0, "the viewer who left is forgotten")


async def test_metrics_are_prometheus_text_without_labels_that_strangers_choose(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    async with running(tmp_path) as (c, swarm), client(c) as ask, web(c) as get:
        await ask.status()
        swarm.beat(0, device="mine")
        swarm.round({0: 600}, loss=4.0)

        async def shown() -> str:
            text = (await get.get("/metrics")).text
            return text if "cairn_round 1.0" in text else ""

        text = await until(shown, "the round is exported", every=0.05)
        found = {f.name: f for f in text_string_to_metric_families(text)}
        assert found["cairn_loss"].samples[0].value == 4.0
        calls = {s.labels["method"]: s.value for s in found["cairn_grpc_calls"].samples if s.name.endswith("_total")}
        assert calls == {"Status": 1.0}
        assert "mine" not in text and str(peer(0).key) not in text


async def test_a_connection_that_sends_nothing_is_cut(tmp_path, monkeypatch):
    from coordinator.page import server

    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    async with running(tmp_path) as (c, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", c.page_port)
        writer.write(b"GET / HT")
        assert await ended(_until_closed(reader)) == b""
        writer.close()


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_an_invite_made_by_the_coordinator_is_read_by_its_client(tmp_path):
    async def check():
        async with running(tmp_path, public=(HostPort("run.example.org", 7100),)) as (c, _):
            invite = c.invite("otter")
            assert Invite.parse(str(invite)) == invite
            assert invite.coordinators == (HostPort("run.example.org", 7100),) and invite.code == "otter"
            assert c.page_url.startswith("http://127.0.0.1:")

    asyncio.run(check())

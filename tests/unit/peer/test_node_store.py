"""A node keeps enough of the run on its disk to go on and to serve others, and no more."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.doctor.disk import to_save
from peer.errors import NotInSwarm, PeerError
from peer.node import chain_store as module
from peer.node import trainer_files
from peer.node.blob_retention import BlobRetention
from peer.node.chain_store import ChainStore
from peer.node.downloads import Download, DownloadTable
from peer.node.options import NodeOptions
from peer.node.snapshot import FILE, Snapshot, read_snapshot, write_snapshot
from peer.node.trainer_files import fetch_assets, room_for_files, start_message
from peer.store import Store, StoreError
from peer.swarm.errors import BlobFetchError
from protocol.chain import Chain, ChainLimits
from protocol.errors import ChainError, FinalizedConflict, MalformedError
from protocol.identity import Identity
from protocol.ids import Digest, Round, RunId
from protocol.message_codec import KeySigner, MessageDecoder, encode_certificate
from protocol.messages import Certificate, Finalization, Signed, UpdateHeader
from protocol.rounds.update_fate import UpdateFate
from protocol.wire import swarm_pb2 as wire
from tests.support.coordinator_fakes import ChainMaker, make_spec, state
from tests.support.specs import OWNER, admission, identity

SPEC = make_spec(genesis={"digest": state(0).hex(), "size": 524_288})  # a checkpoint every 5 rounds
LIMITS = ChainLimits(max_update_windows=64, max_members=8)
KEEP = SPEC.checkpoint.keep


def maker(rounds: int, work=None) -> ChainMaker:
    chain = ChainMaker(SPEC)
    chain.weighs = True
    for _ in range(rounds):
        chain.add(work or {1: 2, 2: 3})
    return chain


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store", 1 << 30) as s:
        yield s


# -- what is kept ---------------------------------------------------------------------------------------------


class Blobs:
    """The blobs of a store, by their digests alone."""

    def __init__(self, *held: Digest):
        self.held = set(held)

    def unreferenced(self, keep: set[Digest]) -> list[Digest]:
        return [d for d in self.held if d not in keep]

    def remove(self, digest: Digest) -> None:
        self.held.remove(digest)


def retention(held: Blobs, *retained: Digest) -> BlobRetention:
    updates: Any = SimpleNamespace(forget=lambda gone: None)
    return BlobRetention(SPEC, cast(Any, held), updates, lambda: retained)


async def test_pruning_removes_what_neither_the_machine_nor_the_spec_names():
    wanted, other = Digest(b"w" * 32), Digest(b"o" * 32)
    held = Blobs(wanted, other, SPEC.genesis.name)
    assert await retention(held, wanted).prune() == [other]
    assert held.held == {wanted, SPEC.genesis.name}


async def test_pruning_among_some_blobs_removes_no_others():
    wanted, other, third = (Digest(letter * 32) for letter in (b"w", b"o", b"t"))
    held = Blobs(wanted, other, third)
    assert await retention(held, wanted).prune({wanted, other}) == [other]
    assert held.held == {wanted, third}


async def test_only_the_newest_states_that_no_record_names_stay_and_an_update_that_is_new():
    states, new = [state(100 + i) for i in range(KEEP + 3)], Digest(b"n" * 32)
    held = Blobs(*states, new)
    kept = retention(held)
    kept.protect_update(new)
    for s in states:
        kept.protect_state(s)
        kept.protect_state(s)
    await kept.prune()
    assert held.held == {*states[-(KEEP + 1) :], new}


async def test_what_a_check_reads_stays_until_the_next_check():
    first, second = Digest(b"f" * 32), Digest(b"s" * 32)
    held = Blobs(first, second)
    kept = retention(held)
    kept.protect_check(frozenset({first, second}))
    assert await kept.prune() == []
    kept.protect_check(frozenset({second}))
    assert await kept.prune() == [first]
    kept.protect_check(frozenset())
    assert await kept.prune() == [second]


# -- the chain between disk and memory ------------------------------------------------------------------------


def log_over(store: Store, limits: ChainLimits = LIMITS) -> ChainStore:
    return ChainStore(store, MessageDecoder(SPEC.run_id, OWNER.key), SPEC, limits)


def test_what_was_kept_is_there_after_a_restart_with_its_final(store):
    made = maker(6)
    log = log_over(store)
    for c in made.certificates:
        log.store(c)
    log.store_finalization(signed_final(made.certificates[2]), awaited=False)
    chain = log_over(store).chain
    assert chain.head == made.head and chain.required_ancestor == made.certificates[2].digest


def test_our_last_header_is_there_after_a_restart_until_its_admission_has_ended(store):
    me, ends = identity("me"), 2_000_000_000
    assert log_over(store).own_header(me.key, ends) is None
    name = SPEC.genesis.name
    body = UpdateHeader(
        SPEC.run_id, Round(0), name, name, 0, 0, 2, 1, name, 9, 0.1, admission(SPEC, me, not_after=ends).encoded
    )  # fmt: skip
    header = KeySigner(me).sign(body)
    log_over(store).store_header(header)
    log = log_over(store)
    assert log.own_header(me.key, ends) == header
    assert log.own_header(me.key, ends + 3600) is None and log.own_header(OWNER.key, ends) is None


def test_a_finalization_in_force_is_so_after_a_restart_though_a_newer_one_awaits_its_record(store):
    made = maker(7)
    known, awaited = made.certificates[:6], made.certificates[6]
    log = log_over(store)
    for c in known:
        log.chain.add(c)
        log.store(c)
    log.store_finalization(signed_final(known[2]), awaited=False)
    log.store_finalization(signed_final(awaited), awaited=True)
    chain = log_over(store).chain
    assert chain.required_ancestor == known[2].digest and chain.head == known[5].digest
    with pytest.raises(FinalizedConflict):
        chain.add(made.fork(1).add({3: 1}))
    assert chain.is_missing_required_ancestor, "the newer one is not forgotten either"
    chain.add(awaited)
    assert chain.required_ancestor == awaited.digest


def signed_final(certificate: Certificate) -> Signed[Finalization]:
    return KeySigner(OWNER).sign(Finalization(SPEC.run_id, certificate.record.body.round, certificate.digest))


def test_a_damaged_certificate_costs_what_is_built_on_it_and_one_line(store, caplog):
    made = maker(6)
    log = log_over(store)
    for c in made.certificates:
        log.store(c)
    files = sorted((store.folder / "chain").iterdir())
    files[2].write_bytes(b"damaged" * 9)
    chain = log_over(store).chain
    assert chain.height(chain.head) == 2
    assert caplog.text.count("left out") == 1 and "3 stored certificates" in caplog.text


def test_a_start_does_not_verify_again_what_was_verified_before_it_was_written(store, monkeypatch):
    made = maker(5)
    log = log_over(store)
    for c in made.certificates:
        log.chain.add(c)
        log.store(c)
    verified: list[object] = []
    for name in ("protocol.envelope.verify", "protocol.vrf.verify"):
        monkeypatch.setattr(name, lambda *given: verified.append(given))
    chain = log_over(store).chain
    assert chain.head == made.head and not verified
    assert chain.seed(made.head) == log.chain.seed(made.head)
    MessageDecoder(SPEC.run_id, OWNER.key).decode_certificate(encode_certificate(made.certificates[0]))
    assert len(verified) == 1 + 1 + 2 * 2 + 2, "from others: record, proof, headers, admissions, votes"
    file = sorted((store.folder / "chain").iterdir())[3]
    content = bytearray(file.read_bytes())
    content[-9] ^= 1  # in a vote's signature, which nobody looks at now
    file.write_bytes(content)
    chain = log_over(store).chain
    assert chain.height(chain.head) == 3 and not file.exists()


def test_without_signatures_all_else_of_own_files_is_still_checked():
    first = maker(1).certificates[0]
    own = MessageDecoder(SPEC.run_id, OWNER.key, verifies=False)
    assert own.decode_certificate(encode_certificate(first)) == first
    few = replace(first, votes=first.votes[:1])
    with pytest.raises(MalformedError, match="two thirds"):
        own.decode_certificate(encode_certificate(few))
    with pytest.raises(MalformedError):
        own.decode_certificate(encode_certificate(first)[:-1])
    other = MessageDecoder(RunId(bytes(32)), OWNER.key, verifies=False)
    with pytest.raises(MalformedError, match="another run"):
        other.decode_certificate(encode_certificate(first))


def test_certificates_of_branches_that_lost_leave_the_disk(store, monkeypatch):
    monkeypatch.setattr(module, "SWEEP_EVERY", 10)
    log = log_over(store, ChainLimits(max_update_windows=64, max_members=8, max_side_records=3))
    chain = log.chain
    made = maker(5, {1: 10})
    for c in made.certificates:
        chain.add(c)
        log.store(c)
    for i in range(15):  # a peer certifies with itself alone, as often as it likes
        c = made.fork(0).add({100 + i: 1})
        chain.add(c)
        log.store(c)
    kept = set(made_digests(store))
    assert {c.record.digest for c in made.certificates} <= kept
    assert len(kept) <= 5 + 3
    assert log_over(store).chain.head == made.head


def test_good_certificates_after_a_damaged_one_stay_on_the_disk(store, monkeypatch):
    monkeypatch.setattr(module, "SWEEP_EVERY", 2)
    made = maker(12, {1: 10})
    for c in made.certificates:
        store.append_certificate(encode_certificate(c), c.record.body.round, c.digest)
    sorted((store.folder / "chain").iterdir())[3].write_bytes(b"damaged")
    log = log_over(store)
    assert log.chain.height(log.chain.head) == 3
    for c in made.certificates[3:7]:  # others have them
        log.chain.add(c)
        log.store(c)
    assert log.chain.height(log.chain.head) == 7 and set(made_digests(store)) == {c.digest for c in made.certificates}
    assert log_over(store).chain.head == made.head


def test_only_records_on_the_heads_path_wait_for_the_disk(store, monkeypatch):
    flushed: list[int] = []
    monkeypatch.setattr("peer.durable.os.fsync", flushed.append)
    log, made = log_over(store), maker(3, {1: 10})
    for c in made.certificates:
        log.chain.add(c)
        log.store(c)
    assert len(flushed) == 6, "each file, and the folder"
    for i in range(5):
        c = made.fork(0).add({100 + i: 1})
        log.chain.add(c)
        log.store(c)
    assert len(flushed) == 6 and len(made_digests(store)) == 8
    other = made.fork(1)
    side = other.add({1: 5, 2: 5})
    log.chain.add(side)
    log.store(side)
    assert len(flushed) == 6
    child = other.add({1: 5, 2: 5})
    log.chain.add(child)
    monkeypatch.setattr(log.chain, "is_ancestor", lambda record, head: True)  # its branch has won
    log.store(child)
    assert len(flushed) == 6 + 2 + 2, "the one that leads to it, too"


def made_digests(store: Store) -> list[Digest]:
    decoder = MessageDecoder(SPEC.run_id, OWNER.key)
    return [decoder.decode_certificate(data).record.digest for data in store.certificates()]


async def test_others_get_what_they_lack_and_strange_questions_an_error(store):
    made = maker(6)
    log = log_over(store)
    chain = log.chain
    for c in made.certificates:
        chain.add(c)
    have = made.certificates[1].record.digest
    reply = await log.answer(wire.ChainRequest(run=SPEC.run_id, locator=[b"z" * 32, have]))
    assert list(reply.certificates) == [encode_certificate(c) for c in made.certificates[2:]] and not reply.more
    assert len((await log.answer(wire.ChainRequest(run=SPEC.run_id))).certificates) == 6
    for wrong in (
        wire.ChainRequest(run=b"r" * 32),
        wire.ChainRequest(run=SPEC.run_id, locator=[b"short"]),
        wire.ChainRequest(run=SPEC.run_id, locator=[bytes(32)] * 300),
    ):
        with pytest.raises(MalformedError):
            await log.answer(wrong)


# -- certificates older than the tree -------------------------------------------------------------------------

FEW = ChainLimits(max_update_windows=64, max_members=8, max_records=4, min_main_records=3, max_side_records=2)


@pytest.fixture(params=["running", "restarted"])
def old(store, request) -> tuple[ChainStore, ChainMaker]:
    """Return a node whose tree has dropped records 0 to 7, and its chain of 12; of round 2 there was a rival, too."""
    log, made = log_over(store, FEW), maker(12, {1: 2, 2: 3})
    for i, c in enumerate(made.certificates):
        for each in (c, made.fork(2).add({7: 1})) if i == 2 else (c,):
            log.chain.add(each)
            log.store(each)
    if request.param == "restarted":
        log = log_over(store, FEW)
    assert log.chain.root == made.certificates[7].digest
    return log, made


async def given(log: ChainStore, *have: Digest) -> tuple[list[bytes], bool]:
    reply = await log.answer(wire.ChainRequest(run=SPEC.run_id, locator=have))
    return list(reply.certificates), reply.more


def encoded(made: ChainMaker, first: int, last: int) -> list[bytes]:
    return [encode_certificate(c) for c in made.certificates[first : last + 1]]


async def test_a_newcomer_gets_from_the_disk_what_the_tree_has_dropped(old):
    log, made = old
    genesis = log.chain.genesis
    assert await given(log, genesis) == (encoded(made, 0, 7), True)
    assert await given(log) == await given(log, Digest(b"?" * 32), genesis) == (encoded(made, 0, 7), True)
    assert await given(log, made.certificates[7].digest, genesis) == (encoded(made, 8, 11), False)


async def test_who_knows_none_of_the_records_gets_none_and_of_many_that_ask_at_once_some_are_sent_away(old):
    log, _ = old
    with pytest.raises(ChainError):
        await given(log, Digest(b"?" * 32))
    asked = [given(log, log.chain.genesis) for _ in range(3 * module.MAX_WAITING)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [a for a in answers if isinstance(a, ChainError)]
    assert len(refused) == 2 * module.MAX_WAITING and all("ask again" in str(e) for e in refused)
    assert (await given(log, log.chain.genesis))[0], "there is room again"


async def test_requests_that_are_taken_back_have_no_more_than_one_read_at_once(old, store, monkeypatch):
    """A thread reads on when its request is cancelled, and a stranger can cancel as often as it asks."""
    log, _ = old
    begun, may_end, real = threading.Semaphore(0), threading.Event(), store.certificate

    def certificate(*a):
        begun.release()
        assert may_end.wait(60)
        return real(*a)

    monkeypatch.setattr(store, "certificate", certificate)
    for _ in range(3):
        asked = asyncio.create_task(given(log, log.chain.genesis))
        for _ in range(2):  # its asker takes it back, and the deadline of calls passes
            await asyncio.sleep(0.05)
            asked.cancel()
    assert begun.acquire(timeout=60) and not begun.acquire(timeout=0.2), "the second waits for the first one's thread"
    may_end.set()
    monkeypatch.setattr(store, "certificate", real)
    assert (await given(log, log.chain.genesis))[0]


async def test_who_was_away_goes_on_from_an_old_record(old):
    log, made = old
    rival = made.fork(2).add({7: 1})
    have = rival.digest, made.certificates[4].digest, made.certificates[1].digest
    assert await given(log, *have) == (encoded(made, 5, 7), True)
    assert await given(log, made.certificates[9].digest, *have) == (encoded(made, 10, 11), False)


async def test_an_answer_from_the_disk_is_bounded(old, monkeypatch):
    log, made = old
    monkeypatch.setattr(module, "REPLY_CERTIFICATES", 3)
    assert await given(log, log.chain.genesis) == (encoded(made, 0, 2), True)
    monkeypatch.setattr(module, "REPLY_BYTES", len(encoded(made, 0, 0)[0]) * 5 // 2)
    assert await given(log, log.chain.genesis) == (encoded(made, 0, 1), True)
    monkeypatch.setattr(module, "REPLY_BYTES", 1)
    assert await given(log, log.chain.genesis) == (encoded(made, 0, 0), True)


@pytest.mark.parametrize("fault", ["missing", "damaged", "another"])
async def test_what_is_lost_on_disk_is_never_given_and_what_is_before_and_after_it_is(old, store, fault):
    log, made = old
    third, other = (store.folder / "chain" / f"{i:013d}-{made.certificates[i].digest.hex()}" for i in (3, 5))
    if fault == "missing":
        third.unlink()
    else:
        third.write_bytes(other.read_bytes()[fault == "damaged" :])
    genesis = log.chain.genesis
    assert await given(log, genesis) == (encoded(made, 0, 2), True)
    with pytest.raises(ChainError, match="round 3"):
        await given(log, made.certificates[2].digest, genesis)
    assert await given(log, made.certificates[3].digest, genesis) == (encoded(made, 4, 7), True)
    assert await log.certificates_after(genesis, 3) == made.certificates[:3]
    assert await log.certificates_after(genesis, 4) is None


async def test_a_disk_that_cannot_be_read_is_no_fault_of_the_one_who_asks(old, monkeypatch):
    log, _ = old

    def broken(*_):
        raise StoreError("reading the certificate of round 0: input/output error; check the disk")

    monkeypatch.setattr(Store, "certificate", broken)
    with pytest.raises(ChainError, match="round 0"):
        await given(log, log.chain.genesis)


async def test_a_newcomer_follows_the_whole_chain_from_one_member(old, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "REPLY_CERTIFICATES", 3)
    log, made = old
    chain, decoder = Chain(SPEC.run_id, SPEC.genesis.name, FEW), MessageDecoder(SPEC.run_id, OWNER.key)
    more = True
    while more:
        found, more = await given(log, *chain.locator())
        assert found and all([chain.add(decoder.decode_certificate(c)) for c in found])
    assert chain.head == made.head and chain.root == log.chain.root


@pytest.mark.parametrize("limit", [1, 3, 8, 9, 100])
async def test_the_coordinator_reads_the_chain_beyond_memory(old, limit):
    log, made = old
    for number, after in enumerate([log.chain.genesis, *(c.digest for c in made.certificates)]):
        found = await log.certificates_after(after, limit)
        assert found is not None and list(found) == made.certificates[number : number + limit]
    assert await log.certificates_after(made.fork(2).add({7: 1}).digest, limit) is None


async def test_a_newcomer_does_not_wait_for_all_that_a_coordinator_reads_for_others(old):
    log, made = old
    others = [asyncio.create_task(log.certificates_after(log.chain.genesis, 8)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await given(log, log.chain.genesis) == (encoded(made, 0, 7), True)
    assert sum(other.done() for other in others) <= 2
    assert await asyncio.gather(*others) == [made.certificates[:8]] * 20


# -- small files ----------------------------------------------------------------------------------------------

SNAPSHOT = Snapshot(
    "tiny", "ada", "ab", "training", 3, "", "", 3, 1, 2, 3, 4, 5.0, 6.0, 1, 2, 3, "cpu", 1, 0, {}, [], 0, ""
)


def test_a_snapshot_comes_back_and_rubbish_is_none(tmp_path):
    assert read_snapshot(tmp_path) is None
    write_snapshot(tmp_path, SNAPSHOT)
    assert read_snapshot(tmp_path) == SNAPSHOT
    told = replace(
        SNAPSHOT, mfu=0.43, memory_used=2, memory_whole=3, time_shares={"training": 1.0},
        last_update=UpdateFate(Round(2), False, "late"), downloads=[Download("the checkpoint", "ab", 1, 2, 3.0)],
    )  # fmt: skip
    write_snapshot(tmp_path, told)
    assert read_snapshot(tmp_path) == told
    text = (tmp_path / FILE).read_text()
    changes = ('"round": 3.0', '"round": 3, "round": 3', '"round": Infinity', '"round": true')
    for rubbish in ['{"run": 1}', "[" * 100_000, *(text.replace('"round": 3', new) for new in changes)]:
        assert rubbish != text
        (tmp_path / FILE).write_text(rubbish)
        assert read_snapshot(tmp_path) is None


def test_a_snapshot_that_cannot_be_written_leaves_no_draft(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peer.node.snapshot.os.replace", full)
    with pytest.raises(OSError):
        write_snapshot(tmp_path, SNAPSHOT)
    assert list(tmp_path.iterdir()) == []


def test_a_spec_that_cannot_be_written_for_the_trainer_is_a_clear_error(store, tmp_path):
    with pytest.raises(StoreError, match="spec.json"):
        start_message(SPEC, store, Identity(bytes(32)).key, NodeOptions(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("addresses", "private", "fetched"),
    [
        ((), False, True),
        (("https://a.example/x",), False, False),
        (("s3://bucket/x",), False, False),
        (("file:///srv/x", "az://container/x"), False, True),
        (("file:///srv/x",), True, False),
        (("file:///srv/x", "https://a.example/x"), False, False),
    ],
)
async def test_shards_come_from_the_swarm_if_no_address_may_be_used(store, tmp_path, addresses, private, fetched):
    data = SPEC.data.model_copy(update={"addresses": list(addresses)})
    spec = SPEC.model_copy(update={"data": data})
    asked: list[Digest] = []

    async def fetch_blob(digest: Digest, *_: object, **__: object) -> None:
        asked.append(digest)

    network = cast(Any, SimpleNamespace(fetch_blob=fetch_blob, providers=list, downloads=DownloadTable(store)))
    await fetch_assets(spec, store, network, private_data=private)
    assert asked[0] == spec.tokenizer.name
    assert asked[1:] == ([s.name for s in spec.data.train] if fetched else [])
    start = start_message(spec, store, Identity(bytes(32)).key, NodeOptions(tmp_path, private_data=private))
    assert start.private_data == private


@pytest.mark.parametrize("failure", [BlobFetchError(SPEC.tokenizer.name, "no provider is left", {}), NotInSwarm("-")])
async def test_the_runs_files_are_asked_for_again_of_those_that_are_there_then(store, monkeypatch, failure):
    monkeypatch.setattr(trainer_files, "AGAIN_SECONDS", 0.0)
    there, asked = iter((["who left"], ["who left"], ["who came"])), []

    async def fetch_blob(digest: Digest, size: int, providers: list[str], **_: object) -> None:
        asked.append(providers)
        if providers == ["who left"]:
            raise failure

    network = SimpleNamespace(
        fetch_blob=fetch_blob, providers=lambda: next(there, ["who came"]), downloads=DownloadTable(store)
    )
    await fetch_assets(SPEC, store, cast(Any, network), private_data=False)
    assert asked[:3] == [["who left"], ["who left"], ["who came"]]


async def test_files_that_never_come_end_the_peer_with_what_to_do(store, monkeypatch):
    monkeypatch.setattr(trainer_files, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(trainer_files, "fetch_seconds", lambda size: 0.1)

    async def fetch_blob(digest: Digest, *_: object, **__: object) -> None:
        raise BlobFetchError(digest, "nobody is known to hold it", {})

    network = SimpleNamespace(fetch_blob=fetch_blob, providers=list, downloads=DownloadTable(store))
    with pytest.raises(PeerError, match="tokenizer did not arrive .*nobody is known.* the same command goes on"):
        await fetch_assets(SPEC, store, cast(Any, network), private_data=False)


def test_a_trainer_may_have_files_within_the_limit_of_the_disk(tmp_path):
    found = []
    for limit in (10**6, 10**9):
        with Store(tmp_path / str(limit), limit) as store:
            found.append(start_message(SPEC, store, Identity(bytes(32)).key, NodeOptions(tmp_path)).disk)
    assert found[0] == 0 < found[1] < 5 * 10**8


def test_what_the_trainer_saves_takes_of_the_disk_and_not_of_the_limit(tmp_path, monkeypatch):
    """The limit is of the store, and saved states lie beside it."""
    free, saves = 10**9, to_save(SPEC, tmp_path / "trainer")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr("peer.node.trainer_files.to_save", lambda *_: saves)
    with Store(tmp_path / "store", 10**8) as store:
        usual = room_for_files(SPEC, store, NodeOptions(tmp_path))
        saves = 8 * 10**8
        assert 0 < usual == room_for_files(SPEC, store, NodeOptions(tmp_path))
        saves = 10**9
        assert room_for_files(SPEC, store, NodeOptions(tmp_path)) == 0


def test_who_reads_a_spec_while_it_is_written_again_reads_a_whole_one(tmp_path):
    path = trainer_files.write_spec(SPEC, tmp_path)
    with path.open("rb") as reader:
        assert trainer_files.write_spec(SPEC, tmp_path) == path
        assert (reader.read(), path.stat().st_ino != os.fstat(reader.fileno()).st_ino) == (SPEC.canonical(), True)

"""What a node keeps of the run on its disk: enough to go on and to serve others, and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peer.node import chainlog as chainlog_module
from peer.node.assets import start_message
from peer.node.chainlog import ChainLog
from peer.node.keeping import Keeping, assets, to_keep
from peer.node.snapshot import FILE, Snapshot, read_snapshot, write_snapshot
from peer.store import Store, StoreError
from peer.store.blobs import WholeBlob
from protocol.chain import Chain, ChainLimits, genesis_digest
from protocol.errors import ChainError, MalformedError
from protocol.identity import Identity
from protocol.ids import Digest
from protocol.merkle import blob_leaves, tree_hash
from protocol.message_codec import KeySigner, MessageDecoder, encode_certificate
from protocol.messages import Certificate, Finalization
from protocol.wire import swarm_pb2 as wire
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer, state
from tests.support.specs import OWNER

SPEC = make_spec(genesis={"digest": state(0).hex(), "size": 524_288})  # a checkpoint every 5 rounds
LIMITS = ChainLimits(max_update_windows=64, max_members=8)
KEEP = SPEC.checkpoint.keep


def maker(rounds: int, work=None) -> ChainMaker:
    chain = ChainMaker(SPEC)
    for _ in range(rounds):
        chain.add(work or {1: 2, 2: 3})
    return chain


def blobs(certificate: Certificate) -> set[Digest]:
    return {u.body.blob for u in certificate.record.body.updates}


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "store", 1 << 30) as s:
        yield s


def hold(store: Store, *digests: Digest) -> None:
    """As if these blobs were there: contents do not matter here."""
    for d in digests:
        path = store._file(d)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        store._states[d] = WholeBlob(1)


# -- what is kept ---------------------------------------------------------------------------------------------


def test_kept_are_the_last_checkpoints_and_every_update_since_the_oldest_of_them():
    chain = maker(5 * (KEEP + 3) + 2).certificates
    keep = to_keep(SPEC, chain, [], [])
    marks = [c for c in chain if c.record.body.round % 5 == 0][-(KEEP + 1) :]
    assert {c.record.body.base_state for c in marks} <= keep
    oldest = marks[0].record.body.round
    assert all((blobs(c) <= keep) == (c.record.body.round >= oldest) for c in chain)
    assert state(oldest - 5) not in keep and assets(SPEC) <= keep


def test_of_a_young_run_nothing_is_dropped():
    chain = maker(7).certificates
    assert set.union(*map(blobs, chain)) <= to_keep(SPEC, chain, [], [])


def test_of_a_round_that_was_reduced_its_parts_are_kept_and_not_its_updates():
    chain = maker(7).certificates
    parts = (Digest(b"p" * 32), Digest(b"q" * 32))
    reduced = [replace(c, parts=parts) if i == 5 else c for i, c in enumerate(chain)]
    keep = to_keep(SPEC, reduced, [], [])
    assert keep >= {*parts} and not keep & blobs(chain[5]) and blobs(chain[4]) <= keep


async def test_pruning_removes_the_rest_and_half_fetched_blobs_that_nobody_wants(store):
    made = maker(5 * (KEEP + 3))
    chain = Chain(SPEC.run_id, SPEC.genesis.name, LIMITS)
    for c in made.certificates:
        chain.add(c)
    everything = set.union(*map(blobs, made.certificates))
    hold(store, *everything, SPEC.genesis.name, state(5))
    data = b"half" * 100
    leaves = blob_leaves(data)
    store.receive(tree_hash(leaves), len(data), leaves).close()
    keeping = Keeping(SPEC, store, chain, peer(9).key)
    undecided = Digest(b"u" * 32)
    hold(store, undecided)
    gone = await keeping.prune([undecided])
    left = set(store.blobs())
    assert undecided in left and SPEC.genesis.name in left and state(5) not in left
    assert left == {d for d in [*everything, undecided, SPEC.genesis.name] if d not in gone} and gone
    assert store.used_bytes == len(left)  # the room of the half-fetched blob is given back


async def test_own_updates_stay_until_they_are_final_after_a_restart_too(store):
    made = maker(5 * (KEEP + 4))
    chain = Chain(SPEC.run_id, SPEC.genesis.name, LIMITS)
    for c in made.certificates:
        chain.add(c)
    me = peer(1).key
    old = made.certificates[1].record.body.updates
    mine = next(u.body.blob for u in old if u.author == me)
    theirs = next(u.body.blob for u in old if u.author != me)
    hold(store, mine, theirs)
    await Keeping(SPEC, store, chain, me).prune([])
    assert store.has(mine) and not store.has(theirs)
    record = made.certificates[1].record
    chain.add_final(KeySigner(OWNER).sign(Finalization(SPEC.run_id, record.body.round, record.digest)))
    await Keeping(SPEC, store, chain, me).prune([])
    assert not store.has(mine)


async def test_only_the_newest_states_that_no_record_names_stay(store):
    chain = Chain(SPEC.run_id, SPEC.genesis.name, LIMITS)
    keeping = Keeping(SPEC, store, chain, peer(1).key)
    states = [state(100 + i) for i in range(KEEP + 3)]
    hold(store, *states)
    for s in states:
        keeping.state(s)
        keeping.state(s)
    await keeping.prune([])
    assert set(store.blobs()) == set(states[-(KEEP + 1) :])


# -- the chain between disk and memory ------------------------------------------------------------------------


def log_over(store: Store) -> ChainLog:
    return ChainLog(store, MessageDecoder(SPEC.run_id, OWNER.key), SPEC)


def test_what_was_kept_is_there_after_a_restart_with_its_final(store):
    made = maker(6)
    log = log_over(store)
    log.load(LIMITS)
    for c in made.certificates:
        log.keep(c)
    record = made.certificates[2].record
    log.keep_final(KeySigner(OWNER).sign(Finalization(SPEC.run_id, record.body.round, record.digest)))
    chain = log_over(store).load(LIMITS)
    assert chain.head == made.head and chain.final is not None and chain.final.body.record == record.digest


def test_a_damaged_certificate_costs_what_is_built_on_it_and_one_line(store, caplog):
    made = maker(6)
    log = log_over(store)
    log.load(LIMITS)
    for c in made.certificates:
        log.keep(c)
    files = sorted((store.folder / "chain").iterdir())
    files[2].write_bytes(b"damaged" * 9)
    chain = log_over(store).load(LIMITS)
    assert chain.height(chain.head) == 2
    assert caplog.text.count("left out") == 1 and "3 stored certificates" in caplog.text


def test_certificates_of_branches_that_lost_leave_the_disk(store, monkeypatch):
    monkeypatch.setattr(chainlog_module, "SWEEP_EVERY", 10)
    log = log_over(store)
    chain = log.load(ChainLimits(max_update_windows=64, max_members=8, max_side=3))
    made = maker(5, {1: 10})
    for c in made.certificates:
        chain.add(c)
        log.keep(c)
    for i in range(15):  # a peer certifies with itself alone, as often as it likes
        c = made.fork(0).add({100 + i: 1})
        chain.add(c)
        log.keep(c)
    kept = set(made_digests(store))
    assert {c.record.digest for c in made.certificates} <= kept
    assert len(kept) <= 5 + 3
    assert log_over(store).load(LIMITS).head == made.head


def made_digests(store: Store) -> list[Digest]:
    decoder = MessageDecoder(SPEC.run_id, OWNER.key)
    return [decoder.certificate(data).record.digest for data in store.certificates()]


def test_others_get_what_they_lack_and_strange_questions_an_error(store):
    made = maker(6)
    log = log_over(store)
    with pytest.raises(ChainError):
        log.answer(wire.ChainRequest(run=SPEC.run_id))
    chain = log.load(LIMITS)
    for c in made.certificates:
        chain.add(c)
    have = made.certificates[1].record.digest
    reply = log.answer(wire.ChainRequest(run=SPEC.run_id, have=[b"z" * 32, have]))
    assert list(reply.certificates) == [encode_certificate(c) for c in made.certificates[2:]] and not reply.more
    assert len(log.answer(wire.ChainRequest(run=SPEC.run_id)).certificates) == 6
    for wrong in (
        wire.ChainRequest(run=b"r" * 32),
        wire.ChainRequest(run=SPEC.run_id, have=[b"short"]),
        wire.ChainRequest(run=SPEC.run_id, have=[bytes(32)] * 300),
    ):
        with pytest.raises(MalformedError):
            log.answer(wrong)


def test_the_chain_after_a_record_comes_in_pages_and_is_none_for_a_branch_that_lost(store):
    made = maker(6)
    log = log_over(store)
    assert log.after(genesis_digest(SPEC.run_id), 3) is None
    chain = log.load(LIMITS)
    for c in made.certificates:
        chain.add(c)
    lost = made.fork(2).add({3: 1})
    chain.add(lost)
    assert log.after(genesis_digest(SPEC.run_id), 4) == tuple(made.certificates[:4])
    assert log.after(made.certificates[3].record.digest, 4) == tuple(made.certificates[4:])
    assert log.after(made.head, 4) == ()
    assert log.after(lost.record.digest, 4) is None and log.after(Digest(b"z" * 32), 4) is None


# -- small files ----------------------------------------------------------------------------------------------

SNAPSHOT = Snapshot(
    "tiny", "ada", "ab", "training", 3, "", "", 3, 1, 2, 3, 4, 5.0, 6.0, 1, 2, 3, "cpu", 1, 0, {}, [], 0, ""
)


def test_a_snapshot_comes_back_and_rubbish_is_none(tmp_path):
    assert read_snapshot(tmp_path) is None
    write_snapshot(tmp_path, SNAPSHOT)
    assert read_snapshot(tmp_path) == SNAPSHOT
    told = replace(SNAPSHOT, mfu=0.43, memory_used=2, memory_whole=3, time_shares={"training": 1.0})
    write_snapshot(tmp_path, told)
    assert read_snapshot(tmp_path) == told
    (tmp_path / FILE).write_text('{"run": 1}')
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
        start_message(SPEC, store, tmp_path / "nowhere", Identity(bytes(32)).key, "cpu", 1)

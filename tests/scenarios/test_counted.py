"""The judge's counters: windows trained, accepted, lost and destroyed; a run's made past; bad chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.authoring.resolve import GENESIS, resolve
from coordinator.authoring.runfile import load_run
from peer.node.enrollment import run_folder
from peer.node.snapshot import Snapshot
from peer.swarm.transfer.blob_server import BlobServer
from peer.swarm.transfer.frames import BlobOp, BlobReply, BlobRequest, ReplyStatus
from protocol.codec import make_codec
from protocol.merkle import CHUNK, blob_digest
from protocol.outer import Contribution, apply
from protocol.state import state_digest, state_layout, tensors_from_checkpoint
from tests.e2e.chains import Branch, check_windows, longest_side, read_branch
from tests.e2e.world import write_run
from tests.scenarios.counted import Counted, Goodput
from tests.scenarios.faulty import Faulty
from tests.scenarios.history import make_history
from tests.scenarios.metered import Downloaded
from tests.support.coordinator_fakes import ChainMaker, make_spec, peer
from tests.support.specs import OWNER, digest

ADA = peer(1)
SHOWN = Snapshot(
    run="", name="", peer="", phase="training", round=0, head="", state="", state_round=0, accepted_tokens=0,
    total_tokens=0, round_tokens=0, target_tokens=0, loss=0.0, tokens_per_second=0.0, members=0, bytes_up=0,
    bytes_down=0, device="", own_updates=0, missed_updates=0, exchange_seconds={}, exchange_rounds=[],
    trainer_restarts=0, finished="",
)  # fmt: skip


def shown(trained: int, next_window: int, open_windows: int = 0, rate: float = 0.0) -> Snapshot:
    return replace(
        SHOWN, trained_windows=trained, next_window=next_window, open_windows=open_windows, tokens_per_second=rate
    )


def accepted(*windows: int) -> Branch:
    """Return a chain of rounds with these numbers of accepted windows of ada."""
    chain = ChainMaker(make_spec())
    return Branch(tuple(chain.add({1: w}) for w in windows), len(windows), None)


def test_what_is_not_decided_yet_is_neither_accepted_nor_lost():
    counted = Counted(16)
    counted.shown("ada", shown(100, 100, 20))
    assert counted.goodput("ada", ADA.key, accepted(40, 40)) == Goodput(80, 0, 0)


def test_what_a_power_cut_destroyed_is_trained_again_and_counts_as_lost():
    counted = Counted(16)
    counted.shown("ada", shown(100, 100, 20))
    counted.cut("ada", shown(100, 100, 20, rate=160.0), age=0.5)  # 5 windows more since it showed itself
    counted.starts("ada")
    counted.shown("ada", shown(0, 80))
    counted.shown("ada", shown(30, 110, 30))
    assert counted.goodput("ada", ADA.key, accepted(40, 40)) == Goodput(80, 25, 25)
    assert counted.goodput("ada", ADA.key, accepted(40, 40)).share == 80 / 105


def test_windows_that_the_chain_passed_over_are_lost():
    spec = make_spec()
    chain = ChainMaker(spec)
    first = chain.add({1: 10})
    chain.next_windows[ADA.key] = 20
    counted = Counted(16)
    counted.shown("ada", shown(30, 30))
    found = counted.goodput("ada", ADA.key, Branch((first, chain.add({1: 10})), 2, None))
    assert found == Goodput(20, 10, 0)
    assert "66.7%" in str(found) and "power" not in str(found)


def test_who_was_never_seen_has_done_nothing():
    assert Counted(16).goodput("ada", ADA.key, accepted(1)).lost == 0


def test_the_longest_branch_that_lost_is_the_one_with_most_records_in_a_row():
    def tree(*pairs: tuple[str, str]):
        return {digest(child): digest(parent) for child, parent in pairs}

    main = {digest("a"), digest("b"), digest("c")}
    path = (("a", "genesis"), ("b", "a"), ("c", "b"))
    assert longest_side(tree(*path), main) == 0
    assert longest_side(tree(*path, ("x", "a"), ("y", "b")), main) == 1
    assert longest_side(tree(*path, ("x", "a"), ("y", "b"), ("z", "x")), main) == 2


def test_a_download_is_told_with_its_share_of_the_line():
    told = str(Downloaded(8_000_000, 18.0, 0.89, 1.06, ("ada", "alan")))
    assert told == "8.0 MB in 18.0 s, 89% of the line used, 1.06 times its size came, from ada alan"


def test_a_made_past_is_a_chain_whose_states_are_what_its_updates_give(tmp_path: Path):
    run = resolve(load_run(write_run(tmp_path / "run")), tmp_path / "work", OWNER)
    genesis, spec = (tmp_path / "work" / GENESIS).read_bytes(), run.spec
    homes = {name: tmp_path / name for name in ("ada", "alan")}
    rounds = 2 * spec.checkpoint.every
    history = make_history(spec, run.spec_envelope, genesis, OWNER, homes, rounds)
    branches = [read_branch(spec, run_folder(home, spec.run_id) / "store") for home in homes.values()]
    assert branches[0] == branches[1] and branches[0].height == rounds
    check_windows(branches[0])
    layout, codec = state_layout(spec.model.layout, spec.outer), make_codec(spec.codec, spec.model.layout)
    state = tensors_from_checkpoint(layout, genesis)
    for certificate in branches[0].path:
        assert certificate.record.body.base_state == state_digest(layout, state, 1)
        updates = [(u.author, u.body.windows, history.blobs[u.body.blob]) for u in certificate.record.body.updates]
        apply(state, [Contribution(*u) for u in updates], codec, spec.outer)
    last = state_digest(layout, state, 1)
    store = run_folder(homes["alan"], spec.run_id) / "store" / "blobs"
    assert blob_digest((store / last.hex()[:2] / last.hex()).read_bytes()) == last


@pytest.mark.parametrize(
    ("op", "length", "wrong"), [(BlobOp.CHUNK, CHUNK, 1), (BlobOp.CHUNK, 100, 0), (BlobOp.LEAVES, CHUNK, 0)]
)
def test_a_faulty_peer_serves_full_chunks_with_one_wrong_bit(monkeypatch, op: BlobOp, length: int, wrong: int):
    whole = bytes(length)
    monkeypatch.setattr(BlobServer, "look_up", lambda self, request: BlobReply(ReplyStatus.OK, whole))
    sent = Faulty.__new__(Faulty).look_up(BlobRequest(op, digest("a state"), 0)).data
    assert sum((a ^ b).bit_count() for a, b in zip(sent, whole, strict=True)) == wrong

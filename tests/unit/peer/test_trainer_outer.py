"""The outer side's promises, on tensors alone: same bits everywhere, nothing lost, missed work comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from peer.training.offload import Offload
from peer.training.outer_state import OuterState
from protocol.codec import make_codec
from protocol.errors import CodecError
from protocol.ids import PeerKey, sha256
from protocol.layout import REFERENCE_NORMS, Layout
from protocol.outer import Contribution
from protocol.spec import CodecSpec, OuterSpec
from protocol.state import state_digest, state_layout
from tests.support.mapped import is_in_a_file_of

LAYOUT = Layout.of({"a.weight": (96, 100), "b.bias": (70,), "c.weight": (3, 4096)})
KEYS = [PeerKey(sha256(bytes([n]))) for n in range(4)]
CODECS = [
    CodecSpec(kind="sparse", k=64),
    CodecSpec(kind="sparse", k=4096),
    CodecSpec(kind="sign"),
    CodecSpec(kind="int8"),
    CodecSpec(kind="none"),
]


def noise(seed: int, scale: float = 0.01) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=made) * scale for t in LAYOUT.tensors}


@pytest.fixture(params=[0, 1, 2], ids=["beside", "offloaded", "in files"], autouse=True)
def offloaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep what is used once a round beside the model, or elsewhere, from where it visits in several pieces."""
    monkeypatch.setattr("tests.unit.peer.test_trainer_outer.OFFLOAD", homes(tmp_path)[request.param])
    monkeypatch.setattr("peer.training.offload.PIECE", 4096)


def homes(folder: Path) -> list[Offload]:
    cpu = torch.device("cpu")
    return [Offload(cpu), Offload(cpu, True), Offload(cpu, True, folder)]


OFFLOAD = Offload(torch.device("cpu"))


def side(
    spec: CodecSpec,
    *,
    beta: float = 1.0,
    outer: OuterSpec | None = None,
    start: int = 99,
    offload: Offload | None = None,
    replayable: bool = False,
) -> OuterState:
    """Return a peer's outer state with the base made from `start`."""
    outer = outer or OuterSpec()
    local = {t.name: torch.zeros(t.shape) for t in LAYOUT.tensors}
    made = OuterState(local, make_codec(spec, LAYOUT), beta, outer, offload or OFFLOAD, replayable=replayable)
    state = noise(start, 1.0)
    for t in state_layout(LAYOUT, outer).tensors:
        state.setdefault(t.name, torch.zeros(t.shape))
    load(made, state)
    return made


def load(peer: OuterState, state: dict[str, Tensor]) -> None:
    peer.base = {name: peer.offload.place(tensor) for name, tensor in state.items()}
    peer.rebase()


def learn(peer: OuterState, change: dict[str, Tensor]) -> None:
    for name, tensor in peer.local.items():
        tensor.add_(change[name])


def apply(peer: OuterState, contributions: list[Contribution]) -> None:
    peer.advance(contributions)
    peer.rebase()


def digest(peer: OuterState):
    assert peer.base is not None
    return state_digest(state_layout(LAYOUT, peer.spec), peer.base)


def dense(peer: OuterState, blob: bytes) -> dict[str, Tensor]:
    into = {t.name: torch.zeros(t.shape) for t in LAYOUT.tensors}
    peer.codec.add_to(blob, into)
    return into


@pytest.mark.parametrize("spec", CODECS, ids=lambda s: f"{s.kind}-{s.k}")
@pytest.mark.parametrize("optimizer", ["plain", "nesterov"])
def test_peers_that_apply_the_same_rounds_hold_the_same_bits_whatever_they_learn(spec, optimizer):
    outer = OuterSpec(optimizer=optimizer, lr=0.7)
    peers = [side(spec, beta=0.95, outer=outer) for _ in range(3)]
    for r in range(4):
        blobs = []
        for n, peer in enumerate(peers):
            learn(peer, noise(10 * r + n))
            blobs.append(Contribution(KEYS[n], n + 1, peer.announce()))
            learn(peer, noise(1000 + 10 * r + n))  # goes on while the updates travel
        for n, peer in enumerate(peers):
            apply(peer, blobs[n:] + blobs[:n])
        assert len({digest(p) for p in peers}) == 1
    assert digest(peers[0]) != digest(side(spec, outer=outer))


def test_a_rebase_moves_what_was_learnt_since_the_announcement_onto_the_new_state():
    peer = side(CodecSpec(kind="sparse", k=64))
    learn(peer, noise(1))
    blob = peer.announce()
    later = noise(2)
    learn(peer, later)
    apply(peer, [Contribution(KEYS[0], 1, blob), Contribution(KEYS[1], 1, blob)])
    assert peer.base is not None
    for name, tensor in peer.local.items():
        torch.testing.assert_close(tensor, peer.base[name] + later[name], atol=1e-6, rtol=0)
        torch.testing.assert_close(dict(peer.progress())[name], later[name], atol=1e-6, rtol=0)


def test_without_progress_the_model_is_the_state_bit_for_bit():
    peer = side(CodecSpec(kind="sparse", k=64))
    learn(peer, noise(1))
    apply(peer, [Contribution(KEYS[0], 1, peer.announce())])
    assert peer.base is not None
    assert all(torch.equal(peer.local[n], peer.base[n]) for n in peer.local)


def test_work_that_is_not_announced_in_a_round_is_carried_over():
    slow, fast = side(CodecSpec(kind="none")), side(CodecSpec(kind="none"))
    done = noise(1)
    learn(slow, done)
    learn(fast, noise(2))
    apply(slow, [Contribution(KEYS[1], 1, fast.announce())])
    carried = dense(slow, slow.announce())
    for name in done:
        torch.testing.assert_close(carried[name], -done[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", CODECS, ids=lambda s: f"{s.kind}-{s.k}")
def test_a_missed_update_returns_to_the_feedback(spec):
    peer = side(spec, beta=0.9)
    learn(peer, noise(3))
    learnt = {n: peer.anchor[n] - t for n, t in peer.local.items()}
    blob = peer.announce()
    peer.add_back(blob)
    for name, e in peer.feedback.items():
        torch.testing.assert_close(e, learnt[name], atol=1e-8, rtol=1e-6)
    peer.subtract(blob, 1.0)  # accepted after all
    again = side(spec, beta=0.9)
    learn(again, noise(3))
    again.announce()
    for name, e in peer.feedback.items():
        torch.testing.assert_close(e, again.feedback[name], atol=1e-8, rtol=1e-6)


def arrived(spec: CodecSpec, misses: int) -> float:
    """Return the share of one round's work, by projection, that 40 rounds bring into the state."""
    peer = side(spec, beta=spec.beta)
    work = noise(3)
    learn(peer, work)
    sent = {n: torch.zeros_like(t) for n, t in work.items()}
    for r in range(40):
        blob = peer.announce()
        if r < misses:
            peer.add_back(blob)
            continue
        for n, t in dense(peer, blob).items():
            sent[n] -= t
    both = sum(float((sent[n] * t).sum()) for n, t in work.items())
    return both / sum(float(t.square().sum()) for t in work.values())


@pytest.mark.parametrize(
    ("spec", "at_once"),
    [(CodecSpec(kind="sign", beta=0.5), 0.75), (CodecSpec(kind="sparse", k=64, beta=0.95), 0.64)],
    ids=["sign", "sparse"],
)
def test_of_a_missed_update_the_share_beta_arrives(spec, at_once):
    assert arrived(spec, 0) == pytest.approx(at_once, abs=0.01)
    assert arrived(spec, 1) == pytest.approx(at_once * spec.beta, abs=0.01)


def test_a_missed_raw_update_returns_exactly():
    peer = side(CodecSpec(kind="none"))
    learn(peer, noise(3))
    learnt = {n: peer.anchor[n] - t for n, t in peer.local.items()}
    peer.add_back(peer.announce())
    assert all(torch.equal(peer.feedback[n], learnt[n]) for n in learnt)


@pytest.mark.parametrize("spec", CODECS, ids=lambda s: f"{s.kind}-{s.k}")
def test_an_update_that_was_taken_back_decays_nothing(spec):
    """However often: what it sent, and what it kept, is what would have been without that, and stays on a rebase."""
    peer, calm = side(spec, beta=0.5), side(spec, beta=0.5)
    for each in (peer, calm):
        learn(each, noise(3))
        each.announce()
        learn(each, noise(4))
    for _ in range(4):
        peer.take_back(peer.announce())
        peer.rebase()
    sums = []
    for each in (peer, calm):
        sent = dense(each, each.announce())
        sums.append({n: each.feedback[n] + t for n, t in sent.items()})
    for n, t in sums[1].items():
        torch.testing.assert_close(sums[0][n], t, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", CODECS, ids=lambda s: f"{s.kind}-{s.k}")
def test_nothing_is_lost_with_beta_one(spec):
    """Accepted + feedback + not yet announced is all that was ever learnt, through misses and training in between."""
    peer = side(spec)
    learnt = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in LAYOUT.tensors}
    accepted = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in LAYOUT.tensors}
    for r in range(12):
        for seed, announce_after in ((2 * r, True), (2 * r + 1, False)):
            change = noise(seed)
            before = {n: t.clone() for n, t in peer.local.items()}
            learn(peer, change)
            for n in learnt:  # as it was in fp32
                learnt[n] += before[n].double() - peer.local[n].double()
            if announce_after:
                blob = peer.announce()
        if r % 3 == 1:
            apply(peer, [Contribution(KEYS[1], 1, dense_blob(spec, 100 + r))])
            peer.add_back(blob)
        else:
            apply(peer, [Contribution(KEYS[0], 2, blob), Contribution(KEYS[1], 1, dense_blob(spec, 100 + r))])
            for n, t in dense(peer, blob).items():
                accepted[n] += t.double()
    for n, progress in peer.progress():
        total = accepted[n] + peer.feedback[n].double() - progress.double()
        torch.testing.assert_close(total, learnt[n], atol=2e-5, rtol=0)
    assert max(float(t.abs().max()) for t in learnt.values()) > 0.05  # it had something to lose


def dense_blob(spec: CodecSpec, seed: int) -> bytes:
    return bytes(make_codec(spec, LAYOUT).encode(noise(seed)))


def test_another_branchs_state_takes_progress_and_feedback_along():
    peer = side(CodecSpec(kind="sparse", k=64))
    learn(peer, noise(1))
    peer.announce()
    later = noise(2)
    learn(peer, later)
    feedback = {n: t.clone() for n, t in peer.feedback.items()}
    other = noise(55, 1.0)
    load(peer, {n: t.clone() for n, t in other.items()})
    for name, tensor in peer.local.items():
        torch.testing.assert_close(tensor, other[name] + later[name], atol=1e-6, rtol=0)
        assert torch.equal(peer.feedback[name], feedback[name])


def test_a_round_that_cannot_be_applied_leaves_no_state_and_loses_no_work():
    peer = side(CodecSpec(kind="sparse", k=64))
    learn(peer, noise(1))
    blob = peer.announce()
    learn(peer, noise(2))
    before = dict(peer.progress())
    with pytest.raises(CodecError):
        apply(peer, [Contribution(KEYS[0], 1, blob), Contribution(KEYS[1], 1, b"rubbish")])
    assert peer.base is None
    load(peer, noise(99, 1.0))
    for name, tensor in peer.progress():
        torch.testing.assert_close(tensor, before[name], atol=1e-6, rtol=0)


def test_what_is_not_finite_is_never_announced():
    peer = side(CodecSpec(kind="sparse", k=64))
    next(iter(peer.local.values())).view(-1)[5] = float("nan")
    with pytest.raises(CodecError):
        peer.announce()


@pytest.mark.parametrize("spec", CODECS, ids=lambda s: f"{s.kind}-{s.k}")
def test_where_tensors_lie_changes_no_bit(spec, tmp_path):
    outer = OuterSpec(optimizer="nesterov", lr=0.7)
    beside, *others = peers = [side(spec, beta=0.5, outer=outer, offload=home) for home in homes(tmp_path)]
    assert others[1].base is not None
    for held in (others[1].base, others[1].anchor, others[1].feedback):
        assert all(is_in_a_file_of(tmp_path, tensor) for tensor in held.values())
    for r in range(3):
        blobs = []
        for peer in peers:
            learn(peer, noise(r))
            blobs.append(bytes(peer.announce()))
            learn(peer, noise(100 + r))
            peer.add_back(blobs[0])
            peer.subtract(blobs[0], 0.5)
            apply(peer, [Contribution(KEYS[0], 1, blobs[0]), Contribution(KEYS[1], 3, blobs[-1])])
        assert len(set(blobs)) == len({digest(peer) for peer in peers}) == 1
        for away in others:
            for name, tensor in beside.local.items():
                assert torch.equal(tensor, away.local[name]) and torch.equal(beside.feedback[name], away.feedback[name])
                assert torch.equal(dict(beside.progress())[name], dict(away.progress())[name])


def test_where_tensors_lie_changes_no_bit_of_a_replayable_update(tmp_path):
    spec = CodecSpec(kind="sign", beta=0)
    beside, *others = peers = [side(spec, beta=0, offload=home, replayable=True) for home in homes(tmp_path)]
    for peer in peers:
        learn(peer, noise(1))
    (blob,) = {bytes(peer.announce()) for peer in peers}
    for own in (blob, None):
        for peer in peers:
            assert peer.base is not None
            peer.base[REFERENCE_NORMS].fill_(0.1)  # so that some tensors are clipped, and others are not
            peer.begin_again(own)
        for away in others:
            for n, t in beside.local.items():
                assert torch.equal(t, away.local[n]) and torch.equal(t, away.anchor[n])

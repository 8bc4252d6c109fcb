"""Both checks of an audit on a tiny run: an honest update passes, and each fake is found with a margin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.auditor.audit import audit
from peer.auditor.job import ClaimedUpdate, Rebase
from peer.auditor.loss_check import GAIN, QUARTER, Gains, LossCheck, t_value, threshold_beside
from peer.auditor.replay import Replayed, compare
from peer.errors import AuditError
from peer.training.inner_optimizer import InnerOptimizer
from protocol.assignment import windows_of
from protocol.codec import make_codec
from protocol.errors import CodecError, MalformedError
from protocol.ids import Digest, PeerKey
from protocol.layout import BLOCK, Layout
from protocol.spec import AdapterSettings, CodecSpec
from tests.support import audit_world
from tests.support.audit_world import AUTHOR, CPU, OTHER, Audited, claimed, passed, scores
from tests.support.local_trainer import closed  # noqa: F401 - a fixture
from tests.support.long_cases import long_cases
from tests.support.seen_operations import SeenOperations

FOUND_BY_REPLAY = {
    "noise", "copy", "flipped", "huge", "tiny", "tenth_flipped", "half", "other_windows", "fresh", "stale",
}  # fmt: skip
FOUND_BY_LOSS = {"noise", "copy", "flipped", "half", "other_windows"}


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> Audited:
    torch.set_num_threads(1)
    return audit_world.make(tmp_path_factory.mktemp("audited"))


@pytest.fixture(scope="module")
def files(audited: Audited, tmp_path_factory):
    return audit_world.fakes(audited, tmp_path_factory.mktemp("fakes"))


def test_a_replay_of_an_honest_update_gives_the_same_bits(audited):
    for author in (AUTHOR, OTHER):
        found = scores(audited.job(of=author))
        assert (found["signs"].value, found["scale"].value) == (1.0, 1.0) and passed(found)


def test_an_honest_update_of_a_gpu_passes_on_a_cpu(audited, tmp_path, monkeypatch):
    # A longer update would differ more: 6% of signs after 48 steps.
    monkeypatch.setattr("peer.auditor.replay.SIGNS", 0.995)
    file = tmp_path / "bf16.blob"
    file.write_bytes(audit_world.in_bf16(audited))
    scale, signs = compare(
        audited.codec, file.read_bytes(), [Replayed(audited.made[AUTHOR].blob_path.read_bytes(), {})]
    )
    assert not passed({"scale": scale, "signs": signs})
    with SeenOperations() as operations:
        found = scores(audited.job(blob=file))
    assert passed(found) and found["signs"].value == 1.0 and 0.95 < found["signs"].threshold < 0.995
    assert operations.types_of("mm") == {frozenset({torch.float32})}, "in bf16 many CPUs take 20 times as long"


def test_replays_that_differ_by_rounding_say_how_much_an_honest_update_may_differ(audited):
    codec, honest = audited.codec, audited.made[AUTHOR].blob_path.read_bytes()

    def flipped(every: int, at: int) -> bytes:
        values = {t.name: torch.zeros(t.shape) for t in codec.layout.tensors}
        codec.add_to(honest, values)
        for tensor in values.values():
            tensor.view(-1)[at::every] *= -1
        return bytes(codec.encode(values))

    def is_passed(announced: bytes, *replays: bytes) -> bool:
        return passed({s.name: s for s in compare(codec, announced, [Replayed(r, {}) for r in replays])})

    other = flipped(20, 1)  # 5% apart, so 7.5% are allowed
    assert not is_passed(flipped(14, 0), honest)
    assert is_passed(flipped(14, 0), honest, other) and not is_passed(flipped(9, 0), honest, other)
    with pytest.raises(AuditError, match="too far apart"):
        compare(codec, honest, [Replayed(honest, {}), Replayed(flipped(4, 0), {})])
    # 25% apart: an honest update may differ in 37.5%, and noise differs in half.
    assert not is_passed(flipped(2, 0), honest, flipped(4, 1))


def test_steps_that_are_not_finite_are_no_work(audited, tmp_path, monkeypatch):
    """An author whose own update before overflows the model leaves a replay no finite step, and announces zeros."""
    codec, step = audited.codec, InnerOptimizer.forward_backward

    def overflowing(self: InnerOptimizer, *args: Any) -> Any:
        made = step(self, *args)
        return None if made is None else replace(made, is_finite=False)

    monkeypatch.setattr(InnerOptimizer, "forward_backward", overflowing)
    zeros = {t.name: torch.zeros(t.shape) for t in codec.layout.tensors}
    file = tmp_path / "zeros.blob"
    file.write_bytes(codec.encode(zeros))
    assert not passed(scores(audited.job(blob=file)))


@pytest.mark.parametrize(("every", "passes"), [(4, True), (3, False)])
def test_steps_without_a_gradient_are_no_work_also_when_they_are_not_in_a_row(
    audited, tmp_path, monkeypatch, every, passes
):
    step, made = InnerOptimizer.forward_backward, list[Any]()

    def sometimes(self: InnerOptimizer, *args: Any) -> Any:
        made.append(step(self, *args))
        return replace(made[-1], has_gradient=len(made) % every != 0)

    monkeypatch.setattr(InnerOptimizer, "forward_backward", sometimes)
    job, file = audited.job(), tmp_path / "replayed.blob"
    file.write_bytes(audit_world.replayed(audited, job, job.update))
    made.clear()
    assert passed(scores(audited.job(blob=file))) is passes


@pytest.mark.parametrize(
    ("reversed_blocks", "large", "failing"),
    [(1, 1, {"scale", "signs"}), (2, 2, {"scale", "signs"}), (0, 1, {"scale"}), (2, 0, set())],
)
def test_large_blocks_of_an_update_count_as_much_as_they_move(reversed_blocks, large, failing):
    """Of 100 blocks a few hold all of the norm, and the norm is right. Nearly all signs are."""
    codec = make_codec(CodecSpec(kind="sign"), Layout.of({"a": (100 * BLOCK,)}))
    honest = torch.randn(100, BLOCK, generator=torch.Generator().manual_seed(1))
    fake = honest.clone()
    fake[:reversed_blocks] *= -1
    if large:
        fake[large:] *= 1e-9
        fake *= honest.norm() / fake.norm()
    blobs = [bytes(codec.encode({"a": values.flatten()})) for values in (fake, honest)]
    scores = compare(codec, blobs[0], [Replayed(blobs[1], {})])
    assert {s.name for s in scores if s.value < s.threshold} == failing


def test_rows_whose_tokens_did_not_come_agree_for_nothing(tmp_path):
    """Of 4,096 tokens 64 come. A fake has random signs where there was a gradient, and decays the other rows."""
    audited = audit_world.make(tmp_path, vocabulary=4096)
    codec, honest = audited.codec, audited.made[AUTHOR].blob_path.read_bytes()
    name, chance = "model.embed_tokens.weight", torch.Generator().manual_seed(3)
    values = {t.name: torch.zeros(t.shape) for t in codec.layout.tensors}
    codec.add_to(honest, values)
    rest = values[name][64:].clone()
    for tensor in values.values():
        tensor *= torch.randint(0, 2, tensor.shape, generator=chance) * 2 - 1
    values[name][64:] = rest
    file = tmp_path / "fake.blob"
    file.write_bytes(codec.encode(values))
    _, plain = compare(codec, file.read_bytes(), [Replayed(honest, {})])
    found = scores(audited.job(blob=file))
    print(f"{plain.value:.3f} of all signs agree, the score is {found['signs'].value:.3f}")
    assert plain.value > 0.6 and found["signs"].value < 0.52 and not passed(found)
    assert scores(audited.job())["signs"].value == 1.0


def test_other_signs_in_rows_whose_tokens_did_not_come_count_against_an_update(tmp_path):
    audited = audit_world.make(tmp_path, vocabulary=256)
    codec, honest = audited.codec, audited.made[AUTHOR].blob_path.read_bytes()
    values = {t.name: torch.zeros(t.shape) for t in codec.layout.tensors}
    codec.add_to(honest, values)
    values["model.embed_tokens.weight"][64:] *= -1
    file = tmp_path / "reversed.blob"
    file.write_bytes(codec.encode(values))
    found = scores(audited.job(blob=file))
    assert found["signs"].value == pytest.approx(1 - 192 * 32 / codec.layout.numel, abs=1e-3) and not passed(found)


def test_an_update_that_was_trained_on_one_state_is_replayed_without_a_rebase(audited):
    late = audited.loaded_at_once
    assert late.rebase_window == late.first_window == 0
    job = replace(audited.job("loss"), check="replay", update=claimed(late, 3))
    found = scores(job)
    assert found["signs"].value == 1.0


@pytest.mark.parametrize("records", [0, 1])
def test_an_authors_own_update_before_cannot_make_a_replay_that_trains_nothing(audited, tmp_path, records):
    """Its matrices have huge scales, which the run clips. The next one claims to be trained beside it, and was not."""
    job = audit_world.after_huge_update(audited, tmp_path, records)
    honest, fake = job.update, tmp_path / "fake.blob"
    assert passed(scores(job))
    moved = replace(honest, first_window=500, rebase_window=500 + honest.windows, end_window=500 + honest.windows)
    fake.write_bytes(audit_world.replayed(audited, job, moved))
    found = scores(replace(job, update=replace(honest, blob=fake)))
    print({name: round(score.value, 3) for name, score in found.items()})
    assert not passed(found) and found["signs"].value < 0.9


@pytest.mark.parametrize("fake", sorted(FOUND_BY_REPLAY))
def test_a_replay_finds_each_fake(audited, files, fake):
    assert files.keys() == FOUND_BY_REPLAY
    found = scores(audited.job(blob=files[fake]))
    print(fake, {name: round(score.value, 3) for name, score in found.items()})
    assert not passed(found)
    # Far from the thresholds: devices add numbers in other orders.
    assert found["signs"].value < 0.91 or found["scale"].value < 0.5


@pytest.mark.parametrize("dtype", ["nf4", *long_cases("bfloat16")])
def test_the_update_of_an_adapter_is_replayed_on_its_frozen_base(tmp_path, dtype):
    audited = audit_world.make(tmp_path, adapter=AdapterSettings(rank=4, alpha=8, dtype=dtype))
    assert passed(scores(audited.job())) and passed(scores(audited.job("loss")))
    fake = tmp_path / "flipped.blob"
    values = {t.name: torch.zeros(t.shape) for t in audited.codec.layout.tensors}
    audited.codec.add_to(audited.made[AUTHOR].blob_path.read_bytes(), values)
    fake.write_bytes(bytes(audited.codec.encode({n: -v for n, v in values.items()})))
    assert not passed(scores(audited.job(blob=fake)))
    with pytest.raises(AuditError, match="frozen base model is not here"):
        scores(replace(audited.job(), base=None))


def test_a_loss_check_passes_honest_updates_with_a_margin(audited):
    for author in (AUTHOR, OTHER):
        found = scores(audited.job("loss", of=author))
        print({name: round(score.value, 2) for name, score in found.items()})
        assert found["gain"].value > 2 * GAIN and found["quarter"].value > 2 * QUARTER


@pytest.mark.parametrize("fake", sorted(FOUND_BY_LOSS))
def test_a_loss_check_finds_what_was_not_trained_on_its_windows(audited, files, fake):
    for own in (False, True):
        found = scores(audited.job("loss", blob=files[fake], own=own))
        print(fake, {name: round(score.value, 2) for name, score in found.items()})
        assert not passed(found)


def test_an_update_that_fails_is_measured_against_the_auditors_own(audited, files):
    # The auditor's own update is noise, too: it cannot tell that the other is worse.
    job = replace(audited.job("loss", blob=files["noise"]), own=claimed(audited.made[OTHER], OTHER, files["flipped"]))
    found = scores(job)
    assert found["gain"].threshold < 0 and found["quarter"].threshold < 0 and passed(found)
    better = scores(audited.job("loss", blob=files["noise"], own=True))
    assert (better["gain"].threshold, better["quarter"].threshold) == (GAIN, QUARTER)


@pytest.mark.parametrize(
    ("own", "threshold"), [(9.0, 3.0), (5.0, 2.5), (3.0, 1.0), (1.0, -1.0), (-4.0, -2.0), (-1e6, -2.0)]
)
def test_a_threshold_beside_the_auditors_own_update_allows_for_chance_and_no_more(own, threshold):
    assert threshold_beside(GAIN, own) == threshold


def test_thresholds_stay_where_an_update_passes(audited):
    found = scores(audited.job("loss", own=True))
    assert (found["gain"].threshold, found["quarter"].threshold) == (GAIN, QUARTER)


class Gaining:
    """A run of 10,000 windows. A blob is a number: what the update gains on each window that it claims, +- 1."""

    seed, total = 7, 10_000

    def __init__(self, update: ClaimedUpdate):
        assigned = windows_of(self.seed, update.author, update.first_window, update.windows, self.total)
        self.claimed = set(assigned.tolist())
        self.noise = torch.randn(self.total, generator=torch.Generator().manual_seed(1))
        self.gain, self.measured = 0.0, list[int]()
        self.outer = self.inner = self

    def begin_again(self, blob: bytes | None, *, clips: bool = True) -> None:
        self.noise_now, self.gain = (0.0, 0.0) if blob is None else (1.0, float(blob))

    def read(self, windows: list[int]) -> torch.Tensor:
        return torch.tensor(windows)

    def window_losses(self, windows: torch.Tensor) -> torch.Tensor:
        self.measured.append(len(windows))
        claimed = torch.tensor([float(w in self.claimed) for w in windows.tolist()])
        return -self.gain * claimed - self.noise_now * self.noise[windows]


@pytest.mark.parametrize(
    ("gain", "own", "passes", "measured"),
    [(2, 2, True, [64]), (0.8, 2, True, [64, 64]), (0, 2, False, [64, 64, 128]), (0, 0, True, [64, 64, 128])],
)
def test_an_update_that_passes_clearly_at_a_first_look_is_measured_on_half_of_the_windows(gain, own, passes, measured):
    update, mine = (ClaimedUpdate(PeerKey(key * 32), 0, 0, 400, Path()) for key in (b"a", b"b"))
    run: Any = Gaining(update)
    run.claimed |= Gaining(mine).claimed
    found = LossCheck(run, b"seed", run, run).scores(update, str(gain).encode(), (mine, str(own).encode()))
    print([(score.name, round(score.value, 2), round(score.threshold, 2)) for score in found])
    assert all(s.value >= s.threshold for s in found) is passes
    assert run.measured == [n for n in measured for _ in ("before", "after")]


@pytest.mark.parametrize(("claimed", "own"), [(400, 64), (20, 20)])
def test_an_auditors_own_update_of_as_many_windows_as_are_compared_counts(claimed, own):
    update = ClaimedUpdate(PeerKey(b"a" * 32), 0, 0, claimed, Path())
    mine = ClaimedUpdate(PeerKey(b"b" * 32), 0, 0, own, Path())
    run: Any = Gaining(update)
    found = LossCheck(run, b"seed", run, run).scores(update, b"0", (mine, b"0"))
    assert [s.threshold for s in found] != [GAIN, QUARTER]


@pytest.mark.parametrize("windows", [4, 63])
def test_an_auditors_own_update_of_too_few_windows_excuses_no_other(windows):
    update = ClaimedUpdate(PeerKey(b"a" * 32), 0, 0, 400, Path())
    mine = ClaimedUpdate(PeerKey(b"b" * 32), 0, 0, windows, Path())
    run: Any = Gaining(update)
    found = LossCheck(run, b"seed", run, run).scores(update, b"0", (mine, b"0"))
    assert [s.threshold for s in found] == [GAIN, QUARTER] and not any(s.value >= s.threshold for s in found)


def test_a_t_value_is_the_difference_in_standard_errors():
    assert t_value([3.0, 5.0], [1.0, 1.0]) == pytest.approx(3.0)
    assert t_value([1.0, 1.0], [1.0, 1.0]) == 0.0
    assert t_value([2.0, 2.0], [1.0, 1.0]) == 1e6  # bounded, as scores are
    quarters = tuple(torch.tensor(q) for q in ([3.0, 5.0], [3.0, 5.0], [3.0, 5.0], [0.0, 2.0]))
    gain, worst = Gains(quarters, torch.tensor([1.0, 1.0])).scores()
    assert gain > 2 and worst == pytest.approx(0.0)


def test_a_replay_is_made_on_the_states_of_the_chain_alone(audited):
    job, wrong = audited.job(), Digest(bytes(32))
    assert job.rebase is not None
    for other in (
        replace(job, start=replace(job.start, state=wrong)),
        replace(job, rebase=replace(job.rebase, state=wrong)),
    ):
        with pytest.raises(AuditError, match="the chain says 0000"):
            audit(other, CPU)
    with pytest.raises(MalformedError, match="damaged or another state"):
        audit(replace(job, start=replace(job.start, checkpoint_digest=wrong)), CPU)


def test_a_blob_of_another_size_is_refused(audited, tmp_path):
    short = tmp_path / "short.blob"
    short.write_bytes(b"CRN1")
    with pytest.raises(CodecError, match="has 4 bytes"):
        audit(audited.job(blob=short), CPU)


def test_a_job_whose_fields_contradict_each_other_is_refused(audited, tmp_path):
    job = audited.job()
    update, rebase = job.update, job.rebase
    assert rebase is not None
    nobody = Rebase(replace(rebase.round, updates=rebase.round.updates[:0]), rebase.state, rebase.accepted_windows)
    for other, reason in (
        (replace(job, rebase=None), "if there was one, and only then"),
        (replace(job, update=replace(update, end_window=update.first_window)), "not in order"),
        (replace(job, update=replace(update, end_window=update.end_window - 1)), "whole steps of 4"),
        (replace(job, own=update), "no other update beside it"),
        (replace(job, check="loss"), "no rebase"),
        (replace(job, rebase=nobody), "no update of its author"),
    ):
        with pytest.raises(AuditError, match=reason):
            audit(other, CPU)


def test_other_runs_have_loss_checks_and_no_replay(tmp_path):
    other = audit_world.make(tmp_path, replayable=False)
    assert passed(scores(other.job("loss")))
    job = other.job()
    assert job.rebase is None
    with pytest.raises(AuditError, match="none can be replayed"):
        audit(job, CPU)


def test_a_tiny_update_has_no_loss_check(audited):
    job = audited.job("loss")
    few = replace(
        job, update=replace(job.update, rebase_window=job.update.first_window, end_window=job.update.first_window + 4)
    )
    with pytest.raises(AuditError, match="too few"):
        audit(few, CPU)

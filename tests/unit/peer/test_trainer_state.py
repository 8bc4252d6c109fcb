"""One trainer without its process: what it makes, loads and applies, and what of it survives a restart."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peer.channel import Apply, MakeUpdate, NothingDone, Orders, UpdateFile, UpdateMade
from peer.errors import SavedStateError, TrainingError
from peer.training.saved_state import STATE_MANIFEST, UPDATE_MANIFEST, SavedFolder
from peer.training.step_loop import MAX_NON_FINITE
from protocol.errors import CodecError, MalformedError
from protocol.ids import Digest
from protocol.merkle import blob_digest
from protocol.spec import CodecSpec, OuterSpec, RunSpec, Schedule
from protocol.state import state_digest, state_layout
from tests.support.local_trainer import born, closed, copied, loaded, make_update, same, train, update, world
from tests.support.trainer_world import BATCH, GENESIS, WINDOW, World, accepted_round, apply, peer_key, record_digest

__all__ = ["closed", "world"]  # fixtures


@pytest.fixture
def raw(tmp_path) -> World:
    """A run that compresses nothing and forgets nothing: sums can be checked."""
    return World.make(tmp_path, codec=CodecSpec(kind="none", beta=1.0))


def test_nothing_is_trained_before_a_state_is_loaded(world):
    trainer, _ = born(world)
    assert not trainer.steps.may_train
    with pytest.raises(TrainingError):
        make_update(trainer, MakeUpdate(0, GENESIS, world.folder / "u"))
    with pytest.raises(TrainingError):
        apply(trainer, Apply(accepted_round(0), (), 0, 0))


@pytest.mark.parametrize("outer", [OuterSpec(), OuterSpec(optimizer="nesterov", lr=0.7)], ids=["plain", "nesterov"])
def test_two_peers_train_together_agree_on_every_bit_and_the_loss_falls(tmp_path, outer):
    world = World.make(tmp_path, outer=outer)
    peers = {n: loaded(world, n) for n in (1, 2)}
    accepted, first, last = 0, 0.0, 0.0
    for r in range(6):
        made = []
        for n, trainer in peers.items():
            train(trainer, 8)
            made.append((n, update(trainer, tmp_path / f"{n}-{r}")))
            train(trainer, 2)
        first, last = first or made[0][1].loss, made[0][1].loss
        accepted += sum(m.end_window - m.first_window for _, m in made)
        record = accepted_round(r, *made)
        answers = [apply(t, Apply(record, (), dict(made)[n].end_window, accepted)) for n, t in peers.items()]
        assert len({a.state_digest for a in answers}) == 1 and answers[0].record == record.record
    assert last < 0.75 * first
    late, _ = born(world, 3)
    assert peers[1].backend.outer.base is not None
    state = tmp_path / "checkpoint"
    answer = apply(peers[1], Apply(accepted_round(6), (), peers[1].windows.claimed_from, accepted, state))
    assert answer.checkpoint_path == state and blob_digest(state.read_bytes()) == answer.state_digest
    load = replace(world.load(), checkpoint=state, base_state=answer.state_digest, record=record_digest(6), round=7)
    assert late.load(load).state_digest == answer.state_digest


def test_a_newcomer_replays_the_rounds_to_the_same_bits(world):
    old = loaded(world)
    rounds = []
    for r in range(3):
        train(old, 3)
        made = update(old, world.folder / f"u{r}")
        rounds.append(accepted_round(r, (1, made)))
        digest = apply(old, Apply(rounds[-1], (), made.end_window, made.end_window)).state_digest
    new, _ = born(world, 2)
    answer = new.load(world.load(*rounds))
    assert (answer.state_digest, answer.record, new.base.round) == (digest, record_digest(2), 3)
    with pytest.raises(TrainingError, match="not in order"):
        new.load(world.load(rounds[1], rounds[0]))
    assert not new.steps.may_train  # until the next load
    assert new.load(world.load(*rounds)).state_digest == digest


def test_an_update_says_what_it_covers_and_asked_again_it_is_the_same(world):
    trainer = loaded(world)
    assert make_update(trainer, MakeUpdate(0, GENESIS, world.folder / "u")) == NothingDone(GENESIS)
    train(trainer, 3)
    made = update(trainer, world.folder / "u")
    assert (made.first_window, made.end_window, made.inner_steps) == (0, 3 * BATCH, 3)
    blob = made.blob_path.read_bytes()
    assert blob_digest(blob) == made.digest and len(blob) == made.size == trainer.base.codec.size
    made.blob_path.rename(world.folder / "moved into the store")
    train(trainer, 1)
    again = update(trainer, world.folder / "again")
    assert replace(again, blob_path=made.blob_path) == made and again.blob_path.read_bytes() == blob
    with pytest.raises(TrainingError, match="what is held"):
        make_update(trainer, MakeUpdate(1, record_digest(0), world.folder / "u"))


def test_an_update_that_cannot_be_written_is_not_lost(raw):
    trainer = loaded(raw)
    train(trainer, 2)
    learnt = dict(trainer.backend.outer.progress())
    with pytest.raises(OSError):
        update(trainer, raw.folder / "no such folder" / "u")
    made = update(trainer, raw.folder / "u")
    decoded = {n: torch.zeros_like(t) for n, t in learnt.items()}
    trainer.base.codec.add_to(made.blob_path.read_bytes(), decoded)
    same(decoded, {n: -t for n, t in learnt.items()})
    assert made.end_window == 2 * BATCH


@pytest.mark.parametrize("moves", ["apply", "load"])
def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_move_is_made(world, moves):
    nowhere = world.folder / "no such folder" / "state"
    trainer, heard = born(world)
    if moves == "load":
        answer = trainer.load(replace(world.load(), write_checkpoint=nowhere))
    else:
        trainer.load(world.load())
        train(trainer, 1)
        record = accepted_round(0, (1, update(trainer, world.folder / "u")))
        answer = apply(trainer, Apply(record, (), BATCH, BATCH, nowhere))
    assert answer.checkpoint_path is None and heard.kinds() == ["checkpoint"]
    assert trainer.base.record == answer.record and trainer.steps.may_train
    assert trainer.base.write(world.folder / "state").state_digest == answer.state_digest
    with pytest.raises(OSError):
        trainer.base.write(nowhere)


def test_a_missed_update_is_in_the_next_one_with_its_windows(raw):
    trainer = loaded(raw)
    train(trainer, 2)
    missed = update(trainer, raw.folder / "u0")
    train(trainer, 1)
    learnt = {n: -t for n, t in trainer.backend.outer.progress()}
    trainer.base.codec.add_to(missed.blob_path.read_bytes(), learnt)
    apply(trainer, Apply(accepted_round(0), (missed.blob_path,), 0, 0))
    made = update(trainer, raw.folder / "u1")
    assert (made.first_window, made.end_window, made.inner_steps) == (0, 3 * BATCH, 3)
    decoded = {n: torch.zeros_like(t) for n, t in learnt.items()}
    trainer.base.codec.add_to(made.blob_path.read_bytes(), decoded)
    same(decoded, learnt)


def test_a_miss_that_is_told_twice_or_not_at_all_is_put_back_once(raw):
    told, twice, untold = loaded(raw, 1), loaded(raw, 1), loaded(raw, 1)
    for i, trainer in enumerate((told, twice, untold)):
        train(trainer, 2)
        missed = update(trainer, raw.folder / f"u{i}")
        files = {0: (missed.blob_path,), 1: (missed.blob_path,) * 2, 2: ()}[i]
        apply(trainer, Apply(accepted_round(0), files, 0, 0))
    same(twice.backend.outer.feedback, told.backend.outer.feedback, atol=0)
    same(untold.backend.outer.feedback, told.backend.outer.feedback, atol=0)


def test_an_update_of_a_branch_that_lost_comes_back_and_leaves_again_when_it_wins(raw):
    trainer = loaded(raw)
    train(trainer, 2)
    mine = update(trainer, raw.folder / "mine")
    branch = accepted_round(0, (1, mine))
    apply(trainer, Apply(branch, (), mine.end_window, mine.end_window))
    empty = copied(trainer.backend.outer.feedback)
    trainer.load(raw.load(restore=(mine.blob_path,)))
    assert trainer.windows.claimed_from == 0 and trainer.windows.claim(99) == (0, 2 * BATCH, 1)
    assert any(bool(t.any()) for t in trainer.backend.outer.feedback.values())
    trainer.load(raw.load(branch, next_window=mine.end_window))
    same(trainer.backend.outer.feedback, empty)
    assert trainer.windows.claim(99) is None


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda d: d[:-4], MalformedError, "not a checkpoint of this run"),
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), MalformedError, "fetch it again"),
    ],
)
def test_a_checkpoint_that_is_not_the_chains_is_refused_and_what_is_held_stays(world, damage, error, words):
    trainer = loaded(world)
    train(trainer, 1)
    bad = world.folder / "bad"
    bad.write_bytes(damage(world.genesis.read_bytes()))
    with pytest.raises(error, match=words):
        trainer.load(replace(world.load(), checkpoint=bad))
    train(trainer, 1)
    with pytest.raises(OSError):
        trainer.load(replace(world.load(), checkpoint=world.folder / "none"))
    assert update(trainer, world.folder / "u").inner_steps == 2


def test_a_blob_of_the_wrong_size_is_refused_before_it_is_read(world):
    trainer = loaded(world)
    train(trainer, 1)
    made = update(trainer, world.folder / "u")
    with open(made.blob_path, "ab") as file:
        file.truncate(1 << 40)  # sparse: to read it would be the end
    with pytest.raises(CodecError, match="an update of this run has"):
        apply(trainer, Apply(accepted_round(0, (1, made)), (), made.end_window, 1))
    assert trainer.steps.may_train  # nothing was touched


def test_training_waits_when_one_update_could_not_claim_more(world):
    trainer = loaded(world)
    most = world.spec.max_update_windows
    while trainer.steps.may_train:
        train(trainer, 1)
    assert trainer.windows.counter == most
    made = update(trainer, world.folder / "u")
    assert made.end_window == most and trainer.steps.may_train


def test_while_the_run_rests_nothing_is_trained_and_an_update_claims_what_the_owner_lets_it(world):
    trainer = loaded(world)
    train(trainer, 2)
    orders = Orders(False, world.spec.max_update_windows, world.spec.round.target_tokens)
    trainer.steps.set_orders(replace(orders, is_idle=True))
    assert not trainer.steps.may_train
    trainer.steps.set_orders(orders)
    assert trainer.steps.may_train
    trainer.steps.set_orders(replace(orders, max_update_windows=BATCH))
    assert not trainer.steps.may_train  # more is trained already than one update may claim
    made = trainer.base.make_update(MakeUpdate(0, GENESIS, world.folder / "u"), BATCH)
    assert isinstance(made, UpdateMade) and made.end_window == BATCH


@pytest.mark.parametrize("missed", [False, True])
def test_without_overlap_nothing_is_trained_while_an_update_is_undecided(world, missed):
    alone, _ = born(world, 1, overlap=False)
    alone.load(world.load())
    train(alone, 2)
    mine = update(alone, world.folder / "mine")
    assert not alone.steps.may_train
    other = loaded(world, 2)
    train(other, 2)
    theirs = update(other, world.folder / "theirs")
    assert other.steps.may_train
    listed = [(2, theirs)] if missed else [(1, mine), (2, theirs)]
    own = (mine.blob_path,) if missed else ()
    apply(alone, Apply(accepted_round(0, *listed), own, 0 if missed else mine.end_window, 8))
    assert alone.steps.may_train


def test_an_update_made_within_a_step_leaves_that_step_to_the_next_update(world, monkeypatch):
    monkeypatch.setattr("peer.training.inner_optimizer.PIECE_TOKENS", WINDOW)  # a step is BATCH pieces
    trainer = loaded(world)
    train(trainer, 2)
    made: list[UpdateMade] = []

    def between() -> None:
        if not made:
            made.append(update(trainer, world.folder / "u"))
            end = made[0].end_window
            apply(trainer, Apply(accepted_round(0, (1, made[0])), (), end, end))

    step = trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter), between)
    assert step is not None and step.is_finite and made[0].end_window == 2 * BATCH
    assert trainer.windows.claim(99) == (2 * BATCH, 3 * BATCH, 1)
    assert any(bool(t.any()) for t in dict(trainer.backend.outer.progress()).values())


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_given_up_when_another_state_comes_or_the_held_one_is_lost(world, monkeypatch, fails):
    monkeypatch.setattr("peer.training.inner_optimizer.PIECE_TOKENS", WINDOW)
    trainer = loaded(world)
    train(trainer, 1)
    wrong = world.folder / "wrong"
    wrong.write_bytes(bytes(trainer.base.codec.size))

    def between() -> None:
        if fails:
            with pytest.raises(CodecError):
                bad = UpdateMade(GENESIS, wrong, trainer.base.codec.size, GENESIS, 0, 0, 4, 1, 1.0)
                trainer.load(world.load(accepted_round(0, (2, bad))))
        else:
            trainer.load(world.load(next_window=80))

    before = trainer.backend.inner.moments()[0]
    assert trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter), between) is None
    assert trainer.backend.inner.moments()[0] == before and trainer.steps.may_train is not fails
    assert trainer.windows.counter == (BATCH if fails else 80)


def test_the_pieces_of_a_step_change_its_result_by_rounding_only(world, monkeypatch):
    whole, pieces = loaded(world, 1), loaded(world, 1)
    train(whole, 3)
    monkeypatch.setattr("peer.training.inner_optimizer.PIECE_TOKENS", WINDOW)
    train(pieces, 3)
    same(pieces.backend.outer.local, whole.backend.outer.local, atol=2e-4)
    assert pieces.exchange.loss.mean == pytest.approx(whole.exchange.loss.mean, rel=1e-4)


def test_the_learning_rate_follows_what_the_chain_accepted(tmp_path):
    schedule = Schedule(kind="cosine", total_tokens=100 * WINDOW, min_ratio=0.0)
    world = World.make(tmp_path, schedule=schedule, lr=0.5)
    trainer = loaded(world)
    assert 0.2 < trainer.backend.inner.learning_rate < 0.5
    trainer.load(replace(world.load(), accepted_windows=100))
    assert trainer.backend.inner.learning_rate == 0.0


@pytest.mark.parametrize("accepted", [True, False])
def test_the_place_in_a_round_counts_own_windows_as_trained_since_the_state_came(tmp_path, accepted):
    schedule = Schedule(kind="constant", warmup_tokens=1000 * BATCH * WINDOW)
    trainer = loaded(World.make(tmp_path, schedule=schedule, lr=1.0))
    train(trainer, 4)
    made = update(trainer, tmp_path / "u")
    # The record weighs the claim of a newcomer down to a window, or leaves it out; other peers had 10 steps' windows.
    weighed = replace(accepted_round(0, (1, made)), updates=(UpdateFile(peer_key(1), 1, made.blob_path),))
    record, end = (weighed, made.end_window) if accepted else (accepted_round(0), 0)
    apply(trainer, Apply(record, () if accepted else (made.blob_path,), end, 10 * BATCH))
    for step in range(8):
        train(trainer, 1)
        batches = 10 + 10 * (step + 0.5) / 4
        assert trainer.backend.inner.learning_rate == pytest.approx(batches / 1000)


def test_muon_steps_hidden_matrices_and_adamw_all_else(tmp_path):
    trainer = loaded(World.make(tmp_path, optimizer="muon"))
    train(trainer, 1)
    _, moments = trainer.backend.inner.moments()
    layer = "model.layers.0."
    hidden = {layer + f"self_attn.{m}_proj.weight" for m in "qkvo"} | {
        layer + f"mlp.{m}_proj.weight" for m in ("gate", "up", "down")
    }
    assert {n.removeprefix("momentum_buffer/") for n in moments if n.startswith("momentum_buffer/")} == hidden
    others = {t.name for t in trainer.spec.model.layout.tensors} - hidden
    assert {n.removeprefix("exp_avg/") for n in moments if n.startswith("exp_avg/")} == others
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= others


def test_steps_that_are_not_finite_are_skipped_and_too_many_are_an_error_with_a_remedy(world):
    trainer, heard = born(world)
    trainer.load(world.load())
    healthy = copied(trainer.backend.outer.local)
    name, poisoned = next((n, t) for n, t in trainer.backend.outer.local.items() if t.ndim == 2 and "embed" not in n)
    poisoned.view(-1)[0] = float("inf")
    for _ in range(MAX_NON_FINITE - 1):
        step = trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
        assert step is not None and not step.is_finite
    poisoned.copy_(healthy[name])
    same(trainer.backend.outer.local, healthy, atol=0)
    train(trainer, 1)  # one good step, and the count restarts
    poisoned.view(-1)[0] = float("inf")
    with pytest.raises(TrainingError, match=r"inner\.lr"):
        for _ in range(MAX_NON_FINITE):
            trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
    assert heard.kinds() == ["non-finite"] * 2


def test_a_step_of_a_model_that_no_data_can_move_is_skipped_and_too_many_are_an_error(world):
    trainer, heard = born(world)
    trainer.load(world.load())
    for tensor in trainer.backend.outer.local.values():
        tensor.fill_(float(tensor.ndim == 1))  # rows of zeros, and norms of ones
    dead = copied(trainer.backend.outer.local)
    for _ in range(MAX_NON_FINITE - 1):
        step = trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
        assert step is not None and step.is_finite and not step.has_gradient
    with pytest.raises(TrainingError, match="no gradient"):
        trainer.steps.step(trainer.steps.batches.take(trainer.windows.counter))
    same(trainer.backend.outer.local, dead, atol=0)
    assert heard.kinds() == ["non-finite"]


def test_a_model_that_this_machine_builds_differently_is_refused(world):
    start = world.start(1)
    changed = world.spec.model_dump(mode="json")
    changed["model"]["tensors"] = [["another.weight", [4, 4]]]
    start.spec_path.write_bytes(RunSpec.model_validate_json(json.dumps(changed)).canonical())
    with pytest.raises(TrainingError, match="builds another model"):
        born(world)


@pytest.mark.parametrize("device", ["tpu:0", "meta", "nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_one_clear_error(world, device):
    with pytest.raises(TrainingError, match=r"cuda:0|--device cpu"):
        born(world, device=device)


# -- restarts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restart_goes_on_where_it_was_with_all_that_was_learnt(tmp_path, optimizer):
    world = World.make(tmp_path, optimizer=optimizer)
    before = loaded(world)
    train(before, 3)
    made = update(before, world.folder / "u")
    apply(before, Apply(accepted_round(0, (1, made)), (), made.end_window, made.end_window))
    train(before, 2)
    before.checkpointer.save_now()
    after, heard = born(world)
    load = world.load(accepted_round(0, (1, made)), next_window=made.end_window)
    after.load(load)
    same(after.backend.outer.feedback, before.backend.outer.feedback, atol=0)
    same(dict(after.backend.outer.progress()), dict(before.backend.outer.progress()))
    assert after.windows == before.windows and not heard
    taken, moments = after.backend.inner.moments()
    assert taken == before.backend.inner.moments()[0] == 5
    same(moments, before.backend.inner.moments()[1], atol=0)
    assert any(m.startswith("momentum_buffer/") for m in moments) is (optimizer == "muon")
    train(before, 2)
    train(after, 2)
    same(
        after.backend.outer.local, before.backend.outer.local, atol=1e-5 if optimizer == "adamw" else 2e-4
    )  # Newton-Schulz iterations magnify rounding
    assert update(after, world.folder / "a").end_window == update(before, world.folder / "b").end_window == 7 * BATCH


def test_a_restart_between_announcement_and_decision_neither_loses_nor_doubles(raw):
    before = loaded(raw)
    train(before, 2)
    made = update(before, raw.folder / "u")
    before.checkpointer.save_now()
    still_open, _ = born(raw)
    still_open.load(raw.load())
    assert update(still_open, raw.folder / "same").digest == made.digest
    assert not any(bool(t.any()) for t in still_open.backend.outer.feedback.values())

    accepted, _ = born(raw)
    accepted.load(raw.load(accepted_round(0, (1, made)), next_window=made.end_window))
    assert accepted.windows.claim(99) is None
    assert not any(bool(t.any()) for t in accepted.backend.outer.feedback.values())


@pytest.mark.parametrize("saved", ["never", "before"])
def test_one_killed_right_after_announcing_gives_the_same_update_and_counts_it_once(raw, saved):
    """Nothing was saved since: what is on disk of before is in the update already."""
    before = loaded(raw)
    train(before, 2)
    if saved == "before":
        before.checkpointer.save_now()
    train(before, 1)
    made = update(before, raw.folder / "u")
    train(before, 2)  # lost

    still_open, heard = born(raw)
    still_open.load(raw.load())
    assert not any(
        bool(t.any())
        for t in (*still_open.backend.outer.feedback.values(), *dict(still_open.backend.outer.progress()).values())
    )
    assert still_open.windows.counter == 3 * BATCH  # windows trained since are trained again
    train(still_open, 1)
    again = update(still_open, raw.folder / "again")
    assert replace(again, blob_path=made.blob_path) == made
    assert again.blob_path.read_bytes() == made.blob_path.read_bytes()
    apply(still_open, Apply(accepted_round(0, (1, again)), (), made.end_window, made.end_window))
    assert not any(bool(t.any()) for t in still_open.backend.outer.feedback.values())
    after = update(still_open, raw.folder / "after")
    assert (after.first_window, after.end_window, after.inner_steps) == (3 * BATCH, 4 * BATCH, 1)
    assert not heard
    if saved == "before":
        assert still_open.backend.inner.moments()[0] == 3  # two of the saved, one since


@pytest.mark.parametrize("saved", ["never", "before"])
@pytest.mark.parametrize("told", [False, True])
def test_one_killed_right_after_announcing_whose_update_was_missed_puts_it_back_once(raw, saved, told):
    before = loaded(raw)
    train(before, 2)
    if saved == "before":
        before.checkpointer.save_now()
    made = update(before, raw.folder / "u")
    missed, _ = born(raw)
    missed.load(raw.load(accepted_round(0), restore=(made.blob_path,) if told else ()))
    decoded = {n: torch.zeros_like(t) for n, t in missed.backend.outer.feedback.items()}
    missed.base.codec.add_to(made.blob_path.read_bytes(), decoded)
    same(missed.backend.outer.feedback, decoded, atol=0)
    train(missed, 1)
    again = update(missed, raw.folder / "v")
    assert (again.first_window, again.end_window, again.inner_steps) == (0, 3 * BATCH, 3)


def test_one_killed_right_after_announcing_whose_update_was_accepted_does_not_send_it_again(raw):
    before = loaded(raw)
    train(before, 2)
    before.checkpointer.save_now()
    made = update(before, raw.folder / "u")
    accepted, heard = born(raw)
    accepted.load(raw.load(accepted_round(0, (1, made)), next_window=made.end_window))
    assert not any(
        bool(t.any())
        for t in (*accepted.backend.outer.feedback.values(), *dict(accepted.backend.outer.progress()).values())
    )
    assert accepted.windows.claim(99) is None and not heard
    # Decided: once a state is saved that knows of it, nothing of it is left.
    assert len(list(accepted.folder.folder.glob("update*"))) == 2
    accepted.checkpointer.save_now()
    apply(accepted, Apply(accepted_round(1), (), made.end_window, made.end_window))
    assert not list(accepted.folder.folder.glob("update*"))


@pytest.mark.parametrize("fate", ["accepted", "missed"])
def test_a_saved_update_is_not_taken_for_a_later_one_of_the_same_windows(world, monkeypatch, fate):
    before = loaded(world)
    train(before, 2)
    first = update(before, world.folder / "u")
    before.checkpointer.save_now()  # the first is undecided, and more was left of its feedback than the codec sends
    assert any(bool(t.any()) for t in before.backend.outer.feedback.values())
    rounds = [accepted_round(0)]
    apply(before, Apply(rounds[0], (first.blob_path,), 0, 0))
    second = update(before, world.folder / "v")  # with all that was left
    assert (second.first_window, second.end_window) == (first.first_window, first.end_window)
    next_window = second.end_window if fate == "accepted" else 0
    rounds.append(accepted_round(1, *([(1, second)] if fate == "accepted" else [])))
    missed = () if fate == "accepted" else (second.blob_path,)
    apply(before, Apply(rounds[1], missed, next_window, next_window))
    train(before, 1)

    def fails(*_: object) -> Path:
        raise OSError("the disk is full")

    with monkeypatch.context() as m, pytest.raises(OSError, match="full"):
        m.setattr(SavedFolder, "keep_update", fails)
        update(before, world.folder / "w")

    after, heard = born(world)  # killed before it saved again
    after.load(world.load(*rounds, next_window=next_window))
    left = {n: torch.zeros_like(t) for n, t in after.backend.outer.feedback.items()}
    if fate == "missed":
        after.base.codec.add_to(second.blob_path.read_bytes(), left)
    same(after.backend.outer.feedback, left, atol=0)
    assert not heard and not any(bool(t.any()) for t in dict(after.backend.outer.progress()).values())
    train(after, 1)
    after.checkpointer.save_now()
    again, _ = born(world)
    again.load(world.load(*rounds, next_window=next_window))
    same(again.backend.outer.feedback, left, atol=0)
    assert again.windows == after.windows


def test_a_state_saved_after_the_announcement_is_taken_up_whole(world):
    before = loaded(world)
    train(before, 2)
    update(before, world.folder / "u")
    train(before, 1)
    before.checkpointer.save_now()
    after, _ = born(world)
    after.load(world.load())
    same(after.backend.outer.feedback, before.backend.outer.feedback, atol=0)
    same(dict(after.backend.outer.progress()), dict(before.backend.outer.progress()))
    assert after.windows == before.windows and any(bool(t.any()) for t in after.backend.outer.feedback.values())


def test_a_restart_after_an_update_was_missed_puts_it_back(raw):
    before = loaded(raw)
    train(before, 2)
    made = update(before, raw.folder / "u")
    before.checkpointer.save_now()
    missed, _ = born(raw)
    missed.load(raw.load(accepted_round(0)))
    decoded = {n: torch.zeros_like(t) for n, t in missed.backend.outer.feedback.items()}
    missed.base.codec.add_to(made.blob_path.read_bytes(), decoded)
    same(missed.backend.outer.feedback, decoded, atol=0)
    assert update(missed, raw.folder / "v").first_window == 0


def test_an_announced_update_that_vanished_is_reported_and_its_windows_are_given_up(world):
    before = loaded(world)
    train(before, 2)
    gone = update(before, world.folder / "u")
    before.checkpointer.save_now()
    for path in before.folder.folder.glob("update-*"):
        path.unlink()
    after, heard = born(world)
    after.load(world.load())
    train(after, 1)
    made = update(after, world.folder / "v")
    assert heard.kinds() == ["lost-update"]
    assert (made.first_window, made.end_window, made.inner_steps) == (gone.end_window, 3 * BATCH, 1)


def test_a_saved_state_older_than_what_was_accepted_since_is_not_sent_again(world):
    before = loaded(world)
    train(before, 2)
    before.checkpointer.save_now()
    train(before, 2)
    made = update(before, world.folder / "u")
    apply(before, Apply(accepted_round(0, (1, made)), (), made.end_window, made.end_window))
    for path in before.folder.folder.glob("update*"):  # as in a copy of the folder that is as old as the state
        path.unlink()
    after, heard = born(world)
    after.load(world.load(accepted_round(0, (1, made)), next_window=made.end_window))
    assert heard.kinds() == ["saved-state"]
    assert not any(
        bool(t.any()) for t in (*after.backend.outer.feedback.values(), *dict(after.backend.outer.progress()).values())
    )
    assert (after.windows.counter, after.windows.claimed_from) == (made.end_window, made.end_window)
    assert after.backend.inner.moments()[0] == 2


def test_saving_again_and_again_leaves_one_state(world):
    trainer = loaded(world)
    trainer.checkpointer.save_now()
    for _ in range(3):
        train(trainer, 1)
        trainer.checkpointer.save_now()
    (trainer.folder.folder / ".trainer-9.safetensors.part").write_bytes(b"of a process that was killed")
    trainer.checkpointer.save_now()
    assert sorted(p.name for p in trainer.folder.folder.iterdir()) == ["trainer-5.safetensors", STATE_MANIFEST]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: _flip(next(folder.glob("trainer-*.safetensors"))),
        lambda folder: next(folder.glob("trainer-*.safetensors")).write_bytes(b""),
        lambda folder: next(folder.glob("trainer-*.safetensors")).unlink(),
        lambda folder: (folder / STATE_MANIFEST).write_text("{"),
        lambda folder: (folder / STATE_MANIFEST).write_text("[]"),
        lambda folder: (folder / STATE_MANIFEST).write_bytes(b"\xff" * 100),
        lambda folder: (folder / STATE_MANIFEST).write_bytes(b" " * (2 << 20)),
        lambda folder: (folder / STATE_MANIFEST).write_text(
            re.sub(r'"record": *"..', '"record":"zz', (folder / STATE_MANIFEST).read_text())
        ),
        lambda folder: (folder / STATE_MANIFEST).write_text(
            (folder / STATE_MANIFEST).read_text().replace("trainer-1", "../../x")
        ),
        lambda folder: (folder / UPDATE_MANIFEST).write_text("{"),
    ],
)
def test_a_damaged_saved_state_is_reported_set_aside_and_training_starts_anew(world, damage):
    trainer = loaded(world)
    train(trainer, 2)
    trainer.checkpointer.save_now()
    damage(trainer.folder.folder)
    (trainer.folder.folder / "unusable-trainer-0.safetensors").write_bytes(b"of an earlier one")
    after, heard = born(world)
    assert heard.kinds() == ["saved-state"] and "unusable-*" in heard[0][2]
    assert not (trainer.folder.folder / "unusable-trainer-0.safetensors").exists()
    after.load(world.load())
    train(after, 1)
    assert after.windows.counter == BATCH
    after.checkpointer.save_now()
    again, heard = born(world)
    assert not heard


def test_that_memory_ran_out_is_known_after_a_restart_on_the_same_device(world):
    trainer = loaded(world)
    train(trainer, 1)
    assert not trainer.folder.memory_ran_out
    trainer.folder.note_memory_ran_out()
    trainer.checkpointer.save_now()
    assert born(world)[0].folder.memory_ran_out
    assert not born(world, gpu_memory=10**9)[0].folder.memory_ran_out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peer.training.single_process.device_name", lambda _: "a larger GPU")
        assert not born(world)[0].folder.memory_ran_out


@pytest.mark.parametrize("replayable", [False, True])
def test_a_damaged_state_leaves_the_undecided_update(tmp_path, replayable):
    world = World.make(tmp_path, replayable=replayable)
    before = loaded(world)
    train(before, 2)
    made = update(before, tmp_path / "u")
    train(before, 1)
    before.checkpointer.save_now()
    _flip(next(before.folder.folder.glob("trainer-*.safetensors")))
    after, heard = born(world)
    assert heard.kinds() == ["saved-state"] and "unusable-*" in heard[0][2]
    after.load(world.load())
    train(after, 3)
    again = update(after, tmp_path / "again")
    assert replace(again, blob_path=made.blob_path) == made
    assert again.blob_path.read_bytes() == made.blob_path.read_bytes()


def test_a_saved_state_of_another_run_or_peer_is_not_used(world):
    trainer = loaded(world)
    train(trainer, 1)
    trainer.checkpointer.save_now()
    _, heard = born(world, identity_key=peer_key(2))
    assert heard.kinds() == ["saved-state"] and "another run, peer or model" in heard[0][2]


def test_a_state_that_cannot_be_saved_leaves_the_old_one(world, monkeypatch):
    trainer = loaded(world)
    train(trainer, 1)
    trainer.checkpointer.save_now()
    train(trainer, 1)

    def full(file: int, data: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peer.training.parallel.sharded_file.write_at", full)
    with pytest.raises(SavedStateError, match="free some space"):
        trainer.checkpointer.save_now()
    monkeypatch.undo()
    assert not list(trainer.folder.folder.glob(".*"))
    after, heard = born(world)
    after.load(world.load())
    assert after.windows.counter == BATCH and not heard


def test_a_saved_state_with_a_number_that_is_not_finite_is_not_used(world):
    trainer = loaded(world)
    next(iter(trainer.backend.outer.feedback.values())).view(-1)[0] = float("nan")
    trainer.checkpointer.save_now()
    _, heard = born(world)
    assert heard.kinds() == ["saved-state"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_gpu_and_a_cpu_hold_the_same_bits(world):
    cpu = loaded(world, 1)
    gpu, _ = born(world, 2, device="cuda:0")
    gpu.load(world.load())
    accepted = 0
    for r in range(3):
        made = []
        for n, trainer in ((1, cpu), (2, gpu)):
            train(trainer, 4)
            made.append((n, update(trainer, world.folder / f"{n}-{r}")))
        accepted += sum(m.end_window - m.first_window for _, m in made)
        record = accepted_round(r, *made)
        digests: set[Digest] = set()
        for n, trainer in ((1, cpu), (2, gpu)):
            digests.add(apply(trainer, Apply(record, (), dict(made)[n].end_window, accepted)).state_digest)
            assert trainer.backend.outer.base is not None
            assert (
                state_digest(state_layout(world.spec.model.layout, world.spec.outer), trainer.backend.outer.base)
                in digests
            )
        assert len(digests) == 1

"""A trainer in reduced rounds: the same bits as every peer, and untransmitted values return to its feedback once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peer.channel import Apply, Load, RoundUpdates, UpdateFile, UpdateMade
from peer.training.trainer import Trainer
from protocol.codec import make_codec
from protocol.errors import CodecError
from protocol.merkle import blob_digest
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.spec import CodecSpec, OuterSpec
from protocol.untransmitted import untransmitted
from tests.support.local_trainer import born, closed, copied, loaded, same, train, update  # noqa: F401
from tests.support.long_cases import long_cases
from tests.support.trainer_world import BATCH, World, accepted_round, apply, peer_key, record_digest

SPARSE = CodecSpec(kind="sparse", k=64, beta=1.0)
OTHERS = 8


@pytest.fixture
def world(tmp_path) -> World:
    """A run whose rounds of many peers leave much out, and whose feedback does not decay: sums can be checked."""
    return World.make(tmp_path, codec=SPARSE)


def reduction(world: World) -> Reduction:
    return Reduction(make_codec(world.spec.codec, world.spec.model.layout))


def reduced_round(
    world: World,
    number: int,
    *made: tuple[int, UpdateMade],
    me: int = 1,
    others: int = 0,
    seed: int = 0,
    count: int = 3,
) -> RoundUpdates:
    """Return round `number`, reduced, of these peers' updates and of some `others`, as peer `me` receives it."""
    by = reduction(world)
    generator = torch.Generator().manual_seed(100 * number + seed)
    found = [Contribution(peer_key(n), m.end_window - m.first_window, m.blob_path.read_bytes()) for n, m in made]
    for n in range(others):
        noise = {t.name: torch.randn(t.shape, generator=generator) * 0.0025 for t in world.spec.model.layout.tensors}
        found.append(Contribution(peer_key(100 + n), BATCH, bytes(by.codec.encode(noise))))
    parts = []
    for part in range(count):
        parts.append(world.folder / f"round-{number}-{seed}-{others}-{part}")
        parts[-1].write_bytes(by.reduce(found, world.spec.outer, count, part))
    own = tuple(UpdateFile(peer_key(n), m.end_window - m.first_window, m.blob_path) for n, m in made if n == me)
    return RoundUpdates(number, record_digest(number + 10 * seed), own, tuple(parts))


def as_told_to(n: int, record: RoundUpdates, made: UpdateMade) -> RoundUpdates:
    own = UpdateFile(peer_key(n), made.end_window - made.first_window, made.blob_path)
    return replace(record, updates=(own,))


def ask(record: RoundUpdates, made: UpdateMade) -> Apply:
    return Apply(record, (), made.end_window, made.end_window)


def left_out(world: World, record: RoundUpdates, made: UpdateMade) -> dict[str, Tensor]:
    """Return the values of this update that the round did not transmit."""
    own, sums = made.blob_path.read_bytes(), [p.read_bytes() for p in record.parts]
    selection = untransmitted(own, sums, reduction(world))
    into = {t.name: torch.zeros(t.shape) for t in world.spec.model.layout.tensors}
    if selection is not None:
        reduction(world).codec.add_to(own, into, mask=selection.batch_mask)
    return into


def whole(world: World, made: UpdateMade) -> dict[str, Tensor]:
    into = {t.name: torch.zeros(t.shape) for t in world.spec.model.layout.tensors}
    reduction(world).codec.add_to(made.blob_path.read_bytes(), into)
    return into


def plus(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t + b[n] for n, t in a.items()}


def some(tensors: dict[str, Tensor]) -> bool:
    return any(bool(t.any()) for t in tensors.values())


def announced(world: World, name: str, saved: bool = False) -> tuple[Trainer, UpdateMade, dict[str, Tensor]]:
    """Return a trainer that has announced, its update, and the rest in its feedback."""
    trainer = loaded(world)
    train(trainer, 2)
    made = update(trainer, world.folder / name)
    if saved:
        trainer.checkpointer.save_now()
    return trainer, made, copied(trainer.backend.outer.feedback)


@pytest.mark.parametrize(
    "codec, outer",
    [
        (CodecSpec(), OuterSpec()),
        (CodecSpec(kind="sparse", k=256), OuterSpec(optimizer="nesterov", lr=0.7)),
        *long_cases(
            (CodecSpec(), OuterSpec(optimizer="nesterov", lr=0.7)), (CodecSpec(kind="sparse", k=256), OuterSpec())
        ),
    ],
    ids=lambda c: getattr(c, "kind", None) or c.optimizer,
)
def test_peers_of_reduced_rounds_agree_on_every_bit_the_loss_falls_and_a_newcomer_replays_them(tmp_path, codec, outer):
    world = World.make(tmp_path, codec=codec, outer=outer)
    peers = {n: loaded(world, n) for n in (1, 2)}
    accepted, first, last, records = 0, 0.0, 0.0, []
    for r in range(6):
        made = []
        for n, trainer in peers.items():
            train(trainer, 8)
            made.append((n, update(trainer, tmp_path / f"{n}-{r}")))
            train(trainer, 2)
        first, last = first or made[0][1].loss, made[0][1].loss
        accepted += sum(m.end_window - m.first_window for _, m in made)
        # Rounds of both kinds follow each other: how many contribute decides.
        record = accepted_round(r, *made) if r == 3 else reduced_round(world, r, *made)
        records.append(record)
        answers = []
        for n, trainer in peers.items():
            mine = record if r == 3 else as_told_to(n, record, dict(made)[n])
            answers.append(apply(trainer, Apply(mine, (), dict(made)[n].end_window, accepted)))
        assert len({a.state_digest for a in answers}) == 1 and answers[0].record == record.record
    assert last < 0.75 * first
    late, _ = born(world, 3)
    assert late.load(world.load(*(replace(r, updates=() if r.parts else r.updates) for r in records))).state_digest == (
        answers[0].state_digest
    )


def test_what_a_round_drops_is_in_the_feedback_once_however_often_it_is_told(world):
    trainer, made, rest = announced(world, "u")
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    apply(trainer, ask(record, made))
    want = plus(rest, left_out(world, record, made))
    assert some(left_out(world, record, made)) and some(
        {n: t - left_out(world, record, made)[n] for n, t in whole(world, made).items()}
    )
    same(trainer.backend.outer.feedback, want, atol=0)
    load = world.load(record, next_window=made.end_window)
    for again in (load, replace(load, withdraw=(made.blob_path,)), replace(load, reduced=(record,))):
        trainer.load(again)
        same(trainer.backend.outer.feedback, want, atol=0)
    train(trainer, 1)
    after = update(trainer, world.folder / "v")
    assert (after.first_window, after.end_window) == (2 * BATCH, 3 * BATCH)
    held = copied(trainer.backend.outer.feedback)
    trainer.load(load)
    same(trainer.backend.outer.feedback, held, atol=0)


@pytest.mark.parametrize("how", ["by replay", "by a checkpoint"])
@pytest.mark.parametrize("saved", ["when announced", "when applied", "after the next update"])
def test_one_killed_finds_what_was_dropped_in_its_feedback_once(world, saved, how):
    before, made, _ = announced(world, "u", saved=saved == "when announced")
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    checkpoint = world.folder / "state"
    state = apply(before, replace(ask(record, made), write_checkpoint=checkpoint)).state_digest
    want = copied(before.backend.outer.feedback)
    if saved == "when applied":
        before.checkpointer.save_now()
    if saved == "after the next update":
        train(before, 1)
        update(before, world.folder / "v")
        before.checkpointer.save_now()
        want = copied(before.backend.outer.feedback)
    after, heard = born(world)
    load = world.load(record, next_window=made.end_window)
    if how == "by a checkpoint":
        load = Load(checkpoint, state, record.record, 1, (), (), made.end_window, made.end_window, reduced=(record,))
    assert after.load(load).state_digest == state
    same(after.backend.outer.feedback, want, atol=0)
    after.load(load)
    same(after.backend.outer.feedback, want, atol=0)
    assert not heard


def test_one_killed_between_announcing_and_saving_has_at_least_what_was_dropped(world):
    _, made, _ = announced(world, "u")
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    after, _ = born(world)
    after.load(world.load(record, next_window=made.end_window))
    same(after.backend.outer.feedback, left_out(world, record, made), atol=0)


def test_with_a_state_older_than_the_last_updates_what_was_dropped_of_the_last_goes_back(world):
    before, first, _ = announced(world, "u", saved=True)
    records = [reduced_round(world, 0, (1, first), others=OTHERS)]
    apply(before, ask(records[0], first))
    train(before, 1)
    second = update(before, world.folder / "v")
    records.append(reduced_round(world, 1, (1, second), others=OTHERS))
    apply(before, ask(records[1], second))
    for path in before.folder.folder.glob("update*"):  # as in a copy of the folder that is as old as the state
        path.unlink()
    after, heard = born(world)
    after.load(world.load(*records, next_window=second.end_window))
    assert "saved-state" in [kind for _, kind, _ in heard]
    same(after.backend.outer.feedback, left_out(world, records[1], second), atol=0)


def test_on_a_branch_that_lost_all_of_an_update_comes_back_and_what_its_round_dropped_does_not_count_twice(world):
    trainer, made, rest = announced(world, "u")
    mine, other = (reduced_round(world, 0, (1, made), others=OTHERS, seed=seed) for seed in (1, 2))
    apply(trainer, ask(mine, made))
    trainer.load(world.load(restore=(made.blob_path,)))
    same(trainer.backend.outer.feedback, plus(rest, whole(world, made)))
    assert trainer.windows.claim(99) == (0, 2 * BATCH, 1)
    # It is accepted after all, in another company.
    trainer.load(world.load(other, next_window=made.end_window))
    same(trainer.backend.outer.feedback, plus(rest, left_out(world, other, made)))
    assert any(bool((t != left_out(world, mine, made)[n]).any()) for n, t in left_out(world, other, made).items())
    # And in the first again.
    trainer.load(world.load(mine, next_window=made.end_window))
    same(trainer.backend.outer.feedback, plus(rest, left_out(world, mine, made)))
    # At last, as it is.
    trainer.load(world.load(accepted_round(0, (1, made)), next_window=made.end_window))
    same(trainer.backend.outer.feedback, rest)


def test_what_was_dropped_leaves_with_what_decay_has_left_of_it_also_after_a_restart(tmp_path):
    world = World.make(tmp_path, codec=SPARSE.model_copy(update={"beta": 0.5}))
    trainer, made, _ = announced(world, "u")
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    apply(trainer, ask(record, made))
    twin, _ = born(world, 1, state_folder=tmp_path / "twin")
    twin.load(world.load())
    train(twin, 2)
    assert blob_digest(made.blob_path.read_bytes()) == update(twin, world.folder / "same").digest
    apply(twin, ask(accepted_round(0, (1, made)), made))  # the same, but for what was dropped
    for peer in (trainer, twin):
        peer.backend.outer.announce()  # decays
    trainer.base.feedback_contents.decay()
    assert next(iter(trainer.base.feedback_contents.entries.values())).factor == 0.5
    trainer.checkpointer.save_now()
    again, heard = born(world)
    again.load(world.load(record, next_window=made.end_window))
    assert not heard
    same(again.backend.outer.feedback, trainer.backend.outer.feedback, atol=0)
    was = copied(again.backend.outer.feedback)
    again.load(world.load(accepted_round(0, (1, made)), next_window=made.end_window))
    gone = {n: (was[n] - t) for n, t in again.backend.outer.feedback.items()}
    same(gone, {n: t * 0.5 for n, t in left_out(world, record, made).items()})
    assert not again.base.feedback_contents.entries and twin.base.feedback_contents.entries == {}


def test_the_files_that_say_what_was_put_back_stay_as_long_as_a_saved_state_needs_them(world):
    trainer, made, _ = announced(world, "u")
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    apply(trainer, ask(record, made))
    trainer.checkpointer.save_now()

    def files() -> int:
        return len(list(trainer.folder.folder.glob("*dropped-*")))

    assert files() == 1
    trainer.load(world.load(restore=(made.blob_path,)))
    assert files() == 1 and trainer.base.feedback_contents.holds_all_of(made.digest)
    trainer.checkpointer.save_now()
    trainer.load(world.load())
    assert not files()


def test_a_selection_that_is_gone_is_told(world):
    trainer, heard = born(world)
    trainer.load(world.load())
    train(trainer, 2)
    made = update(trainer, world.folder / "u")
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    apply(trainer, ask(record, made))
    for path in trainer.folder.folder.glob("dropped-*"):
        path.write_bytes(b"rubbish")
    trainer.load(world.load(restore=(made.blob_path,)))
    assert heard.kinds() == ["lost-update"] and "damaged" in heard[0][2]
    assert trainer.base.feedback_contents.holds_all_of(made.digest)


def test_a_round_before_the_checkpoint_whose_files_are_gone_is_told_and_costs_no_state(world):
    before, made, rest = announced(world, "u", saved=True)
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    state = apply(before, replace(ask(record, made), write_checkpoint=world.folder / "state")).state_digest
    record.parts[0].unlink()
    after, heard = born(world)
    load = Load(world.folder / "state", state, record.record, 1, (), (), made.end_window, 8, reduced=(record,))
    assert after.load(load).state_digest == state
    same(after.backend.outer.feedback, rest, atol=0)
    assert [kind for _, kind, _ in heard] == ["lost-update"]


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"x" * 9), Path.unlink])
def test_reduced_parts_that_cannot_be_used_are_an_error_and_cost_no_work(world, damage):
    trainer, made, rest = announced(world, "u")
    record = reduced_round(world, 0, (1, made), others=OTHERS)
    damage(record.parts[1])
    with pytest.raises((CodecError, OSError)):
        apply(trainer, ask(record, made))
    assert trainer.steps.may_train is (damage is Path.unlink)  # it fails before the base changes
    good = reduced_round(world, 0, (1, made), others=OTHERS, seed=3)
    trainer.load(world.load(good, next_window=made.end_window))
    same(trainer.backend.outer.feedback, plus(rest, left_out(world, good, made)), atol=0)


@pytest.mark.long
def test_many_ranks_do_the_same(world):
    many, heard = born(world, 1, parallel="fsdp=2")
    one, _ = born(world, 1)
    one.folder.folder = world.folder / "twin"
    try:
        for trainer in (many, one):
            trainer.load(world.load())
            train(trainer, 2)
        made = update(one, world.folder / "u")
        mine = update(many, world.folder / "mine")
        record = reduced_round(world, 0, (1, made), others=OTHERS)
        theirs = as_told_to(1, reduced_round(world, 0, (1, made), others=OTHERS), mine)
        digests = {apply(one, ask(record, made)).state_digest, apply(many, ask(theirs, mine)).state_digest}
        assert len(digests) == 1
        many.checkpointer.save_now()
        assert many.base.feedback_contents.entries[mine.digest].only is not None
        many.load(world.load(restore=(mine.blob_path,)))
        assert many.base.feedback_contents.holds_all_of(mine.digest)
        one.load(world.load(restore=(made.blob_path,)))
        after = [update(t, world.folder / f"after-{i}") for i, t in enumerate((one, many))]
        a, b = (whole(world, m) for m in after)
        cosine = (
            sum(float((a[n] * b[n]).sum()) for n in a)
            / (sum(float((t**2).sum()) for t in a.values()) * sum(float((t**2).sum()) for t in b.values())) ** 0.5
        )
        assert cosine > 0.95  # but for roundings of the steps
        assert [kind for _, kind, _ in heard] == ["parallel"]
    finally:
        many.close(in_order=True)

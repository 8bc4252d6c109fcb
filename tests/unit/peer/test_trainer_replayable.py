"""Replayable runs: every update is what a replay from public values gives, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from peer.channel import Apply, MakeUpdate, NothingDone, Orders, UpdateMade
from peer.training.base_state import BaseState
from peer.training.replayable_state import ReplayableState
from peer.training.schedule import factor
from peer.training.trainer import Trainer
from protocol.codec import sign
from protocol.spec import OuterSpec, Schedule
from tests.support.local_trainer import born, closed, copied, loaded, make_update, same, train, update
from tests.support.long_cases import long_cases
from tests.support.replayed_update import Claim, Replay
from tests.support.trainer_world import BATCH, WINDOW, World, accepted_round, apply, peer_key

__all__ = ["closed"]  # a fixture

SCHEDULE = Schedule(kind="cosine", warmup_tokens=20 * BATCH * WINDOW, total_tokens=100 * BATCH * WINDOW)


@pytest.fixture
def world(tmp_path) -> World:
    return World.make(tmp_path, replayable=True, schedule=SCHEDULE)


@dataclass
class Swarm:
    """Peers of one run, the chain that their updates make, and each peer's last blob as announced."""

    world: World
    peers: dict[int, Trainer] = field(default_factory=dict)
    rounds: list = field(default_factory=list)
    next_windows: dict[int, int] = field(default_factory=dict)
    accepted: int = 0

    def join(self, *numbers: int) -> None:
        for n in numbers:
            self.peers[n], heard = born(self.world, n)
            self.next_windows.setdefault(n, 0)
            self.load(n)
            assert not heard

    def load(self, n: int) -> None:
        load = self.world.load(*self.rounds, next_window=self.next_windows[n])
        self.peers[n].load(replace(load, accepted_windows=self.accepted))

    def announce(self, n: int) -> UpdateMade:
        return update(self.peers[n], self.world.folder / f"{n}-{len(self.rounds)}")

    def replay(self, n: int, made: UpdateMade) -> bytes:
        return Replay(self.world, self.rounds).update(peer_key(n), Claim.of(made))

    def is_replayed(self, n: int, made: UpdateMade) -> bool:
        """Return whether a replay from public values gives the same bytes. Before the round is decided."""
        return self.replay(n, made) == made.blob_path.read_bytes()

    def decide(self, *made: tuple[int, UpdateMade], missed: dict[int, UpdateMade] | None = None) -> None:
        """Have all peers apply the round that accepts these updates."""
        record = accepted_round(len(self.rounds), *made)
        self.rounds.append(record)
        for n, u in made:
            self.next_windows[n] = u.end_window
            self.accepted += u.end_window - u.first_window
        for n, trainer in self.peers.items():
            left_out = (missed[n].blob_path,) if missed and n in missed else ()
            apply(trainer, Apply(record, left_out, self.next_windows[n], self.accepted))

    def round(self, steps: int, meanwhile: int = 0) -> None:
        """Train, announce and decide a round of all peers; each update is checked."""
        made = []
        for n, trainer in self.peers.items():
            train(trainer, steps + n)
            made.append((n, self.announce(n)))
            assert self.is_replayed(*made[-1])
            train(trainer, meanwhile)
        self.decide(*made)


@pytest.fixture
def swarm(world) -> Swarm:
    made = Swarm(world)
    made.join(1, 2)
    return made


@pytest.mark.parametrize(
    "optimizer, outer",
    [
        ("adamw", OuterSpec()),
        ("muon", OuterSpec(optimizer="nesterov", lr=0.7)),
        *long_cases(("adamw", OuterSpec(optimizer="nesterov", lr=0.7)), ("muon", OuterSpec())),
    ],
    ids=lambda c: getattr(c, "optimizer", c),
)
def test_updates_over_rounds_with_overlap_misses_and_a_restart_are_those_of_a_replay_to_the_bit(
    tmp_path, optimizer, outer
):
    world = World.make(tmp_path, replayable=True, schedule=SCHEDULE, optimizer=optimizer, outer=outer)
    swarm = Swarm(world)
    swarm.join(1, 2)
    swarm.round(3, meanwhile=2)
    swarm.round(2, meanwhile=1)
    swarm.round(1)
    # Peer 1's update misses its round: its windows are skipped.
    train(swarm.peers[1], 2)
    train(swarm.peers[2], 3)
    missed, listed = swarm.announce(1), swarm.announce(2)
    train(swarm.peers[1], 1)
    train(swarm.peers[2], 1)
    swarm.decide((2, listed), missed={1: missed})
    assert swarm.peers[1].windows.counter == missed.end_window
    train(swarm.peers[1], 4)
    again = swarm.announce(1)
    assert (again.first_window, again.rebase_window) == (missed.end_window, missed.end_window)
    assert swarm.is_replayed(1, again)
    train(swarm.peers[1], 2)
    train(swarm.peers[2], 1)
    other = swarm.announce(2)
    assert other.rebase_window == other.first_window + BATCH and swarm.is_replayed(2, other)
    swarm.decide((1, again), (2, other))
    # A restart in the middle of an update, some of which was trained before the state came.
    train(swarm.peers[1], 1)
    swarm.peers[1].checkpointer.save_now()
    swarm.join(1)
    train(swarm.peers[1], 1)
    last = swarm.announce(1)
    first = again.end_window
    assert (last.first_window, last.rebase_window, last.end_window) == (
        first, first + 2 * BATCH, first + 4 * BATCH,
    )  # fmt: skip
    assert swarm.is_replayed(1, last)


def test_updates_of_other_work_agree_by_less(swarm):
    swarm.round(3, meanwhile=6)
    train(swarm.peers[1], 6)
    made = swarm.announce(1)
    claim, replay = Claim.of(made), Replay(swarm.world, swarm.rounds)
    assert claim.rebase == claim.first + 6 * BATCH and claim.end == claim.rebase + 6 * BATCH
    blob = made.blob_path.read_bytes()
    assert replay.agreement(blob, replay.update(peer_key(1), claim)) == 1.0
    half = replace(claim, end=claim.first + (claim.end - claim.first) // 2)
    stale = Replay(swarm.world, swarm.rounds[:-1])
    fakes = {
        "half of the steps": replay.update(peer_key(1), half),
        "another key's windows": replay.update(peer_key(1), claim, data_of=peer_key(2)),
        "the state before": stale.update(peer_key(1), replace(claim, rebase=claim.first)),
        "no rebase": replay.update(peer_key(1), replace(claim, rebase=claim.first)),
    }
    agreements = {name: replay.agreement(blob, fake) for name, fake in fakes.items()}
    assert max(agreements.values()) < 0.97, agreements


def test_the_rate_is_a_function_of_the_chain_and_the_spec(swarm):
    target = swarm.world.spec.round.target_tokens
    for _ in range(2):
        for counted in (0, 1, 5):
            train(swarm.peers[1], counted)
            rate = 3e-3 * factor(SCHEDULE, swarm.accepted * WINDOW + target / 2)
            assert swarm.peers[1].backend.inner.learning_rate == rate
            swarm.peers[1].steps.set_orders(Orders(False, 40 * BATCH, 7 * target))
        swarm.decide((1, swarm.announce(1)))


def test_training_begins_again_from_the_state_less_the_update(swarm):
    trainer = swarm.peers[1]
    train(trainer, 2)
    made = swarm.announce(1)
    replay = Replay(swarm.world, [])
    same(trainer.backend.outer.local, replay.less(replay.state(0)[0], made.blob_path), atol=0)
    same(trainer.backend.outer.anchor, trainer.backend.outer.local, atol=0)
    assert trainer.backend.inner.moments() == (0, {})
    assert trainer.windows.counter == trainer.windows.rebase_window == 2 * BATCH and trainer.windows.uncovered == 0
    train(trainer, 1)
    again = swarm.announce(1)
    assert replace(again, blob_path=made.blob_path) == made and trainer.windows.counter == 3 * BATCH


@pytest.mark.parametrize("steps", [4, 40])
def test_an_update_before_counts_as_decoded_unless_no_round_could_let_it_through(tmp_path, steps):
    """After a round of 4 and 5 steps an update of 4 steps is not changed by a bit. One of 40 is longer than apply lets
    any update be."""
    swarm = Swarm(World.make(tmp_path, replayable=True))
    swarm.join(1, 2)
    swarm.round(3, meanwhile=steps)
    made, replay = swarm.announce(1), Replay(swarm.world, swarm.rounds)
    state, local = replay.state(1)[0], swarm.peers[1].backend.outer.local
    clipped, whole = replay.less(state, made.blob_path), replay.less(state, made.blob_path, clips=False)
    same(local, clipped, atol=0)
    assert all(torch.equal(local[n], whole[n]) is (steps == 4) for n in local)


@pytest.mark.parametrize(("skipped", "announces"), [(1, True), (2, False)])
def test_an_update_with_too_many_steps_that_changed_nothing_is_not_announced(swarm, monkeypatch, skipped, announces):
    trainer = swarm.peers[1]
    step, made = trainer.backend.inner.forward_backward, []

    def sometimes(*arguments):
        made.append(step(*arguments))
        return replace(made[-1], has_gradient=len(made) > skipped)

    monkeypatch.setattr(trainer.backend.inner, "forward_backward", sometimes)
    train(trainer, 8)
    assert trainer.windows.skipped == skipped
    ask = MakeUpdate(0, trainer.base.record, swarm.world.folder / "u")  # type: ignore[arg-type]
    answer = make_update(trainer, ask)
    if not announces:
        assert answer == NothingDone(ask.parent) and trainer.windows.counter == trainer.windows.skipped == 0
        train(trainer, 2)
        assert swarm.is_replayed(1, swarm.announce(1))
    else:
        assert isinstance(answer, UpdateMade) and trainer.windows.skipped == 0


@pytest.mark.parametrize("announced", [False, True])
def test_a_round_without_an_own_update_costs_what_was_trained(swarm, announced):
    trainer = swarm.peers[1]
    train(trainer, 2)
    if announced:
        swarm.announce(1)
        train(trainer, 1)
    train(swarm.peers[2], 1)
    swarm.decide((2, swarm.announce(2)))
    assert trainer.backend.outer.base is not None
    same(trainer.backend.outer.local, trainer.backend.outer.base, atol=0)
    start = 2 * BATCH if announced else 0
    assert trainer.windows.counter == trainer.windows.claimed_from == trainer.windows.rebase_window == start
    assert trainer.backend.inner.moments() == (0, {}) and trainer.windows.announced is None
    ask = MakeUpdate(1, swarm.rounds[0].record, swarm.world.folder / "none")
    assert make_update(trainer, ask) == NothingDone(swarm.rounds[0].record)


def test_a_load_of_the_same_record_keeps_what_was_trained_and_of_another_does_not(swarm):
    trainer = swarm.peers[1]
    train(trainer, 3)
    made = swarm.announce(1)
    train(trainer, 1)
    before, windows = copied(trainer.backend.outer.local), trainer.windows
    swarm.load(1)
    same(trainer.backend.outer.local, before, atol=0)
    assert trainer.windows == windows and trainer.backend.inner.moments()[0] == 1
    swarm.decide((1, made))
    train(trainer, 1)
    last = swarm.announce(1)
    assert swarm.is_replayed(1, last)
    swarm.rounds.pop()
    swarm.next_windows[1], swarm.accepted = 0, 0
    swarm.load(1)  # another branch won
    assert trainer.windows.counter == last.end_window
    train(trainer, 2)
    windows = trainer.windows
    swarm.load(1)
    assert trainer.windows == windows and trainer.backend.inner.moments()[0] == 2
    assert swarm.is_replayed(1, swarm.announce(1))


@pytest.mark.parametrize("saved", ["never", "before", "after"])
def test_an_update_on_another_branch_ends_after_the_missed_one_also_when_the_peer_restarts_between(swarm, saved):
    """The fork choice counts a key where its windows end last: an earlier end would still count on the old branch."""
    train(swarm.peers[1], 2)
    swarm.decide((1, swarm.announce(1)))
    if saved == "before":
        swarm.peers[1].checkpointer.save_now()
    train(swarm.peers[1], 2)
    missed = swarm.announce(1)
    train(swarm.peers[2], 1)
    swarm.decide((2, swarm.announce(2)), missed={1: missed})
    if saved == "after":
        swarm.peers[1].checkpointer.save_now()
    swarm.rounds.clear()
    swarm.next_windows[1], swarm.accepted = 0, 0
    if saved == "never":
        swarm.load(1)
    else:
        swarm.join(1)
    train(swarm.peers[1], 1)
    swarm.peers[1].checkpointer.save_now()
    swarm.join(1)
    train(swarm.peers[1], 1)
    made, end = swarm.announce(1), missed.end_window
    assert (made.first_window, made.rebase_window, made.end_window) == (end, end, end + 2 * BATCH)
    assert swarm.is_replayed(1, made)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_trained_on_a_state_that_this_peer_got_wrong_is_given_up(swarm, restarts):
    made = []
    for n, trainer in swarm.peers.items():
        train(trainer, 2)
        made.append((n, swarm.announce(n)))
    advance = swarm.peers[1].backend.outer.advance

    def drifting(contributions) -> None:
        advance(contributions)
        next(iter(swarm.peers[1].backend.outer.base.values())).view(-1)[0].add_(1.0)  # type: ignore[union-attr]

    swarm.peers[1].backend.outer.advance = drifting  # type: ignore[method-assign]
    swarm.decide(*made)
    swarm.peers[1].backend.outer.advance = advance  # type: ignore[method-assign]
    train(swarm.peers[1], 2)
    if restarts:
        swarm.peers[1].checkpointer.save_now()
        swarm.join(1)
    else:
        swarm.load(1)  # the chain vouches for another state of the same record
    assert swarm.peers[1].windows.counter == 2 * BATCH
    train(swarm.peers[1], 1)
    assert swarm.is_replayed(1, swarm.announce(1))


def test_an_update_that_could_not_claim_all_starts_over_instead(swarm):
    trainer = swarm.peers[1]
    train(trainer, 4)
    out = swarm.world.folder / "u"
    ask = MakeUpdate(0, trainer.base.record, out)  # type: ignore[arg-type]
    assert trainer.base.make_update(ask, 2 * BATCH) == NothingDone(ask.parent)
    assert trainer.base.is_begin_due and not out.exists()
    trainer.begin_again()
    assert trainer.windows.counter == 0 and not trainer.base.is_begin_due
    train(trainer, 2)
    made = trainer.base.make_update(ask, 2 * BATCH)
    assert isinstance(made, UpdateMade) and swarm.is_replayed(1, made)


def test_an_update_that_cannot_be_written_leaves_the_progress(swarm):
    trainer = swarm.peers[1]
    train(trainer, 2)
    with pytest.raises(OSError):
        update(trainer, swarm.world.folder / "no such folder" / "u")
    assert not trainer.base.is_begin_due
    train(trainer, 1)
    made = swarm.announce(1)
    assert made.end_window == 3 * BATCH and swarm.is_replayed(1, made)


def test_an_update_for_which_memory_ran_out_is_made_again_to_the_bit(swarm, monkeypatch):
    train(swarm.peers[1], 3)
    pack, calls = sign.pack, []

    def full(codes: torch.Tensor, bits: int) -> torch.Tensor:
        calls.append(packed := pack(codes, bits))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return packed

    monkeypatch.setattr(sign, "pack", full)
    with pytest.raises(torch.OutOfMemoryError):
        swarm.announce(1)
    assert swarm.is_replayed(1, swarm.announce(1))


def test_what_is_trained_between_the_announcement_and_the_hand_over_is_dropped(swarm):
    trainer = swarm.peers[1]
    train(trainer, 2)
    ask = MakeUpdate(0, trainer.base.record, swarm.world.folder / "u")  # type: ignore[arg-type]
    made = trainer.base.make_update(ask, 40 * BATCH)
    assert isinstance(made, UpdateMade) and swarm.is_replayed(1, made)
    train(trainer, 2)  # the other thread has announced it, and this one does not know yet
    with pytest.raises(AssertionError):
        swarm.decide((1, made))
    swarm.rounds, swarm.next_windows[1], swarm.accepted = [], 0, 0
    swarm.peers.pop(1).close()
    swarm.join(1)  # it begins from the announced update
    assert swarm.peers[1].windows.counter == made.end_window
    swarm.decide((1, made))
    train(swarm.peers[1], 1)
    assert swarm.is_replayed(1, swarm.announce(1))


@pytest.mark.parametrize("event", ["announce", "apply"])
def test_a_step_under_way_is_dropped_and_made_again_from_the_new_place(swarm, monkeypatch, event):
    monkeypatch.setattr("peer.training.inner_optimizer.PIECE_TOKENS", WINDOW)  # a step is BATCH pieces
    trainer = swarm.peers[1]
    train(trainer, 2)
    made = swarm.announce(1) if event == "apply" else None
    dropped: list[bool] = []

    def between() -> None:
        nonlocal made
        if not dropped:
            dropped.append(True)
            if made is None:
                made = swarm.announce(1)
            else:
                swarm.decide((1, made))

    counter = trainer.windows.counter
    assert trainer.steps.step(trainer.steps.batches.take(counter), between) is None
    assert trainer.windows.counter == counter and trainer.backend.inner.moments() == (0, {})
    train(trainer, 1)
    if event == "announce":
        assert made is not None
        swarm.decide((1, made))
        train(trainer, 1)
    last = swarm.announce(1)
    expected = BATCH if event == "announce" else 0
    assert last.rebase_window - last.first_window == expected and swarm.is_replayed(1, last)


# -- restarts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restart_makes_the_update_that_would_have_been_made_to_the_bit(tmp_path, optimizer):
    swarm = Swarm(World.make(tmp_path, replayable=True, schedule=SCHEDULE, optimizer=optimizer))
    swarm.join(1)
    # Small and large values side by side: a difference to the base would not restore them.
    swarm.round(2, meanwhile=1)
    train(swarm.peers[1], 2)
    before = swarm.peers[1]
    before.checkpointer.save_now()
    swarm.join(1)
    after = swarm.peers[1]
    assert after.windows == before.windows
    same(after.backend.outer.local, before.backend.outer.local, atol=0)
    same(after.backend.outer.anchor, before.backend.outer.anchor, atol=0)
    for trainer in (before, after):
        train(trainer, 2)
    kept = update(before, swarm.world.folder / "kept")
    made = swarm.announce(1)
    assert made.digest == kept.digest and swarm.is_replayed(1, made)


@pytest.mark.parametrize("saved", ["never", "before", "after"])
def test_a_restart_with_an_undecided_update_begins_from_it(swarm, saved):
    trainer = swarm.peers[1]
    train(trainer, 2)
    if saved == "before":
        trainer.checkpointer.save_now()
    made = swarm.announce(1)
    place = copied(trainer.backend.outer.local)
    train(trainer, 2)
    if saved == "after":
        trainer.checkpointer.save_now()
    swarm.join(1)
    trainer = swarm.peers[1]
    same(trainer.backend.outer.local, place, atol=0)
    assert trainer.windows.counter == made.end_window and trainer.backend.inner.moments() == (0, {})
    assert swarm.announce(1).digest == made.digest
    train(trainer, 1)
    swarm.decide((1, made))
    train(trainer, 1)
    last = swarm.announce(1)
    assert last.rebase_window == made.end_window + BATCH and swarm.is_replayed(1, last)


def test_a_restart_on_another_state_starts_over(swarm):
    train(swarm.peers[1], 2)
    made = swarm.announce(1)
    train(swarm.peers[1], 1)
    swarm.peers[1].checkpointer.save_now()
    gone = swarm.peers.pop(1)
    swarm.decide((1, made))
    assert gone.windows.counter == 3 * BATCH
    swarm.peers[1], heard = born(swarm.world, 1)
    swarm.load(1)
    assert heard.kinds() == ["saved-state"] and swarm.peers[1].windows.counter == made.end_window
    train(swarm.peers[1], 2)
    last = swarm.announce(1)
    assert last.rebase_window == last.first_window == made.end_window and swarm.is_replayed(1, last)


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_an_announced_update_that_cannot_be_used_any_more_has_training_start_over(swarm, how):
    train(swarm.peers[1], 2)
    swarm.announce(1)
    train(swarm.peers[1], 1)
    file = next(swarm.peers[1].folder.folder.glob("update-*"))
    file.unlink()  # a hard link of what the node has
    if how == "damaged":
        file.write_bytes(bytes(swarm.peers[1].base.codec.size))
    swarm.peers[1], heard = born(swarm.world, 1)
    swarm.load(1)
    assert heard.kinds() == ["lost-update"] and swarm.peers[1].windows.counter == 2 * BATCH
    train(swarm.peers[1], 1)
    assert swarm.is_replayed(1, swarm.announce(1))


def test_an_announced_update_whose_file_disappears_while_training_has_it_start_over(swarm):
    trainer = swarm.peers[1]
    train(trainer, 2)
    swarm.announce(1)
    train(trainer, 1)
    next(trainer.folder.folder.glob("update-*")).unlink()
    ask = MakeUpdate(0, trainer.base.record, swarm.world.folder / "again")  # type: ignore[arg-type]
    assert make_update(trainer, ask) == NothingDone(ask.parent)
    assert trainer.windows.counter == 2 * BATCH and trainer.windows.announced is None
    train(trainer, 1)
    made = update(trainer, ask.out)
    assert swarm.is_replayed(1, made)


# -- other runs ---------------------------------------------------------------------------------------------------


def test_only_a_replayable_run_begins_again(tmp_path):
    usual = loaded(World.make(tmp_path))
    train(usual, 2)
    place = copied(usual.backend.outer.local)
    made = update(usual, tmp_path / "u")
    assert type(usual.base) is BaseState and not issubclass(BaseState, ReplayableState)
    assert not usual.base.is_begin_due and made.rebase_window == made.first_window
    same(usual.backend.outer.local, place, atol=0)
    assert usual.backend.inner.moments()[0] == 2
    with pytest.raises(ValueError, match="replayable"):
        usual.backend.begin_again(None)


def test_a_saved_state_has_the_parameters_and_no_feedback(swarm):
    train(swarm.peers[1], 1)
    swarm.peers[1].checkpointer.save_now()
    state = swarm.peers[1].folder.read()
    assert state is not None and not state.feedback and not state.progress
    for name, values in swarm.peers[1].backend.outer.local.items():
        assert torch.equal(state.position[name], values)

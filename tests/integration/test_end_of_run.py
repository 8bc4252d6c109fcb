"""The end of a run: its last state reaches the coordinator, and latecomers leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.checkpoints.archive import ArchivedState
from coordinator.checkpoints.copies import file_reader
from coordinator.checkpoints.verification import verify_checkpoint
from peer.node import end_of_run, last_member
from peer.node.enrollment import Enrollment, RunIsOver
from peer.store import Store
from protocol.rounds import departure
from tests.support.coordinated_world import CoordinatedWorld
from tests.support.node_world import TIMERS
from tests.support.trainer_world import BATCH, WINDOW
from tests.support.waiting import ended, until

PEERS = ("ada", "grace")
TARGET = 10 * BATCH * WINDOW
ROUND = {"target_tokens": TARGET, "max_update_tokens": TARGET // 2, **TIMERS}
"""Two peers make a round; on a busy machine it may happen that one makes it alone."""

TOTAL = 3 * TARGET
"""Three rounds at least: the coordinator can be stopped before the end."""

CHECKPOINT = {"every": 50, "keep": 2, "final_depth": 3}
"""No round of these tests is a checkpoint by its number."""

CREDIT = {"hold_rounds": 1}
"""A record that one peer certified alone, which happens on a busy machine, waits this many `max_seconds`."""


@pytest.fixture
async def make(tmp_path: Path, monkeypatch) -> AsyncIterator[Callable[..., CoordinatedWorld]]:
    monkeypatch.setattr(departure, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(end_of_run, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(last_member, "MAX_STAY_SECONDS", 2.0)  # for a coordinator that is away
    worlds: list[CoordinatedWorld] = []

    def make(**fields: Any) -> CoordinatedWorld:
        worlds.append(CoordinatedWorld(tmp_path, round=ROUND, checkpoint=CHECKPOINT, credit=CREDIT, **fields))
        return worlds[0]

    yield make
    await worlds[0].close()


async def begun(world: CoordinatedWorld, *, rounds: int) -> CoordinatedWorld:
    """Serve the run, and wait until both peers have this many rounds."""
    await world.serve()
    for name in PEERS:
        world.start(name)
    await world.rounds(PEERS, rounds)
    return world


async def finish_without_coordinator(world: CoordinatedWorld) -> None:
    await world.stop_serving()
    await world.until("they have finished", lambda: all(world.nodes[n].end_of_run.is_awaited for n in PEERS))


async def archived_last(world: CoordinatedWorld) -> ArchivedState:
    """Wait until the state after the chain's newest record is archived, and signed as final; return it."""
    head = world.view.head

    def look() -> ArchivedState | None:
        # A record that one of the two made alone has no support, and nothing comes after it: it stays as it is.
        is_due = bool(world.view.count_backed([head]))
        return next((a for a in world.archive.all() if a.record == head and (a.final or not is_due)), None)

    found = await until(look, "the last state is archived, and final")
    if found.final:
        verify_checkpoint(file_reader(str(found.folder)), run=world.spec.run_id)
    return found


async def test_the_last_state_of_a_run_that_its_owner_ends_is_archived_before_peers_leave(make):
    world = await begun(make(), rounds=2)
    folder = str(world.folder / "observer")
    asked = await world.command("run", "end", folder, answer="n\n")
    assert "The newest archived state is that of round 0. The coordinator gets the last one from the 2 peers" in asked
    assert world.view.directive is None and "Aborted" in asked
    said = await world.command("run", "end", folder, "--yes")
    assert "waiting until the coordinator has the last state" in said and "is archived in" in said, said
    for name in PEERS:
        await ended(world.left(name))
        assert not world.nodes[name].end_of_run.is_awaited
        assert (info := world.nodes[name].end_of_run.info) is not None and "ended by the run's owner" in info.over
    last = await archived_last(world)
    # A peer may be on a branch that it made alone, or wait for this state no more since the coordinator has it.
    held = [world.nodes[n].snapshot() for n in PEERS]
    assert {s.state for s in held if s.head == str(last.record)} == {str(last.state)}
    await until(lambda: not world.coordinator.overview().pending, "all is settled")
    overview = world.coordinator.overview()
    assert (overview.state, overview.state_round) == (last.state, last.round) and not overview.missing_state


async def test_the_state_of_a_paused_run_is_archived_and_the_run_goes_on_from_it(make):
    world = await begun(make(), rounds=1)
    await world.order("paused")

    def archived() -> ArchivedState | None:
        at_head = (a for a in world.archive.all() if a.record == world.view.head)
        return next(at_head, None)

    paused = await until(archived, "the state is archived")
    await until(lambda: not world.coordinator.overview().missing_state, "the page says so")
    assert not world.coordinator.overview().tokens_per_second
    await world.order("running")
    await world.rounds(PEERS, 2)
    following = world.nodes["ada"].chain.main_chain_at(paused.round + 1)
    assert following is not None
    assert world.nodes["ada"].chain.certificate(following).record.body.base_state == paused.state


async def test_peers_stay_for_a_coordinator_that_is_away_at_the_end(make, caplog):
    world = await begun(make(total_tokens=TOTAL), rounds=1)
    await finish_without_coordinator(world)
    await until(lambda: "staying until it has the last state" in caplog.text, "it is said why they stay")
    assert "Ctrl-C is safe" in caplog.text and all(not world.running[n].done() for n in PEERS)
    await world.serve()
    for name in PEERS:
        await ended(world.left(name))
        assert not world.nodes[name].end_of_run.is_awaited
    await archived_last(world)


async def test_those_who_have_the_last_state_are_named_and_may_come_one_after_the_other(make):
    world = await begun(make(total_tokens=TOTAL), rounds=1)
    await finish_without_coordinator(world)
    for name in PEERS:
        world.nodes[name].leave()
        await ended(world.left(name))
        assert world.nodes[name].end_of_run.is_awaited, "what the volunteer is told at the end"
    await world.serve()
    chain = world.nodes["ada"].chain
    contributors = chain.certificate(chain.head).record.body.contributors
    needed = [name for name in PEERS if world.key(name) in contributors]

    def asks(*names: str) -> bool:
        keys = ", ".join(sorted(world.key(n).short for n in names))
        shown = world.coordinator.overview()
        return shown.health == "finished" and shown.missing_state.endswith(f"ask {keys} to join again")

    def said(name: str) -> bool:
        resting = world.view.resting_state()
        return resting is not None and world.key(name) not in resting.wanted

    for name in needed[:-1]:
        world.start(name)
        await until(lambda n=name: said(n) and asks(*needed[1:]), "the other one is asked for")
        overview = world.coordinator.overview()
        assert overview.missing_state in overview.message
        assert overview.missing_state in overview.archive_problem, "so it becomes an alert"
        world.nodes[name].leave()
        await ended(world.left(name))
    world.start(needed[-1])
    await ended(world.left(needed[-1]))
    await archived_last(world)


async def enter(world: CoordinatedWorld, name: str) -> Enrollment:
    assert world.invite is not None
    home = world.folder / name
    home.mkdir(exist_ok=True)
    with Store(home / "store", 1 << 40) as store:
        return await Enrollment.enter(world.invite, home, store, name=name)


async def test_who_comes_after_the_end_is_not_admitted_and_who_missed_the_end_leaves(make):
    world = await begun(make(total_tokens=TOTAL), rounds=1)
    for name in PEERS:
        await ended(world.left(name))
    last = await archived_last(world)
    assert not world.coordinator.overview().tokens_per_second
    with pytest.raises(RunIsOver, match="is finished: all 1.9k tokens are trained, in [0-9]+ rounds") as told:
        await enter(world, "barbara")
    found = told.value.info.last
    assert found is not None and (found.state, found.round) == (last.state, last.round)
    # Admitted before the end, it leaves whether or not it still gets the last state.
    late = world.start("barbara")
    await ended(world.left("barbara"))
    assert late.end_of_run.info is not None and "is finished: all 1.9k tokens" in late.snapshot().finished


@pytest.mark.long
async def test_an_ended_run_admits_those_who_may_bring_its_last_state_and_nobody_else(make):
    world = await begun(make(), rounds=1)
    for name in PEERS:  # both at once: of a record that the second made alone, half of the stake would never be for it
        world.nodes[name].leave()
    await asyncio.gather(*(ended(world.left(n)) for n in PEERS))
    await until(lambda: not world.coordinator.overview().training, "they are missed")
    asked = await world.command("run", "end", str(world.folder / "observer"), answer="y\n")
    assert "Nobody is here: what was trained since is lost, unless peers that took part join again" in asked
    assert "is not archived: ask" in asked, asked
    contributors = world.view.certificate(world.view.head).record.body.contributors
    await until(lambda: "is not archived: ask" in world.coordinator.overview().missing_state, "somebody is asked for")
    refusal = world.coordinator.control.refusal
    assert all(refusal(key) is None for key in contributors)
    assert "ended by its owner" in (refusal(world.key("barbara")) or "")
    with pytest.raises(RunIsOver, match="is not archived: ask"):
        await enter(world, "barbara")
    for name in PEERS:
        world.start(name)
    await asyncio.gather(*(ended(world.left(n)) for n in PEERS))
    await archived_last(world)
    assert all("ended by its owner" in (refusal(key) or "") for key in contributors)

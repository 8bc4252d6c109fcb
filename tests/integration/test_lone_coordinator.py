"""Everybody has left, and only the coordinator is there: whoever comes then goes on from the head."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cairn.kept_updates import KeptUpdates
from cairn.swarm_view import ObserverView
from coordinator.checkpoints.archive import Archive
from coordinator.checkpoints.settings import ArchiveTable
from peer.channel import RoundUpdates
from peer.errors import PeerError
from protocol.chain import genesis_digest
from protocol.messages import Certificate
from tests.support.node_world import TIMERS, NodeWorld
from tests.support.specs import identity
from tests.support.trainer_world import BATCH, WINDOW

ROUND = {"target_tokens": 10 * BATCH * WINDOW, "max_update_tokens": 40 * BATCH * WINDOW, **TIMERS}
NAMES = {identity(name).key: name for name in ("ada", "bob", "cyd")}
REDUCED = {"round": ROUND | {"exchange": "reduce", "committee": 2}, "codec": {"kind": "int8"}}
CHECKPOINT = {"every": 4, "keep": 1, "final_depth": 2}


class Owner:
    """The observer of `cairn coordinator serve` with its archive, in a world of nodes."""

    def __init__(self, world: NodeWorld, folder: Path, **settings: Any):
        self.world = world
        self.node = world.observe()
        spec, store = world.spec, self.node.store
        self.archive = Archive(folder / "checkpoints", spec)
        self.archive.add(
            store.path(spec.genesis.name), store.path(spec.tokenizer.name), round=0, state=spec.genesis.name,
            record=genesis_digest(spec.run_id), tokens=0,
        )  # fmt: skip
        self.view = ObserverView(self.node, spec, self.archive)
        self.kept = KeptUpdates(self.node, self.view, ArchiveTable(**settings), lambda key: NAMES[key])
        self.tasks = [asyncio.create_task(work) for work in (self.view.keep_archive(), self.kept.run())]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def states(self) -> list[int]:
        """Return the rounds of the archived states, oldest first, without the genesis."""
        return [a.round for a in self.archive.all() if a.round]

    def miss_proofs(self) -> None:
        """Have the updates not come of the rounds whose records name an archived state, but the first such state."""
        files = self.node.work.jobs.files
        fetch = files.round_files

        async def round_files(certificate: Certificate) -> RoundUpdates:
            number = certificate.record.body.round
            if number % CHECKPOINT["every"] == 0 and self.states and number > self.states[0]:
                raise PeerError("the line is bad")
            return await fetch(certificate)

        files.round_files = round_files

    @property
    def height(self) -> int:
        return self.node.chain.height(self.node.chain.head)

    @property
    def archived(self) -> int:
        return max(a.round for a in self.archive.all())


@asynccontextmanager
async def deserted(folder: Path, *, proofs: bool = True, **fields: Any) -> AsyncIterator[tuple[NodeWorld, Owner]]:
    """Yield a world that ada and bob have left in order, past an archived state: only the coordinator is there.

    Without `proofs` there is more than one such state, and it could not fetch the rounds that name the newer ones.
    """
    world = NodeWorld(folder, **{"round": ROUND, "checkpoint": CHECKPOINT, **fields})
    owner = None
    try:
        for name in ("ada", "bob"):
            world.start(name)
        first = owner = Owner(world, folder)
        if not proofs:
            first.miss_proofs()
        await world.until("archived states", lambda: len(first.states) > (not proofs))
        await world.until("rounds after an archived state", lambda: first.height >= first.archived + 2)
        await world.leave("ada", "bob")
        assert owner.height > owner.archived
        await owner.stop()
        await world.kill("observer")
        owner = Owner(world, folder)  # it finds again what it kept
        world.nodes["observer"] = owner.node
        yield world, owner
    finally:
        if owner is not None:
            await owner.stop()
        await world.close()


@pytest.mark.parametrize("fields", [{}, REDUCED], ids=["gathered", "reduced"])
async def test_a_newcomer_reaches_the_head_and_trains_on_after_all_have_left(tmp_path: Path, fields: dict[str, Any]):
    async with deserted(tmp_path, **fields) as (world, owner):
        left = owner.height
        world.start("cyd")
        await world.until("cyd has trained on", lambda: owner.height >= left + 2, 60)
        path = world.path("cyd")
        assert path[left].record.body.contributors == (world.key("cyd"),)
        assert all(bool(c.shards) == bool(fields) for c in path[:left])


async def test_without_the_updates_of_the_last_round_a_newcomer_goes_on_before_it_and_says_so_in_few_lines(
    tmp_path: Path, caplog
):
    async with deserted(tmp_path) as (world, owner):
        left = owner.height
        last = {u.body.blob for u in owner.node.chain.certificate(owner.node.chain.head).record.body.updates}
        world.internet.withheld = lambda giver, blob: blob in last
        caplog.clear()
        caplog.set_level(logging.INFO)
        world.start("cyd")
        await world.until("cyd has trained on", lambda: len(world.path("cyd")) >= left + 1, 120)
        assert world.path("cyd")[left - 1].record.body.contributors == (world.key("cyd"),)
        said = "\n".join(r.getMessage() for r in caplog.records)
        assert said.count("request for blob") <= 1, said  # a fetch that still runs when the branch is left says nothing
        for line in ("was not reached", "no peer provides the update of"):
            assert said.count(line) == 1, said


@pytest.mark.long
async def test_without_the_round_that_proves_the_newest_archived_state_a_newcomer_goes_on_from_there(tmp_path: Path):
    async with deserted(tmp_path, proofs=False) as (world, owner):
        number = owner.states[1]
        said = re.compile(rf"the updates of rounds? {number}( to \d+)? are held by nobody here: .* ha(s|ve) them")
        await world.until("the coordinator says who has them", lambda: bool(said.fullmatch(owner.view.updates_problem)))
        world.start("cyd")
        await world.until(
            "cyd has trained on",
            lambda: (
                [c.record.body.contributors for c in world.path("cyd")[number : number + 1]] == [(world.key("cyd"),)]
            ),
            120,
        )

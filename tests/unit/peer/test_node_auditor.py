"""A node that audits without training: real nodes, and an auditor's process that finds all updates honest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from peer.auditor.job import AuditAnswer, AuditJob, MeasuredScore
from peer.node.enrollment import Enrollment
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.node.rest import RestWish
from peer.store import Store
from protocol.message_codec import KeySigner
from protocol.messages import Directive, WorkReport
from protocol.rounds import events
from protocol.rounds.phase import Phase
from tests.support.node_world import TIMERS, NodeWorld, address_of
from tests.support.specs import OWNER, admission, identity
from tests.support.trainer_world import BATCH, WINDOW
from tests.support.waiting import ended

REPLAYABLE: dict[str, Any] = {
    "round": {"target_tokens": 10 * BATCH * WINDOW, "max_update_tokens": 40 * BATCH * WINDOW, **TIMERS},
    "codec": {"kind": "sign", "beta": 0.0},
    "audit": {"replayable": True},
    "checkpoint": {"every": 4, "keep": 2},
}


class Process:
    """An auditor's process that passes each update, and checks that it has been given all files."""

    def __init__(self):
        self.asked: list[AuditJob] = []

    async def answer(self, job: AuditJob, seconds: float) -> AuditAnswer:
        files = [job.spec_path, job.update.blob, job.start.checkpoint]
        files += [u.blob for r in job.start.rounds for u in r.updates] + [Path(p) for p in job.shards.values()]
        assert all(f.is_file() for f in files), files
        self.asked.append(job)
        return AuditAnswer((MeasuredScore("scale", 1.0, 0.8), MeasuredScore("signs", 1.0, 0.97)), "", 1.0)

    async def close(self) -> None:
        """Do nothing: there is no process."""


def start_auditor(world: NodeWorld, *, rest: RestWish | None = None) -> tuple[Node, Process]:
    """Start an auditor whose disk is empty."""
    me, home = identity("watcher"), world.folder / "watcher"
    home.mkdir()
    store = Store(home / "store", 1 << 40)
    ways_in = [address_of(world.key(n)) for n in world.nodes]
    membership = Enrollment(me, world.spec, store, None, "", admission(world.spec, me).encoded, ways_in)
    node = world.build(membership, NodeOptions(home, device="cpu", auditor=True), owner=OWNER, rest=rest)
    assert node.work.auditor is not None
    process = Process()
    node.work.auditor.process = cast(Any, process)
    world.run("watcher", node, store)
    return node, process


def reports(world: NodeWorld) -> list[tuple[WorkReport, Any]]:
    """Return the reports that records carry, with their authors."""
    return [(r.body, r.author) for c in world.path("ada") for r in c.record.body.reports]


async def test_the_owners_auditor_fetches_all_it_needs_reports_by_the_owners_key_and_ends_with_the_run(tmp_path):
    world = NodeWorld(tmp_path, **REPLAYABLE)
    try:
        world.start("ada")
        await world.rounds(["ada"], 1)
        rest = RestWish()
        node, process = start_auditor(world, rest=rest)
        await world.until("records carry its reports", lambda: len(reports(world)) >= 4)
        told = reports(world)
        assert {author for _, author in told} == {OWNER.key} and {r.check for r, _ in told} == {"replay"}
        assert process.asked[0].device == "cpu" and all(r.passed for r, _ in told)

        # A member that holds no state and announces nothing; no record lists it, and no round waits for it.
        (member,) = (m for m in world.nodes["ada"].machine.summary(0.0).members if m.key == world.key("watcher"))
        assert (member.heartbeat.phase, member.heartbeat.state) == ("observing", None)
        assert world.nodes["ada"].network.is_admitted(world.key("watcher")) and node.machine.phase is Phase.OBSERVING
        assert not world.contributed("watcher") and world.key("watcher") not in world.trainers
        first = process.asked[0].update.blob
        await world.until("its store is pruned of what no check needs any more", lambda: not first.exists())

        rest.want("schedule", "outside the hours 22-7")
        await world.until("its process has ended", lambda: rest.is_free)
        made, auditor = len(process.asked), node.work.auditor
        assert auditor is not None
        await world.until("a check waits", lambda: auditor.waiting)
        assert len(process.asked) == made and node.snapshot().rest == "outside the hours 22-7"
        rest.want("schedule", "")
        await world.until("the check is made", lambda: len(process.asked) > made)

        order = Directive(world.spec.run_id, 1, run_status="ended")
        node.post(events.MessageReceived(KeySigner(OWNER).sign(order)))
        await ended(world.running["watcher"])
        assert "ended by its owner" in node.snapshot().finished and node.snapshot().audits["made"] >= 4
    finally:
        await world.close()

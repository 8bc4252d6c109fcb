"""One peer of Cairn's rows: the product's node, swarm, store, codec and round machine; its trainer trains nothing.

    python -m benchmarks.exchange_wan.cairn_peer JOB.json NUMBER

The trainer's place is taken by `stand_in`, which speaks the same channel. A diary has the node's own events.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import torch

from benchmarks.exchange_wan.job import LOOK_SECONDS, Diary, Job
from benchmarks.exchange_wan.run_spec import PORT, addresses, admission, furnish, identity
from peer.node.builder import build_node, load_chain
from peer.node.enrollment import Enrollment
from peer.node.events import EventQueued, NodeEvents
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.store import Store
from protocol.ids import Digest
from protocol.rounds import events
from protocol.spec import parse_spec

DISK_BYTES = 2**37
LEAVE_SECONDS = 10.0


def keep_diary(node: Node, bus: NodeEvents, diary: Diary) -> None:
    """Write down when the node announced, held each of the others' updates, and was at the new state."""
    own: set[Digest] = set()
    announced = -1

    def note(queued: EventQueued) -> None:
        nonlocal announced
        match queued.event:
            case events.UpdateReady(parent=parent, blob=blob) if blob is not None:
                announced = node.chain.height(parent)
                own.add(blob)
                diary.say("announced", announced)
            case events.BlobHeld(blob=blob) if blob not in own and announced >= 0:
                diary.say("held", announced, blob=str(blob))
            case events.StateReached(record, state) if record in node.chain and record != node.chain.root:
                body = node.chain.certificate(record).record.body
                diary.say("done", body.round, state=str(state), shares=None, taking_part=len(body.updates))
            case _:
                pass

    bus.subscribe(EventQueued, note)


async def serve(job: Job, number: int) -> None:
    """Until the harness says that it is over."""
    folder = job.path / f"p{number + 1}"
    folder.mkdir()
    logging.basicConfig(filename=folder / "peer.log", level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    spec, diary = parse_spec((job.path / "spec.json").read_bytes()), Diary(job, number)
    with Store(folder / "store", DISK_BYTES) as store:
        furnish(store, spec, job.path / "genesis")
        membership = Enrollment(
            identity(number), spec, store, None, f"p{number + 1}",
            admission(spec, number), addresses(job, number),
        )  # fmt: skip
        options = NodeOptions(
            folder,
            listen=(f"/ip4/{job.ips[number]}/tcp/{PORT}",),
            device="cpu",
            audit_device="off",
            trainer_command=(
                sys.executable, "-m", "benchmarks.exchange_wan.stand_in", str(job.path / "job.json"), str(number),
            ),
        )  # fmt: skip
        bus = NodeEvents()
        node = build_node(membership, options, load_chain(membership, options), bus)
        keep_diary(node, bus, diary)
        running = asyncio.create_task(node.run())
        introduced = False
        while not diary.over and not running.done():
            if not introduced and len(node.network.peers.keys()) == len(job.ips) - 1:
                diary.ready(-1)
                introduced = True
            await asyncio.sleep(LOOK_SECONDS)
        if not running.done():
            node.leave()
        await asyncio.wait_for(running, LEAVE_SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Job.read(Path(sys.argv[1])), int(sys.argv[2])))

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
from peer.node.membership import Membership
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.store import Store
from protocol.ids import Digest
from protocol.message_codec import MessageDecoder
from protocol.rounds import events
from protocol.spec import parse_spec

DISK_BYTES = 2**37
LEAVE_SECONDS = 10.0


class Watched(Node):
    """A node that writes down when it announced, held each of the others' updates, and was at the new state."""

    def __init__(self, membership: Membership, options: NodeOptions, diary: Diary):
        self._diary = diary
        self._own: set[Digest] = set()
        self._round = -1
        super().__init__(membership, options)

    def post(self, event: events.Event) -> None:
        match event:
            case events.UpdateReady(parent=parent, blob=blob) if blob is not None:
                self._round = self.chain.height(parent)
                self._own.add(blob)
                self._diary.say("announced", self._round)
            case events.BlobHeld(blob) if blob not in self._own and self._round >= 0:
                self._diary.say("held", self._round, blob=str(blob))
            case events.StateReached(record, state) if record in self.chain and record != self.chain.root:
                body = self.chain.certificate(record).record.body
                taking_part = len(body.updates)
                self._diary.say("done", body.round, state=str(state), shares=None, taking_part=taking_part)
            case _:
                pass
        super().post(event)


async def serve(job: Job, number: int) -> None:
    """Until the harness says that it is over."""
    folder = job.path / f"p{number + 1}"
    folder.mkdir()
    logging.basicConfig(filename=folder / "peer.log", level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    spec, diary = parse_spec((job.path / "spec.json").read_bytes()), Diary(job, number)
    with Store(folder / "store", DISK_BYTES) as store:
        furnish(store, spec, job.path / "genesis")
        membership = Membership(
            identity(number), spec, MessageDecoder(spec.run_id, spec.owner_key), store, None, f"p{number + 1}",
            admission(spec, number), addresses(job, number),
        )  # fmt: skip
        options = NodeOptions(
            folder,
            listen=(f"/ip4/{job.ips[number]}/tcp/{PORT}",),
            device="cpu",
            trainer_command=(
                sys.executable, "-m", "benchmarks.exchange_wan.stand_in", str(job.path / "job.json"), str(number),
            ),
        )  # fmt: skip
        node = Watched(membership, options, diary)
        running = asyncio.create_task(node.run())
        introduced = False
        while not diary.over and not running.done():
            if not introduced and len(node.network.directory.peers()) == len(job.ips) - 1:
                diary.ready(-1)
                introduced = True
            await asyncio.sleep(LOOK_SECONDS)
        if not running.done():
            node.leave()
        await asyncio.wait_for(running, LEAVE_SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Job.read(Path(sys.argv[1])), int(sys.argv[2])))

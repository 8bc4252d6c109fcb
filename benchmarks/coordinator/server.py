"""A coordinator over a simulated swarm, in its own process: `python -m benchmarks.coordinator.server FOLDER PEERS`.

Says on a line of JSON where it is. Each connection counts as an address of its own, as the connections of as many
strangers would; `--by-address` counts as in earnest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.coordinator.swarm import OWNER, SimulatedSwarm, make_spec
from coordinator import admission_table, interceptor, rpc
from coordinator.checkpoints.archive import Archive
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.settings import CheckpointSettings
from coordinator.service import Coordinator, CoordinatorConfig
from protocol.spec import sign_spec

PARTS = 20


async def serve(folder: Path, peers: int, contributors: int, round_seconds: float) -> None:
    """Until SIGTERM."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    spec = make_spec()
    swarm = SimulatedSwarm(spec, peers)
    for part in range(PARTS):
        swarm.beat(part, PARTS)
    for _ in range(10):
        swarm.round(contributors)
    places = {"listen_host": "127.0.0.1", "listen_port": 0, "page_host": "127.0.0.1", "page_port": 0}
    config = CoordinatorConfig(folder, **places)  # type: ignore[arg-type]
    view: Any = swarm
    archive = Archive(folder / "checkpoints", spec)
    archiver = CheckpointArchiver(archive, EvaluationLog(folder), spec, view, CheckpointSettings())
    coordinator = Coordinator(config, spec, sign_spec(OWNER, spec).encoded, OWNER, view, archiver)
    await coordinator.start()
    invite, page = str(coordinator.invite()), coordinator.page_port
    print(json.dumps({"invite": invite, "grpc": coordinator.grpc_port, "page": page, "pid": os.getpid()}), flush=True)
    tick, due = 0, round_seconds
    while not over.is_set():
        await asyncio.sleep(spec.round.heartbeat_seconds / PARTS)
        swarm.beat(tick % PARTS, PARTS)
        tick += 1
        if tick * spec.round.heartbeat_seconds / PARTS >= due:
            due += round_seconds
            swarm.round(contributors)
    await coordinator.stop()


def main() -> int:
    """Serve with arguments from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", type=int)
    parser.add_argument("--contributors", type=int, default=100)
    parser.add_argument("--round-seconds", type=float, default=10.0)
    parser.add_argument("--by-address", action="store_true")
    options = parser.parse_args()
    if not options.by_address:
        rpc.caller_of = interceptor.caller_of = lambda peer: peer
        admission_table.NEW_KEYS = options.peers
    asyncio.run(serve(options.folder, options.peers, min(options.contributors, options.peers), options.round_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An hour of simulated time at full speed: a round of 1,000 updates each minute through chain indexer and ledger."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.coordinator.swarm import OWNER, SimulatedSwarm, make_spec
from coordinator.checkpoints.archive import Archive
from coordinator.checkpoints.archiver import CheckpointArchiver
from coordinator.checkpoints.evaluations import EvaluationLog
from coordinator.checkpoints.settings import CheckpointSettings
from coordinator.service import Coordinator, CoordinatorConfig
from protocol.spec import sign_spec


def processor_seconds() -> float:
    """Return the processor seconds of this process so far, over all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def hour(folder: Path, peers: int, rounds: int) -> dict[str, Any]:
    """Run an hour of rounds, each a minute after the one before by the coordinator's clock."""
    spec, clock = make_spec(), [1.9e9]
    swarm = SimulatedSwarm(spec, peers)
    config = CoordinatorConfig(folder, "127.0.0.1", 0, "127.0.0.1", 0)

    def made() -> Coordinator:
        envelope, view = sign_spec(OWNER, spec).encoded, cast(Any, swarm)
        archive = Archive(folder / "checkpoints", spec)
        archiver = CheckpointArchiver(archive, EvaluationLog(folder), spec, view, CheckpointSettings())
        return Coordinator(config, spec, envelope, OWNER, view, archiver, now=lambda: clock[0])

    coordinator = made()
    await coordinator.start()
    await coordinator.stop()
    empty = _bytes(folder)  # stopped: all is in the database's file, and nothing in its log
    coordinator = made()
    await coordinator.start()
    making, used, began = 0.0, processor_seconds(), time.monotonic()
    chain = coordinator.chain
    waits: list[float] = []
    for n in range(rounds):
        clock[0] += 60
        at = processor_seconds()
        swarm.beat(0, 1)
        swarm.round(peers, loss=3.0 + 1 / (n + 1))
        making += processor_seconds() - at
        due = time.monotonic()
        while chain.head is None or chain.head[0] < n:  # noqa: ASYNC110 - it is measured, and tells nobody
            await asyncio.sleep(0.002)
        waits.append(time.monotonic() - due)
    took, used = time.monotonic() - began, processor_seconds() - used - making
    settled = chain.posted
    await coordinator.stop()
    on_disk = _bytes(folder) - empty
    again = time.monotonic()
    coordinator = made()
    await coordinator.start()
    restart = time.monotonic() - again
    await coordinator.stop()
    return {
        "peers": peers, "rounds": rounds, "processor_seconds": used, "wall_seconds": took,
        "followed_ms": 1e3 * sorted(waits)[len(waits) // 2], "followed_max_ms": 1e3 * max(waits),
        "bytes_per_round": on_disk / rounds,
        "final_rounds": 0 if settled is None else settled[0] + 1,
        "restart_seconds": restart, "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file())


def main() -> int:
    """Peers and rounds from the command line; the result as JSON."""
    peers, rounds = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(hour(Path(folder), peers, rounds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long blobs take over simulated lines, as a table: `python -m tests.support.fetch_lines`.

There are no downlink limits and no TCP.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from benchmarks.report import table
from benchmarks.transfer.cases import CASES, Case
from tests.support.fetch_world import World, simulated

LINES = [c for c in CASES if c.kind == "time" and not c.loss]


async def spread(case: Case, folder: Path) -> tuple[float, float]:
    """Seconds until all have it, and how many times the donors sent it."""
    world = World(folder, rtt=case.rtt_ms / 1e3)
    donors = [world.host(case.donor_mbit) for _ in range(case.donors)]
    fetchers = [world.host(case.fetcher_mbit) for _ in range(case.fetchers)]
    data = random.Random(0).randbytes(case.size)
    digest = [d.store.put(data) for d in donors][0]
    took = await asyncio.gather(*(f.fetch(digest, case.size, [*donors, *fetchers]) for f in fetchers))
    world.close()
    return max(took), sum(d.traffic.up for d in donors) / case.size


def main() -> None:
    rows = []
    for case in LINES:
        with tempfile.TemporaryDirectory() as folder:
            seconds, copies = simulated(spread(case, Path(folder)))
        rows.append([case.name, case.size // 10**6, round(seconds, 2), round(case.floor, 2), round(copies, 2)])
    print(table(["case", "MB", "seconds", "floor", "copies sent"], rows))


if __name__ == "__main__":
    main()

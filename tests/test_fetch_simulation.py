"""How blobs spread over lines of every sort, in simulated time: how long it takes, and what a source sends."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from protocol.merkle import CHUNK
from tests.fetch_world import MBIT, World, simulated


def data_of(chunks: float, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(int(chunks * CHUNK))


@pytest.mark.parametrize("fetchers", [2, 7])
def test_a_slow_author_sends_each_chunk_about_once(tmp_path: Path, fetchers: int):
    data = data_of(48)

    async def main() -> tuple[float, float]:
        world = World(tmp_path, rtt=0.1)
        author, *others = hosts = [world.host(20 if n == 0 else 100) for n in range(fetchers + 1)]
        digest = author.store.put(data)
        took = await asyncio.gather(*(h.fetch(digest, len(data), hosts) for h in others))
        copies = author.traffic.up / len(data)
        world.close()
        return max(took), copies

    took, copies = simulated(main())
    print(took, copies)
    assert copies <= 1.25
    assert took <= 1.25 * (len(data) / (20 * MBIT) + 0.2)


def test_a_newcomer_is_filled_by_many_slow_donors(tmp_path: Path):
    data = data_of(160)

    async def main() -> tuple[float, list[int]]:
        world = World(tmp_path, rtt=0.1)
        rates = [20, 20, 20, 20, 10, 30]
        donors = [world.host(r) for r in rates]
        new = world.host(100)
        digest = [d.store.put(data) for d in donors][0]
        took = await new.fetch(digest, len(data), donors)
        sent = [d.traffic.up for d in donors]
        world.close()
        return took, sent

    took, sent = simulated(main())
    print(took, [s / len(data) for s in sent])
    assert took <= 1.25 * (len(data) / (120 * MBIT) + 0.2)
    assert sent[5] > 2 * sent[4]
    assert sum(sent) <= 1.05 * len(data)


def test_a_far_donor_is_asked_for_what_fills_the_line(tmp_path: Path):
    data = data_of(200)

    async def main() -> float:
        world = World(tmp_path, rtt=0.2)
        donor, new = world.host(200), world.host(200)
        digest = donor.store.put(data)
        took = await new.fetch(digest, len(data), [donor])
        world.close()
        return took

    took = simulated(main())
    print(took)
    assert took <= 1.2 * (len(data) / (200 * MBIT) + 0.4) + 0.4

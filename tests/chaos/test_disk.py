"""The ledger after a power cut, and on a disk that lost synced data."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos import disk
from tests.chaos.verdict import problems

CUTS = int(os.environ.get("CAIRN_CHAOS_CUTS", 60))


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> list[disk.Note]:
    if reason := disk.missing():
        pytest.skip(reason)
    found = disk.noted(tmp_path_factory.mktemp("noted"), rounds=48)
    names = {n.name for n in found}
    assert {"ledger.sqlite", "ledger.sqlite-wal", "acknowledged"} <= names
    assert sum(n.what == "S" for n in found) > 20 and sum(n.name == "ledger.sqlite" for n in found) > 50
    return found


def test_after_a_power_cut_all_that_was_acknowledged_is_there(notes, tmp_path: Path):
    rng = random.Random(5)
    torn = 0
    for _ in range(CUTS):
        at = rng.randrange(1, len(notes) + 1)
        files, acknowledged = disk.left(notes[:at], rng)
        torn += files != disk.left(notes[:at], random.Random(0))[0]
        where = disk.put(files, tmp_path / "disk")
        assert problems(where, acknowledged) == [], f"cut after note {at}"
    assert torn > CUTS // 4, "most cuts were between writes: nothing was torn"


def test_a_disk_that_lies_is_noticed_or_the_ledger_is_an_older_whole_one(notes, tmp_path: Path):
    rng = random.Random(6)
    noticed = older = 0
    for _ in range(CUTS):
        at = rng.randrange(len(notes) // 2, len(notes) + 1)
        files, acknowledged = disk.left(notes[:at], rng, lie=True)
        where = disk.put(files, tmp_path / "disk")
        found = problems(where)  # never mind what was lost: the disk said that it was kept
        if found:
            assert len(found) == 1 and "does not open" in found[0], found
            assert "computed again from the chain" in found[0], found
            noticed += 1
        else:
            older += bool(problems(where, acknowledged))
    assert noticed > 0 and older > 0, (noticed, older)


def test_a_synced_write_that_is_left_out_would_be_found(notes, tmp_path: Path):
    """The harness sees a ledger that acknowledges without syncing: the same disk, without its syncs."""
    rng, lost = random.Random(7), 0
    unsynced = [n for n in notes if n.what != "S" or n.name == "acknowledged"]
    for _ in range(20):
        files, acknowledged = disk.left(unsynced[: rng.randrange(len(unsynced) // 2, len(unsynced))], rng)
        lost += bool(problems(disk.put(files, tmp_path / "disk"), acknowledged))
    assert lost > 10

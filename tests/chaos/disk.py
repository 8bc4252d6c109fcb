"""A disk that is cut off at any moment, tears what it was writing, or has lost what it said was kept.

A worker's writes are noted by a small library in C (disk.c). From the notes one can make a possible disk after a
power cut at any of them. Synced data are there; of later writes each sector is there or not, in any order. A
disk that lies has also lost some of what was synced.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("disk.c")
ROOT = SOURCE.parent.parent.parent
SECTOR = 512
_HEAD = struct.Struct("<cHQI")

WORKER = """
import os, sys
from coordinator.ledger import database
from tests.chaos import worker
opened = database.SqliteDatabase.__init__
def often(self, *a, **k):
    opened(self, *a, **k)
    self.query("PRAGMA wal_autocheckpoint = 40")  # checkpoints are where most can go wrong
database.SqliteDatabase.__init__ = often
said = os.open(sys.argv[1] + "/acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
worker.run(sys.argv[1] + "/ledger.sqlite", "honest", worker.on_pipe(said), int(sys.argv[2]))
"""


@dataclass(frozen=True)
class Note:
    """One thing that was done to a file: "W"rite, "T"runcate, "S"ync, "U"nlink."""

    what: str
    name: str
    offset: int
    data: bytes


def missing() -> str:
    """Why there is no such disk here; "" when there is."""
    if not sys.platform.startswith("linux") or not shutil.which("cc"):
        return "needs Linux and a C compiler (cc)"
    return ""


def noted(folder: Path, rounds: int) -> list[Note]:
    """Record the disk operations of a worker that posts a number of rounds.

    Its acknowledgements are a file in the folder, too.
    """
    library, log, disk = folder / "disk.so", folder / "notes", folder / "disk"
    disk.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library), "CAIRN_DISK_FOLDER": f"{disk}/", "CAIRN_DISK_LOG": str(log),
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", WORKER, disk, str(rounds)], check=True, env=environment, timeout=500)
    return list(_read(log.read_bytes()))


def _read(log: bytes) -> Iterator[Note]:
    at = 0
    while at < len(log):
        what, name, offset, length = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        yield Note(what.decode(), log[at : at + name].decode(), offset, log[at + name : at + name + length])
        at += name + length


def left(notes: Sequence[Note], rng: random.Random, *, lie: bool = False) -> tuple[dict[str, bytes], list[str]]:
    """Return possible files of a disk that lost power after these notes, and the acknowledgements until then.

    `lie`: it has kept, of one file, only what was synced by some earlier moment, and any of what came after.
    """
    lied_on = rng.choice(sorted({n.name for n in notes if n.name.startswith("ledger")})) if lie else ""
    lied_from = rng.randrange(len(notes)) if lie else 0
    files: dict[str, bytearray] = {}
    since: dict[str, list[Note]] = {}
    for i, note in enumerate(notes):
        waiting = since.setdefault(note.name, [])
        if note.name.endswith("-shm"):
            continue  # memory that processes share: it is made again at each opening
        if note.name == "acknowledged":
            _do(files, note)
        elif note.what == "S":
            if not (note.name == lied_on and i >= lied_from):
                for done in waiting:
                    _do(files, done)
                waiting.clear()
        elif note.what == "U":
            waiting.clear()
            files.pop(note.name, None)
        else:
            waiting.append(note)
    for waiting in since.values():
        for note in waiting:
            _do_some(files, note, rng)
    said = bytes(files.pop("acknowledged", b"")).decode().splitlines()
    return {name: bytes(data) for name, data in files.items()}, [s for s in said if s != "opened"]


def _do(files: dict[str, bytearray], note: Note) -> None:
    data = files.setdefault(note.name, bytearray())
    if note.what == "T":
        del data[note.offset :]
        data.extend(bytes(note.offset - len(data)))
    elif note.what == "W":
        if len(data) < note.offset:
            data.extend(bytes(note.offset - len(data)))
        data[note.offset : note.offset + len(note.data)] = note.data


def _do_some(files: dict[str, bytearray], note: Note, rng: random.Random) -> None:
    """Apply a write that was not synced: all of it, none, its beginning, or any of its sectors."""
    fate = rng.randrange(4)
    if fate == 0 or (note.what == "T" and fate > 1):
        return
    if fate == 1 or note.what != "W":
        _do(files, note)
    elif fate == 2:
        _do(files, Note("W", note.name, note.offset, note.data[: rng.randrange(len(note.data) + 1)]))
    else:
        for at in range(0, len(note.data), SECTOR):
            if rng.random() < 0.5:
                _do(files, Note("W", note.name, note.offset + at, note.data[at : at + SECTOR]))


def put(files: dict[str, bytes], folder: Path) -> str:
    """Write such a disk down; the ledger's address on it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return str(folder / "ledger.sqlite")

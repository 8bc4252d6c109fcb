"""Archives states as folders that `transformers` loads: the model's weights, its config, the tokenizer, and where from.

checkpoints/round-000030/model.safetensors   the checkpoint itself: its blob digest is the state digest
                         config.json         for AutoModelForCausalLM.from_pretrained
                         tokenizer.json
                         cairn.json          run, round, state digest, the record before it, accepted tokens
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import CoordinatorError
from protocol.errors import MalformedError
from protocol.ids import Digest, RunId
from protocol.spec import RunSpec

SHEET = "cairn.json"
DRAFT = ".round-"


@dataclass(frozen=True, slots=True)
class Archived:
    """One archived state: the state after `record`, with which `round` begins."""

    folder: Path
    run: RunId
    round: int
    state: Digest
    record: Digest
    tokens: int


class Archive:
    """The archived states of one run, in `folder`; the newest `keep` and round 0 stay."""

    def __init__(self, folder: Path, spec: RunSpec, *, keep: int = 5):
        self.folder = folder
        self._spec = spec
        self._run = spec.run_id
        self._keep = keep

    def add(
        self, checkpoint: Path, tokenizer: Path, *, round: int, state: Digest, record: Digest, tokens: int
    ) -> Archived:
        """Archive a checkpoint file that lies in a store (linked if possible, else copied). Idempotent."""
        target = self.folder / f"round-{round:06d}"
        if (existing := read_sheet(target)) is not None and (existing.state, existing.record) == (state, record):
            return existing
        draft = self.folder / f"{DRAFT}{round:06d}"
        try:
            for left in self.folder.glob(f"{DRAFT}*"):  # by a process that was killed: one archives at a time
                shutil.rmtree(left)
            draft.mkdir(parents=True)
            _link_or_copy(checkpoint, draft / "model.safetensors")
            _copy(tokenizer, draft / "tokenizer.json")
            _write(draft / "config.json", self._spec.model.config)
            names = {"run": str(self._run), "name": self._spec.name, "state": str(state), "record": str(record)}
            _write(draft / SHEET, names | {"round": round, "tokens": tokens})
            shutil.rmtree(target, ignore_errors=True)
            os.rename(draft, target)
            _flush(self.folder)
        except OSError as e:
            shutil.rmtree(draft, ignore_errors=True)
            remedy = "free some disk space" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "make the folder writable"
            why = (e.strerror or str(e)).lower()
            raise CoordinatorError(f"cannot archive round {round} in {target}: {why}; {remedy}") from None
        self._prune()
        return Archived(target, self._run, round, state, record, tokens)

    def all(self) -> list[Archived]:
        """What is archived, oldest first."""
        found = [read_sheet(p) for p in sorted(self.folder.glob("round-*"))]
        return sorted((a for a in found if a is not None and a.run == self._run), key=lambda a: a.round)

    def newest(self) -> Archived | None:
        """The archived state of the highest round."""
        archived = self.all()
        return archived[-1] if archived else None

    def drop(self, archived: Iterable[Archived]) -> None:
        """Remove these."""
        for a in archived:
            shutil.rmtree(a.folder, ignore_errors=True)

    def _prune(self) -> None:
        self.drop([a for a in self.all() if a.round][: -self._keep])


def read_sheet(folder: Path) -> Archived | None:
    """What an archived folder says of itself; None when it is not one."""
    try:
        sheet = json.loads((folder / SHEET).read_text())
        run, state, record = RunId.parse(sheet["run"]), Digest.parse(sheet["state"]), Digest.parse(sheet["record"])
        return Archived(folder, run, int(sheet["round"]), state, record, int(sheet["tokens"]))
    except (OSError, ValueError, KeyError, TypeError, MalformedError):
        return None


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    _flush(path)


def _link_or_copy(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    _flush(target)


def _flush(path: Path) -> None:
    """What is in a file, or a folder, is there after a power cut too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

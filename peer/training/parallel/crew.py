"""Rank 0's side of many ranks: starts the others, gives the orders, and ends when one of them does.

`Crew` has what `Alone` has for one process. Two threads may ask it for something: each order is whole before the next
begins, so that all ranks do the same in the same order.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from peer.channel import Choice, Memory
from peer.errors import TrainingError
from peer.training.beside import PartSaver, copy_size
from peer.training.device import choose_device, device_name, out_of_memory
from peer.training.inner import Step
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.memory import memory_of
from peer.training.parallel.degrees import Degrees
from peer.training.parallel.group import SECONDS, Group
from peer.training.parallel.hands import (
    OUT_OF_MEMORY,
    STEPPING,
    Hands,
    Order,
    Result,
    contributions_to,
    part_of_update_to,
    windows_to,
)
from peer.training.parallel.passes import Pass, Passes
from peer.training.saved import Saved
from protocol.ids import Digest
from protocol.outer import Contribution
from protocol.spec import RunSpec

LEAVE_SECONDS = 5.0
TELL_SECONDS = 3.0
"""After a collective failed: until it is known which rank has gone."""


class Crew:
    """All ranks of this peer. `inner` and `outer` are used as one process's are."""

    many = True

    def __init__(
        self,
        spec: RunSpec,
        spec_path: Path,
        degrees: Degrees,
        kind: str,
        threads: int,
        *,
        aside: Callable[[], None],
        beside: Callable[[], None] = lambda: None,
        lost: Callable[[str], None],
        passes: Passes,
        folder: Path,
        seconds: float = SECONDS,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
    ):
        """`kind`: "cpu", or "cuda" (rank n has cuda:n). `lost(why)` is called, by a thread, when a rank has ended.

        `passes`: what is known of what fits into a pass. `folder`: of this crew alone, made anew; the ranks
        meet there. `layers`, `report`: as in `Inner`. `aside`: called often, by the thread that trains; `beside`: by
        the one that writes what is saved. Raises TrainingError when not all ranks start.
        """
        self.degrees = degrees
        self._tell_lost = lost
        self._told = threading.Lock()
        """Taken for good by whoever says that the ranks are lost."""
        self._turn = threading.Lock()
        self._closing = False
        self._meeting = True
        self._copied = 0
        """Bytes of memory that the last copy took, on all ranks."""
        self._part: PartSaver | None = None
        self._passes = passes
        self._recompute: Choice = layers.recompute
        known = passes.known(layers.recompute)
        layers = replace(layers, recompute="on" if known.recompute else "off")
        if layers.compiled:
            seconds *= degrees.pp  # a stage compiles when the one before it has, which takes a minute
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
        folder.mkdir(parents=True)
        self.device = choose_device("cuda:0" if kind == "cuda" else "cpu", max(1, threads // degrees.world))
        self._ranks = [
            self._start(rank, spec_path, kind, max(1, threads // degrees.world), known, layers.compiled, seconds)
            for rank in range(1, degrees.world)
        ]
        self._watch = threading.Thread(target=self._watch_ranks, name="ranks", daemon=True)
        self._watch.start()
        try:
            self._group = Group.join(degrees, 0, self._folder / "meet", self.device, seconds)
            self._meeting = False
            self.hands = Hands(spec, self._group, self.device, known.windows, layers, report, beside)
            self._part = self.hands.keeping.part
        except (RuntimeError, TrainingError) as e:
            why = self._who_ended()
            self.close()
            raise (TrainingError(why) if why else e) from None
        except BaseException:
            self.close()
            raise
        self.inner = CrewInner(self, aside)
        self.outer = CrewOuter(self)

    def _start(
        self, rank: int, spec: Path, kind: str, threads: int, known: Pass, compiled: bool, seconds: float
    ) -> subprocess.Popen[bytes]:
        options = {
            "rank": rank, "threads": threads, "parent": os.getpid(), "piece": known.windows or 0, "spec": spec,
            "recompute": int(known.recompute), "compile": int(compiled),
            "folder": self._folder, "parallel": self.degrees, "device": f"cuda:{rank}" if kind == "cuda" else "cpu",
            "seconds": seconds,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "peer.training.rank", *words], stdin=subprocess.DEVNULL, env=environment
            )
        except OSError as e:
            raise TrainingError(f"rank {rank} cannot be started: {e}; check the limits on processes") from None

    @property
    def device_name(self) -> str:
        """For people."""
        return f"{self.degrees.world} x {device_name(self.device)} ({self.degrees})"[:80]

    @property
    def devices(self) -> list[str]:
        """The names of the devices that share the work."""
        if self.device.type != "cuda":
            return [device_name(self.device)] * self.degrees.world
        return [device_name(torch.device("cuda", rank)) for rank in range(self.degrees.world)]

    def memory(self) -> Memory | None:
        """What is used of a device's by the rank that used most at its last step: this rank's own before the first."""
        mine, most = memory_of(self.device), self.hands.inner.most_memory
        return mine and Memory(max(most, mine.used), mine.whole)

    # -- orders ------------------------------------------------------------------------------------------------

    def do(self, order: Order, payload: bytes = b"") -> Result:
        """All ranks do this. Raises what they agree on, and TrainingError when they have come apart."""
        with self._turn:
            try:
                self._group.give(order, payload)
                return self.hands.do(order, payload)
            except torch.OutOfMemoryError:
                why = str(out_of_memory(self.device, "hold this rank's share of the training"))
                raise self._lost(why, in_a_pass=order in STEPPING) from None
            except RuntimeError as e:
                raise self._lost(self._why(e)) from None

    def _lost(self, why: str, *, in_a_pass: bool = False) -> TrainingError:
        """Say, once, that it cannot go on. `in_a_pass`: for want of memory, which an easier pass may mend."""
        if not self._closing and self._told.acquire(blocking=False):
            if in_a_pass or any(process.poll() == OUT_OF_MEMORY for process in self._ranks):
                why += self._easier_pass()
            if not self._meeting:  # torch would look for the file for minutes, and let no other thread do anything
                shutil.rmtree(self._folder, ignore_errors=True)  # whoever is told may end this process at once
            self._tell_lost(why)
        return TrainingError(why)

    def _easier_pass(self) -> str:
        """Have the next start try a pass that needs less memory. What to add to the reason."""
        inner = self.hands.inner
        tried = Pass(inner.in_a_pass, inner.layers.recompute)
        try:
            return self._passes.easier(tried, self._recompute)
        except OSError as e:
            return f"; that a pass of {tried.windows} windows is too much cannot be kept ({e})"

    def _why(self, error: Exception) -> str:
        """What to say when ranks do not hear each other any more."""
        deadline = time.monotonic() + TELL_SECONDS
        while time.monotonic() < deadline:
            if why := self._who_ended():
                return why
            time.sleep(0.02)
        return (
            f"the {self.degrees.world} ranks do not hear each other ({' '.join(str(error).split())[:300]}): "
            "one of them hangs, or is slower than the others by minutes"
        )

    # -- ranks that end ------------------------------------------------------------------------------------------

    def _watch_ranks(self) -> None:
        while not self._closing:
            if why := self._who_ended():
                self._lost(why)
                return
            time.sleep(0.1)

    def _who_ended(self) -> str:
        for rank, process in enumerate(self._ranks, 1):
            if (code := process.poll()) is not None:
                words = self._folder / f"rank-{rank}"
                said = words.read_text() if words.exists() else ""
                if not said and code == -9:
                    said = "killed (out of memory is the usual cause: the system log tells)"
                return (
                    f"rank {rank} of {self.degrees.world} ended with code {code}: {said or 'see what it printed above'}"
                )
        return ""

    def close(self, *, in_order: bool = False) -> None:
        """End all ranks: in order when all is well, else at once. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if in_order and not self._who_ended() and self._turn.acquire(timeout=LEAVE_SECONDS):
            try:
                self._group.give(Order.STOP, b"")
                self.hands.do(Order.STOP)
            except RuntimeError:
                in_order = False
        for process in self._ranks:
            try:
                process.wait(LEAVE_SECONDS if in_order else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._part is not None:
            self._part.give_up(LEAVE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- files and restarts --------------------------------------------------------------------------------------

    def open(self, checkpoint: Path) -> None:
        """Take the state in a checkpoint whose digest was checked; `outer.rebase` is then due. Raises OSError."""
        self.do(Order.LOAD, str(checkpoint).encode())

    def store(self, threads: int, checkpoint: Path | None) -> Digest:
        """The state's digest; its checkpoint is written where asked. Raises OSError."""
        found = self.do(Order.STORE, str(checkpoint).encode() if checkpoint else b"")
        if not isinstance(found, Digest):
            raise TypeError("a state's digest is made on rank 0")
        return found

    def set_moments(self, saved: Saved) -> None:
        self._resume(saved, everything=False)

    def resume(self, saved: Saved) -> None:
        """Moments, feedback and progress as they were saved."""
        self._resume(saved, everything=True)

    def _resume(self, saved: Saved, *, everything: bool) -> None:
        if saved.file is not None:
            fields = {"path": str(saved.file), "steps": saved.optimiser_steps, "all": everything}
            self.do(Order.RESUME, json.dumps(fields).encode())

    # What `Alone` has for saving. A copy is of what each rank owns, and so are the threads that write it.

    @property
    def steps_taken(self) -> int:
        """By the optimiser."""
        return self.hands.inner.moments()[0]

    @property
    def save_size(self) -> int:
        """Bytes of the file that saves what is held."""
        return self.hands.keeping.file().size

    @property
    def copy_size(self) -> int:
        """Bytes of memory that a copy of it takes, beyond those that are held for it."""
        keeping = self.hands.keeping
        return copy_size(keeping.file(), self.device) - (self._copied if keeping.part.held else 0)

    def keep(self) -> None:
        """Copy feedback, progress and moments to memory."""
        self._copied = copy_size(self.hands.keeping.file(), self.device)
        self.do(Order.KEEP)

    def begin(self, path: Path) -> None:
        """Write what was kept into a file, beside the training."""
        self.do(Order.WRITE, str(path).encode())

    @property
    def is_written(self) -> bool:
        """By this rank: the others have as much to write, and are about to be done."""
        return self.hands.keeping.part.is_written

    @property
    def written(self) -> float:
        """What share of the file: of this rank's part, as much as of the others'."""
        return self.hands.keeping.part.written

    def end(self) -> None:
        """Wait for it: `digest` is then known. Raises OSError."""
        self.hands.keeping.part.wait()  # not within an order: ranks that wait for each other for minutes end
        self.do(Order.WRITTEN)

    def digest(self) -> Digest:
        """Of the file that was written last. By any thread."""
        return self.hands.keeping.digest()

    def give_up(self) -> None:
        """Forget what was kept, or is being written."""
        self.do(Order.GIVE_UP)

    def write(self, path: Path) -> Digest:
        """Feedback, progress and moments into a file, at once. Its digest. Raises OSError."""
        found = self.do(Order.SAVE, str(path).encode())
        if not isinstance(found, Digest):
            raise TypeError("a file's digest is made on rank 0")
        return found


class CrewInner:
    """The step of all ranks, used as `Inner`."""

    def __init__(self, crew: Crew, aside: Callable[[], None]):
        self._crew = crew
        self._aside = aside

    @property
    def learning_rate(self) -> float:
        return self._crew.hands.inner.learning_rate

    def set_rate(self, factor: float) -> None:
        self._crew.do(Order.RATE, struct.pack("<d", factor))

    def look(self, windows: Tensor, go_on: Callable[[], bool] = lambda: True) -> Step | None:
        """As `Inner.look`. Between two pieces another thread's order may come first."""
        pieces = self._crew.do(Order.BEGIN, windows_to(windows))
        if not isinstance(pieces, int):
            raise TypeError("BEGIN gives the number of pieces")
        for number in range(pieces):
            if number and not go_on():
                self._crew.do(Order.DROP)
                return None
            self._aside()
            self._crew.do(Order.PIECE, struct.pack("<q", number))
        self._aside()
        step = self._crew.do(Order.END)
        return step if isinstance(step, Step) else None

    def take(self, step: Step) -> None:
        self._crew.do(Order.TAKE)


class CrewOuter:
    """The outer side of all ranks, used as `OuterSide`."""

    def __init__(self, crew: Crew):
        self._crew = crew

    @property
    def base(self) -> object | None:
        """Not None when a state is held."""
        return self._crew.hands.share.base

    @base.setter
    def base(self, value: None) -> None:
        self._crew.hands.share.base = value

    def announce(self) -> bytes:
        blob = self._crew.do(Order.ANNOUNCE)
        if not isinstance(blob, bytes):
            raise TypeError("ANNOUNCE gives the blob, on rank 0")
        return blob

    def advance(self, contributions: Sequence[Contribution]) -> None:
        self._crew.do(Order.ADVANCE, contributions_to(contributions))

    def advance_reduced(self, parts: Sequence[Path]) -> None:
        self._crew.do(Order.ADVANCE_REDUCED, json.dumps([str(p) for p in parts]).encode())

    def rebase(self) -> None:
        self._crew.do(Order.REBASE)

    def restore(self, blob: bytes, only: bytes | None = None) -> None:
        self._crew.do(Order.RESTORE, part_of_update_to(blob, only))

    def withdraw(self, blob: bytes, factor: float, only: bytes | None = None) -> None:
        self._crew.do(Order.WITHDRAW, struct.pack("<d", factor) + part_of_update_to(blob, only))

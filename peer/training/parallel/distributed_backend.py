"""Rank 0's side of several ranks: starts the others, gives the commands, and ends when one of them does.

Two threads may use it: each command is complete before the next begins, so that all ranks do the same in the same
order.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer.channel import Choice, Memory
from peer.errors import TrainingError
from peer.training.device import choose_device, device_name, out_of_memory
from peer.training.frozen_base import check_base
from peer.training.inner_optimizer import StepResult
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.memory import memory_of
from peer.training.offload import Home, Offload
from peer.training.parallel.group import SECONDS, RankGroup
from peer.training.parallel.micro_batch import MicroBatchProfile, MicroBatchStore
from peer.training.parallel.parallel_dims import ParallelDims
from peer.training.parallel.rank_worker import OUT_OF_MEMORY, STEPPING, Command, RankWorker
from peer.training.saved_state import SavedState
from protocol.ids import Digest
from protocol.outer import Contribution
from protocol.python_command import python_command
from protocol.spec import RunSpec

LEAVE_SECONDS = 5.0
"""Maximum time for other ranks to end by themselves."""

BLAME_SECONDS = 3.0
"""Maximum time after a failed collective until it is known which rank has ended."""


class DistributedBackend:
    """All ranks of this peer. `SingleProcessBackend` documents the methods that both have."""

    is_distributed = True

    def __init__(
        self,
        spec: RunSpec,
        spec_path: Path,
        dims: ParallelDims,
        kind: str,
        threads: int,
        *,
        gpu_memory: int = 0,
        home: Home = "device",
        yield_hook: Callable[[], None],
        background_hook: Callable[[], None] = lambda: None,
        lost: Callable[[str, bool], None],
        profiles: MicroBatchStore,
        folder: Path,
        seconds: float = SECONDS,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        base: Path | None = None,
    ):
        """Start all ranks. `kind`: "cpu", or "cuda" (rank n has cuda:n). Raises TrainingError when one does not start.

        `lost` is called, by a thread, when a rank has ended: with why, and whether the next start needs less memory.
        `profiles`: the micro-batches that fit. `folder`: of these ranks alone, emptied first; they meet there.
        `layers`, `report`: as in `InnerOptimizer`. `yield_hook` is called often by the thread that trains,
        `background_hook` by the one that writes a state. `seconds`: deadline of a collective. `gpu_memory`: as in
        `choose_device`, on each rank's GPU. `home`: of what is used once a round. `base`: the file of the frozen base,
        which is zeros without one. Raises MalformedError or OSError for it.
        """
        if base is not None and spec.model.adapter is not None:
            check_base(spec.model.adapter, base)  # for all ranks, before any of them could wait for this one
        self._base = base
        self.dims = dims
        self._gpu_memory = gpu_memory
        self._on_lost = lost
        self._reported = threading.Lock()
        """Acquired for good by the thread that reports that the ranks are lost."""
        self._turn = threading.Lock()
        self._closing = False
        self._meeting = True
        self._worker: RankWorker | None = None
        self._profiles = profiles
        self._recompute: Choice = layers.recompute
        self._profile = profile = profiles.profile(layers.recompute)
        layers = replace(layers, recompute="on" if profile.recompute else "off")
        if layers.compiled:
            seconds *= dims.pp  # a stage compiles when the one before it has, which takes a minute
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir(parents=True)
        self.device = choose_device(
            "cuda:0" if kind == "cuda" else "cpu", max(1, threads // dims.world), gpu_memory
        )  # fmt: skip
        self._home: Home = home
        self.ranks = [
            self._start(rank, spec_path, kind, max(1, threads // dims.world), profile, layers.compiled, seconds)
            for rank in range(1, dims.world)
        ]
        self._watch = threading.Thread(target=self._watch_ranks, name="ranks", daemon=True)
        self._watch.start()
        try:
            self.group = RankGroup.join(dims, 0, self._folder / "meet", self.device, seconds, self._ended_rank)
            self._meeting = False
            self.worker = RankWorker(
                spec, self.group, Offload.to(home, self.device, folder), profile.windows, layers, report,
                background_hook, base=base,
            )  # fmt: skip
            self._worker = self.worker
        except (RuntimeError, TrainingError) as e:
            why = self._ended_rank()
            self.close()
            raise (TrainingError(why) if why else e) from None
        except BaseException:
            self.close()
            raise
        self.inner = DistributedInner(self, yield_hook)
        self.outer = DistributedOuter(self)
        self.load_state = partial(self.do, Command.LOAD)
        self.begin_again = partial(self.do, Command.BEGIN_AGAIN)
        self.copy_state = partial(self.do, Command.COPY)
        self.start_write = partial(self.do, Command.WRITE)
        self.cancel_write = partial(self.do, Command.CANCEL_WRITE)
        self.write_now = partial(self.do, Command.SAVE)

    def _start(
        self, rank: int, spec: Path, kind: str, threads: int, profile: MicroBatchProfile, compiled: bool, seconds: float
    ) -> subprocess.Popen[bytes]:
        options = {
            "rank": rank, "threads": threads, "parent": os.getpid(), "piece": profile.windows, "spec": str(spec),
            "recompute": profile.recompute, "compile": compiled, "folder": str(self._folder),
            "parallel": str(self.dims), "device": f"cuda:{rank}" if kind == "cuda" else "cpu", "seconds": seconds,
            "gpu_memory": self._gpu_memory, "home": self._home,
            "base": None if self._base is None else str(self._base),
        }  # fmt: skip
        command = python_command("peer.training.rank", json.dumps(options))
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        except OSError as e:
            raise TrainingError(f"rank {rank} cannot be started: {e}; check the limits on processes") from None

    @property
    def device_name(self) -> str:
        return f"{self.dims.world} x {device_name(self.device)} ({self.dims})"[:80]

    @property
    def devices(self) -> list[str]:
        if self.device.type != "cuda":
            return [device_name(self.device)] * self.dims.world
        return [device_name(torch.device("cuda", rank)) for rank in range(self.dims.world)]

    def memory(self) -> Memory | None:
        """Return the memory in use on the rank that used most at its last step; before the first, on rank 0."""
        mine, most = memory_of(self.device), self.worker.inner.most_memory
        return mine and Memory(max(most, mine.used), mine.whole)

    # -- commands ----------------------------------------------------------------------------------------------

    def do(self, command: Command, *arguments: object) -> Any:
        """Execute a command on all ranks. Raises what they agree on, and TrainingError when a rank is lost."""
        with self._turn:
            try:
                self.group.send_command(command.value, arguments)
                return self.worker.do(command, *arguments)
            except torch.OutOfMemoryError:
                why = str(out_of_memory(self.device, "hold this rank's share of the training"))
                raise self._lost(why, in_a_pass=command in STEPPING) from None
            except RuntimeError as e:
                raise self._lost(self._why(e)) from None

    def _lost(self, why: str, *, in_a_pass: bool = False) -> TrainingError:
        """Report, once, that training cannot continue; return the error to raise.

        `in_a_pass`: memory ran out in a pass, so a smaller one may succeed.
        """
        if not self._closing and self._reported.acquire(blocking=False):
            if in_a_pass or any(process.poll() == OUT_OF_MEMORY for process in self.ranks):
                why += self._make_pass_easier()
            if not self._meeting:  # torch would poll the file for minutes, and block every other thread
                shutil.rmtree(self._folder, ignore_errors=True)  # the callback may end this process at once
            self._on_lost(why, self._profiles.profile(self._recompute) != self._profile)
        return TrainingError(why)

    def _make_pass_easier(self) -> str:
        """Have the next start try a pass that needs less memory. Return what to add to the error."""
        inner = self.worker.inner
        tried = MicroBatchProfile(inner.windows_in_a_pass, inner.layers.recompute)
        try:
            return self._profiles.make_easier(tried, self._recompute)
        except OSError as e:
            return f"; that a pass of {tried.windows} windows is too much cannot be kept ({e})"

    def _why(self, error: Exception) -> str:
        """Return the reason for a failed collective, as soon as it is known which rank has ended."""
        deadline = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < deadline:
            if why := self._ended_rank():
                return why
            time.sleep(0.02)
        return (
            f"the {self.dims.world} ranks get no answers from each other ({' '.join(str(error).split())[:300]}): "
            "one of them hangs, or is slower than the others by minutes"
        )

    # -- ranks that end ------------------------------------------------------------------------------------------

    def _watch_ranks(self) -> None:
        while not self._closing:
            if why := self._ended_rank():
                self._lost(why)
                return
            time.sleep(0.1)

    def _ended_rank(self) -> str:
        """Return in words which rank has ended, and why; empty while all run."""
        for rank, process in enumerate(self.ranks, 1):
            if (code := process.poll()) is not None:
                file = self._folder / f"rank-{rank}"
                reason = file.read_text() if file.exists() else ""
                if not reason and code == -9:
                    reason = "killed (out of memory is the usual cause: see the system log)"
                reason = reason or "see what it printed above"
                return f"rank {rank} of {self.dims.world} ended with code {code}: {reason}"
        return ""

    def close(self, *, in_order: bool = False) -> None:
        """End all ranks: by a command if `in_order`, by a signal otherwise. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if in_order and not self._ended_rank() and self._turn.acquire(timeout=LEAVE_SECONDS):
            try:
                self.group.send_command(Command.STOP.value, ())
                self.worker.stop()
            except RuntimeError:
                in_order = False
        for process in self.ranks:
            try:
                process.wait(LEAVE_SECONDS if in_order else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._worker is not None:
            self._worker.cancel_write(LEAVE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- states --------------------------------------------------------------------------------------------------

    def store_state(self, threads: int, checkpoint: Path | None) -> Digest:
        return self.do(Command.STORE, checkpoint)

    def resume(self, saved: SavedState, *, everything: bool) -> None:
        if saved.file is not None:
            self.do(Command.RESUME, saved.file, saved.optimizer_steps, everything)

    # -- saving: each rank copies and writes the chunks that it owns -------------------------------------------

    optimizer_steps = property(lambda self: self.worker.optimizer_steps)
    copy_size = property(lambda self: self.worker.copy_size)
    is_written = property(lambda self: self.worker.is_written)
    """True when rank 0 has written its shard: the others have as much to write, and are about to be done."""
    written_share = property(lambda self: self.worker.written_share)
    """Share of rank 0's shard that is written, which is also an estimate for the others."""

    def finish_write(self) -> None:
        # Not within a command: ranks that wait for each other for minutes end.
        self.worker.wait()
        self.do(Command.WRITTEN)

    def digest(self) -> Digest:
        return self.worker.digest()


class DistributedInner:
    """The inner side of all ranks. `InnerOptimizer` documents the methods."""

    def __init__(self, backend: DistributedBackend, yield_hook: Callable[[], None]):
        self._do = backend.do
        self._yield_hook = yield_hook
        self.set_rate = partial(backend.do, Command.RATE)

    def forward_backward(self, windows: Tensor, go_on: Callable[[], bool] = lambda: True) -> StepResult | None:
        """Compute a step's gradient. Between two pieces another thread's command may come first."""
        tokens = windows.cpu().to(torch.int32).numpy().tobytes()
        for number in range(self._do(Command.BEGIN, windows.shape[1], tokens)):
            if number and not go_on():
                self._do(Command.DROP)
                return None
            self._yield_hook()
            self._do(Command.PIECE, number)
        self._yield_hook()
        return self._do(Command.END)

    def optimizer_step(self, step: StepResult) -> None:
        self._do(Command.OPTIMIZER_STEP)


class DistributedOuter:
    """The outer side of all ranks. `OuterOperations` documents the methods."""

    def __init__(self, backend: DistributedBackend):
        self._do = backend.do
        self.drop_base = backend.worker.outer.drop_base  # rank 0's: `load_state` releases the others'
        self.announce = partial(backend.do, Command.ANNOUNCE)
        self.advance_reduced = partial(backend.do, Command.ADVANCE_REDUCED)
        self.rebase = partial(backend.do, Command.REBASE)
        self.add_back = partial(backend.do, Command.ADD_BACK)
        self.take_back = partial(backend.do, Command.TAKE_BACK)
        self.subtract = partial(backend.do, Command.SUBTRACT)

    def advance(self, contributions: Sequence[Contribution]) -> None:
        self._do(Command.ADVANCE, [(c.author, c.windows, c.blob) for c in contributions])

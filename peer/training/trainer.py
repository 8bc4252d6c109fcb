"""A peer's training, put together: backend, step loop, base state and checkpointer around one exchange point.

No channel and no loop here (that is `service`): a test drives these objects directly, in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from peer.channel import Applied, Load, Ready, Start
from peer.errors import TrainingError
from peer.training.backend import TrainingBackend
from peer.training.base_state import BaseMove, BaseState
from peer.training.checkpointer import AsyncCheckpointer
from peer.training.data import Batches, WindowReader
from peer.training.device import choose_device, device_name, pinned_for
from peer.training.eight_bit import refusal
from peer.training.exchange_point import ExchangePoint
from peer.training.flops import flops_per_token, peak_flops
from peer.training.gate import YieldGate
from peer.training.layers import LayerOptions, Report, compiles, keep_compiled
from peer.training.offload import Home, Offload, note_of
from peer.training.parallel.parallel_dims import ParallelDims
from peer.training.parallel.setup import resolve
from peer.training.replayable_state import ReplayableState
from peer.training.saved_state import SavedFolder
from peer.training.single_process import SingleProcessBackend
from peer.training.step_loop import StepLoop
from peer.training.time_breakdown import TimeBreakdown
from peer.training.windows import WindowAccounting
from protocol.adapter import build_run_model
from protocol.assignment import windows_of
from protocol.extras import pip_install
from protocol.ids import Digest, PeerKey
from protocol.model import model_layout
from protocol.spec import RunSpec, parse_spec
from protocol.training_memory import round_bytes

Lost = Callable[[str, bool], None]
"""Called by any thread when one of several ranks has ended, so training cannot continue.

The arguments are the reason, and whether the next start tries a micro-batch that needs less memory.
"""


class Trainer:
    """The parts of a peer's training. Built by the thread that trains, which owns all of them at first."""

    def __init__(self, start: Start, report: Report, lost: Lost = lambda why, easier: None, *, trial: bool = False):
        """Build the model and read what was saved.

        `report` is called with what a person should know. `trial`: only time and memory matter, so a frozen base is
        zeros. Raises CairnError, OSError or torch.OutOfMemoryError.
        """
        self.spec: RunSpec = parse_spec(start.spec_path.read_bytes())
        dims, kind, why, self.home = resolve(
            start.parallel, start.device, self.spec, start.gpu_memory, start.disk, eight_bit=start.moments == "8bit"
        )
        if start.moments == "8bit" and (never := refusal(self.spec, dims.world)):
            raise TrainingError(never)
        model = build_run_model(self.spec.model, device="meta")
        if model_layout(model) != self.spec.model.layout:
            packages = ["transformers"] if self.spec.model.adapter is None else ["transformers", "peft"]
            raise TrainingError(
                "the installed transformers builds another model from this run's config than its owner's did: "
                f"install a newer one ({pip_install(*packages, upgrade=True)}), or ask the owner for the version"
            )
        if self.spec.model.adapter is not None and start.base is None and not trial:
            raise TrainingError("the run's frozen base model is not here: start the peer again, which fetches it")
        self._kind = kind
        self.exchange = ExchangePoint()
        self.gate = YieldGate()
        times = TimeBreakdown(time.monotonic())
        if self.home != ("memory" if kind == "cuda" else "device"):
            report("warning" if self.home == "files" else "info", "memory", note_of(self.home, self.spec))
        self.backend = _backend(self.spec, start, dims, kind, self.home, self.gate, times, report, lost)
        if why:
            report("info", "parallel", why)
        if start.gpu_memory and kind == "cpu":
            report(
                "warning", "memory", "--gpu-memory does nothing here: it is for GPUs, and this peer trains on the CPU"
            )
        data = self.spec.data
        flops = flops_per_token(model, data.window)
        # Throughput is in tokens that count; the others of a window are computed all the same.
        self.flops_per_token = None if flops is None else flops * data.window // data.window_tokens
        self.peak_flops = peak_flops(self.backend.devices)
        self.folder = SavedFolder(
            start.state_folder, self.spec.run_id, start.identity_key, self.spec.model.layout,
            replayable=self.spec.audit.replayable, device=self.backend.device_name, gpu_memory=start.gpu_memory,
        )  # fmt: skip
        batches = _batches(self.spec, start, self.backend, report)
        self.steps = StepLoop(
            self.spec, self.backend, batches, self.exchange, self.gate, times, overlap=start.overlap, report=report
        )
        state = ReplayableState if self.spec.audit.replayable else BaseState
        self.base = state(
            self.spec, start.identity_key, start.threads, self.backend, self.exchange, self.folder, report
        )
        self.checkpointer = AsyncCheckpointer(self.folder, self.backend, self.exchange, self.base.manifest, report)

    @property
    def windows(self) -> WindowAccounting:
        """The present count of windows."""
        return self.exchange.windows

    def ready(self) -> Ready:
        """Return the answer to Start."""
        layout = self.spec.model.layout
        in_files = round_bytes(layout, self.spec.outer) if self.home == "files" else 0
        on_gpu = self._kind == "cuda"
        return Ready(self.backend.device_name, layout.numel, self.base.codec.size, in_files, on_gpu)

    def swap_base(self, move: BaseMove) -> None:
        """Continue training from the base that `BaseState.advance` moved."""
        self.base.swap_base(move, self.checkpointer.pending)
        self.steps.follow(move)

    def begin_again(self) -> None:
        """Continue training from the update that `BaseState.make_update` announced, in a replayable run."""
        self.base.begin_again(self.checkpointer.pending)
        self.steps.drop()

    def load(self, ask: Load) -> Applied:
        """Continue training from a checkpoint and the records after it. Return the answer."""
        answer, move = self.base.load(ask, self.checkpointer.pending)
        self.checkpointer.begin()
        self.steps.follow(move)
        return answer

    def close(self, *, in_order: bool = False) -> None:
        """Stop reading ahead, and end other ranks. `in_order`: nothing has failed."""
        self.steps.batches.close()
        self.checkpointer.close()
        self.backend.close(in_order=in_order)


def _backend(
    spec: RunSpec, start: Start, dims: ParallelDims, kind: str, home: Home, gate: YieldGate,
    times: TimeBreakdown, report: Report, lost: Lost,
) -> TrainingBackend:  # fmt: skip
    layers = LayerOptions(start.recompute, compiles(start.compile, kind))
    if layers.compiled:
        keep_compiled(start.state_folder / "compiled")
    yield_hook = partial(gate.wait, times)
    if dims.world == 1:
        device = choose_device(start.device, start.threads, start.gpu_memory)
        return SingleProcessBackend(
            spec, device, yield_hook, layers, report, gate.wait, base=start.base, eight_bit=start.moments == "8bit",
            offload=Offload.to(home, device, start.state_folder),
        )  # fmt: skip
    from peer.training.parallel.distributed_backend import DistributedBackend  # torch.distributed: only where needed
    from peer.training.parallel.micro_batch import MicroBatchStore

    profiles = MicroBatchStore(start.state_folder, str(dims), device_name(torch.device(kind)), start.gpu_memory)
    return DistributedBackend(
        spec, start.spec_path, dims, kind, start.threads, gpu_memory=start.gpu_memory, home=home, yield_hook=yield_hook,
        background_hook=gate.wait, lost=lost, profiles=profiles, folder=start.state_folder / "ranks", layers=layers,
        report=report, base=start.base,
    )  # fmt: skip


def _batches(spec: RunSpec, start: Start, backend: TrainingBackend, report: Report) -> Batches:
    vocabulary = spec.model.config.get("vocab_size")
    reader = WindowReader(
        spec.data,
        {Digest.parse(d): Path(p) for d, p in start.shards.items() if p},
        vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        report=lambda text: report("warning", "data", text),
        private_data=start.private_data,
    )
    me: PeerKey = start.identity_key
    assigned = partial(windows_of, spec.seed, me, total=reader.total)
    # Several ranks receive their windows as bytes, and each pins its own.
    pinned = None if backend.is_distributed else pinned_for(backend.device)
    return Batches(reader, assigned, batch=spec.inner.batch, prepare=pinned)

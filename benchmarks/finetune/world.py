"""A fine-tuning run, simulated: the product's run file, data, trainer, codec and outer step, without a network.

Every peer's update arrives, and all are applied when they were announced. One process that trains alone has the windows
of all peers in each step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.wan_run_file import toml
from benchmarks.finetune.base import BaseModel
from coordinator.authoring.resolve import ResolvedRun, resolve
from coordinator.authoring.runfile import load_run
from peer.training.data import WindowReader
from peer.training.schedule import factor
from peer.training.single_process import SingleProcessBackend
from protocol.assignment import windows_of
from protocol.codec import make_codec
from protocol.identity import Identity
from protocol.ids import PeerKey
from protocol.outer import Contribution
from protocol.spec import Schedule
from protocol.state import state_layout, tensors_from_checkpoint

CPU = torch.device("cpu")
OWNER = Identity(hashlib.sha256(b"benchmarks.finetune").digest())


@dataclass(frozen=True)
class Tuning:
    """The size of a fine-tuning run: each peer makes `steps` of `batch` windows, `h` of them a round."""

    steps: int
    batch: int
    h: int
    window: int
    rank: int = 8


@dataclass(frozen=True)
class Outcome:
    """Loss on held-out answers (nats per trained token), and bytes that a peer announced in all."""

    loss: float
    bytes: int
    trained_tokens: int


class FineTuning:
    """One run: the base model, conversations, and what is trained, an adapter or the whole model.

    `dtype`: that of an adapter's frozen base. `device`: where `backend` trains.
    """

    def __init__(self, folder: Path, base: Path, rows: tuple[Path, Path], size: BaseModel, tuning: Tuning, *,
                 adapter: bool, optimizer: str, seed: int, outer: str = "plain", codec: str = "sign",
                 dtype: str = "bfloat16", device: torch.device = CPU):  # fmt: skip
        self.tuning, self.seed, self.device = tuning, seed, device
        folder.mkdir(parents=True, exist_ok=True)
        tables = _tables(base, rows, size, tuning, optimizer=optimizer, seed=seed, outer=outer, codec=codec)
        if adapter:
            settings = {"rank": tuning.rank, "alpha": 2 * tuning.rank, "targets": ["all-linear"], "dtype": dtype}
            tables["model"] |= {"adapter": settings}
        (folder / "run.toml").write_text(toml(tables))
        self.run: ResolvedRun = resolve(load_run(folder / "run.toml"), folder / "run", OWNER)
        self.spec = self.run.spec
        self.codec = make_codec(self.spec.codec, self.spec.model.layout)
        self.train = WindowReader(self.spec.data, self.run.blobs)
        self.held_out = WindowReader(self.spec.data, self.run.blobs, part="validation")
        self._layout = state_layout(self.spec.model.layout, self.spec.outer)

    def alone(self, peers: int, lr: float) -> Outcome:
        """Return the outcome of one process with the windows of `peers` in each step."""
        backend = self.backend()
        for step in range(self.tuning.steps):
            self._set_rate(backend, lr, step)
            self._step(backend, torch.cat([self._windows(p, step) for p in range(peers)]))
        gradient = 2 * self.spec.model.layout.numel
        return Outcome(self._loss(backend), gradient * self.tuning.steps, self._trained(peers))

    def together(self, peers: int, lr: float, *, freeze_a: bool = False) -> Outcome:
        """Return the outcome of `peers`. `freeze_a`: only the factors B are trained (FFA-LoRA, arXiv 2403.12313)."""
        backends = [self.backend() for _ in range(peers)]
        keys = [PeerKey(hashlib.sha256(b"finetune/%d" % p).digest()) for p in range(peers)]
        fixed = {n: t.clone() for n, t in backends[0].outer.local.items() if freeze_a and ".lora_A." in n}
        for step in range(self.tuning.steps):
            for p, backend in enumerate(backends):
                self._set_rate(backend, lr, step)
                self._step(backend, self._windows(p, step))
                for name, values in fixed.items():
                    backend.outer.local[name].copy_(values)
            if (step + 1) % self.tuning.h == 0:
                windows = self.tuning.h * self.tuning.batch
                made = [Contribution(k, windows, b.outer.announce()) for k, b in zip(keys, backends, strict=True)]
                for backend in backends:
                    backend.outer.advance(made)
                    backend.outer.rebase()
        rounds = self.tuning.steps // self.tuning.h
        return Outcome(self._loss(backends[0]), self.codec.size * rounds, self._trained(peers))

    def before(self) -> float:
        """Return the loss of the base model."""
        return self._loss(self.backend())

    def backend(self) -> SingleProcessBackend:
        """Return a trainer of one process with the run's first state."""
        adapter = self.spec.model.adapter
        base = None if adapter is None else self.run.blobs[adapter.base.name]
        backend = SingleProcessBackend(self.spec, self.device, lambda: None, base=base)
        state = tensors_from_checkpoint(self._layout, self.run.blobs[self.spec.genesis.name].read_bytes())
        for name, values in backend.outer.local.items():
            values.copy_(state[name])
            backend.outer.anchor[name].copy_(values)
        backend.outer.base = state
        backend.outer.rebase()
        return backend

    def train_step(self, backend: SingleProcessBackend, step: int) -> None:
        """Make a step of the first peer. Raises FloatingPointError."""
        self._step(backend, self._windows(0, step))

    def _windows(self, peer: int, step: int) -> Tensor:
        key = PeerKey(hashlib.sha256(b"finetune/%d/%d" % (self.seed, peer)).digest())
        batch = self.tuning.batch
        return self.train.read(windows_of(self.seed, key, step * batch, batch, self.train.total))

    def _set_rate(self, backend: SingleProcessBackend, lr: float, step: int) -> None:
        steps = self.tuning.steps
        falls = Schedule(kind="cosine", warmup_tokens=max(1, steps // 16), total_tokens=steps, min_ratio=0.1)
        backend.inner.set_rate(factor(falls, step + 0.5) * lr / self.spec.inner.lr)

    def _step(self, backend: SingleProcessBackend, windows: Tensor) -> None:
        step = backend.inner.forward_backward(windows)
        if step is None or not step.is_finite:
            raise FloatingPointError("the loss or the gradient is not finite")
        backend.inner.optimizer_step(step)

    def _loss(self, backend: SingleProcessBackend) -> float:
        backend.inner.model.eval()
        total = trained = 0.0
        for first in range(0, self.held_out.total, 32):
            windows = self.held_out.read(range(first, min(first + 32, self.held_out.total)))
            counts = (windows[:, 1:] >> 30 & 1).sum(1)
            total += float((backend.inner.window_losses(windows) * counts).sum())
            trained += float(counts.sum())
        backend.inner.model.train()
        return total / trained

    def _trained(self, peers: int) -> int:
        return self.tuning.steps * self.tuning.batch * peers * self.spec.data.window_tokens


def _tables(
    base: Path,
    rows: tuple[Path, Path],
    size: BaseModel,
    tuning: Tuning,
    *,
    optimizer: str,
    seed: int,
    outer: str,
    codec: str,
) -> dict[str, dict[str, Any]]:
    return {
        "run": {"name": "finetune", "seed": seed, "weights": str(base)},
        "model": dict(size.config),
        "data": {
            "source": str(rows[0]),
            "validation": [str(rows[1])],
            "window": tuning.window,
            "tokenizer": str(base / "tokenizer.json"),
            "conversations": {"long": "drop"},
        },
        "inner": {"optimizer": optimizer, "batch": tuning.batch, "lr": 1e-3, "schedule": {"kind": "constant"}},
        "codec": {"kind": codec},
        "outer": {"optimizer": outer},
        "round": {"target_tokens": 4096, "max_update_tokens": 2**20},
        "credit": {"hold_rounds": 1},
    }

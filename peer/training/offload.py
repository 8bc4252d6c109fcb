"""The memory of what is touched once a round: base, outer momentum, anchor and error feedback.

Beside a GPU these lie in the machine's memory, pinned, and visit the GPU in pieces. So the GPU holds weights, gradients
and moments. On a CPU, and where the machine has too little memory, they lie beside the model. The arithmetic is the
same, on the same device, so no bit depends on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peer.training.layers import Report
from peer.training.memory import available
from protocol.spec import RunSpec
from protocol.training_memory import round_bytes

PIECE = 1 << 24
"""Elements of a tensor that visit the device at once: 64 MiB of fp32."""

SHARE = 0.7
"""Share of the machine's available memory that the offloaded tensors may take, with the copies that are saved."""

SAVED_BYTES = 16
"""Bytes of a parameter in the copy of what is saved: feedback, progress and two moments."""


@dataclass(frozen=True, slots=True)
class Offload:
    """`device`: of the arithmetic. `enabled`: the tensors lie in the machine's memory, and visits are copies."""

    device: torch.device
    enabled: bool = False

    @classmethod
    def choose(cls, device: torch.device, spec: RunSpec, report: Report) -> Offload:
        """Offload from a GPU if the machine has the memory for it; otherwise report that it has not."""
        enabled = can_offload(device.type, spec)
        if device.type == "cuda" and not enabled:
            text = (
                f"the state between rounds stays on the GPU ({round_bytes(spec.model.layout, spec.outer) / 1e9:.1f} GB)"
                f": elsewhere it would need {_needed(spec) / SHARE / 1e9:.1f} GB of free memory in this machine"
            )
            report("info", "memory", text)
        return cls(device, enabled)

    @property
    def home(self) -> torch.device:
        """The device whose memory the tensors lie in."""
        return torch.device("cpu") if self.enabled else self.device

    @property
    def _pins(self) -> bool:
        return self.enabled and self.device.type == "cuda"

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor at home."""
        return self.zeros(tensor.shape).copy_(tensor)

    def place(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values at home: a copy, unless it may be kept as it is."""
        return tensor if not self._pins and tensor.device == self.home else self.copy(tensor)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Return an fp32 tensor of zeros at home."""
        if not self._pins:
            return torch.zeros(shape, dtype=torch.float32, device=self.home)
        memory = np.zeros(shape, dtype=np.float32)
        _pin(memory, self.device)
        return torch.from_numpy(memory)

    def pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the same pieces of tensors with as many elements each: flat views, which cover them in order."""
        flat = [t.view(-1) for t in tensors]
        if not self.enabled:
            yield tuple(flat)
            return
        yield from zip(*(t.split(PIECE) for t in flat), strict=True)

    def on_device(self, piece: Tensor) -> Tensor:
        """Return the piece's values on the device, to read: a copy, or the piece itself."""
        return piece.to(self.device, copy=True) if self.enabled else piece

    @contextmanager
    def changed_on_device(self, piece: Tensor) -> Iterator[Tensor]:
        """Yield the piece's values on the device, to change; they are written home at the end."""
        here = self.on_device(piece)
        yield here
        if here is not piece:
            piece.copy_(here)


def can_offload(kind: str, spec: RunSpec) -> bool:
    """Return whether a peer of this machine offloads from its devices, "cuda" or "cpu"."""
    return kind == "cuda" and _needed(spec) <= SHARE * available()


def _needed(spec: RunSpec) -> int:
    layout = spec.model.layout
    return round_bytes(layout, spec.outer) + SAVED_BYTES * layout.numel


_refused = False
"""True once the system pinned no more memory."""


def _pin(memory: np.ndarray, device: torch.device) -> None:
    """Pin an array's memory, so that copies go at the link's speed. If the system pins no more, they are slower.

    torch's own pinned memory would take up to twice the bytes: it is allocated in powers of two.
    """
    global _refused
    if _refused or not memory.size:
        return
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
            # Called before the memory is freed.
            weakref.finalize(memory, _unpin, device, memory.ctypes.data).atexit = False
            return
        _refused = True
        with suppress(RuntimeError):  # it takes the error, which the next kernel would report as its own
            torch.ones(1, device=device)


def _unpin(device: torch.device, address: int) -> None:
    """Unpin memory, in whichever thread: a new thread's device is cuda:0, where another process may train."""
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        runtime.cudaHostUnregister(address)

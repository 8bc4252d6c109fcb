"""The memory of what is touched once a round: base, outer momentum, anchor and error feedback.

Beside a GPU these lie in the machine's memory, pinned, and visit the GPU in pieces. So the GPU holds weights, gradients
and moments. In a machine with too little memory they stay on the GPU. If neither has room for them, they lie in mapped
files, whose pages the system writes out. On a CPU they lie beside the model. The arithmetic is the same, on the same
device, so no bit depends on it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from peer.errors import TrainingError
from peer.training.memory import available
from protocol.spec import RunSpec
from protocol.training_memory import SAVED_BYTES, round_bytes
from protocol.units import byte_size

PIECE = 1 << 24
"""Elements of a tensor that visit the device at once: 64 MiB of fp32."""

SHARE = 0.7
"""Share of the machine's available memory that the offloaded tensors may take: in `home_of`, with a copy or without."""

Home = Literal["device", "memory", "files"]
"""A place of the tensors: beside the model, in the machine's memory, or in files that are mapped into it."""


@dataclass(frozen=True, slots=True)
class Offload:
    """`device`: of the arithmetic. `enabled`: the tensors lie in the machine's memory, and visits are copies.

    `folder`: they lie in files on its disk instead.
    """

    device: torch.device
    enabled: bool = False
    folder: Path | None = None

    @classmethod
    def to(cls, home: Home, device: torch.device, folder: Path) -> Offload:
        """Return the offload to a home; `folder`: of its files, if it has any."""
        return cls(device, home != "device", folder if home == "files" else None)

    @property
    def home(self) -> torch.device:
        """The device whose memory the tensors lie in."""
        return torch.device("cpu") if self.enabled else self.device

    @property
    def _pins(self) -> bool:
        return self.enabled and self.device.type == "cuda" and self.folder is None

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor at home."""
        return self.zeros(tensor.shape).copy_(tensor)

    def place(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values at home: a copy, unless it may be kept as it is."""
        is_home = not self._pins and self.folder is None and tensor.device == self.home
        return tensor if is_home else self.copy(tensor)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Return an fp32 tensor of zeros at home. Raises TrainingError if its file cannot be made."""
        if self.folder is not None and prod(shape):
            return _mapped(shape, self.folder)
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


def home_of(kind: str, spec: RunSpec, *, fits: bool = True, room: int = 0) -> Home:
    """Return where the tensors of a peer of this machine lie; `kind`: of its devices, "cuda" or "cpu".

    Files are the last resort: they are slower, and each round writes `written_bytes`, which wears an SSD. `fits`:
    training fits on the GPUs with the tensors on them; if not, memory need not hold the copy to save, without which
    training waits while it is saved. `room`: bytes of the disk that files may take.
    """
    if kind != "cuda":
        return "device"
    if (_needed(spec) if fits else _size(spec)) <= SHARE * available():
        return "memory"
    return "files" if not fits and _size(spec) <= room else "device"


def written_bytes(spec: RunSpec) -> int:
    """Return the bytes that a round writes to files: base and momentum once, anchor and feedback twice, 4 each time."""
    return _size(spec) + 8 * spec.model.layout.numel


def note_of(home: Home, spec: RunSpec) -> str:
    """Return the note to the user about tensors that lie beside a GPU, but not in the machine's memory."""
    size, needed = byte_size(_size(spec)), byte_size(_size(spec) / SHARE)
    if home == "device":
        return (
            f"the state between rounds stays on the GPU ({size}): elsewhere it would need "
            f"{byte_size(_needed(spec) / SHARE)} of free memory in this machine ({needed}, or a larger --disk, if the "
            "GPU is too small)"
        )
    return (
        f"the state between rounds lies in files ({size}), and each round writes about {byte_size(written_bytes(spec))}"
        " to the disk, which wears an SSD, and training waits meanwhile: add memory to this machine "
        f"({needed} must be free), or take a larger GPU; a smaller --disk refuses files"
    )


def _size(spec: RunSpec) -> int:
    return round_bytes(spec.model.layout, spec.outer)


def _needed(spec: RunSpec) -> int:
    return _size(spec) + SAVED_BYTES * spec.model.layout.numel


def _mapped(shape: Sequence[int], folder: Path) -> Tensor:
    """Return zeros in a file without a name: whatever ends this process, nothing of it stays.

    All its space is reserved at once, since a page that finds the disk full ends the process. That can still happen on
    a file system that copies on write (btrfs, ZFS).
    """
    size = 4 * prod(shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=tuple(shape)))
    except OSError as e:
        raise TrainingError(
            f"the state between rounds needs {byte_size(size)} more in files of {folder}: {e}; free some of that disk, "
            "or memory of this machine"
        ) from None


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

"""The training of a peer with one process: model, inner optimizer, outer state, and the files of both."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from peer.channel import Memory
from peer.durable import write_durably
from peer.errors import TrainingError
from peer.training.background import ShardCheckpointWriter, TensorToSave, copy_size, write_shard
from peer.training.device import device_name
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.memory import memory_of
from peer.training.outer_state import OuterState
from peer.training.parallel.sharded_file import ShardedFile
from peer.training.saved_state import FEEDBACK, PROGRESS, SavedState
from protocol.codec import make_codec
from protocol.ids import Digest
from protocol.layout import Layout
from protocol.model import build_model, parameters_of
from protocol.spec import RunSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_from_checkpoint

CLOSE_SECONDS = 5.0
"""Maximum time that a process which ends because of an error waits for its disk."""


class SingleProcessBackend:
    """One process that holds everything. `TrainingBackend` documents the methods."""

    is_distributed = False

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        yield_hook: Callable[[], None],
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        background_hook: Callable[[], None] = lambda: None,
    ):
        """Build the model. `yield_hook`, `layers`, `report`: as in `InnerOptimizer`.

        `background_hook`: called often by the thread that writes a state.
        """
        self.device = device
        model = build_model(spec.model.config, device=device)
        self.inner = InnerOptimizer(spec.inner, model, device, yield_hook, layers, report)
        codec = make_codec(spec.codec, spec.model.layout)
        self.outer = OuterState(parameters_of(model), codec, spec.codec.beta, spec.outer)
        self._model_layout = spec.model.layout
        self._layout: Layout = state_layout(spec.model.layout, spec.outer)
        self.writer = ShardCheckpointWriter(0, device, background_hook)
        self._copied: ShardedFile | None = None
        self._report = b""

    @property
    def device_name(self) -> str:
        return device_name(self.device)

    @property
    def devices(self) -> list[str]:
        return [device_name(self.device)]

    def memory(self) -> Memory | None:
        return memory_of(self.device)

    def load_state(self, checkpoint: Path) -> None:
        self.outer.drop_base()
        with open(checkpoint, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            state = tensors_from_checkpoint(self._layout, data)
        self.outer.base = {name: tensor.to(self.device) for name, tensor in state.items()}

    def store_state(self, threads: int, checkpoint: Path | None) -> Digest:
        base = self.outer.base
        if base is None:
            raise TrainingError("no state is held")
        digest = state_digest(self._layout, base, threads)
        if checkpoint is not None:
            write_durably(checkpoint, checkpoint_chunks(self._layout, base))
        return digest

    def set_moments(self, saved: SavedState) -> None:
        self.inner.set_moments(saved.optimizer_steps, saved.moments)

    def resume(self, saved: SavedState) -> None:
        self.set_moments(saved)
        self.outer.resume(saved.feedback, saved.progress)

    # -- saving --------------------------------------------------------------------------------------------------

    @property
    def optimizer_steps(self) -> int:
        return self.inner.moments()[0]

    @property
    def save_size(self) -> int:
        return self._file().size

    @property
    def copy_size(self) -> int:
        return copy_size(self._file(), self.device) - self.writer.reserved

    def copy_state(self) -> None:
        self._copied = self._file()
        self.writer.copy(self._copied, self._tensors(self._copied))

    def start_write(self, path: Path) -> None:
        self.writer.start(path)

    @property
    def is_written(self) -> bool:
        return self.writer.is_written

    @property
    def written_share(self) -> float:
        return self.writer.written_share

    def finish_write(self) -> None:
        self._report = self.writer.report()

    def digest(self) -> Digest:
        if self._copied is None:
            raise ValueError("no file was written")
        return self._copied.digest([self._report])

    def cancel_write(self) -> None:
        self.writer.cancel()

    def write_now(self, path: Path) -> Digest:
        file = self._file()
        return file.digest([write_shard(file, 0, (t.tensor.reshape(-1) for t in self._tensors(file)), path)])

    def _file(self) -> ShardedFile:
        """Return the file of all that there is to save now, with this process as its only rank."""
        shapes = {t.name: t.shape for t in self._model_layout.tensors}
        named = {f"{group}/{n}": s for group in (FEEDBACK, PROGRESS) for n, s in shapes.items()}
        layout = Layout.of(named | {n: tuple(t.shape) for n, t in self.inner.moments()[1].items()})
        return ShardedFile(layout, {0: layout.full_slices})

    def _tensors(self, file: ShardedFile) -> Iterator[TensorToSave]:
        moments = self.inner.moments()[1]
        for tensor in file.layout.tensors:
            group, _, name = tensor.name.partition("/")
            if group == PROGRESS:
                yield TensorToSave(tensor.name, self.outer.progress_of(name), fresh=True)
            else:
                held = self.outer.feedback[name] if group == FEEDBACK else moments[tensor.name]
                yield TensorToSave(tensor.name, held)

    def close(self, *, in_order: bool = False) -> None:
        self.writer.cancel(None if in_order else CLOSE_SECONDS)

"""The training of a peer with one process: its model, inner loop, outer side, and what of them is written to files.

With many ranks `peer.training.parallel.crew.Crew` stands in its place.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from peer.channel import Memory
from peer.errors import TrainingError
from peer.training.beside import Live, PartSaver, copy_size, write_part
from peer.training.device import device_name
from peer.training.durable import write_durably
from peer.training.inner import Inner
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.memory import memory_of
from peer.training.outer import OuterSide
from peer.training.parallel.file import PartFile
from peer.training.saved import FEEDBACK, PROGRESS, Saved
from protocol.codec import make_codec
from protocol.ids import Digest
from protocol.layout import Layout
from protocol.model import build_model, parameters_of
from protocol.spec import RunSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_from_checkpoint

CLOSE_SECONDS = 5.0
"""The most that a process which ends not in order waits for its disk."""


class Alone:
    """One process that holds everything."""

    many = False

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        aside: Callable[[], None],
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        beside: Callable[[], None] = lambda: None,
    ):
        """`aside`, `layers`, `report`: as in `Inner`. `beside`: called often by the thread that writes a state."""
        self.device = device
        model = build_model(spec.model.config, device=device)
        self.inner = Inner(spec.inner, model, device, aside, layers, report)
        codec = make_codec(spec.codec, spec.model.layout)
        self.outer = OuterSide(parameters_of(model), codec, spec.codec.beta, spec.outer)
        self._model_layout = spec.model.layout
        self._layout: Layout = state_layout(spec.model.layout, spec.outer)
        self._part = PartSaver(0, device, beside)
        self._kept: PartFile | None = None
        self._report = b""

    @property
    def device_name(self) -> str:
        """For people."""
        return device_name(self.device)

    @property
    def devices(self) -> list[str]:
        """The names of the devices that share the work."""
        return [device_name(self.device)]

    def memory(self) -> Memory | None:
        """What is used of the device's."""
        return memory_of(self.device)

    def open(self, checkpoint: Path) -> None:
        """Take the state in a checkpoint whose digest was checked; `outer.rebase` is then due.

        Raises MalformedError, OSError. Lets go of the old state first: there may be no memory for both.
        """
        self.outer.base = None
        with open(checkpoint, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            state = tensors_from_checkpoint(self._layout, data)
        self.outer.base = {name: tensor.to(self.device) for name, tensor in state.items()}

    def store(self, threads: int, checkpoint: Path | None) -> Digest:
        """The state's digest; its checkpoint is written where asked. Raises OSError."""
        base = self.outer.base
        if base is None:
            raise TrainingError("no state is held")
        digest = state_digest(self._layout, base, threads)
        if checkpoint is not None:
            write_durably(checkpoint, checkpoint_chunks(self._layout, base))
        return digest

    def set_moments(self, saved: Saved) -> None:
        self.inner.set_moments(saved.optimiser_steps, saved.moments)

    def resume(self, saved: Saved) -> None:
        """Moments, feedback and progress as they were saved."""
        self.set_moments(saved)
        self.outer.resume(saved.feedback, saved.progress)

    # -- what survives a restart: copied, and written beside the training, or at once --------------------------

    @property
    def steps_taken(self) -> int:
        """By the optimiser."""
        return self.inner.moments()[0]

    @property
    def save_size(self) -> int:
        """Bytes of the file that saves what is held."""
        return self._file().size

    @property
    def copy_size(self) -> int:
        """Bytes of memory that a copy of it takes, beyond those that are held for it."""
        return copy_size(self._file(), self.device) - self._part.held

    def keep(self) -> None:
        """Copy feedback, progress and moments to memory."""
        self._kept = self._file()
        self._part.keep(self._kept, self._live(self._kept))

    def begin(self, path: Path) -> None:
        """Write what was kept into a file, beside the training."""
        self._part.begin(path)

    @property
    def is_written(self) -> bool:
        """`end` need not wait."""
        return self._part.is_written

    @property
    def written(self) -> float:
        """What share of the file."""
        return self._part.written

    def end(self) -> None:
        """Wait for it: `digest` is then known. Raises OSError."""
        self._report = self._part.report()

    def digest(self) -> Digest:
        """Of the file that was written last. By any thread."""
        if self._kept is None:
            raise ValueError("no file was written")
        return self._kept.digest([self._report])

    def give_up(self) -> None:
        """Forget what was kept, or is being written."""
        self._part.give_up()

    def write(self, path: Path) -> Digest:
        """Feedback, progress and moments into a file, at once. Its digest. Raises OSError."""
        file = self._file()
        return file.digest([write_part(file, 0, (live.tensor.reshape(-1) for live in self._live(file)), path)])

    def _file(self) -> PartFile:
        """The file of what there is to save now, all of it by this process."""
        shapes = {t.name: t.shape for t in self._model_layout.tensors}
        named = {f"{group}/{n}": s for group in (FEEDBACK, PROGRESS) for n, s in shapes.items()}
        layout = Layout.of(named | {n: tuple(t.shape) for n, t in self.inner.moments()[1].items()})
        return PartFile(layout, {0: layout.whole})

    def _live(self, file: PartFile) -> Iterator[Live]:
        moments = self.inner.moments()[1]
        for tensor in file.layout.tensors:
            group, _, name = tensor.name.partition("/")
            if group == PROGRESS:
                yield Live(tensor.name, self.outer.progress_of(name), fresh=True)
            else:
                yield Live(tensor.name, self.outer.feedback[name] if group == FEEDBACK else moments[tensor.name])

    def close(self, *, in_order: bool = False) -> None:
        """End what is being written."""
        self._part.give_up(None if in_order else CLOSE_SECONDS)

"""A process's shard of the saved state: copied and written beside the training, or at once.

The file has whole tensors, whatever the number of ranks, so the next start may have another layout. To copy is
collective (tensors are gathered one by one). To write is not, until all ranks meet for the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from peer.training.background import ShardCheckpointWriter, TensorToSave, copy_size, gather_reports, write_file
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.outer_state import OuterOperations
from peer.training.parallel.sharded_file import ShardedFile
from peer.training.saved_state import FEEDBACK, PROGRESS
from protocol.ids import Digest
from protocol.layout import Layout


class StateWriter(ShardCheckpointWriter):
    """The only process of a peer, or one rank. Methods are called on all ranks in the same order; properties alone.

    A state is copied by `copy_state`, then written by `start_write` and `finish_write`; or by `write_now`.
    """

    def __init__(
        self, layout: Layout, inner: InnerOptimizer, outer: OuterOperations, background_hook: Callable[[], None]
    ):
        """Write the state of these. `background_hook` is called often by the thread that writes."""
        super().__init__(outer.group.rank, inner.device, background_hook)
        self._layout = layout
        self._inner = inner
        self._outer = outer
        self._group = outer.group
        self._copied: ShardedFile | None = None
        self._reports: tuple[ShardedFile, list[bytes]] | None = None

    @property
    def optimizer_steps(self) -> int:
        """Number of steps that the optimizer has made."""
        return self._inner.moments()[0]

    @property
    def copy_size(self) -> int:
        """Bytes of memory that a copy needs, on all ranks, beyond those that are reserved for it already."""
        reserved = self._copied if self.reserved else None
        return copy_size(self._state_file(), self._device) - (copy_size(reserved, self._device) if reserved else 0)

    def copy_state(self) -> None:
        """Copy feedback, progress and moments to memory."""
        self._copied = self._state_file()
        self.copy(self._copied, self._tensors(self._copied))

    def finish_write(self) -> None:
        """Wait until all have written; rank 0 then knows the `digest`. Raise OSError on all ranks."""
        if (file := self._copied) is None:
            raise ValueError("nothing was copied")
        self._set_reports(file, gather_reports(self._group, file, self.report))

    def _set_reports(self, file: ShardedFile, every: list[bytes] | None) -> None:
        self._reports = (file, every) if every is not None else None

    def digest(self) -> Digest:
        """Return the digest of the file whose writing ended last. On rank 0, by any thread."""
        if self._reports is None:
            raise ValueError("no file was written")
        file, every = self._reports
        return file.digest(every)

    def write_now(self, path: Path) -> None:
        """Write feedback, progress and moments into a file at once; rank 0 then knows the `digest`. Raise OSError."""
        file = self._state_file()
        tensors = (saved.tensor.reshape(-1) for saved in self._tensors(file))
        self._set_reports(file, write_file(self._group, file, tensors, path))

    def _state_file(self) -> ShardedFile:
        """Return the file of all that there is to save now."""
        shapes = {t.name: t.shape for t in self._layout.tensors}
        held = self._inner.moments()[1]
        named = {f"{group}/{n}": s for group in (FEEDBACK, PROGRESS) for n, s in shapes.items()}
        for name, shape in shapes.items() if held else ():
            # A rank holds no moments of another stage's parameters; a single process, none of those without gradients.
            keys = [f"{moment}/{name}" for moment in self._inner.moments_of(name)]
            named |= {key: shape for key in keys if self._group.world > 1 or key in held}
        return self._outer.file_of(Layout.of(named))

    def _tensors(self, file: ShardedFile) -> Iterator[TensorToSave]:
        """Yield this process's slices in the file's order: names sort by group, then as in the layout. Collective."""
        moments = self._inner.moments()[1]
        for group in sorted({t.name.partition("/")[0] for t in file.layout.tensors}):
            if group == FEEDBACK:
                found = iter(self._outer.feedback.items())
            elif group == PROGRESS:
                found = self._outer.progress()
            else:
                here = {n for n in self._inner.parameters if f"{group}/{n}" in moments}
                found = self._outer.owned_of(lambda n, g=group: moments[f"{g}/{n}"], here)
            for name, tensor in found:
                yield TensorToSave(f"{group}/{name}", tensor, fresh=group == PROGRESS)

"""A rank's shard of the saved state: copied and written beside the training, or at once.

The file is that of one process, whole tensors, so the next start may have another layout. To copy is collective
(tensors are gathered one by one). To write is not, until all ranks meet for the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from peer.training.background import ShardCheckpointWriter, TensorToSave
from peer.training.inner_optimizer import ADAMW_MOMENTS, MUON_MOMENTS
from peer.training.parallel.group import RankGroup
from peer.training.parallel.model import RankModel
from peer.training.parallel.outer_state import ShardedOuterState
from peer.training.parallel.rank_optimizer import RankOptimizer
from peer.training.parallel.sharded_file import ShardedFile
from peer.training.saved_state import FEEDBACK, PROGRESS
from protocol.ids import Digest
from protocol.layout import Layout
from protocol.spec import RunSpec


class RankCheckpoint:
    """One rank's. All ranks call the same methods in the same order, except `file` and `digest`."""

    def __init__(
        self,
        spec: RunSpec,
        built: RankModel,
        inner: RankOptimizer,
        outer: ShardedOuterState,
        group: RankGroup,
        background_hook: Callable[[], None] = lambda: None,
    ):
        self._spec = spec
        self._built = built
        self._inner = inner
        self._outer = outer
        self._group = group
        self._copied: ShardedFile | None = None
        self._reports: tuple[ShardedFile, list[bytes]] | None = None
        self.writer = ShardCheckpointWriter(group.rank, built.device, background_hook)

    def file(self) -> ShardedFile:
        """Return the file of all that there is to save now. Any rank may call it alone."""
        shapes = {t.name: t.shape for t in self._spec.model.layout.tensors}
        groups = {FEEDBACK: shapes, PROGRESS: shapes}
        if self._inner.moments()[1]:
            by_muon = self._built.hidden if self._spec.inner.optimiser == "muon" else frozenset()
            for moment in ADAMW_MOMENTS:
                groups[moment] = {n: s for n, s in shapes.items() if n not in by_muon}
            for moment in MUON_MOMENTS if by_muon else ():
                groups[moment] = {n: s for n, s in shapes.items() if n in by_muon}
        return self._outer.file_of(
            Layout.of({f"{group}/{n}": s for group, named in groups.items() for n, s in named.items()})
        )

    def write_now(self, path: Path) -> Digest | None:
        """Write feedback, progress and moments. Return the digest on rank 0. Raise OSError on all ranks."""
        file = self.file()
        return self._outer.write(file, (saved.tensor for saved in self._tensors(file)), path)

    def copy(self) -> None:
        """Copy them to memory."""
        self._copied = self.file()
        self.writer.copy(self._copied, self._tensors(self._copied))

    def start_write(self, path: Path) -> None:
        """Write the copy in the background. An error shows in `finish_write`."""
        self.writer.start(path)

    def finish_write(self) -> None:
        """Wait until all have written; rank 0 then knows the `digest`. Raise OSError on all ranks."""
        if (file := self._copied) is None:
            raise ValueError("nothing was kept")
        report = b""
        with self._group.together():
            report = self.writer.report()
        sizes = [file.report_size(rank) for rank in range(self._group.world)]
        every = self._group.gather(report, sizes)
        self._reports = (file, every) if every is not None else None

    def digest(self) -> Digest:
        """Return the digest of the file whose writing ended last. On rank 0, by any thread."""
        if self._reports is None:
            raise ValueError("no file was written")
        file, every = self._reports
        return file.digest(every)

    def _tensors(self, file: ShardedFile) -> Iterator[TensorToSave]:
        """Yield this rank's slices in the file's order: names sort by group, then as in the layout. Collective."""
        moments = self._inner.moments()[1]
        for group in sorted({t.name.partition("/")[0] for t in file.layout.tensors}):
            if group == FEEDBACK:
                for name, part in self._outer.feedback.items():
                    yield TensorToSave(f"{group}/{name}", part)
            elif group == PROGRESS:
                for name, part in self._outer.progress():
                    yield TensorToSave(f"{group}/{name}", part, fresh=True)
            else:
                here = {n for n in self._built.parameters if f"{group}/{n}" in moments}
                for name, part in self._outer.owned_of(lambda n, g=group: moments[f"{g}/{n}"], here):
                    yield TensorToSave(f"{group}/{name}", part)

    def resume(self, path: str, steps: int, everything: bool) -> None:
        """Restore a saved state whose digest was checked: the moments, and with `everything` feedback and progress."""
        with self._group.together():
            saved = load_file(path)  # mapped, not read: each rank reads what it needs
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        mine = {
            f"{moment}/{n}": self._built.shard_of(n, tensor)
            for moment in (*ADAMW_MOMENTS, *MUON_MOMENTS)
            for n, tensor in groups.get(moment, {}).items()
            if n in self._built.parameters
        }
        self._inner.set_moments(steps, mine)
        if everything:
            self._outer.resume(groups[FEEDBACK], groups[PROGRESS])

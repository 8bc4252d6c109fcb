"""What of a rank survives a restart: its part of the saved file, copied and written beside the training, or at once.

The file is that of one process, whole tensors, so the next start may have another layout. Copying is collective
(tensors are gathered one by one); writing is each rank's own affair, until all come together for the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from peer.training.beside import Live, PartSaver
from peer.training.inner import ADAMW_MOMENTS, MUON_MOMENTS
from peer.training.parallel.file import PartFile
from peer.training.parallel.group import Group
from peer.training.parallel.inner import RankInner
from peer.training.parallel.model import RankModel
from peer.training.parallel.outer import Share
from peer.training.saved import FEEDBACK, PROGRESS
from protocol.ids import Digest
from protocol.layout import Layout
from protocol.spec import RunSpec


class Keeping:
    """One rank's. All ranks call the same methods in the same order, but for what is said to be of one."""

    def __init__(
        self,
        spec: RunSpec,
        built: RankModel,
        inner: RankInner,
        share: Share,
        group: Group,
        beside: Callable[[], None] = lambda: None,
    ):
        self._spec = spec
        self._built = built
        self._inner = inner
        self._share = share
        self._group = group
        self._kept: PartFile | None = None
        self._reports: tuple[PartFile, list[bytes]] | None = None
        self.part = PartSaver(group.rank, built.device, beside)
        """What this rank copies and writes."""

    def file(self) -> PartFile:
        """The file of what there is to save now. Of one."""
        shapes = {t.name: t.shape for t in self._spec.model.layout.tensors}
        groups = {FEEDBACK: shapes, PROGRESS: shapes}
        if self._inner.moments()[1]:
            by_muon = self._built.hidden if self._spec.inner.optimiser == "muon" else frozenset()
            for moment in ADAMW_MOMENTS:
                groups[moment] = {n: s for n, s in shapes.items() if n not in by_muon}
            for moment in MUON_MOMENTS if by_muon else ():
                groups[moment] = {n: s for n, s in shapes.items() if n in by_muon}
        return self._share.file_of(
            Layout.of({f"{group}/{n}": s for group, named in groups.items() for n, s in named.items()})
        )

    def at_once(self, path: Path) -> Digest | None:
        """Feedback, progress and moments in a file. Its digest, on rank 0. Raises OSError on all ranks."""
        file = self.file()
        return self._share.write(file, (live.tensor for live in self._live(file)), path)

    def keep(self) -> None:
        """Copy them to memory."""
        self._kept = self.file()
        self.part.keep(self._kept, self._live(self._kept))

    def begin(self, path: Path) -> None:
        """Write what was kept, beside what is done next. Fails in `end`, if it does."""
        self.part.begin(path)

    def end(self) -> None:
        """Wait until all have written; `digest` is then known on rank 0. Raises OSError on all ranks."""
        if (file := self._kept) is None:
            raise ValueError("nothing was kept")
        report = b""
        with self._group.together():
            report = self.part.report()
        sizes = [file.report_size(rank) for rank in range(self._group.world)]
        every = self._group.gather(report, sizes)
        self._reports = (file, every) if every is not None else None

    def digest(self) -> Digest:
        """Of the file whose writing ended last. Of rank 0, and any thread."""
        if self._reports is None:
            raise ValueError("no file was written")
        file, every = self._reports
        return file.digest(every)

    def _live(self, file: PartFile) -> Iterator[Live]:
        """This rank's parts in the file's order: names sort by group, and then as in the layout. Collective."""
        moments = self._inner.moments()[1]
        for group in sorted({t.name.partition("/")[0] for t in file.layout.tensors}):
            if group == FEEDBACK:
                for name, part in self._share.feedback.items():
                    yield Live(f"{group}/{name}", part)
            elif group == PROGRESS:
                for name, part in self._share.progress():
                    yield Live(f"{group}/{name}", part, fresh=True)
            else:
                here = {n for n in self._built.parameters if f"{group}/{n}" in moments}
                for name, part in self._share.owned_of(lambda n, g=group: moments[f"{g}/{n}"], here):
                    yield Live(f"{group}/{name}", part)

    def resume(self, path: str, steps: int, all: bool) -> None:
        """Take up a saved state, whose digest was checked: the moments, and with `all` feedback and progress."""
        with self._group.together():
            saved = load_file(path)  # mapped, not read: each rank looks at what it needs
        groups: dict[str, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        mine = {
            f"{moment}/{n}": self._built.part_of(n, tensor)
            for moment in (*ADAMW_MOMENTS, *MUON_MOMENTS)
            for n, tensor in groups.get(moment, {}).items()
            if n in self._built.parameters
        }
        self._inner.set_moments(steps, mine)
        if all:
            self._share.resume(groups[FEEDBACK], groups[PROGRESS])

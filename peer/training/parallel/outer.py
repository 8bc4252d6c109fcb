"""One rank's share of the outer side: what `OuterSide` does, on the chunks that this rank owns.

Every rank calls the same methods in the same order. Base, anchor and feedback are of the owned parts only. The model is
split otherwise than by chunks, so for `announce` and `rebase` one parameter after the other is whole for a moment.
What all ranks together hold, send and apply has the bits of one process that holds it all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peer.training.durable import publish
from peer.training.mapped import mapped
from peer.training.outer import chosen
from peer.training.parallel.file import PartFile
from peer.training.parallel.group import Group
from peer.training.parallel.model import RankModel
from peer.training.parallel.ownership import Ownership
from peer.training.parallel.plans import stage_of
from protocol.codec import Codec
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.layout import CODEC_CHUNK, Layout, Part
from protocol.outer import Contribution, apply
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import OuterSpec
from protocol.state import state_layout

PIECE = 4096
"""Chunks that are encoded between two words of how far an update is."""

Shares = dict[str, Tensor]
"""The owned parts by name: fp32, 1-d."""


class Share:
    """See the module. `base` is None before a state is loaded, and after one that failed."""

    def __init__(self, built: RankModel, group: Group, codec: Codec, beta: float, spec: OuterSpec, layers: int):
        """`layers`: how many the whole model has."""
        self.built = built
        self.group = group
        self.codec = codec
        self.beta = beta
        self.spec = spec
        self.layout = codec.layout
        stages = [stage_of(t.name, layers, group.degrees.pp) for t in self.layout.tensors]
        self.owned = Ownership.of(self.layout, stages, group.ranks)
        self.parts = self.owned.parts[group.rank]
        self._of_stage = [i for i, s in enumerate(stages) if s == group.stage]
        self._mine = {p.index: p for p in self.parts}
        self._by_name = {self._name(p.index): p for p in self.parts}
        self.state_file = self.file_of(state_layout(self.layout, spec))
        self.base: Shares | None = None
        # The model is all zeros yet, and so is what progress is counted from.
        self.anchor = self._empty()
        self.feedback = self._empty()

    def file_of(self, layout: Layout) -> PartFile:
        """The file of tensors that are held as their parameters are: "prefix/parameter", or the parameter's name."""
        own = {t.name for t in self.layout.tensors}
        names = {t.name: t.name if t.name in own else t.name.partition("/")[2] for t in layout.tensors}
        return PartFile(layout, self.owned.within(layout, names))

    def _empty(self) -> Shares:
        device = self.built.device
        return {self._name(p.index): torch.zeros(p.numel, dtype=torch.float32, device=device) for p in self.parts}

    def _name(self, index: int) -> str:
        return self.layout.tensors[index].name

    # -- what the outer side does ------------------------------------------------------------------------------

    @torch.no_grad()
    def announce(self) -> bytes | None:
        """An update's blob, on rank 0, from all that was learnt and not sent. Raises CodecError on all ranks."""
        for name, values in self._owned_values():
            self.feedback[name].mul_(self.beta).add_(self.anchor[name]).sub_(values)
            self.anchor[name].copy_(values)
        records = bytearray()
        with self.group.together():
            for part, first in self._pieces():
                values = self.feedback[self._name(part.index)][first * CODEC_CHUNK :][: PIECE * CODEC_CHUNK]
                records += self.codec.encode_chunks(part.index, part.start // CODEC_CHUNK + first, values)
        places = {rank: [self.codec.place(p) for p in parts] for rank, parts in self.owned.parts.items()}
        sizes = [sum(size for _, size in places[rank]) for rank in range(self.group.world)]
        every = self.group.gather(records, sizes)
        if every is None:
            return None
        blob = bytearray(self.codec.size)
        blob[: len(self.codec.header)] = self.codec.header
        for rank, found in enumerate(every):
            at = 0
            for offset, size in places[rank]:
                blob[offset : offset + size] = found[at : at + size]
                at += size
        return bytes(blob)

    def _pieces(self) -> Iterator[tuple[Part, int]]:
        """The owned parts, PIECE chunks at a time: (part, the first chunk in it)."""
        for part in self.parts:
            for first in range(0, part.chunks, PIECE):
                yield part, first

    def advance(self, contributions: Sequence[Contribution]) -> None:
        """The base goes on to the next state; `rebase` is then due. Raises CodecError on all ranks, without a base."""
        base, self.base = self.base, None
        with self.group.together():
            if base is None:
                raise MalformedError("a round was to be applied, and no state is held")
            apply(base, contributions, self.codec, self.spec, parts=self.parts)
        self.base = base

    def advance_reduced(self, parts: Sequence[Path]) -> None:
        """The same by the files of a round's reduced parts. Raises CodecError or OSError on all ranks."""
        base, self.base = self.base, None
        with self.group.together():
            if base is None:
                raise MalformedError("a round was to be applied, and no state is held")
            apply_reduced(base, mapped(parts), Reduction.of(self.codec), self.spec, parts=self.parts)
        self.base = base

    def load(self, path: Path) -> None:
        """The state in a checkpoint, whose digest was checked; `rebase` is then due. Raises OSError on all ranks."""
        self.base = None
        with self.group.together():
            found = self.state_file.read(path, self.group.rank, self.built.device)
        self.base = found

    @torch.no_grad()
    def rebase(self) -> None:
        """Progress since the anchor is moved onto the base, in the model of every rank."""
        base = self.base
        if base is None:
            raise ValueError("rebase before a state was loaded")

        def moved(name: str, values: Tensor) -> None:
            values.sub_(self.anchor[name]).add_(base[name])
            self.anchor[name].copy_(base[name])

        self._change(moved)

    def restore(self, blob: bytes, only: bytes | None = None) -> None:
        """As `OuterSide.restore`. Raises CodecError on all ranks."""
        with self.group.together():
            self.codec.add_to(blob, self.feedback, self.parts, chosen(self.codec, only, self.feedback))

    @torch.no_grad()
    def withdraw(self, blob: bytes, factor: float, only: bytes | None = None) -> None:
        """As `OuterSide.withdraw`. Raises CodecError on all ranks."""
        decoded = self._empty()
        with self.group.together():
            self.codec.add_to(blob, decoded, self.parts, chosen(self.codec, only, decoded))
        for name, e in self.feedback.items():
            e.sub_(decoded[name].mul_(factor))

    @torch.no_grad()
    def progress(self) -> Iterator[tuple[str, Tensor]]:
        """What was learnt since the anchor: fresh tensors, of the owned parts, one after the other. Collective."""
        for name, values in self._owned_values():
            yield name, values - self.anchor[name]

    @torch.no_grad()
    def resume(self, feedback: Mapping[str, Tensor], progress: Mapping[str, Tensor]) -> None:
        """Take up saved feedback and progress, whole tensors (in files), as far as they are owned."""

        def resumed(name: str, values: Tensor) -> None:
            part = self._by_name[name]
            self.feedback[name].copy_(_slice(feedback[name], part))
            values.copy_(self.anchor[name]).add_(_slice(progress[name], part).to(values.device))

        self._change(resumed)

    def store(self, path: Path | None) -> Digest | None:
        """The state's digest, on rank 0; its checkpoint, durably, at `path`. Raises OSError on all ranks."""
        if self.base is None:
            raise ValueError("store before a state was loaded")
        base, file = self.base, self.state_file
        names = [file.layout.tensors[p.index].name for p in file.parts[self.group.rank]]
        return self.write(file, (base[name] for name in names), path)

    def write(self, file: PartFile, tensors: Iterable[Tensor], path: Path | None) -> Digest | None:
        """A file of owned parts: its digest, on rank 0. With a path, it is there, whole, or as before."""
        temporary = path.with_name(f".{path.name.lstrip('.')}.part.part") if path is not None else None
        descriptor: int | None = None
        with self.group.together():
            if temporary is not None and self.group.rank == 0:
                temporary.touch()
                os.truncate(temporary, file.size)
        try:
            with self.group.together():
                descriptor = os.open(temporary, os.O_WRONLY) if temporary is not None else None
            # What is asked of `tensors` may be collective: an error waits until all are done with it.
            report, failed = _report(file, self.group.rank, tensors, descriptor)
            with self.group.together():
                if failed is not None:
                    raise failed
            sizes = [file.report_size(rank) for rank in range(self.group.world)]
            every = self.group.gather(report, sizes)
            with self.group.together():
                if temporary is not None and path is not None and self.group.rank == 0:
                    publish(temporary, path)
        except BaseException:
            if temporary is not None and self.group.rank == 0:
                temporary.unlink(missing_ok=True)
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return file.digest(every) if every is not None else None

    # -- between chunks and the model --------------------------------------------------------------------------

    def _owned_values(self) -> Iterator[tuple[str, Tensor]]:
        """The model's values of each owned part, 1-d: not to be changed, and to be used at once. Collective."""
        return self.owned_of(lambda name: None)

    def owned_of(
        self, part_of_rank: Callable[[str], Tensor | None], names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Owned parts of what is split as the parameters are: `part_of_rank(name)` is this rank's (None: itself).

        `names`: of those parameters only. Collective.
        """
        for index in self._of_stage:
            name = self._name(index)
            if names is not None and name not in names:
                continue
            whole = self.built.whole(name, part_of_rank(name)).view(-1)
            if (part := self._mine.get(index)) is not None:
                yield name, whole[part.start : part.stop]

    def _change(self, how: Callable[[str, Tensor], None]) -> None:
        """`how(name, values)` changes the model's values of each owned part in place; then every rank has its own."""
        for index in self._of_stage:
            name = self._name(index)
            local = self.built.local(name)
            whole = self.built.whole(name)
            flat = whole.view(-1)
            if (part := self._mine.get(index)) is not None:
                how(name, flat[part.start : part.stop])
            for owner, part in self.owned.owners[index]:
                self.group.share(flat[part.start : part.stop], owner)
            if whole.data_ptr() != local.data_ptr():
                local.copy_(self.built.part_of(name, whole))


def _slice(tensor: Tensor, part: Part) -> Tensor:
    return tensor.reshape(-1)[part.start : part.stop]


def _report(
    file: PartFile, rank: int, tensors: Iterable[Tensor], descriptor: int | None
) -> tuple[bytes, OSError | None]:
    """A rank's report; when writing fails, what all ranks hold is still asked for to its end."""
    left = iter(tensors)
    try:
        report = file.report(rank, left, descriptor)
        if descriptor is not None:
            os.fsync(descriptor)
        return report, None
    except OSError as e:
        for _ in left:
            pass
        return b"", e

"""One rank's shard of the outer state: the operations of `OuterState` on the chunks that this rank owns.

Every rank calls the same methods in the same order. Base, anchor and feedback cover the owned slices only. The model is
not split by chunks, so for `announce` and `rebase` one parameter after the other is gathered. All ranks together hold,
send and apply the same bits as one process that holds everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peer.durable import publish
from peer.mapped import mapped_files
from peer.training.outer_state import selector
from peer.training.parallel.group import RankGroup
from peer.training.parallel.model import RankModel
from peer.training.parallel.ownership import ChunkOwnership
from peer.training.parallel.plans import stage_of
from peer.training.parallel.sharded_file import ShardedFile
from protocol.codec import Codec
from protocol.errors import MalformedError
from protocol.ids import Digest
from protocol.layout import CODEC_CHUNK, Layout, TensorSlice
from protocol.outer import Contribution, apply
from protocol.reduce import Reduction, apply_reduced
from protocol.spec import OuterSpec
from protocol.state import state_layout

PIECE = 4096
"""Chunks that are encoded at once, which bounds the memory."""

Slices = dict[str, Tensor]
"""The owned slices by name: fp32, 1-d."""


class ShardedOuterState:
    """`base` is None before a state is loaded, and after one that failed."""

    def __init__(self, built: RankModel, group: RankGroup, codec: Codec, beta: float, spec: OuterSpec, layers: int):
        """Start without a base. `layers`: the number of the whole model's layers."""
        self.built = built
        self.group = group
        self.codec = codec
        self.beta = beta
        self.spec = spec
        self.layout = codec.layout
        stages = [stage_of(t.name, layers, group.dims.pp) for t in self.layout.tensors]
        self.owned = ChunkOwnership.of(self.layout, stages, group.ranks)
        self.parts = self.owned.parts[group.rank]
        self._of_stage = [i for i, s in enumerate(stages) if s == group.stage]
        self._mine = {p.index: p for p in self.parts}
        self._by_name = {self._name(p.index): p for p in self.parts}
        self.state_file = self.file_of(state_layout(self.layout, spec))
        self.base: Slices | None = None
        # The model is all zeros yet, and so is the anchor.
        self.anchor = self._empty()
        self.feedback = self._empty()

    def file_of(self, layout: Layout) -> ShardedFile:
        """Return the file of tensors that are sharded as their parameters: "prefix/parameter", or "parameter"."""
        own = {t.name for t in self.layout.tensors}
        names = {t.name: t.name if t.name in own else t.name.partition("/")[2] for t in layout.tensors}
        return ShardedFile(layout, self.owned.within(layout, names))

    def _empty(self) -> Slices:
        device = self.built.device
        return {self._name(p.index): torch.zeros(p.numel, dtype=torch.float32, device=device) for p in self.parts}

    def _name(self, index: int) -> str:
        return self.layout.tensors[index].name

    # -- the outer side ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def announce(self) -> bytes | None:
        """Return an update's blob of all progress that was not sent, on rank 0. Raise CodecError on all ranks."""
        for name, values in self._owned_values():
            self.feedback[name].mul_(self.beta).add_(self.anchor[name]).sub_(values)
            self.anchor[name].copy_(values)
        records = bytearray()
        with self.group.together():
            for part, first in self._pieces():
                values = self.feedback[self._name(part.index)][first * CODEC_CHUNK :][: PIECE * CODEC_CHUNK]
                records += self.codec.encode_chunks(part.index, part.start // CODEC_CHUNK + first, values)
        places = {rank: [self.codec.record_range(p) for p in parts] for rank, parts in self.owned.parts.items()}
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

    def _pieces(self) -> Iterator[tuple[TensorSlice, int]]:
        """Yield the owned slices, PIECE chunks at a time: (slice, the first chunk in it)."""
        for part in self.parts:
            for first in range(0, part.chunks, PIECE):
                yield part, first

    def advance(self, contributions: Sequence[Contribution]) -> None:
        """Move the base to the next state; `rebase` is then due. Raise CodecError on all ranks, without a base."""
        base, self.base = self.base, None
        with self.group.together():
            if base is None:
                raise MalformedError("a round was to be applied, and no state is held")
            apply(base, contributions, self.codec, self.spec, slices=self.parts)
        self.base = base

    def advance_reduced(self, parts: Sequence[Path]) -> None:
        """Do the same by the files of a round's reduced shards. Raise CodecError or OSError on all ranks."""
        base, self.base = self.base, None
        with self.group.together():
            if base is None:
                raise MalformedError("a round was to be applied, and no state is held")
            apply_reduced(base, mapped_files(parts), Reduction.of(self.codec), self.spec, slices=self.parts)
        self.base = base

    def load(self, path: Path) -> None:
        """Read the base from a checked checkpoint; `rebase` is then due. Raise OSError on all ranks."""
        self.base = None
        with self.group.together():
            found = self.state_file.read(path, self.group.rank, self.built.device)
        self.base = found

    @torch.no_grad()
    def rebase(self) -> None:
        """Move the progress since the anchor onto the base, in the model of every rank."""
        base = self.base
        if base is None:
            raise ValueError("rebase before a state was loaded")

        def moved(name: str, values: Tensor) -> None:
            values.sub_(self.anchor[name]).add_(base[name])
            self.anchor[name].copy_(base[name])

        self._change(moved)

    def add_back(self, blob: bytes, only: bytes | None = None) -> None:
        """Add an own update to the feedback (see `OuterSide.add_back`). Raise CodecError on all ranks."""
        with self.group.together():
            self.codec.add_to(blob, self.feedback, self.parts, selector(self.codec, only, self.feedback))

    @torch.no_grad()
    def subtract(self, blob: bytes, factor: float, only: bytes | None = None) -> None:
        """Take out of the feedback what `add_back` added, times `factor`. Raise CodecError on all ranks."""
        decoded = self._empty()
        with self.group.together():
            self.codec.add_to(blob, decoded, self.parts, selector(self.codec, only, decoded))
        for name, e in self.feedback.items():
            e.sub_(decoded[name].mul_(factor))

    @torch.no_grad()
    def progress(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the progress since the anchor, by owned slice: (name, fresh tensor). Collective."""
        for name, values in self._owned_values():
            yield name, values - self.anchor[name]

    @torch.no_grad()
    def resume(self, feedback: Mapping[str, Tensor], progress: Mapping[str, Tensor]) -> None:
        """Restore saved feedback and progress as far as they are owned. The arguments are whole tensors, in files."""

        def resumed(name: str, values: Tensor) -> None:
            part = self._by_name[name]
            self.feedback[name].copy_(_slice(feedback[name], part))
            values.copy_(self.anchor[name]).add_(_slice(progress[name], part).to(values.device))

        self._change(resumed)

    def store(self, path: Path | None) -> Digest | None:
        """Return the state's digest on rank 0; write its checkpoint, durably, to `path`. Raise OSError on all ranks."""
        if self.base is None:
            raise ValueError("store before a state was loaded")
        base, file = self.base, self.state_file
        names = [file.layout.tensors[p.index].name for p in file.parts[self.group.rank]]
        return self.write(file, (base[name] for name in names), path)

    def write(self, file: ShardedFile, tensors: Iterable[Tensor], path: Path | None) -> Digest | None:
        """Return the digest of a file of owned slices, on rank 0. With a path, write it: whole, or not at all."""
        temporary = path.with_name(f".{path.name.lstrip('.')}.part.part") if path is not None else None
        descriptor: int | None = None
        with self.group.together():
            if temporary is not None and self.group.rank == 0:
                temporary.touch()
                os.truncate(temporary, file.size)
        try:
            with self.group.together():
                descriptor = os.open(temporary, os.O_WRONLY) if temporary is not None else None
            # To iterate over `tensors` may be collective: an error waits until all ranks are done with that.
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
        """Yield the model's values of each owned slice, 1-d; read-only, and valid until the next one. Collective."""
        return self.owned_of(lambda name: None)

    def owned_of(
        self, shard_of: Callable[[str], Tensor | None], names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the owned slices of tensors that are split as the parameters are. Collective.

        `shard_of(name)` returns this rank's shard of such a tensor (None: the parameter itself). `names`: restricts
        the parameters.
        """
        for index in self._of_stage:
            name = self._name(index)
            if names is not None and name not in names:
                continue
            whole = self.built.whole(name, shard_of(name)).view(-1)
            if (part := self._mine.get(index)) is not None:
                yield name, whole[part.start : part.stop]

    def _change(self, how: Callable[[str, Tensor], None]) -> None:
        """Call `how(name, values)`, which changes the model's values of an owned slice in place, on every rank."""
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
                local.copy_(self.built.shard_of(name, whole))


def _slice(tensor: Tensor, part: TensorSlice) -> Tensor:
    return tensor.reshape(-1)[part.start : part.stop]


def _report(
    file: ShardedFile, rank: int, tensors: Iterable[Tensor], descriptor: int | None
) -> tuple[bytes, OSError | None]:
    """Return a rank's report, and the error of writing; `tensors` is iterated to its end in any case."""
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

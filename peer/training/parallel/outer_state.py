"""One rank's shard of the outer state: the operations of `OuterOperations` on the blocks that this rank owns.

Base, anchor and feedback cover the owned slices only; of the base every rank also holds the reference norms. The model
is not split by blocks, so for `announce` and `rebase` one parameter after the other is gathered. All ranks together
hold, send and apply the same bits as one process that holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path

import torch
from torch import Tensor

from peer.durable import publish
from peer.training.background import write_file
from peer.training.offload import Offload
from peer.training.outer_state import OuterOperations
from peer.training.parallel.group import RankGroup
from peer.training.parallel.model import RankModel
from peer.training.parallel.ownership import BlockOwnership
from peer.training.parallel.plans import stage_of
from peer.training.parallel.sharded_file import ShardedFile
from protocol.codec import Codec
from protocol.ids import Digest
from protocol.layout import BLOCK, REFERENCE_NORMS, Layout
from protocol.spec import OuterSpec
from protocol.state import state_layout

PIECE = 4096
"""Blocks that are encoded at once, which bounds the memory."""


class ShardedOuterState(OuterOperations):
    """The owned slices by name: fp32, 1-d. Errors are raised on all ranks."""

    group: RankGroup

    def __init__(
        self, built: RankModel, group: RankGroup, codec: Codec, beta: float, spec: OuterSpec, layers: int,
        offload: Offload, *, replayable: bool = False,
    ):  # fmt: skip
        """Start without a base. `layers`: the number of the whole model's layers."""
        self.built = built
        self.layout = codec.layout
        stages = [stage_of(t.name, layers, group.dims.pp) for t in self.layout.tensors]
        self.owned = BlockOwnership.of(self.layout, stages, group.ranks)
        parts = self.owned.parts[group.rank]
        self._of_stage = [i for i, s in enumerate(stages) if s == group.stage]
        self._mine = {self._name(p.index): p for p in parts}
        # The model is all zeros yet, and so is the anchor.
        anchor = {n: offload.zeros((p.numel,)) for n, p in self._mine.items()}
        super().__init__(codec, beta, spec, anchor, group, offload, parts, replayable=replayable)
        self.state_file = self.file_of(state_layout(self.layout, spec))

    def file_of(self, layout: Layout) -> ShardedFile:
        own = {t.name for t in self.layout.tensors}
        names = {
            t.name: t.name if t.name in own else t.name.partition("/")[2]
            for t in layout.tensors
            if t.name != REFERENCE_NORMS
        }
        return ShardedFile(layout, self.owned.within(layout, names))

    def _name(self, index: int) -> str:
        return self.layout.tensors[index].name

    @torch.no_grad()
    def announce(self) -> bytes | None:
        """Return an update's blob of all progress that was not sent, on rank 0. Raises CodecError."""
        self._gather_progress()
        encoded = bytearray()
        with self.group.together():
            for name, part in self._mine.items():
                first = part.start // BLOCK
                for n, values in enumerate(self.feedback[name].split(PIECE * BLOCK)):
                    encoded += self.codec.encode_blocks(part.index, first + n * PIECE, values, self.offload.device)
        places = {rank: [self.codec.encoded_range(p) for p in parts] for rank, parts in self.owned.parts.items()}
        sizes = [sum(size for _, size in places[rank]) for rank in range(self.group.world)]
        every = self.group.gather(encoded, sizes)
        if every is None:
            return None
        blob = bytearray(self.codec.header.ljust(self.codec.size, b"\0"))
        for rank, found in enumerate(every):
            at = 0
            for offset, size in places[rank]:
                blob[offset : offset + size] = found[at : at + size]
                at += size
        return bytes(blob)

    def load(self, path: Path) -> None:
        """Read the base from a checked checkpoint; `rebase` is then due. Raises OSError."""
        self.base = None
        with self.group.together():
            base = self.state_file.read(path, self.group.rank, self.offload.place)
            if self.spec.clip == "median":  # every rank clips by it, and computes the same next one
                base[REFERENCE_NORMS] = self.state_file.read_tensor(path, REFERENCE_NORMS, self.offload.place)
        self.base = base

    def store(self, path: Path | None) -> Digest | None:
        """Return the state's digest on rank 0; write its checkpoint, durably, to `path`. Raises OSError."""
        base, file = self.base, self.state_file
        if base is None:
            raise ValueError("store before a state was loaded")
        names = [file.layout.tensors[p.index].name for p in file.parts[self.group.rank]]
        temporary = path and path.with_name(f".{path.name}.part")
        try:
            every = write_file(self.group, file, (base[name] for name in names), temporary)
            with self.group.together():
                if temporary and path and self.group.rank == 0:
                    publish(temporary, path)
            return file.digest(every) if every is not None else None
        except BaseException:
            if temporary and self.group.rank == 0:
                temporary.unlink(missing_ok=True)
            raise

    # -- between blocks and the model --------------------------------------------------------------------------

    def owned_of(
        self, tensor_of: Callable[[str], Tensor | None], names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name in map(self._name, self._of_stage):
            if names is not None and name not in names:
                continue
            whole = self.built.whole(name, tensor_of(name))
            if name in self._mine:
                yield name, self._owned(name, whole)

    def _owned(self, name: str, whole: Tensor) -> Tensor:
        part = self._mine[name]
        return whole.reshape(-1)[part.start : part.stop]

    def _change(self, how: Callable[[str, Tensor], None]) -> None:
        for index in self._of_stage:
            name = self._name(index)
            local = self.built.local(name)
            whole = self.built.whole(name)
            flat = whole.view(-1)
            if name in self._mine:
                how(name, self._owned(name, flat))
            for owner, part in self.owned.owners[index]:
                self.group.share(flat[part.start : part.stop], owner)
            if whole.data_ptr() != local.data_ptr():
                local.copy_(self.built.shard_of(name, whole))

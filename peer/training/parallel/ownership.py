"""The distribution of the state between peers over ranks: each has an equal share of the blocks of its stage's tensors.

Blocks cover whole flattened tensors, whatever the layout of the model. So a peer's updates and states do not tell how
many GPUs it has. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.layout import BLOCK, Layout, TensorSlice


@dataclass(frozen=True)
class BlockOwnership:
    """The owner of each slice of a layout's tensors.

    The blocks of a stage, in layout order, are split into one consecutive range per rank; these differ by one block at
    most. So a rank's slices are adjacent in updates and in checkpoints, and most tensors belong to one
    rank.
    """

    layout: Layout
    parts: Mapping[int, tuple[TensorSlice, ...]]
    """Each rank's slices, in layout order; at most one of a tensor."""
    owners: Sequence[tuple[tuple[int, TensorSlice], ...]]
    """Each tensor's (rank, slice) pairs, which cover it in order."""

    @classmethod
    def of(cls, layout: Layout, stages: Sequence[int], ranks: Sequence[Sequence[int]]) -> BlockOwnership:
        """Distribute a layout: `stages` has the stage of each tensor, `ranks` the ranks of each stage."""
        parts: dict[int, list[TensorSlice]] = {r: [] for of_stage in ranks for r in of_stage}
        owners: list[list[tuple[int, TensorSlice]]] = [[] for _ in layout.tensors]
        for stage, of_stage in enumerate(ranks):
            mine = [i for i, s in enumerate(stages) if s == stage]
            total = sum(layout.tensors[i].blocks for i in mine)
            ends = [total * (n + 1) // len(of_stage) for n in range(len(of_stage))]
            at, n = 0, 0
            for i in mine:
                tensor = layout.tensors[i]
                first = 0
                while first < tensor.blocks:
                    while at >= ends[n]:
                        n += 1
                    count = min(tensor.blocks - first, ends[n] - at)
                    stop = min(tensor.numel, (first + count) * BLOCK)
                    part = TensorSlice(i, first * BLOCK, stop)
                    parts[of_stage[n]].append(part)
                    owners[i].append((of_stage[n], part))
                    first, at = first + count, at + count
        return cls(layout, {r: tuple(p) for r, p in parts.items()}, [tuple(o) for o in owners])

    def within(self, other: Layout, names: Mapping[str, str]) -> Mapping[int, tuple[TensorSlice, ...]]:
        """Return the same distribution of another layout; `names` maps its tensors' names to this one's.

        Momentum, feedback and the like are held this way: by the rank that holds their parameter. A tensor that is not
        in `names` belongs to no parameter: rank 0 writes it.
        """
        index = {t.name: i for i, t in enumerate(self.layout.tensors)}
        found: dict[int, list[TensorSlice]] = {r: [] for r in self.parts}
        for i, tensor in enumerate(other.tensors):
            if tensor.name not in names:
                found[0].append(TensorSlice(i, 0, tensor.numel))
                continue
            for rank, part in self.owners[index[names[tensor.name]]]:
                found[rank].append(TensorSlice(i, part.start, part.stop))
        return {r: tuple(p) for r, p in found.items()}

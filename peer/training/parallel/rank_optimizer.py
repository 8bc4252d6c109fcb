"""The inner step of one rank: forward and backward of its share of the windows, the whole gradient, the step.

All ranks call the same methods in the same order. The loss is weighted so that the sum over all ranks is the value of
one process: the mean over all trained tokens of the step. The optimizer works on each rank's own plain shard of the
parameters. AdamW uses one coordinate at a time, so its steps are the same for every layout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from peer.training.device import pinned_for
from peer.training.inner_optimizer import PIECE_TOKENS, InnerOptimizer, StepResult
from peer.training.layers import USUAL, LayerOptions, Report
from peer.training.memory import memory_of
from peer.training.muon import Muon, step_along
from peer.training.parallel.model import RankModel, shard
from peer.training.parallel.pipeline import Pipeline, groups_of
from protocol import packed_sequences
from protocol.marked_tokens import IGNORED, inputs_of, trained_tokens
from protocol.spec import ConversationSpec, InnerSpec


class RankOptimizer(InnerOptimizer):
    """One rank's optimizer: `begin`, then `piece` for each piece, then `end`, and `optimizer_step` or `drop`."""

    def __init__(
        self,
        spec: InnerSpec,
        built: RankModel,
        piece: int | None = None,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        *,
        conversations: ConversationSpec | None = None,
    ):
        """Build it. `piece`: maximum windows in one pass; by default all on CUDA, PIECE_TOKENS on a CPU.

        `conversations`: as in `InnerOptimizer`.
        """
        self.built = built
        self.shards = {n: nn.Parameter(built.local(n)) for n in built.parameters}
        super().__init__(
            spec, built.body, built.device, layers=layers, report=report, parameters=self.shards, hidden=built.hidden,
            conversations=conversations,
        )  # fmt: skip
        if self.muon is not None and built.dims.fsdp * built.dims.tp > 1:
            self.muon = ShardedMuon({n: p for n, p in self.shards.items() if n in self._by_muon}, built, spec)
        self._most = piece
        self.windows_in_a_pass = 0
        """Number of windows in one pass of the present step."""
        self.most_memory = 0
        """Bytes in use, at the end of the last step, on the rank that uses most of its device."""
        self._windows = torch.empty(0)
        self._tokens: list[Tensor] = []
        self._trained = 0
        """The trained tokens of the present step."""
        self._each = 1.0
        """The weight of a trained token in the step's loss."""
        self._loss = torch.zeros((), device=self.device)
        self._pipeline: Pipeline | None = None
        self._pinned = pinned_for(self.device)

    def begin(self, windows: Tensor) -> int:
        """Begin a step on tokens [batch, window + 1], the same on all ranks. Return its number of pieces."""
        dims = self.built.dims
        self._trained = trained_tokens(windows, self.conversations)
        self._each = 1 / max(1, self._trained)
        # Without pinned memory the copy would wait for the last step's kernels.
        self._windows = (self._pinned(windows) if self._pinned else windows).to(self.device, non_blocking=True)
        mine = self._windows.tensor_split(dims.shares)[dims.share(dist.get_rank())]
        largest = -(-len(windows) // dims.shares)
        most = self._most or (largest if self.device.type != "cpu" else PIECE_TOKENS // (windows.shape[1] - 1))
        if dims.pp > 1:
            self._lay_pipeline(largest, max(1, most), windows.shape[1] - 1)
            self._tokens = [mine]  # the schedule cuts it
        else:
            self._tokens = list(mine.tensor_split(-(-largest // max(1, most))))
            self.windows_in_a_pass = -(-largest // len(self._tokens))
        self._loss = torch.zeros((), device=self.device)
        self.drop()
        return len(self._tokens)

    def piece(self, number: int) -> None:
        """Run forward and backward on one piece of this rank's share."""
        tokens = self._tokens[number]
        if self._pipeline is not None:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
                shares = self.built.dims.shares
                found = self._pipeline.run(inputs_of(tokens, self.conversations), shares * self._each)
            self._loss += found / shares
            return
        weight = self._each
        if not len(tokens):
            tokens, weight = self._windows[:1], 0.0  # others wait for this rank in every layer
        inputs = inputs_of(tokens, self.conversations)
        outside = self.built.outside
        last = number == len(self._tokens) - 1
        # Not for FSDP, which shards each piece's gradient at once: otherwise every rank would hold a whole gradient.
        apart = outside.no_sync() if isinstance(outside, DistributedDataParallel) and not last else None
        with apart or contextlib.nullcontext():
            documents = packed_sequences.documents_apart(inputs.positions is not None)
            with documents, torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = outside(**inputs.forward_arguments(), use_cache=False).logits
            loss = weight * cross_entropy(
                logits.flatten(0, 1).float(), inputs.targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            # DDP and FSDP compute the mean over the shares; the sum is needed.
            (loss * self.built.dims.shares).backward()
        self._loss += loss.detach()

    def _lay_pipeline(self, windows: int, most: int, width: int) -> None:
        groups, each = groups_of(windows, self.built.dims.pp, most)
        self.windows_in_a_pass = each
        if self._pipeline is None or self._pipeline.shape != (groups, each, width):
            config = self.built.body.config
            sizes = (int(config.hidden_size), int(config.vocab_size))  # type: ignore[union-attr]
            self._pipeline = Pipeline(self.built.outside, self.built.mesh, self.device, sizes, groups, each, width)

    def end(self) -> StepResult:
        """Clip the whole model's gradient, of which each rank has its shard. Return the same result on every rank."""
        self._take_gradients()
        dims = self.built.dims
        stage = dims.world // dims.pp
        # Each shard counts once, however many ranks hold it.
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, part in self.shards.items():
            if part.grad is not None and part.numel():
                squares += part.grad.norm().double().square() * (self.built.shard_count(name) / stage)
        # Each rank's memory travels along, in an element of its own: that costs no further wait.
        memory, mine = torch.zeros(dims.world, dtype=torch.float64, device=self.device), memory_of(self.device)
        memory[dist.get_rank()] = mine.used if mine else 0
        sums = torch.cat([torch.stack([self._loss.double() / dims.tp, squares]), memory])
        dist.all_reduce(sums)
        loss, square, *used = sums.tolist()  # the step's one wait for the device
        norm = math.sqrt(square) if square >= 0 else math.nan
        self.most_memory = int(max(used))
        factor = self.spec.clip_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
        if factor < 1:
            for part in self.shards.values():
                if part.grad is not None:
                    part.grad.mul_(factor)
        finite = math.isfinite(loss) and math.isfinite(norm)
        return StepResult(loss, finite, has_gradient=norm != 0 or not self._trained)

    def drop(self) -> None:
        """Drop the step's gradients."""
        self._zero_gradients()
        for parameter in self.built.parameters.values():
            parameter.grad = None

    def optimizer_step(self, step: StepResult) -> None:
        super().optimizer_step(step)
        self.drop()

    def _take_gradients(self) -> None:
        """Give each shard its gradient, and its present memory, which FSDP may have moved in its first pass."""
        for name, part in self.shards.items():
            now = self.built.local(name)
            if now.data_ptr() != part.data_ptr():
                part.data = now
            gradient = self.built.parameters[name].grad
            part.grad = None if gradient is None else shard(gradient)


class ShardedMuon(Muon):
    """Muon on matrices of which each rank has a shard: the same step as on whole ones.

    Momentum stays sharded. Its direction is gathered, one matrix after the other, on each rank of the stage. Each rank
    makes it orthogonal by itself and applies its own shard. That costs one gather of the hidden matrices a step.
    """

    def __init__(self, shards: Mapping[str, nn.Parameter], built: RankModel, spec: InnerSpec):
        """Step `shards`: this rank's shards of the hidden matrices, by name."""
        super().__init__(shards.values(), spec)
        self.stack = 0
        self._names = {id(shard): name for name, shard in shards.items()}
        self._built = built

    def _changes(self, matrices: list[Tensor], directions: list[Tensor], rate: float) -> list[Tensor]:
        (matrix,), (direction,) = matrices, directions
        name = self._names[id(matrix)]
        return [self._built.shard_of(name, step_along(self._built.whole(name, direction), rate, self.dtype))]

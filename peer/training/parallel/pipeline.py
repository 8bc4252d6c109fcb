"""Pipeline parallelism: each rank runs some consecutive layers; windows pass through in small groups (1F1B).

The schedule is torch.distributed.pipelining's (PipeDream-flush: Narayanan et al. 2021, arXiv 2006.09503): a rank holds
the activations of at most as many groups as there are stages after it. Shapes are given beforehand; otherwise torch
would send them pickled.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

from peer.training.parallel.plans import first_layers
from protocol import packed_sequences
from protocol.marked_tokens import IGNORED, ModelInputs


class StageModule(nn.Module):
    """One stage of a Llama-like model: tokens or activations in, activations or logits out."""

    def __init__(self, body: nn.Module, stage: int, stages: int):
        """Reduce `body`, which has no memory yet, to this stage's modules; they keep their names."""
        super().__init__()
        model = cast(nn.Module, body.model)
        layers = cast(nn.ModuleList, model.layers)
        starts = first_layers(len(layers), stages)
        kept = nn.ModuleList()
        for n in range(starts[stage], starts[stage + 1]):
            kept.add_module(str(n), layers[n])
        model.layers = kept
        self.first, self.last = stage == 0, stage == stages - 1
        if not self.first:
            model.embed_tokens = None  # type: ignore[assignment]
        if not self.last:
            model.norm = nn.Identity()
            body.lm_head = None  # type: ignore[assignment]
        self.body = body

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        model = cast(nn.Module, self.body.model)
        given = {"input_ids" if self.first else "inputs_embeds": x}
        out = model(**given, position_ids=position_ids, use_cache=False)
        if self.last:
            return cast(nn.Module, self.body.lm_head)(out.last_hidden_state).float()
        return out.last_hidden_state.float()  # one type between stages, whatever they compute in


class Pipeline:
    """The schedule for groups of one shape."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, device: torch.device, sizes: tuple[int, int], groups: int, each: int,
        width: int,
    ):  # fmt: skip
        """Build the schedule for `groups` of `each` windows of `width` tokens. Collective.

        `sizes`: hidden size and vocabulary.
        """
        stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
        hidden, vocabulary = sizes
        tokens = torch.empty((each, width), dtype=torch.int64, device="meta")
        between = torch.empty((each, width, hidden), device="meta", requires_grad=True)
        logits = torch.empty((each, width, vocabulary), device="meta", requires_grad=True)
        self.first, self.last = stage == 0, stage == stages - 1
        self.shape = (groups, each, width)
        self._factor = 1.0
        part = PipelineStage(
            module,
            stage,
            stages,
            device,
            input_args=(tokens if self.first else between,),
            output_args=(logits if self.last else between,),
            group=mesh["pp"].get_group(),
        )
        self._schedule = Schedule1F1B(part, groups, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total * self._factor

    def run(self, windows: ModelInputs, factor: float) -> Tensor:
        """Run forward and backward on groups * each windows or fewer.

        Return the sum of the tokens' losses times `factor` on the last stage, 0 on others.
        """
        groups, each, width = self.shape
        missing = groups * each - len(windows.tokens)

        def filled(rows: Tensor, value: int) -> Tensor:
            return torch.cat([rows, rows.new_full((missing, width), value)])

        self._factor = factor
        losses: list[Tensor] = []
        arguments = (filled(windows.tokens, 0),) if self.first else ()
        named: dict[str, Any] = {} if windows.positions is None else {"position_ids": filled(windows.positions, 0)}
        with packed_sequences.documents_apart(windows.positions is not None):
            if self.last:
                targets = filled(windows.targets, IGNORED)
                self._schedule.step(*arguments, target=targets, losses=losses, return_outputs=False, **named)
            else:
                self._schedule.step(*arguments, return_outputs=False, **named)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=windows.tokens.device)


def groups_of(windows: int, stages: int, most: int | None) -> tuple[int, int]:
    """Return (groups, windows of each): at least as many groups as stages, of at most `most` windows."""
    each = max(1, min(most or windows, windows // (2 * stages) or windows // stages))
    return max(stages, -(-windows // each)), each

"""The inner loop: one optimiser step at a time on this process's model.

AdamW with decoupled weight decay (Loshchilov and Hutter 2019) on matrices and embeddings, none on norms and biases
(parameters of fewer than two dimensions); the gradient's norm is clipped. With `muon`, hidden matrices are stepped by
Muon (see `hidden_matrices`), all else by AdamW. On CUDA the forward pass runs in bf16 by autocast over fp32 weights. A
step is `inner.batch` windows, in pieces: on CUDA as few as fit into memory, on a CPU of PIECE_TOKENS, which costs
nothing there (caches) and lets a round be settled within a step. How the decoder layers run is `layers`'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from peer.errors import TrainingError
from peer.training import packing
from peer.training.layers import USUAL, LayerOptions, Layers, Report
from protocol.spec import InnerSpec

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = ("momentum_buffer",)
MOMENTS = (*ADAMW_MOMENTS, *MUON_MOMENTS)

PIECE_TOKENS = 512
"""On a CPU. Of a step of 16 windows of 128 tokens (0.9M parameters, one core): 243 ms in one piece, 230 in pieces of
512 tokens, 258 in pieces of 256, 324 in pieces of 128."""


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a step: the mean loss of its tokens, the gradient's norm before clipping, whether it is taken."""

    loss: float
    gradient_norm: float
    taken: bool


class Inner:
    """Model, optimiser, and the step. The only place that runs the model; with many ranks it becomes theirs."""

    def __init__(
        self,
        spec: InnerSpec,
        model: nn.Module,
        device: torch.device,
        aside: Callable[[], None] = lambda: None,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        *,
        named: Mapping[str, Tensor] | None = None,
        hidden: frozenset[str] | None = None,
    ):
        """`aside` is called often within a step on a CPU: other threads have a turn. `layers`: how they run; `report`:
        what a person should hear of that.

        `named`: what the optimiser steps, by parameter, where that is not the model's parameters themselves (a rank's
        parts of them). `hidden`: the names of `hidden_matrices`, where the model does not tell.
        """
        packing.expect_none()
        self.spec = spec
        self.model = model
        self.device = device
        self._named = named or {n: p for n, p in model.named_parameters() if p.requires_grad}
        hidden = hidden_matrices(model) if hidden is None else hidden
        by_muon = hidden if spec.optimiser == "muon" else frozenset()
        self._by_muon = {n: p for n, p in self._named.items() if n in by_muon}
        self._by_adamw = {n: p for n, p in self._named.items() if n not in by_muon}
        decayed = [p for p in self._by_adamw.values() if p.ndim >= 2]
        plain = [p for p in self._by_adamw.values() if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,
        )
        self.muon = muon(self._by_muon.values(), spec) if self._by_muon else None
        self._piece = spec.batch
        """Windows in one forward pass; fewer when memory runs out."""
        self.layers = Layers(model, layers, report)
        self._report = report
        self._on_cpu = device.type == "cpu"
        self._aside = aside if self._on_cpu else lambda: None
        if self._on_cpu:
            for module in self.layers.hookable():
                module.register_forward_pre_hook(lambda *_: aside())

    @property
    def learning_rate(self) -> float:
        return self.adamw.param_groups[0]["lr"]

    def set_rate(self, factor: float) -> None:
        """The learning rate from now on, as a factor of the spec's."""
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.spec.lr * factor

    @property
    def _optimisers(self) -> list[torch.optim.Optimizer]:
        return [self.adamw, self.muon] if self.muon else [self.adamw]

    def _forget_gradients(self) -> None:
        for optimiser in self._optimisers:
            optimiser.zero_grad(set_to_none=True)

    def step(self, windows: Tensor) -> Step | None:
        """A whole step: `look`, and `take`."""
        step = self.look(windows)
        if step is not None:
            self.take(step)
        return step

    def look(self, windows: Tensor, go_on: Callable[[], bool] = lambda: True) -> Step | None:
        """A step on tokens [batch, window + 1] (inputs, and targets shifted by one), up to its clipped gradient.

        Changes no parameter: `take` does. `go_on` is asked between two pieces; when it says no, the step is given up
        (None). The parameters may be moved while it is asked (a rebase): the step's gradient is then of both places.
        A step whose loss or gradient is not finite is not to be taken.
        Raises TrainingError when memory does not suffice for a single window, with `recompute` where that may be.
        """
        if self._on_cpu:
            self._piece = max(1, min(len(windows), PIECE_TOKENS // (windows.shape[1] - 1)))
        while True:
            try:
                return self._look(windows, go_on)
            except torch.OutOfMemoryError:
                self._forget_gradients()
                if not self._need_less():
                    off = ", leave out --recompute off" if self.layers.refused else ""
                    raise TrainingError(
                        "the GPU's memory does not suffice for one window: stop other programs on it (nvidia-smi lists "
                        f"them), choose another with --device{off}, or take a GPU with more memory"
                    ) from None
            # Outside of the handler: the exception's frames hold the tensors that are to be freed.
            torch.cuda.empty_cache()

    def _need_less(self) -> bool:
        """After memory ran out: fewer windows in a pass, and when one is too much, all once more with `recompute`.

        False when there is nothing left to try.
        """
        if self._piece > 1:
            self._piece //= 2
            return True
        if self.layers.recompute or not self.layers.may_recompute:
            return False
        self.layers.recompute = True
        self._piece = self.spec.batch
        text = (
            "one window with all its activations does not fit into the GPU's memory: from now on those of the layers "
        )
        self._report("info", "memory", text + "are computed again in the backward pass (a third more work)")
        return True

    def _look(self, windows: Tensor, go_on: Callable[[], bool]) -> Step | None:
        windows = windows.to(self.device, non_blocking=True)
        total = torch.zeros((), device=self.device)
        self._forget_gradients()
        for i, piece in enumerate(windows.split(self._piece)):
            if i and not go_on():
                self._forget_gradients()
                return None
            tokens = piece.long()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss = loss * (len(piece) / len(windows))
            loss.backward()
            self._aside()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self._named.values(), self.spec.clip_norm)
        loss_value, norm_value = torch.stack([total, norm.to(total)]).tolist()  # the step's one wait for the device
        return Step(loss_value, norm_value, math.isfinite(loss_value) and math.isfinite(norm_value))

    def take(self, step: Step) -> None:
        """The optimiser's step by the gradient that `look` left, if it is one to be taken."""
        if step.taken:
            for optimiser in self._optimisers:
                optimiser.step()
        self._forget_gradients()

    # -- what survives a restart -----------------------------------------------------------------------------

    def moments(self) -> tuple[int, dict[str, Tensor]]:
        """(steps taken, the optimisers' moments as MOMENT/parameter). No copies."""
        taken, out = 0, {}
        for name, parameter in self._by_adamw.items():
            state = self.adamw.state.get(parameter)
            if state:
                taken = max(taken, int(state["step"].item()))
                out |= {f"{moment}/{name}": state[moment] for moment in ADAMW_MOMENTS}
        for name, parameter in self._by_muon.items():
            if self.muon is not None and (state := self.muon.state.get(parameter)):
                out |= {f"{moment}/{name}": state[moment] for moment in MUON_MOMENTS}
        return taken, out

    def set_moments(self, taken: int, moments: Mapping[str, Tensor]) -> None:
        """Take up saved moments. A parameter without any starts anew."""
        for name, parameter in self._by_adamw.items():
            if self._take_up(self.adamw.state[parameter], name, ADAMW_MOMENTS, moments):
                self.adamw.state[parameter]["step"] = torch.tensor(float(taken), device=self.device)
        for name, parameter in self._by_muon.items():
            if self.muon is not None:
                self._take_up(self.muon.state[parameter], name, MUON_MOMENTS, moments)

    def _take_up(
        self, state: dict[str, Tensor], name: str, wanted: Sequence[str], moments: Mapping[str, Tensor]
    ) -> bool:
        if not all(f"{moment}/{name}" in moments for moment in wanted):
            return False
        for moment in wanted:
            # Not as_tensor: the optimiser changes them in place, and the saved ones are the caller's.
            state[moment] = moments[f"{moment}/{name}"].to(self.device, torch.float32, copy=True)
        return True


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """The parameters that Muon steps: matrices that take one hidden activation to another.

    Not embeddings nor the output head, whose rows are looked up or scored one by one (Jordan et al. 2024).
    """
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if isinstance(head, nn.Linear):
        outside.add(id(head.weight))
    return frozenset(n for n, p in model.named_parameters() if p.ndim == 2 and id(p) not in outside)


def muon(matrices: Iterable[Tensor], spec: InnerSpec) -> torch.optim.Muon:
    """Muon (Jordan et al. 2024; within DiLoCo: MuLoCo, arXiv 2505.23725), its steps scaled to AdamW's.

    Momentum 0.95 (Nesterov), five Newton-Schulz iterations; "match_rms_adamw" (Moonlight, arXiv 2502.16982) brings the
    root mean square of a step to that of AdamW's, so that one learning rate and weight decay serve both.
    """
    return torch.optim.Muon(
        matrices, lr=spec.lr, weight_decay=spec.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )

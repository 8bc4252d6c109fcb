"""The inner loop: one optimizer step at a time on this process's model.

AdamW with decoupled weight decay (Loshchilov and Hutter 2019) steps matrices and embeddings; norms and biases
(parameters of fewer than two dimensions) have no decay. The gradient's norm is clipped. With `muon`, Muon steps the
hidden matrices (see `hidden_matrices`) and AdamW all else. On CUDA the forward pass runs in bf16 by autocast over fp32
weights.

A step is `inner.batch` windows, in pieces. On CUDA there are as few as fit into memory. On a CPU a piece has
PIECE_TOKENS, which costs nothing there (caches) and lets a round be settled within a step. `layers` runs the decoder
layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_utils import PreTrainedModel

from peer.errors import TrainingError
from peer.training.cast_linear import cast_again
from peer.training.eight_bit import Moments, adamw_8bit, held_moment, restored_state
from peer.training.layers import USUAL, LayerOptions, Layers, Report
from peer.training.muon import MOMENT, Muon
from protocol import packed_sequences
from protocol.marked_tokens import IGNORED, ModelInputs, inputs_of, trained_tokens
from protocol.spec import ConversationSpec, InnerSpec

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = (MOMENT,)
MOMENTS = (*ADAMW_MOMENTS, *MUON_MOMENTS)

PIECE_TOKENS = 512
"""Tokens of a piece on a CPU.

A step of 16 windows of 128 tokens (0.9M parameters, one core) took 243 ms in one piece. In pieces of 512 tokens it took
230 ms, of 256 tokens 258 ms, of 128 tokens 324 ms.
"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: mean loss of its tokens (nats), and whether it and the gradient are finite.

    `has_gradient`: False when tokens were trained and the gradient is 0, as of a model that no data can move.
    """

    loss: float
    is_finite: bool
    has_gradient: bool = True

    @property
    def is_skipped(self) -> bool:
        """True when the step changes no parameter, not even by weight decay."""
        return not (self.is_finite and self.has_gradient)


class InnerOptimizer:
    """Model, optimizers and the step. The only place that runs the model of one process."""

    def __init__(
        self,
        spec: InnerSpec,
        model: nn.Module,
        device: torch.device,
        yield_hook: Callable[[], None] = lambda: None,
        layers: LayerOptions = USUAL,
        report: Report = lambda *_: None,
        *,
        parameters: Mapping[str, Tensor] | None = None,
        hidden: frozenset[str] | None = None,
        conversations: ConversationSpec | None = None,
        eight_bit: bool = False,
    ):
        """Build the optimizers. `yield_hook` is called often within a step on a CPU: other threads have a turn.

        `layers`: how the layers run. `report`: called with what a person should know of it. `parameters`: the tensors
        to step by name, if those are not the model's parameters themselves (a rank's shards of them). `hidden`:
        the names of `hidden_matrices`, if the model does not have them all. `conversations`: the spec's, if its tokens
        are marked. `eight_bit`: moments have 8 bits a value. Raises TrainingError, SpecError if they cannot here.
        """
        packed_sequences.control_detection()
        packed_sequences.check_apart(conversations is not None and conversations.attention == "document")
        self.spec = spec
        self.conversations = conversations
        self.model = model
        self.device = device
        self.parameters = parameters or {n: p for n, p in model.named_parameters() if p.requires_grad}
        hidden = hidden_matrices(model) if hidden is None else hidden
        self._hidden = hidden if spec.optimizer == "muon" else frozenset()
        self._by_muon = {n: p for n, p in self.parameters.items() if n in self._hidden}
        self._by_adamw = {n: p for n, p in self.parameters.items() if n not in self._hidden}
        decayed = [p for p in self._by_adamw.values() if p.ndim >= 2]
        plain = [p for p in self._by_adamw.values() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._eight_bit, self._is_share = eight_bit, parameters is not None
        self.adamw = (
            adamw_8bit(groups, spec, device)
            if eight_bit
            else torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
        )
        self.muon = Muon(self._by_muon.values(), spec, eight_bit=eight_bit) if self._by_muon else None
        self._piece = spec.batch
        """Windows in one forward pass; fewer when memory runs out."""
        self.in_bf16 = device.type == "cuda"
        """The forward pass runs in bf16 by autocast, and Muon's iterations in bf16.

        An audit sets it to the author's type, which its device would not choose.
        """
        self.layers = Layers(model, layers, report)
        if parameters is None:
            cast_again(self.layers.hookable())
        self._report = report
        self._on_cpu = device.type == "cpu"
        self._yield_hook = yield_hook if self._on_cpu else lambda: None
        if self._on_cpu:
            for module in self.layers.hookable():
                module.register_forward_pre_hook(lambda *_: yield_hook())

    @property
    def learning_rate(self) -> float:
        """The present learning rate of AdamW."""
        return self.adamw.param_groups[0]["lr"]

    def set_rate(self, factor: float) -> None:
        """Set the learning rate from now on to `factor` times the spec's."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.spec.lr * factor

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.adamw, self.muon] if self.muon else [self.adamw]

    def _zero_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, windows: Tensor, go_on: Callable[[], bool] = lambda: True) -> StepResult | None:
        """Compute the clipped gradient of a step on tokens [batch, window + 1]: inputs, and targets shifted by one.

        The loss is the sum over the trained tokens, divided by their number in the step.

        No parameter changes. `go_on` is called between two pieces; when it returns False, the step is dropped and the
        result is None. The parameters may be moved meanwhile (a rebase): the gradient is then of both places. Raises
        TrainingError when memory does not suffice for a single window, even with `recompute` where that is allowed.
        """
        if self._on_cpu:
            self._piece = max(1, min(len(windows), PIECE_TOKENS // (windows.shape[1] - 1)))
        while True:
            try:
                return self._forward_backward(windows, go_on)
            except torch.OutOfMemoryError:
                self._zero_gradients()
                if not self._need_less():
                    off = ", leave out --recompute off" if self.layers.forbids_recompute else ""
                    if not (self._eight_bit or self._is_share):
                        off += ", add --moments 8bit unless the run is replayable"
                    raise TrainingError(
                        "the GPU's memory does not suffice for one window: stop other programs on it (nvidia-smi lists "
                        f"them), allow more with --gpu-memory if that is set, choose another with --device{off}, "
                        "or take a GPU with more memory"
                    ) from None
            # Outside of the handler: the exception's frames hold the tensors that are to be freed.
            torch.cuda.empty_cache()

    def _need_less(self) -> bool:
        """Halve the windows in a pass; below one window, start over with all of them and `recompute`.

        Return False when there is nothing left to try.
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

    def _forward_backward(self, windows: Tensor, go_on: Callable[[], bool]) -> StepResult | None:
        trained = trained_tokens(windows, self.conversations)
        each = 1 / max(1, trained)
        windows = windows.to(self.device, non_blocking=True)
        total = torch.zeros((), device=self.device)
        self._zero_gradients()
        for i, piece in enumerate(windows.split(self._piece)):
            if i and not go_on():
                self._zero_gradients()
                return None
            total += self.add_gradient(piece, each)
            self._yield_hook()
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.spec.clip_norm)
        loss_value, norm_value = torch.stack([total, norm.to(total)]).tolist()  # the step's one wait for the device
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        return StepResult(loss_value, finite, has_gradient=norm_value != 0 or not trained)

    def add_gradient(self, windows: Tensor, each: float) -> Tensor:
        """Add the gradient of `each` times the sum of the windows' losses; return that."""
        inputs = inputs_of(windows, self.conversations)
        # Only the loss keeps what it needs of the logits, which are the largest tensor of a step.
        loss = each * cross_entropy(
            self._logits(inputs).flatten(0, 1).float(),
            inputs.targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        loss.backward()
        return loss.detach()

    def _logits(self, inputs: ModelInputs) -> Tensor:
        apart = packed_sequences.documents_apart(inputs.positions is not None)
        with apart, torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.in_bf16):
            return self.model(**inputs.forward_arguments(), use_cache=False).logits

    @torch.inference_mode()
    def window_losses(self, windows: Tensor) -> Tensor:
        """Return each window's mean loss in nats per trained token: fp32 [windows], on the CPU. No parameter changes.

        The model has no dropout meanwhile. `windows`: tokens [windows, window + 1]. Raises torch.OutOfMemoryError when
        one window does not fit.
        """
        piece = max(1, PIECE_TOKENS // (windows.shape[1] - 1)) if self._on_cpu else self.spec.batch
        was_training = self.model.training
        self.model.eval()
        try:
            while True:
                try:
                    return torch.cat([self._window_losses(some.to(self.device)) for some in windows.split(piece)])
                except torch.OutOfMemoryError:
                    if piece == 1:
                        raise
                    piece //= 2
        finally:
            self.model.train(was_training)

    def _window_losses(self, windows: Tensor) -> Tensor:
        inputs = inputs_of(windows, self.conversations)
        logits = self._logits(inputs).transpose(1, 2).float()
        losses = cross_entropy(logits, inputs.targets, ignore_index=IGNORED, reduction="none")
        return (losses.sum(1) / (inputs.targets != IGNORED).sum(1).clamp(min=1)).cpu()

    def optimizer_step(self, step: StepResult) -> None:
        """Step the optimizers by the gradient that `forward_backward` left, unless the step is skipped."""
        if not step.is_skipped:
            if self.muon is not None:
                self.muon.dtype = torch.bfloat16 if self.in_bf16 else torch.float32
            for optimizer in self._optimizers:
                optimizer.step()
        self._zero_gradients()

    # -- what survives a restart -----------------------------------------------------------------------------

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Return the names of a parameter's moments, even of one that another rank has."""
        return MUON_MOMENTS if name in self._hidden else ADAMW_MOMENTS

    def moments(self) -> tuple[int, Mapping[str, Tensor]]:
        """Return (steps made, the optimizers' moments as MOMENT/parameter): fp32, without copies of those that are."""
        made, out = 0, {}
        for name, state in self._states():
            if state:
                made = max(made, int(state.get("step", 0)))
                out |= {f"{m}/{name}": held_moment(state, m) for m in self.moments_of(name)}
        return made, Moments(out)

    def set_moments(self, steps: int, moments: Mapping[str, Tensor]) -> None:
        """Restore saved moments. A parameter without any starts from scratch."""
        for name, state in self._states():
            keys = {moment: f"{moment}/{name}" for moment in self.moments_of(name)}
            if all(key in moments for key in keys.values()):
                # Not as_tensor: the optimizer changes them in place, and the saved ones are the caller's.
                values = {m: moments[key].to(self.device, torch.float32, copy=True) for m, key in keys.items()}
                state |= restored_state(steps, values) if self._eight_bit else values
                if name in self._by_adamw and not self._eight_bit:
                    state["step"] = torch.tensor(float(steps), device=self.device)

    def reset_moments(self) -> None:
        """Forget all moments: the next step is the first."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def rows_with_gradient(self) -> dict[str, Tensor]:
        """Return which rows of AdamW's matrices had a gradient since the moments were reset: bool, on the CPU.

        Weight decay alone moves the others: rows of an embedding whose tokens did not come.
        """
        states = ((name, state) for name, state in self._states() if name in self._by_adamw)
        return {n: s["exp_avg_sq"].any(1).cpu() for n, s in states if s and s["exp_avg_sq"].ndim == 2}

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, parameter in self.parameters.items():
            optimizer = self.muon if self.muon and name in self._by_muon else self.adamw
            yield name, optimizer.state[parameter]


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that Muon steps: matrices that map one hidden activation to another.

    Embeddings and the output layer are not among them: their rows are looked up or scored one by one (Jordan et al.
    2024).
    """
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output_layer = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if isinstance(output_layer, nn.Linear):
        outside.add(id(output_layer.weight))
    return frozenset(n for n, p in model.named_parameters() if p.ndim == 2 and id(p) not in outside)

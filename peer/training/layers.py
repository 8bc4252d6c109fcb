"""The decoder layers: compiled or not, with activations kept for the backward pass or computed again in it.

Both replace each layer's `forward`, in place. The layer, its parameters' names, and the hooks around the call (FSDP
gathers there) stay as they are. So it works alike for one process and for every layout of several. `recompute` is
activation checkpointing (Chen et al. 2016, arXiv 1604.06174) of whole layers, which keeps only each layer's input. It
wraps the compiled layer: the backward pass runs the same compiled layer once more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from peer.channel import Choice
from protocol.extras import pip_install

Level = Literal["info", "warning", "error"]
Report = Callable[[Level, str, str], None]
"""Called with (level, kind, text) for people, from any thread."""

Forward = Callable[..., Any]

BACKEND = "inductor"

_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+$")
"""Names of the decoder layers in the models of `transformers`."""


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """`recompute`: "auto" turns it on when one window does not fit into memory. `compiled`: by torch.compile."""

    recompute: Choice = "auto"
    compiled: bool = False


USUAL = LayerOptions()


def decoder_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers within a model, by name, in order."""
    return {name: module for name, module in root.named_modules() if _LAYER.search(name)}


def compiles(asked: Choice, kind: str) -> bool:
    """Return whether to compile, by the user's choice and the device's kind: "cpu" or "cuda"."""
    return asked == "on" or (asked == "auto" and kind == "cuda")


def keep_compiled(folder: Path) -> None:
    """Keep compiled layers in this folder for the next start, unless the environment names another one.

    torch would keep them in a folder of /tmp, which another user may have made, and it trusts the files that it finds.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


class Layers:
    """The decoder layers of one model in this process. Both options may change from one pass to the next."""

    def __init__(self, model: nn.Module, options: LayerOptions = USUAL, report: Report = lambda *_: None):
        self._report = report
        found = decoder_layers(model)
        self.recompute = options.recompute == "on"
        """True while activations are computed again."""
        self.forbids_recompute = options.recompute == "off" and bool(found)
        """True when the user forbids to compute activations again."""
        self.may_recompute = options.recompute != "off" and bool(found)
        self.compiled = options.compiled and bool(found)
        """True while the compiled layers are used; False once compiling has failed."""
        self._outgrown = False
        self._inside = {id(m) for layer in found.values() for m in layer.modules() if m is not layer}
        self._model = model
        if options.compiled and not found:
            report("warning", "compile", "this model keeps its layers where they are not known: it is not compiled")
        if self.compiled:
            _set_up()
            text = "the model's layers are compiled in the first step, which may take minutes (--compile off: never)"
            report("info", "compile", text)
        for layer in found.values():
            self._wrap(layer)

    def hookable(self) -> Iterator[nn.Module]:
        """Yield the modules that may be given hooks or another `forward`: none within a compiled layer."""
        for module in self._model.modules():
            if not self.compiled or id(module) not in self._inside:
                yield module

    def _wrap(self, layer: nn.Module) -> None:
        plain: Forward = layer.forward
        compiled: Forward | None = torch.compile(plain, backend=BACKEND) if self.compiled else None

        def forward(*positional: Any, **named: Any) -> Any:
            chosen: list[Forward] = []  # of this call
            once = partial(self._compiled_or_plain, compiled, plain, chosen) if compiled else plain
            if self.recompute and torch.is_grad_enabled():
                return checkpoint(once, *positional, use_reentrant=False, **named)
            return once(*positional, **named)

        layer.forward = forward

    def _compiled_or_plain(
        self, compiled: Forward, plain: Forward, chosen: list[Forward], *positional: Any, **named: Any
    ) -> Any:
        """Call one of both, and note it in `chosen`: the backward pass must call the same one."""
        if chosen:
            return chosen[0](*positional, **named)
        if self.compiled:
            from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

            try:
                out = compiled(*positional, **named)
                chosen.append(compiled)
                return out
            except FailOnRecompileLimitHit:
                self._report_outgrown()
            except TorchDynamoException as e:  # raised before anything is computed
                cause = getattr(e, "inner_exception", None) or e
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                self._disable_compile(cause)
        chosen.append(plain)
        return plain(*positional, **named)

    def _report_outgrown(self) -> None:
        if not self._outgrown:
            self._outgrown = True
            text = "torch.compile has met too many forms of a layer's input: new ones run without it, which is slower"
            self._report("warning", "compile", text)

    def _disable_compile(self, why: BaseException) -> None:
        self.compiled = False
        self._report(
            "warning",
            "compile",
            f"torch.compile does not work here ({' '.join(str(why).split())[:300]}): training goes on without it, "
            "which is slower. It needs a C++ compiler and Python's headers (apt install g++ python3-dev), for a GPU "
            f"triton too ({pip_install('triton')}); --compile off does without",
        )


def _set_up() -> None:
    """Set torch's options for compiling layer by layer."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    # DDP sums a layer's gradients after its backward pass anyway; to cut its graph at DDP's buckets gains nothing.
    dynamo.optimize_ddp = False
    # A layer's first size is compiled as such, the second for any number of windows, so sizes do not reach the limit.
    # If the limit is reached all the same, torch must say so.
    dynamo.fail_on_recompile_limit_hit = True
    # By default torch keeps each weight's copy in bf16, and other inputs of products, for the backward pass. They are
    # cheap to compute again; the time on a GPU was not measured.
    functorch.ban_recompute_materialized_backward = False
    # Compile the backward pass at the first call, too: a layer that cannot be compiled can still run without.
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True

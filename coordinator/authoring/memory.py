"""An estimate of the memory that training takes, before anybody trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.layout import Layout
from protocol.spec import AuditSpec, InnerSpec
from protocol.training_memory import model_bytes


def training_memory(
    layout: Layout, config: Mapping[str, Any], inner: InnerSpec, window: int, frozen: int = 0, *, on_cpu: bool = False
) -> int:
    """Estimate the bytes on one GPU: what a step holds, casts of one weight, and activations of one window.

    A trainer splits a step until it fits, and then computes activations again: more windows at once, or kept
    activations, are faster, and not needed. `window`: its tokens. `frozen`: bytes of a frozen base; its output layer
    counts as cast, as one that shares the embeddings is. Activations are each layer's input, and 34 bytes a token and
    hidden unit of one layer (Korthikanti et al. 2022, without attention scores), in bf16; and fp32 logits with their
    gradient. On a CPU a step computes in fp32, and keeps the activations of every layer: a system that runs out of
    memory there ends the process instead. A config whose sizes have other names counts without them.
    """
    hidden, vocabulary = _size(config, "hidden_size", "n_embd"), _size(config, "vocab_size")
    layers = _size(config, "num_hidden_layers", "n_layer")
    kept = 2 * 34 * hidden * layers if on_cpu else 2 * hidden * layers + 34 * hidden
    activations = window * (kept + 10 * vocabulary)
    casts = max(6 * max(t.numel for t in layout.tensors), 2 * hidden * vocabulary if frozen else 0)
    return frozen + model_bytes(layout, config, inner) + casts + activations


def eight_bit_saving(layout: Layout, config: Mapping[str, Any], inner: InnerSpec, audit: AuditSpec, memory: int) -> int:
    """Return the bytes of `memory`, of training, that moments in 8 bits save; 0: under 5%, or the run forbids them."""
    saved = model_bytes(layout, config, inner) - model_bytes(layout, config, inner, eight_bit=True)
    return 0 if audit.replayable or saved < memory // 20 else saved


def _size(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that is a whole number; 0 without one."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)

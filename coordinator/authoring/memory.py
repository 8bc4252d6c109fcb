"""An estimate of the memory that training takes, before anybody trains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from protocol.layout import Layout
from protocol.spec import AuditSpec, InnerSpec
from protocol.training_memory import model_bytes, size_in


def training_memory(
    layout: Layout, config: Mapping[str, Any], inner: InnerSpec, window: int, frozen: int = 0, *, on_cpu: bool = False
) -> int:
    """Estimate the bytes on one GPU: what a step holds, and activations of one window.

    A trainer splits a step until it fits, and then computes activations again: more windows at once, or kept
    activations, are faster, and not needed. `window`: its tokens. `frozen`: bytes of a frozen base.

    Each layer's input is kept, in fp32. The most beside these is in the loss, or in a backward pass. The loss has fp32
    logits, and their gradients. A backward pass has a layer's activations in bf16, and casts of one weight and its
    gradient. A frozen base has those of an output layer alone, which may share the embeddings, and three copies of a
    layer's stacked experts if these have an adapter. On a CPU a step computes in fp32, and keeps the activations of
    every layer: a system that runs out of memory there ends the process instead.
    The factors were measured for Llama's layers. A config whose sizes have other names counts without them.
    """
    hidden, vocabulary = size_in(config, "hidden_size", "n_embd"), size_in(config, "vocab_size")
    layers = size_in(config, "num_hidden_layers", "n_layer")
    experts = max(1, size_in(config, "num_experts_per_tok"))
    inner_width = experts * size_in(config, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * hidden
    kept, layer = 4 * hidden * layers, (42 * hidden + 14 * inner_width if frozen else 34 * hidden + 12 * inner_width)
    if on_cpu:
        kept, layer = (40 * hidden + 16 * inner_width) * layers, 8 * (hidden + inner_width)
    casts = max(6 * max(t.numel for t in layout.tensors), 2 * hidden * vocabulary if frozen else 0)
    if frozen and any(re.search(r"\.experts\.(?!\d)", t.name) for t in layout.tensors):
        stacked = size_in(config, "num_experts", "num_local_experts", "n_routed_experts")
        width = size_in(config, "moe_intermediate_size", "intermediate_size")
        casts = max(casts, 12 * 3 * stacked * width * hidden)
    logit = 12 + (4 if on_cpu else 2) * bool(config.get("final_logit_softcapping"))  # as Gemma 2 has it
    most = max(logit * window * vocabulary, window * max(2 * vocabulary, layer) + casts)
    return frozen + model_bytes(layout, config, inner) + window * kept + most


def eight_bit_saving(layout: Layout, config: Mapping[str, Any], inner: InnerSpec, audit: AuditSpec, memory: int) -> int:
    """Return the bytes of `memory`, of training, that moments in 8 bits save; 0: under 5%, or the run forbids them."""
    saved = model_bytes(layout, config, inner) - model_bytes(layout, config, inner, eight_bit=True)
    return 0 if audit.replayable or saved < memory // 20 else saved

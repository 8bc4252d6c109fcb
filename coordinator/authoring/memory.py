"""An estimate of the memory that training takes, before anybody trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE_BYTES = 28
"""Bytes a parameter: weights, gradients, optimizer, base, anchor, error feedback."""


def training_memory(parameters: int, config: Mapping[str, Any], step: int, frozen: int = 0) -> int:
    """Estimate the bytes on one GPU: state, activations of one inner step in bf16, and fp32 logits with their gradient.

    `frozen`: bytes of a frozen base. `step`: tokens of an inner step. Activations are 34 values a token, layer and
    hidden unit (Korthikanti et al. 2022, without attention scores). A config whose sizes have other names counts
    without them.
    """
    hidden = _size(config, "hidden_size", "n_embd")
    layers = _size(config, "num_hidden_layers", "n_layer")
    return frozen + STATE_BYTES * parameters + step * (34 * hidden * layers + 10 * _size(config, "vocab_size"))


def _size(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that is a whole number; 0 without one."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)

"""The bytes that training takes, without activations: what a step uses, and what is used once a round. Estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.layout import Layout
from protocol.spec import InnerSpec, OuterSpec

_WEIGHT, _GRADIENT, _MOMENT = 4, 4, 4
"""Bytes of fp32 values: what a step holds of each parameter."""

MOST_BYTES = _WEIGHT + _GRADIENT + 2 * _MOMENT
"""Bytes of a parameter that a step holds at most."""


def model_bytes(layout: Layout, config: Mapping[str, Any], inner: InnerSpec) -> int:
    """Return the bytes of weights, gradients and moments, all fp32.

    AdamW has two moments, Muon one. A matrix with a side of `vocab_size` counts as one that AdamW steps: the embedding,
    or the head.
    """
    by_muon, vocabulary = 0, config.get("vocab_size")
    if inner.optimizer == "muon":
        by_muon = sum(t.numel for t in layout.tensors if len(t.shape) == 2 and vocabulary not in t.shape)
    return MOST_BYTES * layout.numel - _MOMENT * by_muon


def round_bytes(layout: Layout, outer: OuterSpec) -> int:
    """Return the bytes of base, anchor, error feedback, and outer momentum where the run has one."""
    return 4 * layout.numel * (4 if outer.optimizer == "nesterov" else 3)

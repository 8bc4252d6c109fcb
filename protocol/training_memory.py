"""The bytes that training takes, without activations: of a step, of a round, and of what is saved. Estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.layout import Layout
from protocol.spec import InnerSpec, OuterSpec

_WEIGHT, _GRADIENT, _MOMENT = 4, 4, 4
"""Bytes of fp32 values: what a step holds of each parameter."""

LEAST_BYTES = _WEIGHT + _GRADIENT + _MOMENT
"""Bytes that a step holds of a parameter with one moment: those that Muon steps."""

MOST_BYTES = LEAST_BYTES + _MOMENT
"""Bytes of a parameter that a step holds at most: with two moments."""

SAVED_BYTES = 16
"""Bytes of a parameter in what is saved at most: feedback, progress and two moments."""

BLOCK = 256
"""Values of a moment in 8 bits that share an fp32 scale: those of bitsandbytes' optimizers."""
LEAST = 4096
"""Tensors of fewer values have moments in fp32 only, as there."""
MOST_EIGHT_BIT = _WEIGHT + _GRADIENT + 2 * (1 + 4 / BLOCK)
"""Bytes of a parameter with moments in 8 bits, but for small tensors."""


def model_bytes(layout: Layout, config: Mapping[str, Any], inner: InnerSpec, *, eight_bit: bool = False) -> int:
    """Return the bytes of weights, gradients and moments: fp32, but for moments of `eight_bit`.

    AdamW has two moments, Muon one. A matrix with a side of `vocab_size` counts as one that AdamW steps: the embedding,
    or the output layer.
    """
    moments, vocabulary = 0, config.get("vocab_size")
    for t in layout.tensors:
        by_muon = inner.optimizer == "muon" and len(t.shape) == 2 and vocabulary not in t.shape
        is_rounded = eight_bit and t.numel >= LEAST
        moment = t.numel + 4 * -(-t.numel // BLOCK) if is_rounded else _MOMENT * t.numel
        moments += moment if by_muon else 2 * moment
    return (_WEIGHT + _GRADIENT) * layout.numel + moments


def saved_bytes(layout: Layout, config: Mapping[str, Any], inner: InnerSpec, *, replayable: bool) -> int:
    """Return the bytes of what a trainer saves: moments, and feedback and progress, or in replayable runs the position.

    Moments count as fp32.
    """
    held = model_bytes(layout, config, inner) - (_WEIGHT + _GRADIENT) * layout.numel
    return held + 4 * layout.numel * (1 if replayable else 2)


def round_bytes(layout: Layout, outer: OuterSpec) -> int:
    """Return the bytes of base, anchor, error feedback, and outer momentum where the run has one."""
    return 4 * layout.numel * (4 if outer.optimizer == "nesterov" else 3)


def size_in(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields of a model's config that is a whole number; 0 without one."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)

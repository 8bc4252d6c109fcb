"""A trial on a small model of the same kind: can it keep the documents of a window apart?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from protocol.errors import SpecError
from protocol.marked_tokens import inputs_of
from protocol.model import build_model
from protocol.packed_sequences import control_detection, documents_apart
from protocol.spec import BEGINS, ConversationSpec

TRIED_LAYERS = 2
"""Layers of the model that is tried: all are alike where they attend."""

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
_LENGTH = 16


def keeps_documents_apart(config: Mapping[str, Any]) -> bool:
    """Return whether no token sees another document, if positions begin again with each document.

    The installed `transformers` decides. A model with layers that are not attention never does. Raises SpecError.
    """
    kinds = config.get("layer_types")
    if not control_detection() or kinds and not set(kinds) <= ATTENDING:
        return False
    small = dict(config)
    for field in ("num_hidden_layers", "n_layer"):
        if isinstance(small.get(field), int):
            small[field] = min(TRIED_LAYERS, small[field])
    if kinds:
        small["layer_types"] = list(kinds)[:TRIED_LAYERS]
    try:
        model = build_model(small).eval()
    except SpecError:
        model = build_model(config).eval()  # a type whose layers cannot simply be left out
    tokens = torch.arange(1, _LENGTH + 1).repeat(2, 1)
    tokens[1, : _LENGTH // 2] += _LENGTH  # another first document
    tokens[:, 0] |= BEGINS
    tokens[:, _LENGTH // 2] |= BEGINS
    asked = inputs_of(torch.cat([tokens, tokens[:, :1]], 1), ConversationSpec(window_tokens=1, attention="document"))
    try:
        with torch.inference_mode(), documents_apart(True):
            logits = model(**asked.forward_arguments(), use_cache=False).logits[:, _LENGTH // 2 :]
    except TypeError:
        return False  # it takes no positions
    return torch.allclose(logits[0], logits[1], rtol=1e-5, atol=1e-6)

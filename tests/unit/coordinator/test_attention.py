"""A trial shows whether a model keeps the documents of a window apart."""

from __future__ import annotations

import pytest

from coordinator.authoring.attention import keeps_documents_apart
from protocol.model import plain_config

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "more", "apart"),
    [
        ("llama", {}, True),
        ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4}, True),
        ("gemma3_text", {"head_dim": 8, "num_key_value_heads": 1, "sliding_window": 4}, True),
        ("mamba", {"state_size": 8, "num_hidden_layers": 2}, False),
        ("bloom", {"n_layer": 3, "n_head": 4}, False),
    ],
)
def test_a_model_with_a_memory_or_without_positions_does_not(kind, more, apart):
    shared = {"gpt2": ["vocab_size"], "bloom": ["vocab_size", "hidden_size"], "mamba": ["vocab_size", "hidden_size"]}
    fields = {name: SMALL[name] for name in shared.get(kind, SMALL)}
    assert keeps_documents_apart(plain_config({"model_type": kind} | fields | more)) is apart

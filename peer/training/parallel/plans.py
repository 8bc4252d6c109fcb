"""How a family of models is split: the matrices that tensor parallelism splits, and the layers of each stage.

A plan is for models of `transformers` that are built like Llama (Touvron et al. 2023): attention with q, k, v and o, a
gated MLP, and no other weights but embeddings, norms and the output layer. Those are not split: each rank of a tp group
computes the same, which also serves tied embeddings. Models without a plan have dp and fsdp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from typing import Any

from peer.training.parallel.parallel_dims import ModelLimits
from protocol.adapter import held_bytes
from protocol.spec import AdapterSpec, RunSpec
from protocol.training_memory import model_bytes, round_bytes, size_in

LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2"})

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linear layers whose outputs are split (Shoeybi et al. 2019): a head or a hidden unit is whole on one rank."""

ROWS = ("o_proj", "down_proj")
"""Linear layers with split inputs, whose outputs are summed over the tp ranks."""

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def limits(spec: RunSpec, device: str, *, offloads: bool, eight_bit: bool = False) -> ModelLimits:
    """Return what a run's model allows on devices of a kind, "cpu" or "cuda".

    `offloads`: the devices hold nothing of the state between rounds. `eight_bit`: moments in 8 bits. Raises SpecError.
    """
    config, layout, batch, adapter = spec.model.config, spec.model.layout, spec.inner.batch, spec.model.adapter
    kind = str(config.get("model_type"))  # the config has all defaults written out
    numel = layout.numel + (0 if adapter is None else adapter.parameters)
    model = model_bytes(layout, config, spec.inner, eight_bit=eight_bit)
    sizes = (numel, model, 0 if offloads else round_bytes(layout, spec.outer))
    if adapter is not None:
        none = "is not for a run that trains an adapter on a frozen base"
        whole = f"cannot divide this run's frozen base, whose {adapter.dtype} codes each GPU holds whole"
        return ModelLimits(
            kind, *sizes, batch, no_fsdp=whole if adapter.quantised else "", no_tp=none, no_pp=none,
            frozen_bytes=held_bytes(config, adapter, device), base_at_once=_gathered_at_once(config, adapter),
        )  # fmt: skip
    if kind not in LLAMA_LIKE:
        none = f"has no plan for model_type {kind} (there is one for {', '.join(sorted(LLAMA_LIKE))})"
        return ModelLimits(kind, *sizes, batch, no_tp=none, no_pp=none)
    heads = int(config["num_attention_heads"])
    split = gcd(heads, int(config.get("num_key_value_heads") or heads), int(config["intermediate_size"]))
    tied = "would put tied embeddings on its first and on its last stage" if config.get("tie_word_embeddings") else ""
    layers = 1 if tied else int(config["num_hidden_layers"])
    return ModelLimits(kind, *sizes, batch, tp=split, pp=layers, no_pp=tied)


def _gathered_at_once(config: Mapping[str, Any], adapter: AdapterSpec) -> int:
    """Return the bytes in bf16 of a base's embeddings and output layer, which are one group of FSDP, and of a layer."""
    names = ("hidden_size", "n_embd"), ("vocab_size",), ("num_hidden_layers", "n_layer")
    hidden, vocabulary, layers = (size_in(config, *each) for each in names)
    outer = hidden * vocabulary * (1 if config.get("tie_word_embeddings") else 2)
    return 2 * (outer + max(0, adapter.parameters - outer) // max(1, layers))


def first_layers(layers: int, stages: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers: as even as possible, with fewer in the last.

    The last stage also has the output layer, which costs as much as some layers.
    """
    return [-(-layers * s // stages) for s in range(stages + 1)]


def stage_of(name: str, layers: int, stages: int) -> int:
    """Return the stage of a parameter: the first has the embeddings, the last has the last norm and output layer."""
    if found := _LAYER.match(name):
        starts = first_layers(layers, stages)
        return next(s for s in range(stages) if int(found[1]) < starts[s + 1])
    return 0 if "embed" in name else stages - 1

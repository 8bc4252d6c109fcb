"""Exports the state of a run that trains an adapter: the adapter alone, as `peft` loads it, or merged into its base.

OUT/adapter_model.safetensors    the adapter's tensors, fp32, with PEFT's names
    adapter_config.json          PEFT's settings
    tokenizer.json, tokenizer_config.json, README.md

A merged model has the files of every exported model (`export`).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from coordinator.export import (
    ADAPTER,
    CARD,
    MODEL,
    Exported,
    ExportError,
    check_digest,
    checkpoint_digest,
    generation_texts,
    held_layout,
    model_files,
    model_texts,
    new_folder,
    tokenizer_texts,
    write_texts,
)
from coordinator.model_card import Origin, adapter_card, model_card
from protocol.adapter import NAME, base_parameters, build_adapted, load_base, merge_adapter
from protocol.errors import os_reason
from protocol.layout import Layout
from protocol.merkle import blob_digest
from protocol.model import load_state, model_layout
from protocol.spec import AdapterSpec, ChatSpec
from protocol.state import tensors_in


def export_adapter(
    checkpoint: Path, config: Mapping[str, Any], adapter: AdapterSpec, tokenizer: Path, origin: Origin, out: Path, *,
    base: str = "", chat: ChatSpec | None = None, force: bool = False,
) -> Exported:  # fmt: skip
    """Write the adapter of a checkpoint file to the folder `out`, for `peft.PeftModel.from_pretrained(base, out)`.

    With `base`, the base's name on a hub or its folder, `AutoPeftModelForCausalLM.from_pretrained(out)` finds it. The
    other arguments are those of `export.export`. Raises ExportError, and SpecError.
    """
    model = build_adapted(config, adapter)
    layout = model_layout(model)
    state = _state(checkpoint, layout, origin)
    settings: Any = model.peft_config[NAME]  # type: ignore[index]
    settings.inference_mode, settings.base_model_name_or_path = True, base or None
    named = {f"base_model.model.{name.replace(f'.{NAME}.weight', '.weight')}": t for name, t in state.items()}
    size = 4 * layout.numel
    with new_folder(out, size, force=force) as draft:
        save_file(named, draft / ADAPTER, metadata={"format": "pt"} | origin.metadata())
        settings.save_pretrained(str(draft))
        card = adapter_card(origin, checkpoint_digest(checkpoint), layout.numel, adapter, config, base)
        texts = tokenizer_texts(tokenizer, config, chat) | {CARD: card}
        if chat is not None:
            texts |= generation_texts(config, chat)
        write_texts(draft, texts)
    return Exported(out, layout.numel, size)


def export_merged(
    checkpoint: Path, config: Mapping[str, Any], adapter: AdapterSpec, base: Path, tokenizer: Path, origin: Origin,
    out: Path, *, chat: ChatSpec | None = None, force: bool = False,
) -> Exported:  # fmt: skip
    """Write the base with the adapter added to it as a whole model, in fp32, which must fit into memory.

    `base`: the file of the frozen base. The other arguments are those of `export.export`. Raises ExportError, and
    SpecError.
    """
    check_digest(base, checkpoint_digest(base), adapter.base.name)
    model = build_adapted(config, adapter, device="cpu")
    with open(base, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        load_base(model, adapter, data)
    load_state(model, _state(checkpoint, model_layout(model), origin))
    merge_adapter(model)
    layout, made, whole = model_files(config)
    tensors = {name: t.contiguous() for name, t in base_parameters(model).items()}
    size = 4 * layout.numel
    with new_folder(out, size, force=force) as draft:
        save_file(tensors, draft / MODEL, metadata={"format": "pt"} | origin.metadata())
        card = model_card(origin, checkpoint_digest(checkpoint), layout.numel, made, config)
        write_texts(draft, model_texts(whole, chat) | tokenizer_texts(tokenizer, config, chat) | {CARD: card})
    return Exported(out, layout.numel, size)


def _state(checkpoint: Path, layout: Layout, origin: Origin) -> dict[str, Tensor]:
    """Return the adapter's tensors in a checkpoint, which is small. Raises ExportError."""
    held = held_layout(checkpoint, layout, origin)
    try:
        data = checkpoint.read_bytes()
    except OSError as e:
        raise ExportError(f"{checkpoint}: cannot be read: {os_reason(e)}") from None
    check_digest(checkpoint, blob_digest(data), origin.state)
    wanted = {t.name for t in layout.tensors}
    return {name: tensor for name, tensor in tensors_in(held, data) if name in wanted}

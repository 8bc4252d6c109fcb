"""The genesis checkpoint: state[0] of a run, initial weights drawn from the run's seed, or those of a trained model.

Of a run that trains an adapter, state[0] is the adapter, and the trained model is a file of its own: the frozen base.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coordinator import durable
from coordinator.authoring.errors import AuthoringError
from coordinator.authoring.shards import PARTIAL
from coordinator.authoring.weights import read
from protocol.adapter import base_file_layout, build_adapted, draw_adapter, quantised_forms
from protocol.errors import os_reason
from protocol.layout import Layout, is_outer_tensor
from protocol.merkle import leaf_hash, tree_hash
from protocol.model import build_model, parameters_of
from protocol.quantised import ABSMAX
from protocol.spec import AdapterSettings, AdapterSpec, BlobRef, OuterSpec
from protocol.state import DTYPES, checkpoint_chunks, state_layout


def write_genesis(
    config: Mapping[str, Any], seed: int, outer: OuterSpec, path: Path, weights: Path | None = None
) -> BlobRef:
    """Build the model on the CPU and write its checkpoint, in which the outer step's tensors are zeros.

    `weights`, a model's folder, gives the initial weights (`weights.read`). Without it they are drawn: the same config
    and seed give the same bytes on the same version of torch. The checkpoint travels as a blob, so no other machine
    draws them. Raises SpecError for the config, and AuthoringError for the weights or if the file cannot be written.
    """
    if weights is not None:
        tensors = read(weights, config)
    else:
        tensors = {name: p.contiguous() for name, p in parameters_of(build_model(config, seed=seed)).items()}
    return _write_state(tensors, outer, path)


def write_adapter_genesis(
    config: Mapping[str, Any], settings: AdapterSettings, seed: int, outer: OuterSpec, path: Path, weights: Path,
    base_folder: Path,
) -> tuple[BlobRef, AdapterSpec]:  # fmt: skip
    """Write the checkpoint of a new adapter, and its base into a folder: DIGEST.safetensors and DIGEST.leaves.

    The adapter is drawn from the seed. Raises as `write_genesis` does.
    """
    base = read(weights, config, DTYPES[settings.kind])
    parameters = sum(t.numel() for t in base.values())
    adapted = build_adapted(config, settings)
    for name, form in quantised_forms(adapted, settings).items():
        base[name], base[name + ABSMAX] = form.quantise(base[name])
    layout = base_file_layout(adapted, settings)
    draft = base_folder / f"{PARTIAL}base"
    try:
        base_folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise AuthoringError(f"{base_folder}: cannot be made: {os_reason(e)}") from None
    ref, leaves = _write(layout, base, draft)
    try:
        durable.replace(base_folder / f"{ref.digest}.leaves", b"".join(leaves))
        draft.rename(base_folder / f"{ref.digest}.safetensors")
        durable.sync(base_folder)
    except OSError as e:
        raise AuthoringError(f"{base_folder}: the base model cannot be written: {os_reason(e)}") from None
    adapter = draw_adapter(config, settings, seed)
    # A tensor that is trained in full has the same name in the base, and begins with its values.
    state = {name: base[name].float() if name in base else drawn for name, drawn in adapter.items()}
    spec = AdapterSpec(**settings.model_dump(), base=ref, parameters=parameters)
    return _write_state(state, outer, path), spec


def _write_state(tensors: dict[str, Tensor], outer: OuterSpec, path: Path) -> BlobRef:
    layout = state_layout(Layout.of({name: tuple(t.shape) for name, t in tensors.items()}), outer)
    for t in layout.tensors:
        if is_outer_tensor(t.name):
            tensors[t.name] = torch.zeros(t.shape)
    ref, _ = _write(layout, tensors, path)
    return ref


def _write(layout: Layout, tensors: Mapping[str, Tensor], path: Path) -> tuple[BlobRef, list[bytes]]:
    """Write a checkpoint file, whole or not at all; return its digest and size, and its leaf hashes."""
    partial = path.with_name(f"{PARTIAL}{path.name}")
    leaves = []
    try:
        with partial.open("wb") as file:
            for chunk in checkpoint_chunks(layout, tensors):
                leaves.append(leaf_hash(chunk))
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        durable.sync(path.parent)
    except OSError as e:
        raise AuthoringError(f"{path}: cannot be written: {os_reason(e)}") from None
    return BlobRef(digest=str(tree_hash(leaves)), size=layout.checkpoint_size), leaves

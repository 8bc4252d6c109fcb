"""The genesis checkpoint: state[0] of a run, initial weights drawn from the run's seed, or those of a trained model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coordinator import durable
from coordinator.authoring.errors import AuthoringError
from coordinator.authoring.shards import PARTIAL
from coordinator.authoring.weights import read
from protocol.layout import Layout, is_outer_tensor
from protocol.merkle import leaf_hash, tree_hash
from protocol.model import build_model, parameters_of
from protocol.spec import BlobRef, OuterSpec
from protocol.state import checkpoint_chunks, state_layout


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
    layout = state_layout(Layout.of({name: tuple(t.shape) for name, t in tensors.items()}), outer)
    for t in layout.tensors:
        if is_outer_tensor(t.name):
            tensors[t.name] = torch.zeros(t.shape)
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
        raise AuthoringError(f"{path}: the genesis checkpoint cannot be written: {e.strerror or e}") from None
    return BlobRef(digest=str(tree_hash(leaves)), size=layout.checkpoint_size)

"""The validation loss of a state: what a run is judged by; from an archived checkpoint and the held-out shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.errors import CoordinatorError
from coordinator.quiet import quiet_transformers
from protocol.layout import MOMENTUM
from protocol.spec import DataSpec, windows_in


def load_archived(folder: Path, device: str = "cpu") -> torch.nn.Module:
    """The model in an archived folder, in evaluation mode. Raises CoordinatorError for anything else."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise CoordinatorError(
            f"{folder} is not an archived checkpoint: it has no config.json and model.safetensors; "
            "name a folder like checkpoints/round-000030 of a coordinator"
        )
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as e:
        raise CoordinatorError(f"{folder} does not load: {' '.join(str(e).split())[:300]}") from None
    model, said = loaded
    # A state has the outer momentum beside the model.
    strange = sorted(k for k in said["unexpected_keys"] if not k.startswith(MOMENTUM))
    if missing := sorted(said["missing_keys"]) + strange:
        raise CoordinatorError(f"{folder}: its tensors are not its config's: {', '.join(missing)[:300]}")
    model.to(torch.device(device))
    return model.eval()


def validation_loss(
    model: torch.nn.Module,
    data: DataSpec,
    shards: Sequence[Path],
    *,
    max_windows: int = 512,
    batch: int = 16,
) -> float:
    """Mean cross-entropy in nats a token over at most `max_windows` evenly spaced windows of the validation shards.

    `shards`: files of `data.dtype` tokens, little endian, in the order of `data.validation`. Raises CoordinatorError.
    """
    dtype, window = np.dtype(data.dtype).newbyteorder("<"), data.window
    try:
        tokens = [np.memmap(path, dtype=dtype, mode="r") for path in shards if path.stat().st_size]
    except (OSError, ValueError) as e:
        raise CoordinatorError(f"a validation shard cannot be read ({e}): prepare the data again") from None
    counts = [windows_in(len(t), window) for t in tokens]
    total_windows = sum(counts)
    if not total_windows:
        raise CoordinatorError("the run has no validation data: hold some out in run.toml ([data] validation)")
    n = min(max_windows, total_windows)
    starts = np.cumsum([0, *counts])
    picked: list[np.ndarray] = []
    for index in (i * total_windows // n for i in range(n)):
        shard = int(np.searchsorted(starts, index, side="right")) - 1
        at = (index - int(starts[shard])) * window
        picked.append(tokens[shard][at : at + window + 1])
    device = next(model.parameters()).device
    total = 0.0
    with torch.inference_mode():
        for i in range(0, len(picked), batch):
            block = torch.from_numpy(np.stack(picked[i : i + batch]).astype(np.int64)).to(device)
            logits = model(input_ids=block[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), block[:, 1:].flatten())
            total += float(loss) * len(block)
    return total / len(picked)

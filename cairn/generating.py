"""Text from an archived checkpoint: what the swarm's model says."""

from __future__ import annotations

import os
from pathlib import Path

from coordinator.errors import CoordinatorError


def generate_text(
    checkpoint: Path, prompt: str, *, tokens: int, temperature: float, seed: int, device: str = "cpu"
) -> str:
    """The prompt and what the model goes on with. `temperature` 0 takes the likeliest token each time.

    Raises CairnError when the folder is not an archived checkpoint, the prompt is empty, or there is no such device.
    """
    from tokenizers import Tokenizer

    from coordinator.checkpoints.evaluation import continue_prompt, load_archived
    from peer.training.device import choose_device

    if not (checkpoint / "tokenizer.json").is_file():
        raise CoordinatorError(
            f"{checkpoint} is not an archived checkpoint: it has no tokenizer.json; "
            "name a folder like checkpoints/round-000030 of a coordinator"
        )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise CoordinatorError("the prompt is empty: write at least one word")
    model = load_archived(checkpoint, str(choose_device(device, os.cpu_count() or 1)))
    return tokenizer.decode(continue_prompt(model, ids, tokens=tokens, temperature=temperature, seed=seed))

"""`cairn generate`: text from an archived checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cairn.commands.options import PLACE, device_option
from protocol.errors import CairnError


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.option("--prompt", required=True, help="The beginning of the text.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How much to write.")
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True, help="0: the likeliest.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another one gives another text.")
@device_option("cpu")
def generate(checkpoint: Path, prompt: str, tokens: int, temperature: float, seed: int, device: str) -> None:
    """Let the model in CHECKPOINT continue a prompt.

    CHECKPOINT is a run's folder, an archived state, a checkpoint file, or a model that `cairn export` made.
    """
    click.echo(generate_text(checkpoint, prompt, tokens=tokens, temperature=temperature, seed=seed, device=device))


def generate_text(
    checkpoint: Path, prompt: str, *, tokens: int, temperature: float, seed: int, device: str = "cpu"
) -> str:
    """Return the prompt and its continuation. With `temperature` 0 each token is the likeliest.

    Raises CairnError when there is no checkpoint, the prompt is empty, or there is no such device.
    """
    from tokenizers import Tokenizer

    from cairn.checkpoints import find_checkpoint
    from coordinator.checkpoints.evaluation import continue_prompt, load_archived, load_checkpoint
    from peer.training.device import choose_device

    found, file = None, checkpoint / "tokenizer.json"
    if not (file.is_file() and (checkpoint / "model.safetensors").is_file()):
        found = find_checkpoint(checkpoint)
        file = found.tokenizer
        if found.adapter is not None:
            raise CairnError(f"{checkpoint} has an adapter, no whole model: `cairn export --merge` makes one")
    tokenizer = Tokenizer.from_file(str(file))
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise CairnError("the prompt is empty: write at least one word")
    where = str(choose_device(device, os.cpu_count() or 1))
    model = (
        load_archived(checkpoint, where) if found is None
        else load_checkpoint(found.checkpoint, found.config, found.origin, where)
    )  # fmt: skip
    return tokenizer.decode(continue_prompt(model, ids, tokens=tokens, temperature=temperature, seed=seed))

"""`cairn generate`: text from a checkpoint of a run, or from an exported model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.commands.options import PLACE, device_option
from protocol.errors import CairnError

if TYPE_CHECKING:
    from cairn.checkpoints import FoundCheckpoint


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.option("--prompt", required=True, help="The beginning of the text; in chat, your message.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How much to write.")
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True, help="0: the likeliest.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Another one gives another text.",
)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, though the model learnt to answer in chat.")
@device_option("cpu")
def generate(checkpoint: Path, **options: Any) -> None:
    """Let the model in CHECKPOINT continue a prompt, or answer it if it learnt that from conversations.

    CHECKPOINT is a run's folder, an archived state, a checkpoint file, or a model that `cairn export` made.
    """
    try:
        text = generate_text(checkpoint, **options)
    except RuntimeError as e:
        import torch  # not for those who ask for help

        if not isinstance(e, torch.OutOfMemoryError):
            raise
        raise CairnError(
            "the GPU's memory does not suffice: a model takes 4 bytes a parameter here, unless its base is quantised; "
            "leave out --device to use the CPU, or stop other programs on the GPU"
        ) from None
    from coordinator.checkpoints.evaluation_job import plain

    click.echo(plain(text, limit=len(text)))  # strangers trained the model: it may write what a terminal obeys


def generate_text(
    checkpoint: Path, prompt: str, *, tokens: int, temperature: float, seed: int, device: str = "cpu",
    raw: bool = False,
) -> str:  # fmt: skip
    """Return the prompt and its continuation; of a model with a chat template its answer alone, unless `raw`.

    With `temperature` 0 each token is the likeliest. Raises CairnError when there is no usable checkpoint or no
    such device, and for a prompt that is empty, not UTF-8, or too long.
    """
    from cairn.chat_question import chat_question
    from cairn.checkpoints import find_checkpoint
    from coordinator.authoring.tokens import open_tokenizer
    from coordinator.checkpoints.archive import MANIFEST
    from coordinator.checkpoints.evaluation import continue_prompt, end_tokens, load_archived
    from coordinator.checkpoints.evaluation_job import added_text
    from coordinator.export import ADAPTER_CONFIG, MODEL, TOKENIZER
    from peer.training.device import choose_device

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise CairnError("--prompt: not UTF-8 text: convert it, for example with `iconv -t UTF-8`") from None
    there = {name for name in (MANIFEST, MODEL, TOKENIZER, ADAPTER_CONFIG) if (checkpoint / name).is_file()}
    if ADAPTER_CONFIG in there:
        raise CairnError(
            f"{checkpoint}: an adapter alone: name its run's folder, or a whole model that `cairn export --merge` makes"
        )
    found = None if there == {MODEL, TOKENIZER} else find_checkpoint(checkpoint)
    tokenizer = open_tokenizer(checkpoint / TOKENIZER if found is None else found.tokenizer)
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise CairnError("the prompt is empty: write at least one word")
    chat, asked = None if found is None else found.chat, None
    if not raw and (found is None or chat is not None):
        asked = chat_question(prompt, chat, checkpoint / TOKENIZER)
    where = str(choose_device(device, os.cpu_count() or 1))
    model: Any = load_archived(checkpoint, where) if found is None else _model_of(found, where)
    if asked is None:
        return tokenizer.decode(continue_prompt(model, ids, tokens=tokens, temperature=temperature, seed=seed))
    ids = tokenizer.encode(asked, add_special_tokens=False).ids
    ends = end_tokens(checkpoint) if chat is None else chat.end_tokens
    said = continue_prompt(model, ids, tokens=tokens, temperature=temperature, seed=seed, ends=ends)
    return added_text(tokenizer, ids, said)


def _model_of(found: FoundCheckpoint, device: str) -> Any:
    """Load the model of a run's checkpoint. Raises CairnError, and OSError."""
    from coordinator.checkpoints.evaluation import load_adapted, load_checkpoint
    from coordinator.export import check_digest, checkpoint_digest, held_layout

    check_digest(found.checkpoint, checkpoint_digest(found.checkpoint), found.origin.state)
    if found.adapter is not None:
        base = found.base_file()
        check_digest(base, checkpoint_digest(base), found.adapter.base.name)
        held_layout(found.checkpoint, found.model.layout, found.origin)
        return load_adapted(found.checkpoint, found.model, base, device)
    return load_checkpoint(found.checkpoint, found.config, found.origin, device)

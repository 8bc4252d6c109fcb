"""`cairn data prepare`: token shards with a manifest from text, JSONL or Parquet."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.commands.options import FILE, FOLDER

VOCABULARY = 32_768


@click.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, type=FOLDER, help="Folder for the shards.")
@click.option("--vocab", type=click.IntRange(257, 2**20), help=f"Size of a new vocabulary.  [default: {VOCABULARY}]")
@click.option("--tokenizer", type=FILE, help="Use this tokenizer.json.")
@click.option("--end-of-text", help="Its token that ends a document.  [default: eos_token of its config]")
@click.option("--field", default="text", show_default=True, help="The text's field in JSONL and column in Parquet.")
@click.option(
    "--validation-every",
    type=click.IntRange(0, 10**6),
    default=0,
    show_default=True,
    help="Hold out each N-th document; 0: none.",
)
@click.option("--window", type=click.IntRange(8, 2**20), help="The documents are conversations: pack them into these.")
@click.option("--chat-template", type=FILE, help="Their chat template.  [default: the one beside the tokenizer]")
@click.option(
    "--train-on", multiple=True, metavar="ROLE", help="A role whose messages are trained.  [default: assistant]"
)
@click.option(
    "--long",
    type=click.Choice(["refuse", "drop", "cut", "split"]),
    default="refuse",
    show_default=True,
    help="What to do with a conversation that is longer than a window.",
)
@click.option("--mix", type=(str, float), multiple=True, metavar="INPUT SHARE", help="Other documents beside them.")
def prepare(
    inputs: tuple[str, ...], out: Path, vocab: int | None, tokenizer: Path | None, end_of_text: str | None, field: str,
    validation_every: int, window: int | None, chat_template: Path | None,
    train_on: tuple[str, ...], long: str, mix: tuple[tuple[str, float], ...],
) -> None:  # fmt: skip
    """Turn text, JSONL or Parquet files into token shards with a manifest."""
    from pydantic import ValidationError

    from coordinator.authoring.conversations import ConversationTable
    from coordinator.authoring.data_check import spelled_warning
    from coordinator.authoring.prepare import prepare
    from protocol.spec import explain

    if vocab is not None and tokenizer is not None:
        raise click.UsageError("--tokenizer has a vocabulary of its own: leave out --vocab or --tokenizer")
    if end_of_text is not None and tokenizer is None:
        raise click.UsageError("--end-of-text names a token of a given tokenizer: give --tokenizer, too")
    asked = {
        "chat_template": str(chat_template) if chat_template else None,
        "long": long,
        "mix": [{"source": source, "share": share} for source, share in mix],
    } | ({"train_on": list(train_on)} if train_on else {})
    try:
        table = ConversationTable.model_validate(asked)
    except ValidationError as e:
        raise click.UsageError(explain(e, "conversations")) from None
    if window is None and table != ConversationTable():
        raise click.UsageError("--chat-template, --train-on, --long and --mix are for conversations: give --window too")
    prepared = prepare(
        inputs,
        out,
        field=field,
        vocabulary=None if tokenizer else vocab or VOCABULARY,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        validation_every=validation_every,
        window=window,
        conversations=None if window is None else table,
        report=lambda line: click.echo(line, err=True),
    )
    m = prepared.manifest
    for name, part in (("training", m.train), ("validation", m.validation)):
        shards = len(part.shards)
        click.echo(f"{name:<11} {part.tokens:,} tokens in {shards} shard{'s' * (shards != 1)}")
    if (packed := m.conversations) is not None:
        click.echo(f"trained     {packed.trained:,} tokens: a window counts as {packed.window_tokens:,}")
    if warning := spelled_warning(m.spelled, m.documents, m.end_of_text):
        click.echo(warning, err=True)
    click.echo(f"tokenizer   {m.vocabulary:,} tokens, {m.dtype}")
    click.echo(f'folder      {out}  (in a run.toml beside it: [data] prepared = "{out.absolute().name}")')

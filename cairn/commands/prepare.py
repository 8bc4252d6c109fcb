"""`cairn data prepare`: token shards with a manifest from text, JSONL or Parquet."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.commands.options import FILE, FOLDER


@click.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, type=FOLDER, help="Folder for the shards.")
@click.option(
    "--vocab", type=click.IntRange(257, 2**20), default=32_768, show_default=True, help="Size of a new vocabulary."
)
@click.option("--tokenizer", type=FILE, help="Use this tokenizer.json.")
@click.option("--field", default="text", show_default=True, help="The text's field in JSONL and column in Parquet.")
@click.option(
    "--shard-tokens", type=click.IntRange(1024, 2**31), default=2**26, show_default=True, help="Tokens a shard."
)
@click.option(
    "--validation-every",
    type=click.IntRange(0, 10**6),
    default=0,
    show_default=True,
    help="Hold out each N-th document; 0: none.",
)
def prepare(
    inputs: tuple[str, ...], out: Path, vocab: int, tokenizer: Path | None, field: str, shard_tokens: int,
    validation_every: int,
) -> None:  # fmt: skip
    """Turn text, JSONL or Parquet files into token shards with a manifest."""
    from coordinator.authoring.prepare import prepare

    prepared = prepare(
        inputs,
        out,
        field=field,
        vocabulary=None if tokenizer else vocab,
        tokenizer=tokenizer,
        validation_every=validation_every,
        shard_tokens=shard_tokens,
        report=lambda line: click.echo(line, err=True),
    )
    m = prepared.manifest
    for name, part in (("training", m.train), ("validation", m.validation)):
        shards = len(part.shards)
        click.echo(f"{name:<11} {part.tokens:,} tokens in {shards} shard{'s' * (shards != 1)}")
    click.echo(f"tokenizer   {m.vocabulary:,} tokens, {m.dtype}")
    click.echo(f'folder      {out}  (in a run.toml beside it: [data] prepared = "{out.absolute().name}")')

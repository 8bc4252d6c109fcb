"""`cairn data prepare`: token shards with a manifest from text, JSONL or Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


def prepare_data(
    inputs: Sequence[str], out: Path, *, vocab: int, tokenizer: Path | None, field: str, shard_tokens: int,
    validation_every: int,
) -> None:  # fmt: skip
    """Prepare, and say what came out. Raises CairnError."""
    from coordinator.authoring import prepare

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
    click.echo(f"training    {m.train.tokens:,} tokens in {len(m.train.shards)} shards")
    click.echo(f"validation  {m.validation.tokens:,} tokens in {len(m.validation.shards)} shards")
    click.echo(f"tokenizer   {m.vocabulary:,} tokens, {m.dtype}")
    click.echo(f'folder      {out}  (in run.toml: [data] prepared = "{out}")')

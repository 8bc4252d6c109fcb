"""`cairn export`: a checkpoint of a run as a folder that Hugging Face's libraries load."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.figures import byte_size
from protocol.errors import CairnError, MalformedError
from protocol.invite import Invite


def export_checkpoint(checkpoint: Path, out: Path, *, spec: Path | None, invite: str | None, force: bool) -> None:
    """Find, export, and say what came out. Raises CairnError."""
    from cairn.checkpoints import find_checkpoint
    from coordinator.export import export

    try:
        run = Invite.parse(invite).run if invite is not None else None
    except MalformedError as e:
        raise CairnError(f"--invite: {e}") from None
    found = find_checkpoint(checkpoint, spec, run)
    made = export(found.checkpoint, found.config, found.tokenizer, found.origin, out, force=force)
    o = found.origin
    known = ", ".join(
        part
        for part in (
            "" if o.round is None else f"round {o.round}",
            "" if o.tokens is None else f"{o.tokens:,} tokens",
            "" if o.loss is None else f"training loss {o.loss:.4f}",
        )
        if part
    )
    click.echo(f"run     {o.name} ({o.run.short}){': ' if known else ''}{known}")
    click.echo(f"model   {made.parameters:,} parameters, {byte_size(made.size)}")
    click.echo(f'folder  {made.folder}  (AutoModelForCausalLM.from_pretrained("{made.folder}"))')

"""`cairn export`: a checkpoint of a run as a folder that Hugging Face's libraries load."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from cairn.commands.options import FILE, PLACE, invite_or_stdin
from protocol.errors import CairnError, MalformedError
from protocol.units import byte_size

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def _named(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """Return a base as loaders find it from anywhere. Raises click.BadParameter."""
    if text is None:
        return None
    if (folder := Path(text).expanduser()).is_dir():
        return str(folder.resolve())
    if not HUB_NAME.fullmatch(text):
        raise click.BadParameter(f"{text[:80]!r} is no folder here, and no model's name on a hub, such as org/model-7B")
    return text


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.argument("out", type=PLACE)
@click.option("--force", is_flag=True, help="Replace the model that is in OUT, if nothing else is.")
@click.option(
    "--spec", type=FILE, help="The run's spec.json or spec.signed, for a checkpoint file that lies elsewhere."
)
@click.option("--invite", callback=invite_or_stdin, help="The checkpoint must be of the run that this invite names.")
@click.option("--merge", is_flag=True, help="Of an adapter: write the whole model, the adapter added to its base.")
@click.option(
    "--base",
    metavar="NAME_OR_FOLDER",
    callback=_named,
    help="Of an adapter: the base that OUT names, on a hub or here.  [default: the owner's folder, if it is here]",
)
def export(
    checkpoint: Path, out: Path, force: bool, spec: Path | None, invite: str | None, merge: bool, base: str | None
) -> None:
    """Write the model in CHECKPOINT as a folder OUT that transformers loads, or an adapter that peft loads.

    CHECKPOINT is a run's folder (its newest checkpoint), a state that a coordinator archived, or a checkpoint file.
    """
    from cairn.checkpoints import find_checkpoint
    from coordinator.export import export
    from protocol.invite import Invite

    try:
        run = Invite.parse(invite).run if invite is not None else None
    except MalformedError as e:
        raise CairnError(f"--invite: {e}") from None
    found = find_checkpoint(checkpoint, spec, run, partial(click.echo, err=True))
    if base is not None and (merge or found.adapter is None):
        raise CairnError("--base: only an adapter that is exported alone names its base: leave it out")
    what, loads = "model ", f'AutoModelForCausalLM.from_pretrained("{out}")'
    if found.adapter is None:
        if merge:
            raise CairnError("--merge: this run trains a whole model, not an adapter: leave it out")
        made = export(found.checkpoint, found.config, found.tokenizer, found.origin, out, chat=found.chat, force=force)
    else:
        from coordinator.adapter_export import export_adapter, export_merged

        given = (found.tokenizer, found.origin, out)
        if merge:
            made = export_merged(
                found.checkpoint, found.config, found.adapter, found.base_file(), *given, chat=found.chat, force=force
            )
        else:
            base = base or found.base_folder
            what, loads = "adapter", f'PeftModel.from_pretrained(base, "{out}")'
            if base:
                loads = f'AutoPeftModelForCausalLM.from_pretrained("{out}")'
            made = export_adapter(
                found.checkpoint, found.config, found.adapter, *given, base=base, chat=found.chat, force=force
            )
    o = found.origin
    facts = [] if o.round is None else [f"round {o.round}"]
    if o.tokens is not None:
        facts.append(f"{o.tokens:,} tokens")
    if o.loss is not None:
        facts.append(f"training loss {o.loss:.4f}")
    click.echo(f"run     {o.name} ({o.run.short}){': ' if facts else ''}{', '.join(facts)}")
    click.echo(f"{what:7} {made.parameters:,} parameters, {byte_size(made.size)}")
    if what == "adapter":
        named = base or "not known here, so OUT does not name it: --base NAME_OR_FOLDER --force does"
        here = "  (to publish OUT: --base NAME --force)" if base and Path(base).is_dir() else ""
        click.echo(f"base    {named}{here}")
    click.echo(f"folder  {made.folder}  ({loads})")

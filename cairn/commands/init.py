"""`cairn run init`: a commented run.toml for a run that continues from a trained model."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.commands.options import count_option
from cairn.files import write_whole
from protocol.errors import CairnError


@click.command()
@click.option(
    "--from", "folder", required=True, type=click.Path(path_type=Path), help="A model's folder, with safetensors."
)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The run.toml to write.")
@click.option("--peers", type=int, default=16, show_default=True, help="Volunteers at a time.")
@click.option("--uplink", type=float, default=100, show_default=True, help="Mbit/s that a typical one sends.")
@count_option("--total-tokens", "Of the run.  [default: 100M]")
@click.option("--force", is_flag=True, help="Write over what is there.")
def init(folder: Path, out: Path, peers: int, uplink: float, total_tokens: int | None, force: bool) -> None:
    """Write a commented run.toml for a run that continues from a trained model (fine-tuning)."""
    from coordinator.authoring.plan import PlanError, PlanInputs
    from coordinator.authoring.pretrained import TOTAL_TOKENS, run_file_from

    if out.exists() and not force:
        raise CairnError(f"{out}: is there already: take another name, or --force to write over it")
    try:
        # The model is the folder's: 1 parameter stands for it until it is read.
        inputs = PlanInputs(model=1, peers=peers, uplink=uplink, total_tokens=total_tokens or TOTAL_TOKENS)
        draft = run_file_from(folder, out, inputs)
    except PlanError as e:
        raise click.BadParameter(e.reason, param_hint=f"--{e.field.replace('_', '-')}") from None
    write_whole(out, draft.text)
    click.echo(f"model   {draft.parameters:,} parameters, from {folder}; tokenizer of {draft.vocabulary:,} tokens")
    if draft.left_out:
        click.echo(f"note    left out of [model], for transformers does not know them: {', '.join(draft.left_out)}")
    click.echo(f"{out} is written ({draft.name}): name your documents in its [data], then:")
    click.echo(f"    cairn run validate {out}")

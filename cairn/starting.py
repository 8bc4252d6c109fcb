"""`cairn run init`: a commented run.toml for a run that goes on from a trained model."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.files import write_whole
from protocol.errors import CairnError


def init_run(folder: Path, out: Path, *, peers: int, uplink: float, total_tokens: int | None, force: bool) -> None:
    """Write it, and say what to do next. Raises CairnError, and click.BadParameter for an option."""
    from coordinator.authoring.plan import PlanError, Question
    from coordinator.authoring.starting import TOTAL_TOKENS, run_file_from

    if out.exists() and not force:
        raise CairnError(f"{out}: is there already: take another name, or --force to write over it")
    try:
        # The model is the folder's: any number stands for it until it is read.
        question = Question(model=1, peers=peers, uplink=uplink, total_tokens=total_tokens or TOTAL_TOKENS)
        started = run_file_from(folder, out, question)
    except PlanError as e:
        raise click.BadParameter(e.reason, param_hint=f"--{e.field.replace('_', '-')}") from None
    write_whole(out, started.text)
    click.echo(f"model   {started.parameters:,} parameters, from {folder}; tokenizer of {started.vocabulary:,} tokens")
    if started.left_out:
        click.echo(f"note    left out of [model], for transformers does not know them: {', '.join(started.left_out)}")
    click.echo(f"{out} is written ({started.name}): name your documents in its [data], then:")
    click.echo(f"    cairn run validate {out}")

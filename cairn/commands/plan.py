"""`cairn run plan`: from a model, volunteers and links to a run.toml, with reasons and costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cairn.commands.options import count_option
from cairn.files import write_whole
from protocol.errors import CairnError

if TYPE_CHECKING:
    from coordinator.authoring.model_config import ModelConfig
    from coordinator.authoring.plan import RunPlan

PARAMETERS = 10**9
"""Parameters of the model if neither a model nor a number is given."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line; None means not given."""

    model: Path | None
    parameters: int | None
    peers: int
    uplink: float
    downlink: float | None
    rtt: float
    tokens_per_second: int | None
    window: int | None
    batch: int | None
    total_tokens: int | None
    share: float
    relays: bool
    out: Path | None
    force: bool


@click.command()
@click.option(
    "--model", type=click.Path(dir_okay=False, path_type=Path), default=None, help="A config.json, or a run.toml."
)
@count_option("--parameters", "Or: how many, e.g. 130M, 1B, 7e9.  [default: 1B]")
@click.option("--peers", type=int, default=16, show_default=True, help="Volunteers at a time.")
@click.option("--uplink", type=float, default=100, show_default=True, help="Mbit/s that a typical one sends.")
@click.option("--downlink", type=float, default=None, help="Mbit/s that one receives.  [default: the uplink]")
@click.option("--rtt", type=float, default=100, show_default=True, help="Milliseconds from one to another and back.")
@count_option("--tokens-per-second", "Of one volunteer.  [default: estimated from parameters]")
@click.option("--window", type=int, default=None, help="Tokens that the model sees at once.  [default: up to 2048]")
@click.option("--batch", type=int, default=None, help="Windows in an inner step.  [default: by total tokens, up to 64]")
@count_option("--total-tokens", "Of the run.  [default: 20 a parameter]")
@click.option(
    "--share", type=float, default=0.5, show_default=True, help="Most that an exchange may take of a round's training."
)
@click.option("--relays", is_flag=True, help="Well-connected members pass updates on: a peer sends its own about once.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write a commented run.toml here."
)
@click.option("--force", is_flag=True, help="Write over what is there.")
def plan(**options: Any) -> None:
    """Plan a run.toml for a model, volunteers and their links: each field with its reason, and the costs."""
    run_plan(PlanOptions(**options))


def run_plan(options: PlanOptions) -> None:
    """Print a plan, and write the template if asked. Raises CairnError, and click.BadParameter for an option."""
    from cairn.plan_view import lines
    from coordinator.authoring.model_config import LEAST_PARAMETERS
    from coordinator.authoring.plan import PlanError, PlanInputs, plan

    if options.model and options.parameters is not None:
        raise click.UsageError("--model and --parameters: give one of the two")
    if options.out and options.out.exists() and not options.force:
        raise CairnError(f"{options.out}: is there already: take another name, or --force to write over it")
    parameters = PARAMETERS if options.parameters is None else options.parameters
    if parameters < LEAST_PARAMETERS:
        raise click.BadParameter(
            f"{parameters:,} is too small for a language model: give at least {LEAST_PARAMETERS:,}",
            param_hint="--parameters",
        )
    model = _model(options)
    default = PlanInputs.window if model is None or model.positions is None else min(PlanInputs.window, model.positions)
    try:
        made = plan(
            PlanInputs(
                model=parameters if model is None else model.layout,
                peers=options.peers,
                uplink=options.uplink,
                downlink=options.downlink,
                rtt=options.rtt,
                tokens_per_second=options.tokens_per_second,
                window=default if options.window is None else options.window,
                batch=options.batch,
                total_tokens=options.total_tokens,
                share=options.share,
                relays=options.relays,
            )
        )
    except PlanError as e:
        raise click.BadParameter(e.reason, param_hint=f"--{e.field.replace('_', '-')}") from None
    if options.out:  # first, since the reader of our output may close it early
        write_whole(options.out, _template(made, options, model))
    assumed = options.model is None and options.parameters is None
    for line in lines(made, str(options.model or ""), assumed=assumed):
        click.echo(line)
    if options.out:
        click.echo(f"\n{options.out} is written: name your documents in its [data], then:")
        click.echo(f"    cairn run validate {options.out}")


def _model(options: PlanOptions) -> ModelConfig | None:
    from coordinator.authoring.model_config import read_model

    if options.model is None:
        return None
    model = read_model(options.model)
    if options.window is not None and model.positions is not None and options.window > model.positions:
        raise click.BadParameter(
            f"{options.window} tokens do not fit the model's {model.positions} positions: give at most that",
            param_hint="--window",
        )
    return model


def _template(made: RunPlan, options: PlanOptions, model: ModelConfig | None) -> str:
    from coordinator.authoring.model_config import llama_of, parameters_of_table
    from coordinator.authoring.template import fill

    if model is not None:
        return fill(made, model.table, model.vocabulary, f"From {ascii(options.model.name if options.model else '')}.")
    table = llama_of(made.inputs.parameters, made.inputs.window)
    note = f"A Llama of {parameters_of_table(table):,} parameters, drawn for the plan: put your own model here."
    return fill(made, table, table["vocab_size"], note)

"""`cairn run plan`, `init` and `validate`: a run.toml for a model and volunteers, and what it costs a peer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cairn.commands.options import FILE, PLACE, count_option
from cairn.files import refuse_existing, write_new

PARAMETERS = 10**9
"""Parameters of the model if neither a model nor a number is given."""

DTYPES = ("bfloat16", "float32", "int8", "nf4")
"""Of `protocol.spec.AdapterSettings`, whose import takes long."""

PEERS = click.option("--peers", type=int, default=16, show_default=True, help="Volunteers at a time.")
UPLINK = click.option("--uplink", type=float, default=100, show_default=True, help="Mbit/s that a typical one sends.")
FORCE = click.option("--force", is_flag=True, help="Write over what is there.")


@click.command()
@click.argument("file", type=FILE)
def validate(file: Path) -> None:
    """Check a run.toml, and print its cost for a peer."""
    from coordinator.authoring.summary import validate

    for line in validate(file):
        click.echo(line)


@click.command()
@click.option("--model", type=FILE, help="A config.json, or a run.toml.")
@count_option("--parameters", "Or: how many, e.g. 130M, 1B, 7e9.  [default: 1B]")
@PEERS
@UPLINK
@click.option("--downlink", type=float, help="Mbit/s that one receives.  [default: the uplink]")
@click.option("--rtt", type=float, default=100, show_default=True, help="Milliseconds from one to another and back.")
@count_option("--tokens-per-second", "Of one volunteer.  [default: estimated from parameters]")
@click.option("--window", type=int, help="Tokens that the model sees at once.  [default: up to 2048]")
@click.option("--batch", type=int, help="Windows in an inner step.  [default: by total tokens, up to 64]")
@count_option("--total-tokens", "Of the run.  [default: 20 a parameter]")
@click.option(
    "--share", type=float, default=0.5, show_default=True, help="Most that an exchange may take of a round's training."
)
@click.option("--relays", is_flag=True, help="Well-connected members pass updates on: a peer sends its own about once.")
@click.option("--out", type=FILE, help="Write a commented run.toml here.")
@FORCE
def plan(
    model: Path | None, parameters: int | None, window: int | None, out: Path | None, force: bool, **inputs: Any
) -> None:
    """Plan a run.toml for a model, volunteers and their links: each field with its reason, and the costs."""
    from cairn.plan_view import lines
    from coordinator.authoring.memory import training_memory
    from coordinator.authoring.model_config import LEAST_PARAMETERS, llama_of, parameters_of_table, read_model
    from coordinator.authoring.plan import PlanError, PlanInputs, plan
    from coordinator.authoring.summary import dtypes_line
    from coordinator.authoring.template import fill
    from protocol.adapter import held_bytes
    from protocol.model import plain_config
    from protocol.spec import InnerSpec

    if model and parameters is not None:
        raise click.UsageError("--model and --parameters: give one of the two")
    asked = PARAMETERS if parameters is None else parameters
    if asked < LEAST_PARAMETERS:
        raise click.BadParameter(
            f"{asked:,} is too small for a language model: give at least {LEAST_PARAMETERS:,}",
            param_hint="--parameters",
        )
    read = None if model is None else read_model(model)
    positions = None if read is None else read.positions
    if window is not None and positions is not None and window > positions:
        raise click.BadParameter(
            f"{window} tokens do not fit the model's {positions} positions: give at most that", param_hint="--window"
        )
    if window is None:
        window = min(PlanInputs.window, positions or PlanInputs.window)
    try:
        if read is not None:
            inputs |= {"frozen": read.frozen, "frozen_bytes": read.frozen_bytes}
        made = plan(PlanInputs(asked if read is None else read.layout, window=window, **inputs))
    except PlanError as e:
        raise _bad_option(e.field, e.reason) from None
    if out:  # first, since the reader of our output may close it early
        if read is None:
            table = llama_of(made.inputs.parameters, window)
            note = f"A Llama of {parameters_of_table(table):,} parameters, drawn for the plan: put your own model here."
            text = fill(made, table, table["vocab_size"], note)
        else:
            note = f"From {ascii(model.name if model else '')}."
            text = fill(made, read.table, read.vocabulary, note, adapter=read.adapter)
        write_new(out, text, force=force)
    for line in lines(made, str(model or ""), assumed=model is None and parameters is None):
        click.echo(line)
    if read is not None and read.adapter is not None:
        inner = InnerSpec.model_validate({"optimizer": made.inner.value, "batch": made.inputs.windows})
        config = plain_config({"vocab_size": read.vocabulary} | read.table)
        frozen = held_bytes(config, read.adapter, "cuda")
        beside = training_memory(read.layout, config, inner, window, frozen) - frozen
        click.echo(dtypes_line(read.adapter, config, beside))
    if out:
        click.echo(f"\n{out} is written: name your documents in its [data], then:")
        click.echo(f"    cairn run validate {out}")


@click.command()
@click.option("--from", "folder", required=True, type=PLACE, help="A model's folder, with safetensors.")
@click.option("--out", required=True, type=FILE, help="The run.toml to write.")
@PEERS
@UPLINK
@click.option("--sft", metavar="INPUT", help="Conversations to train on: JSONL or Parquet, a folder or an address.")
@click.option("--adapter", type=click.IntRange(1, 1024), help="Train a LoRA adapter of this rank, not the whole model.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Of the adapter's base; nf4: for small GPUs.  [default: bfloat16]"
)
@click.option("--window", type=int, help="Tokens that the model sees at once.  [default: up to 2048]")
@count_option("--total-tokens", "Of the run.  [default: 100M; with --sft three passes]")
@FORCE
def init(
    folder: Path, out: Path, peers: int, uplink: float, sft: str | None, adapter: int | None, dtype: str | None,
    window: int | None, total_tokens: int | None, force: bool,
) -> None:  # fmt: skip
    """Write a commented run.toml for a run that continues from a trained model (fine-tuning)."""
    from coordinator.authoring.chat_template import TEMPLATE
    from coordinator.authoring.plan import PlanError, PlanInputs
    from coordinator.authoring.pretrained import run_file_from
    from protocol.spec import AdapterSettings

    refuse_existing(out, force=force)  # before anything is written
    if dtype is not None and adapter is None:
        raise click.BadParameter(
            "it is the type of an adapter's frozen base: give --adapter, too", param_hint="--dtype"
        )
    try:
        # The model is the folder's: 1 parameter stands for it until it is read.
        inputs = PlanInputs(model=1, peers=peers, uplink=uplink, total_tokens=total_tokens)
        if window is not None:
            inputs = replace(inputs, window=window)
        settings = None
        if adapter is not None:
            settings = AdapterSettings.model_validate(
                {"rank": adapter, "alpha": 2 * adapter, "dtype": dtype or DTYPES[0]}
            )
        draft = run_file_from(
            folder, out, inputs, sft, settings, report=lambda line: click.echo(line, err=True),
            check_template=lambda text: refuse_existing(out.with_name(TEMPLATE), text, force=force),
        )  # fmt: skip
    except PlanError as e:
        raise _bad_option(e.field, e.reason) from None
    if draft.template is not None:
        write_new(out.with_name(TEMPLATE), draft.template, force=force)
    write_new(out, draft.text, force=force)
    click.echo(f"model   {draft.parameters:,} parameters, from {folder}; tokenizer of {draft.vocabulary:,} tokens")
    if draft.left_out:
        click.echo(f"note    left out of [model], for transformers does not know them: {', '.join(draft.left_out)}")
    if draft.template is not None:
        click.echo(f"note    the model has no chat template: a plain one is in {out.with_name(TEMPLATE)}")
    for caution in draft.cautions:
        click.echo(f"note    {caution}")
    first = ": name your documents in its [data], then:" if sft is None else ". Then:"
    click.echo(f"{out} is written ({draft.name}){first}")
    click.echo(f"    cairn run validate {out}")


def _bad_option(field: str, reason: str) -> click.BadParameter:
    return click.BadParameter(reason, param_hint=f"--{field.replace('_', '-')}")

"""The `cairn` command: parses arguments, hands over, and turns expected failures into one line with the remedy."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import click

from cairn import __version__
from cairn.commands.account import account
from cairn.commands.alerting import test_alert
from cairn.commands.audit import audit
from cairn.commands.checkpoint import archive_options
from cairn.commands.checkpoint import checkpoint as checkpoint_commands
from cairn.commands.control import COMMANDS
from cairn.commands.options import home_option, via_option
from cairn.commands.watch import watch
from protocol.errors import CairnError

_CHOICE = click.Choice(["auto", "on", "off"])


class _Commands(click.Group):
    """A group whose commands fail in one line: expected errors are printed, the rest is a bug and crashes loudly."""

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except CairnError as e:
            click.echo(f"error: {e}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            # The reader of our output has left (`cairn ... | head`): nothing is wrong.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cairn")
def main() -> None:
    """Cairn: strangers train one model together, on their own GPUs, over the ordinary internet.

    \b
    Volunteer:   cairn peer join INVITE
    Run owner:   cairn run plan, cairn run validate run.toml, then cairn coordinator serve run.toml
    Anyone:      cairn status INVITE, cairn watch INVITE, cairn audit ledger INVITE
    Look first:  cairn demo
    """


main.add_command(account)
main.add_command(audit)


@main.group(cls=_Commands)
def peer() -> None:
    """Contribute your GPU (or CPU) to a run."""


@peer.command("join")
@click.argument("invite")
@home_option("Where identity, runs and logs are kept.")
@click.option("--name", default="", help="What to be called on the run's page (at most 40 bytes).")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto, cpu, cuda or cuda:N.",
    callback=lambda _c, _p, value: _device(value),
)
@click.option(
    "--parallel",
    default="auto",
    show_default=True,
    help="How to use many GPUs: auto, or some of dp=N, fsdp=N, tp=N, pp=N with commas, such as fsdp=4,tp=2.",
    callback=lambda _c, _p, value: _parallel(value),
)
@click.option(
    "--recompute",
    type=_CHOICE,
    default="auto",
    show_default=True,
    help="Compute activations again in the backward pass: much less memory, a third more work. auto: if it must be.",
)
@click.option(
    "--compile",
    "compiled",
    type=_CHOICE,
    default="auto",
    show_default=True,
    help="Compile the model's layers with torch.compile. auto: on a GPU.",
)
@click.option("--overlap", type=click.Choice(["on", "off"]), default="on", hidden=True)  # to measure what it saves
@click.option(
    "--threads", type=click.IntRange(1, 1024), default=None, help="CPU threads of the trainer.  [default: all]"
)
@click.option(
    "--listen", multiple=True, metavar="MULTIADDR", help="Where to listen.  [default: any free port, TCP and UDP]"
)
@click.option("--announce", multiple=True, metavar="MULTIADDR", help="Addresses to tell others, if not those found.")
@click.option("--disk", default="50G", show_default=True, metavar="SIZE", help="The most disk space to use.")
@click.option("--plain", is_flag=True, help="Log lines instead of a live view (the default without a terminal).")
@via_option
def join(
    invite, home, name, device, parallel, recompute, compiled, overlap, threads, listen, announce, disk, plain, via
) -> None:
    """Join the run that INVITE names, and train until Ctrl-C.

    Ctrl-C announces what is done, saves the rest and leaves; the same command resumes.
    """
    from cairn.joining import JoinOptions, join_run

    join_run(
        JoinOptions(
            invite=invite,
            home=home,
            name=name,
            device=device,
            parallel=parallel,
            recompute=recompute,
            compile=compiled,
            overlap=overlap == "on",
            threads=threads,
            listen=tuple(listen),
            announce=tuple(announce),
            disk_bytes=_size(disk, "--disk"),
            plain=plain,
            via=via,
        )
    )


@peer.command("invite")
@click.argument("invite")
@home_option("Where identity, runs and logs are kept.")
def fresh_invite(invite, home) -> None:
    """Print INVITE anew: with where the coordinator is now, and the addresses of members that this peer knows.

    For a newcomer whose invite is old, or whose coordinator is away. The peer may be running.
    """
    from cairn.inviting import renewed_invite

    click.echo(renewed_invite(invite, home))


@main.group(cls=_Commands)
def coordinator() -> None:
    """Run the service of a run that you own."""


@coordinator.command("serve")
@click.argument("run_file", type=click.Path(dir_okay=False, path_type=Path))
@home_option("Where identity, runs and logs are kept.")
@click.option("--grpc", default="0.0.0.0:7410", show_default=True, metavar="HOST:PORT", help="For peers.")
@click.option("--page", default="0.0.0.0:7411", show_default=True, metavar="HOST:PORT", help="For people.")
@click.option("--swarm", default="/ip4/0.0.0.0/tcp/7412", show_default=True, metavar="MULTIADDR", help="For the swarm.")
@click.option("--public", default="", metavar="HOST", help="Name or address by which strangers reach this machine.")
@click.option("--code", default="", help='The invite code, for a run whose admission.mode is "invite".')
@click.option("--ledger", default="", envvar="CAIRN_LEDGER", metavar="URL", help="postgresql://..., not a file.")
@click.option("--webhook", multiple=True, metavar="URL", help="Tell alerts there; may be repeated (or alerts.toml).")
@archive_options
def serve(run_file, home, grpc, page, swarm, public, code, ledger, webhook, **keeping) -> None:
    """Serve the run that RUN_FILE (a run.toml) describes, and print its invite."""
    from cairn.commands.checkpoint import settings_of
    from cairn.serving import ServeOptions, serve_run

    settings = settings_of(run_file, **keeping)
    serve_run(ServeOptions(run_file, home, grpc, page, swarm, public, code, ledger, settings, webhook))


coordinator.add_command(test_alert)
main.add_command(watch)


@main.command()
@click.argument("invite")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@via_option
def status(invite, as_json, via) -> None:
    """Show the swarm of the run that INVITE names."""
    from cairn.status import show_status

    show_status(invite, as_json=as_json, via=via)


main.add_command(checkpoint_commands)


@main.group(cls=_Commands)
def run() -> None:
    """Write and check run files; order what a run that you own is to do."""


@run.command("validate")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def validate(file) -> None:
    """Check a run.toml, and say what it would cost a peer."""
    from coordinator.authoring import validate as check

    for line in check(file):
        click.echo(line)


@run.command("plan")
@click.option(
    "--model", type=click.Path(dir_okay=False, path_type=Path), default=None, help="A config.json, or a run.toml."
)
@click.option(
    "--parameters",
    metavar="N",
    callback=lambda _c, p, value: _count(value, p.opts[0]),
    help="Or: how many, e.g. 130M, 1B, 7e9.  [default: 1B]",
)
@click.option("--peers", type=int, default=16, show_default=True, help="Volunteers at a time.")
@click.option("--uplink", type=float, default=100, show_default=True, help="Mbit/s that a typical one sends.")
@click.option("--downlink", type=float, default=None, help="Mbit/s that one receives.  [default: the uplink]")
@click.option("--rtt", type=float, default=100, show_default=True, help="Milliseconds from one to another and back.")
@click.option(
    "--tokens-per-second",
    metavar="N",
    callback=lambda _c, p, value: _count(value, p.opts[0]),
    help="Of one volunteer.  [default: estimated from parameters]",
)
@click.option("--window", type=int, default=None, help="Tokens that the model sees at once.  [default: up to 2048]")
@click.option("--batch", type=int, default=None, help="Windows in an inner step.  [default: by total tokens, up to 64]")
@click.option(
    "--total-tokens",
    metavar="N",
    callback=lambda _c, p, value: _count(value, p.opts[0]),
    help="Of the run.  [default: 20 a parameter]",
)
@click.option(
    "--share", type=float, default=0.5, show_default=True, help="Most that an exchange may take of a round's training."
)
@click.option("--relays", is_flag=True, help="Well-connected members pass updates on: a peer sends its own about once.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write a commented run.toml here."
)
@click.option("--force", is_flag=True, help="Write over what is there.")
def plan(**options) -> None:
    """Say what to write into a run.toml for a model, volunteers and their links, why, and what it costs."""
    from cairn.planning import PlanOptions, run_plan

    run_plan(PlanOptions(**options))


@run.command("init")
@click.option(
    "--from", "folder", required=True, type=click.Path(path_type=Path), help="A model's folder, with safetensors."
)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The run.toml to write.")
@click.option("--peers", type=int, default=16, show_default=True, help="Volunteers at a time.")
@click.option("--uplink", type=float, default=100, show_default=True, help="Mbit/s that a typical one sends.")
@click.option(
    "--total-tokens",
    metavar="N",
    callback=lambda _c, p, value: _count(value, p.opts[0]),
    help="Of the run.  [default: 100M]",
)
@click.option("--force", is_flag=True, help="Write over what is there.")
def init(folder, out, peers, uplink, total_tokens, force) -> None:
    """Write a commented run.toml for a run that goes on from a trained model (fine-tuning)."""
    from cairn.starting import init_run

    init_run(folder, out, peers=peers, uplink=uplink, total_tokens=total_tokens, force=force)


for order in COMMANDS:
    run.add_command(order)


@main.group(cls=_Commands)
def data() -> None:
    """Prepare data for a run."""


@data.command("prepare")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for the shards.")
@click.option(
    "--vocab", type=click.IntRange(257, 2**20), default=32_768, show_default=True, help="Size of a new vocabulary."
)
@click.option(
    "--tokenizer", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Use this tokenizer.json."
)
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
def prepare(inputs, out, vocab, tokenizer, field, shard_tokens, validation_every) -> None:
    """Turn text, JSONL or Parquet files into token shards with a manifest."""
    from cairn.preparing import prepare_data

    prepare_data(
        inputs,
        out,
        vocab=vocab,
        tokenizer=tokenizer,
        field=field,
        shard_tokens=shard_tokens,
        validation_every=validation_every,
    )


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="What the text begins with.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How much to write.")
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True, help="0: the likeliest.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True)
def generate(checkpoint, prompt, tokens, temperature, seed, device) -> None:
    """Let the model in CHECKPOINT (a folder that a coordinator archived) go on from a prompt."""
    from cairn.generating import generate_text

    click.echo(generate_text(checkpoint, prompt, tokens=tokens, temperature=temperature, seed=seed, device=device))


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace the model that is in OUT.")
@click.option(
    "--spec",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="The run's spec.json or spec.signed, for a checkpoint file that lies elsewhere.",
)
@click.option("--invite", default=None, help="The checkpoint must be of the run that this invite names.")
def export(checkpoint, out, force, spec, invite) -> None:
    """Write the model in CHECKPOINT as a folder OUT that transformers loads.

    CHECKPOINT is a run's folder (its newest checkpoint), a state that a coordinator archived, or a checkpoint file.
    """
    from cairn.exporting import export_checkpoint

    export_checkpoint(checkpoint, out, spec=spec, invite=invite, force=force)


@main.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default="demo-run", show_default=True)
@click.option(
    "--run-file", type=click.Path(dir_okay=False, path_type=Path), default=None, help="[default: examples/sotu.toml]"
)
@click.option("--plain", is_flag=True, help="Log lines instead of a live view (the default without a terminal).")
def demo(folder, run_file, plain) -> None:
    """Train a small Llama with four peers on this machine: one is killed, one joins late."""
    from cairn.demo import run_demo

    sys.exit(run_demo(folder, run_file, plain=plain))


def _size(text: str, option: str) -> int:
    """Bytes in "50G", "800M" or "123456"."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    try:
        value = int(float(number) * units.get(unit, 1))
    except ValueError:
        value = 0
    if value < 10**6:
        raise click.BadParameter(
            f"{text!r} is not a size of at least 1M: write for example 800M or 50G", param_hint=option
        )
    return value


def _count(text: str | None, option: str) -> int | None:
    """An option that may be written 130M, 1B or 7e9."""
    from cairn.planning import parse_count

    return None if text is None else parse_count(text, option)


def _parallel(text: str) -> str:
    """Whether the model and the machine allow it is the trainer's to say; whether it is a layout, is said at once."""
    from peer.errors import TrainingError
    from peer.training.parallel.parallel_dims import ParallelDims

    try:
        return text if text == "auto" else str(ParallelDims.parse(text))
    except TrainingError as e:
        raise click.BadParameter(str(e).removeprefix("--parallel ")) from None


def _device(text: str) -> str:
    """Whether there is such a device is the trainer's to say; whether it could be, is said before anything starts."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise click.BadParameter(f"{text[:40]!r} is not a device: write auto, cpu, cuda, or cuda:0 (cuda:1, ...)")
    return text


if __name__ == "__main__":
    main()

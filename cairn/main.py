"""The `cairn` command: parses arguments, runs the subcommand, and prints expected failures with their remedy."""

from __future__ import annotations

import io
import subprocess
import sys

import click

from cairn import ROOT, __version__
from cairn.commands.account import account
from cairn.commands.alert import test_alert
from cairn.commands.audit import audit
from cairn.commands.auditor import auditor
from cairn.commands.checkpoint import checkpoint
from cairn.commands.completion import completion
from cairn.commands.control import COMMANDS
from cairn.commands.demo import demo
from cairn.commands.doctor import doctor
from cairn.commands.examples import EXAMPLES
from cairn.commands.export import export
from cairn.commands.generate import generate
from cairn.commands.group import CommandGroup, add_examples
from cairn.commands.invite import invite
from cairn.commands.join import join
from cairn.commands.key import key
from cairn.commands.pause import leave, pause, resume
from cairn.commands.prepare import prepare
from cairn.commands.run_file import init, plan, validate
from cairn.commands.runs import runs
from cairn.commands.serve import serve
from cairn.commands.status import status
from cairn.commands.upgrade import upgrade
from cairn.commands.watch import watch
from protocol.version import PROTOCOL


def _commit() -> str:
    """Return the commit of a checkout for --version, after a comma; nothing for an installed Cairn."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=, changed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ", a checkout; git does not tell its commit"
    return f", commit {done.stdout.strip()}"


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"cairn {__version__} (protocol {PROTOCOL}{_commit()})")
        context.exit()


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
    help="Show the versions of Cairn and its protocol; in a checkout also the commit.",
)  # fmt: skip
def main() -> None:
    """Cairn: strangers train one model together, on their own GPUs, over the ordinary internet.

    \b
    Volunteer:   cairn peer doctor INVITE, then cairn peer join INVITE
    Run owner:   cairn run plan, cairn run validate run.toml, then cairn coordinator serve run.toml
    Anyone:      cairn status INVITE, cairn watch INVITE, cairn audit ledger INVITE
    First look:  cairn demo
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may have fewer characters than our bars and names need


@main.group(cls=CommandGroup)
def peer() -> None:
    """Contribute your GPU (or CPU) to a run."""


@main.group(cls=CommandGroup)
def coordinator() -> None:
    """Run the service of a run that you own."""


@main.group(cls=CommandGroup)
def run() -> None:
    """Write and check run files, and sign directives for a run that you own."""


@main.group(cls=CommandGroup)
def data() -> None:
    """Prepare data for a run."""


for _group, _commands in (
    (main, (account, audit, auditor, checkpoint, completion, demo, export, generate, runs, status, watch)),
    (peer, (join, doctor, key, pause, resume, leave, invite, upgrade)),
    (coordinator, (serve, test_alert)),
    (run, (validate, plan, init, *COMMANDS)),
    (data, (prepare,)),
):
    for _command in _commands:
        _group.add_command(_command)
add_examples(main, EXAMPLES)


if __name__ == "__main__":
    main()

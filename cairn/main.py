"""The `cairn` command: parses arguments, runs the subcommand, and prints expected failures with their remedy."""

from __future__ import annotations

import os
import sys

import click

from cairn import __version__
from cairn.commands.account import account
from cairn.commands.alert import test_alert
from cairn.commands.audit import audit
from cairn.commands.auditor import auditor
from cairn.commands.checkpoint import checkpoint
from cairn.commands.control import COMMANDS
from cairn.commands.demo import demo
from cairn.commands.export import export
from cairn.commands.generate import generate
from cairn.commands.invite import invite
from cairn.commands.join import join
from cairn.commands.prepare import prepare
from cairn.commands.run_file import init, plan, validate
from cairn.commands.serve import serve
from cairn.commands.status import status
from cairn.commands.watch import watch
from protocol.errors import CairnError


class _Commands(click.Group):
    """A group whose commands print an expected error on one line; any other error is a bug and crashes loudly."""

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
            # The reader of our output has closed it (`cairn ... | head`), which is no error.
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
    First look:  cairn demo
    """


@main.group(cls=_Commands)
def peer() -> None:
    """Contribute your GPU (or CPU) to a run."""


@main.group(cls=_Commands)
def coordinator() -> None:
    """Run the service of a run that you own."""


@main.group(cls=_Commands)
def run() -> None:
    """Write and check run files, and sign directives for a run that you own."""


@main.group(cls=_Commands)
def data() -> None:
    """Prepare data for a run."""


for _group, _commands in (
    (main, (account, audit, auditor, checkpoint, demo, export, generate, status, watch)),
    (peer, (join, invite)),
    (coordinator, (serve, test_alert)),
    (run, (validate, plan, init, *COMMANDS)),
    (data, (prepare,)),
):
    for _command in _commands:
        _group.add_command(_command)


if __name__ == "__main__":
    main()

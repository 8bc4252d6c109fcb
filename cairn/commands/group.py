"""Groups of commands: an expected error has no traceback, a listing whole sentences, and each help an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from protocol.errors import CairnError

FAILED, INTERRUPTED = 1, 130
"""Exit codes (docs/command_line.md). Click gives 0 for success and 2 for wrong use."""


class CommandGroup(click.Group):
    """A group whose commands print an expected error, with its remedy; any other is a bug and crashes loudly."""

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except CairnError as e:
            click.echo(f"error: {e}", err=True)
            ctx.exit(FAILED)
        except (KeyboardInterrupt, click.Abort) as e:
            if isinstance(e, click.Abort) and not isinstance(e.__context__, KeyboardInterrupt):
                raise  # a prompt was answered with no
            click.echo("stopped", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output has closed it (`cairn ... | head`), which is no error.
            from cairn.output import discard_stdout

            discard_stdout()
            ctx.exit(0)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands. Click would cut a sentence that does not fit one line."""
        shown = [(name, c) for name in self.list_commands(ctx) if (c := self.get_command(ctx, name)) and not c.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in shown])


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command below a group, groups included, with its path."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def add_examples(group: click.Group, examples: Mapping[str, str]) -> None:
    """Add to each command's help its example, if there is one."""
    for path, command in commands(group):
        name = " ".join(path)
        if name in examples:
            command.epilog = f"\b\nExample:\n  cairn {name} {examples[name]}".rstrip()
